"""Runs of pipelines: their steps, items and attempts, from their records alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Query

from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.pipeline.cancellation import cancel
from kedge.pipeline.history import explain, find_run, logs_of, run_of
from kedge.pipeline.inbox import send
from kedge.pipeline.keys import show
from kedge.server import run_schemas, schemas
from kedge.server.auth import Access, Reads, Writes
from kedge.server.gate import GatedRoute
from kedge.server.responses import JsonAnswer

from . import API, PROBLEMS
from .checkpoints import Cursor
from .jobs import NameCursor, PageSize, Prefix

router = APIRouter(prefix=API, tags=["runs"], responses=PROBLEMS, route_class=GatedRoute)

Look = Callable[[CheckpointManager, str], Iterable[object]]

LOOKED_AT = 500  # jobs one request looks at, however few of them are runs (I6)


async def page_of(access: Access, title: str, prefix: str, after: str | None, limit: int, look: Look) -> JsonAnswer:
    """What `look` finds in jobs by name, at least `limit` if there are so many, and where to go on."""

    def find(store: CheckpointManager) -> tuple[list[object], str | None]:
        entries: list[object] = []
        jobs = store.jobs(prefix, LOOKED_AT, after)
        for job in jobs:
            entries += look(store, job.name)
            if len(entries) >= limit:
                return entries, job.name if job is not jobs[-1] or len(jobs) == LOOKED_AT else None
        return entries, jobs[-1].name if len(jobs) == LOOKED_AT else None

    entries, following = await access.ask(find)
    return JsonAnswer({title: entries, "next_cursor": following})


@router.get("/runs", response_model=run_schemas.RunPage)
async def list_runs(
    access: Reads,
    prefix: Prefix = "",
    status: Annotated[
        str | None, Query(pattern="^(running|paused|completed|failed|cancelled|abandoned|unreadable)$")
    ] = None,
    limit: PageSize = 50,
    cursor: NameCursor = None,
) -> object:
    """Runs by key."""

    def look(store: CheckpointManager, key: str) -> Iterator[object]:
        run = run_of(store, key)
        if run is not None and (status is None or run.status == status):
            yield run.to_json()

    return await page_of(access, "runs", prefix, cursor, limit, look)


@router.get("/runs/{key}", response_model=run_schemas.RunDetail)
async def get_run(access: Reads, key: schemas.Name) -> object:
    """A run, each of its steps with what became of it and why, and its newest log lines."""

    def find(store: CheckpointManager) -> dict[str, object]:
        run = find_run(store, key)
        lines = [
            {
                "at": line.timestamp,
                "level": str(line.metadata.get("level", "info")),
                "text": str(line.metadata.get("text", "")),
            }
            for line in logs_of(store, key)
        ]
        return {"run": run.to_json(), "steps": [step.to_json() for step in explain(store, key)], "log": lines}

    return JsonAnswer(await access.ask(find))


@router.get("/runs/{key}/attempts", response_model=schemas.CheckpointPage)
async def list_attempts(access: Reads, key: schemas.Name, limit: PageSize = 50, cursor: Cursor = None) -> object:
    """The failed attempts of a run's steps, oldest first; each is a checkpoint whose metadata tells the error."""
    records, following = await access.ask(lambda store: _records(store, key, "attempt", limit, cursor))
    return JsonAnswer({"checkpoints": [c.to_json() for c in records], "next_cursor": following})


@router.get("/runs/{key}/items", response_model=run_schemas.ItemPage)
async def list_items(access: Reads, key: schemas.Name, limit: PageSize = 50, cursor: Cursor = None) -> object:
    """The items of a run's maps in the batches in which they were recorded, oldest first, with those that failed."""

    def find(store: CheckpointManager) -> tuple[list[dict[str, object]], str | None]:
        records, following = _records(store, key, "items", limit, cursor)
        return [_batch(store, record) for record in records], following

    batches, following = await access.ask(find)
    return JsonAnswer({"batches": batches, "next_cursor": following})


def _records(
    store: CheckpointManager, key: str, kind: str, limit: int, cursor: int | None
) -> tuple[list[Checkpoint], str | None]:
    if run_of(store, key) is None:
        raise NotFound(f"run {key} not found", hint="GET /api/v1/runs lists the runs")
    records = store.list(key, metadata={"kind": kind}, limit=limit + 1, after=cursor or 0)
    return records[:limit], str(records[limit - 1].seq) if len(records) > limit else None


def _batch(store: CheckpointManager, record: Checkpoint) -> dict[str, object]:
    about = record.metadata
    path = about.get("path")
    failed: list[dict[str, object]] = []
    if about.get("failed"):
        state: Any = store.load(record.id, only="failed")
        failed = [{name: failure[name] for name in ("key", "error", "attempts")} for failure in state["failed"]]
    return {
        "checkpoint": record.id,
        "path": show(tuple(map(str, path))) if isinstance(path, list) else "",
        "at": record.timestamp,
        "session": about.get("session", 0),
        "items": about.get("items", 0),
        "failed": failed,
    }


@router.post("/runs/{key}/cancel", response_model=run_schemas.Cancelled)
async def cancel_run(access: Writes, key: schemas.Name) -> object:
    """End a run for good; what it finished is kept."""
    return {"run": key, "cancelled": await access.ask(lambda store: cancel(store, key))}


@router.post("/runs/{key}/signals", status_code=201, response_model=run_schemas.Sent)
async def send_signal(access: Writes, key: schemas.Name, wish: run_schemas.Signal) -> object:
    """Send a value to a run that waits, or will wait, for it."""

    def post(store: CheckpointManager) -> str:
        find_run(store, key)
        return send(store, key, wish.name, wish.value)

    return {"message": await access.ask(post)}
