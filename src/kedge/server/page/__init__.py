"""The page: the store for people, made of HTML from templates, with htmx for what changes in place.

    templates.py     who may see a page, templates, errors as pages
    jobs.py          jobs, and the history of one
    search.py        everything, by any part of its text
    numbers.py       numbers of metadata over the steps of jobs, as charts
    checkpoints.py   a checkpoint, its state, what can be done with it
    conversation.py  the messages of a thread; generations.py: the checkpoints of a container, and what changed
    comparison.py    two of them, or one and a live job
    retention.py     policies, and what they would delete; previews.py: told while a history is read
    runs.py          runs, their steps and log; approvals.py: what waits for a person
    run_records.py   what was read of runs; timeline.py: a run over time; items.py: the items of its maps
    resumption.py    starting a run again; forks.py: another one from one of its steps
    models.py        what LLM calls cost; spending.py: counted, over time
    queues.py        what waits for workers, and schedules
    storage.py       what grew, what gc would free, the log of changes
    session.py       signing in; tokens.py: who may; webhooks.py: who is told of runs
    kinds.py         what a job is, and its status; roster.py: all jobs, the ones that changed last first
    graph.py, charts.py, states.py, growth.py    what they draw and count; memory.py: what is remembered of it

Nothing is fetched from elsewhere. static/vendor/ is brought by `./dev assets` and packed into the wheel; without it,
and without scripts at all, everything but unfolding and live updates still works.
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from kedge.errors import NotFound
from kedge.server.problems import answer_to

from . import (
    checkpoints,
    comparison,
    forks,
    items,
    jobs,
    models,
    numbers,
    queues,
    retention,
    runs,
    search,
    session,
    storage,
    tokens,
    views,
    webhooks,
)
from .memory import PageMemory
from .templates import STATIC, error_page


class _Files(StaticFiles):
    """Their addresses change with their content, so that they may be kept for good."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "public, max-age=31536000, immutable"
        return response


def add_page(app: FastAPI) -> None:
    app.state.page = PageMemory()
    for module in (
        jobs,
        search,
        views,
        numbers,
        checkpoints,
        comparison,
        retention,
        items,
        forks,
        runs,
        models,
        queues,
        storage,
        session,
        tokens,
        webhooks,
    ):
        app.router.routes.extend(module.router.routes)
    app.mount("/static", _Files(directory=STATIC), name="static")
    app.add_exception_handler(404, _nowhere)


async def _nowhere(request: Request, error: Exception) -> Response:
    """An address that nobody has: who reads pages gets one, with the way back."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    if "text/html" not in request.headers.get("accept", "") or path.startswith("/api/"):
        return await answer_to(request, error)
    return error_page(request, NotFound("there is no such page", hint="the address may be misspelt, or an old one"))
