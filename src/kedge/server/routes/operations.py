"""Caring for the store: numbers, verify and gc in the background, the log of changes, leases; and who one is."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request
from starlette.responses import Response

from kedge.manager import CheckpointManager
from kedge.model import Lease
from kedge.server import schemas
from kedge.server.auth import Administers, Reads, Writes, public, sign_in, sign_out
from kedge.server.gate import GatedRoute
from kedge.server.responses import JsonAnswer
from kedge.server.tasks import Report
from kedge.store.lease import default_holder

from . import API, PROBLEMS
from .checkpoints import Cursor
from .jobs import PageSize

router = APIRouter(prefix=API, tags=["operations"], responses=PROBLEMS, route_class=GatedRoute)


@router.get("/stats", response_model=schemas.Stats)
async def stats(access: Reads, job: Annotated[schemas.Name | None, Query()] = None) -> Any:
    """Numbers of the namespace, or of one job; those that end in _bytes are bytes."""
    return JsonAnswer(dict(await access.ask(lambda store: store.stats(job))))


@router.post("/verify", status_code=202, response_model=schemas.Task)
async def verify(access: Administers, wish: Annotated[schemas.VerifyRequest | None, Body()] = None) -> Any:
    """Prove what is stored against its digests, in the background."""
    options = wish or schemas.VerifyRequest()

    def work(store: CheckpointManager, report: Report) -> dict[str, Any]:
        return asdict(store.verify(options.job, options.deep, progress=report))

    return JsonAnswer(await access.ask(lambda store: access.service.tasks.start("verify", store, work)), 202)


@router.post("/gc", status_code=202, response_model=schemas.Task)
async def gc(
    access: Administers, dry_run: Annotated[bool, Query(description="Only find out what would be freed.")] = False
) -> Any:
    """Give back the space of deleted checkpoints, in the background."""

    def work(store: CheckpointManager, report: Report) -> dict[str, Any]:
        return access.service.tasks.collect_garbage(store, report, dry_run=dry_run)

    return JsonAnswer(await access.ask(lambda store: access.service.tasks.start("gc", store, work)), 202)


@router.get("/tasks", response_model=schemas.TaskList)
async def list_tasks(access: Reads) -> object:
    """Background tasks, newest first."""
    return JsonAnswer({"tasks": await access.ask(lambda _: access.service.tasks.all(access.namespace))})


@router.get("/tasks/{task_id}", response_model=schemas.Task)
async def get_task(access: Reads, task_id: schemas.Name) -> object:
    """How far a background task is, and what came of it."""
    return JsonAnswer(await access.ask(lambda _: access.service.tasks.get(task_id, access.namespace)))


@router.get("/audit", response_model=schemas.EventPage)
async def audit_log(
    access: Reads,
    limit: PageSize = 50,
    cursor: Cursor = None,
    order: Annotated[str, Query(pattern="^(newest|oldest)$", description="Which come first.")] = "newest",
    after: Annotated[int, Query(ge=0, le=(1 << 53) - 1, description="Only entries above this one.")] = 0,
) -> object:
    """Who changed what. Every change of the store is an entry, chained to the one before by SHA-256."""
    if order == "newest":
        events = await access.ask(lambda store: store.events(after, limit + 1, newest=True, before=cursor))
        events.reverse()
    else:
        events = await access.ask(lambda store: store.events(max(after, cursor or 0), limit + 1))
    page = events[:limit]
    following = str(page[-1].id) if len(events) > limit else None
    return JsonAnswer({"events": [event.to_json() for event in page], "next_cursor": following})


@router.get("/audit/verify", response_model=schemas.Audit)
async def verify_audit(
    access: Administers,
    until: Annotated[int | None, Query(ge=0, le=(1 << 53) - 1, description="Only up to this entry.")] = None,
) -> object:
    """Read the log of changes from its beginning and prove that no entry was altered or removed."""
    chain = await access.ask(lambda store: store.audit(until))
    return {**asdict(chain), "ok": chain.broken_at is None}


@router.post("/jobs/{job}/lease", status_code=201, response_model=schemas.Lease)
async def take_lease(access: Writes, job: schemas.Name, wish: schemas.TakeLease) -> object:
    """The right to write a job, for a while; a conflict while somebody else has it. Renew it in time."""
    return asdict(await access.ask(lambda store: store.catalogue.acquire_lease(job, wish.holder, wish.ttl_s)))


@router.put("/jobs/{job}/lease", status_code=204, response_class=Response)
async def renew_lease(access: Writes, job: schemas.Name, wish: schemas.LeaseToken) -> Response:
    """Extend a lease; a conflict when it was released or taken over."""
    lease = Lease(job, wish.token, default_holder(), wish.ttl_s)
    await access.ask(lambda store: store.catalogue.renew_lease(lease))
    return Response(status_code=204)


@router.delete("/jobs/{job}/lease", status_code=204, response_class=Response)
async def release_lease(access: Writes, job: schemas.Name, token: Annotated[int, Query(ge=0, le=1 << 53)]) -> Response:
    """Give a lease back; one that is lost is ignored."""
    await access.ask(lambda store: store.break_lease(Lease(job, token, "", 0)))
    return Response(status_code=204)


@router.get("/whoami", response_model=schemas.Identity, tags=["session"])
async def whoami(access: Reads) -> Any:
    """Who the service takes the caller for."""
    caller = access.caller
    return {
        "actor": caller.actor,
        "scope": str(caller.scope),
        "namespaces": list(caller.namespaces),
        "namespace": access.namespace,
    }


@router.post("/session", status_code=204, response_class=Response, tags=["session"])
@public
async def log_in(request: Request, wish: schemas.Session) -> Response:
    """Start a session, in a cookie that no script can read: how the page logs in."""
    answer = Response(status_code=204)
    await sign_in(request, answer, wish.token)
    return answer


@router.delete("/session", status_code=204, response_class=Response, tags=["session"])
@public
async def log_out(request: Request) -> Response:
    """End the session."""
    answer = Response(status_code=204)
    await sign_out(request, answer)
    return answer
