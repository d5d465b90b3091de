"""Whether the service is there and can work, and its numbers."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kedge.errors import Unavailable
from kedge.server import schemas
from kedge.server.auth import Reads, public, service_of
from kedge.server.gate import GatedRoute
from kedge.server.metrics import CONTENT_TYPE

from . import PROBLEMS

router = APIRouter(tags=["operations"], responses=PROBLEMS, route_class=GatedRoute)


@router.get("/healthz", response_model=schemas.Health)
@public
async def healthz() -> object:
    """The process answers."""
    return {"status": "ok"}


@router.get("/readyz", response_model=schemas.Health)
@public
async def readyz(request: Request) -> object:
    """The store takes writes, and the service is not about to stop."""
    service = service_of(request)
    if service.is_draining:
        raise Unavailable("the service is stopping", hint="ask another one")
    await service.in_thread(service.check_writable)
    return {"status": "ok"}


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(access: Reads) -> Response:
    """Numbers of this process, and of the namespaces open to the caller, for Prometheus."""
    service = access.service
    stores = [store for store in service.managers() if store.namespace in access.caller.namespaces]
    text = await service.in_thread(lambda: service.metrics.text(stores))
    return Response(text, headers={"content-type": CONTENT_TYPE})


@router.get("/openapi.json", include_in_schema=False)
@public
async def openapi(request: Request) -> object:
    """What this service takes and answers."""
    root = request.scope.get("root_path", "")
    return JSONResponse({**request.app.openapi(), **({"servers": [{"url": root}]} if root else {})})
