"""The application: routes, rules, errors and limits put together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import iter_route_contexts
from fastapi.telemetry import TelemetryConfig
from starlette.routing import Mount

import kedge
from kedge.manager import CheckpointManager

from .auth import rule_of
from .gate import GatedRoute
from .limits import LOOPBACK_NAMES, Edge, Limits
from .page import add_page
from .problems import add_handlers
from .route import DirectRoute
from .routes import (
    checkpoints,
    chunks,
    containers,
    events,
    executions,
    health,
    jobs,
    llm,
    older,
    operations,
    retention,
    runs,
    saves,
    states,
)
from .schemas import Problem, Save
from .service import Service

# The router looks through them in this order: those that are asked most come first.
_ROUTES = (
    saves,
    checkpoints,
    states,
    chunks,
    jobs,
    older,
    runs,
    executions,
    retention,
    llm,
    containers,
    operations,
    events,
    health,
)


def create_app(
    store: CheckpointManager | str | os.PathLike[str] | None = None,
    runner: object | None = None,
    *,
    namespace: str = "default",
    allow_hosts: Collection[str] = LOOPBACK_NAMES,
    root_path: str = "",
    limits: Limits | None = None,
    telemetry: TelemetryConfig | None = None,
) -> FastAPI:
    """An ASGI application over a store: an open one (which stays yours to close), a place, or None for the default.

    `runner` is anything with `resume_job(job_id, state)`; one that takes only the job ID works too. `allow_hosts` are
    the names under which it may be called; empty: any. `root_path` is the path prefix a proxy takes off. Spans go
    to OpenTelemetry once that is configured; `telemetry` is what FastAPI takes.
    """
    service = Service(store, runner, namespace=namespace, limits=limits or Limits())

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        service.is_draining = False  # an application may be started again
        service.notifier.start()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="Kedge",
        version=kedge.__version__,
        description="Checkpoints of any job: saved durably, verified when loaded.",
        docs_url=None,  # these bring scripts from elsewhere
        redoc_url=None,
        openapi_url=None,  # a route of ours, with a rule
        telemetry=telemetry,
        lifespan=life,
        redirect_slashes=False,  # an address that nobody has is a 404, whatever it ends with
    )
    app.root_path = root_path  # the argument is deprecated: FastAPI would have the server say it, which may be any
    app.state.service = service
    add_handlers(app)
    for module in _ROUTES:
        app.router.routes.extend(module.router.routes)  # as they are: including them builds each a second time
    add_page(app)
    check_rules(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    direct = [route for route in app.routes if isinstance(route, DirectRoute)]
    app.add_middleware(Edge, service=service, hosts=allow_hosts, direct=direct)
    return app


def check_rules(app: FastAPI) -> None:
    """Every route says who may use it; one that does not is a mistake found here, not in production."""
    for route in iter_route_contexts(app.routes):
        if isinstance(route.original_route, Mount):  # of static files, for everybody
            continue
        rule_of(route)
        if not isinstance(route.original_route, GatedRoute):
            raise TypeError(f"{route.path} has no gate: its router needs route_class=GatedRoute")


def _openapi(app: FastAPI) -> dict[str, object]:
    if app.openapi_schema is None:
        made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for model in (Problem, Save):  # named in bodies and answers that FastAPI does not see
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            made["components"]["schemas"][model.__name__] = schema
        _as_3_1(made)
        app.openapi_schema = made
    return app.openapi_schema


def _as_3_1(document: dict[str, Any]) -> None:
    """What the framework says of a stream's items is OpenAPI 3.2: here a stream is text, its description says more."""
    for methods in document["paths"].values():
        for operation in methods.values():
            for answer in operation["responses"].values():
                for content in answer.get("content", {}).values():
                    if content.pop("itemSchema", None) is not None:
                        content["schema"] = {"type": "string"}
