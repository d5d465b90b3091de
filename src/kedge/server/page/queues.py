"""Queues: what waits, what is being worked on, what was given up, what comes by the clock; and the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from kedge.errors import InvalidName
from kedge.manager import CheckpointManager
from kedge.model import QUEUE_PREFIX, Checkpoint
from kedge.pipeline.entries import DEAD, RUNNING, Entry, queue_job, queue_of, schedule_job, workers_job
from kedge.pipeline.heartbeat import find_workers
from kedge.pipeline.queues import Queue
from kedge.pipeline.schedules import Schedule, pause, resume

from .templates import PageRoute, Reader, Writer, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

T = TypeVar("T")

_QUEUES = 100
_ENTRIES = 500  # of a queue that are looked at
_SHOWN = 50
_SCHEDULES = 100


@dataclass(frozen=True, slots=True)
class QueueRow:
    name: str
    total: int
    states: Counter[str]  # of the first entries
    running: Sequence[Entry]
    dead: Sequence[Entry]
    waiting: Sequence[Entry]
    schedules: Sequence[Schedule]


@router.get("/queues")
async def queues(request: Request, access: Reader) -> Response:
    def look(store: CheckpointManager) -> dict[str, Any]:
        return {"queues": _queues(store), "most": _ENTRIES, "workers": find_workers(store)}

    return await answer(request, access, "queues.html", look)


def _queues(store: CheckpointManager) -> list[QueueRow]:
    jobs = (job.name for job in store.jobs(QUEUE_PREFIX, 2 * _QUEUES) if job.name != workers_job())
    names = dict.fromkeys(map(queue_of, jobs))
    return [_row(store, name) for name in islice((name for name in names if _is_usable(name)), _QUEUES)]


def _is_usable(name: str) -> bool:
    """Anybody who may save can make jobs of other names."""
    try:
        queue_job(name)
    except InvalidName:
        return False
    return bool(name)


def _row(store: CheckpointManager, name: str) -> QueueRow:
    job = queue_job(name)
    entries = _parsed(Entry.of, store.list(job, after=0, limit=_ENTRIES))
    by_state = {state: [entry for entry in entries if entry.state == state][:_SHOWN] for state in (RUNNING, DEAD)}
    waiting = [entry for entry in entries if entry.state not in by_state][:_SHOWN]
    states = Counter(entry.state for entry in entries)
    planned = _parsed(Schedule.of, store.list(schedule_job(name), after=0, limit=_SCHEDULES))
    total = len(Queue(name, store=store))
    return QueueRow(name, total, states, by_state[RUNNING], by_state[DEAD], waiting, planned)


def _parsed(parse: Callable[[Checkpoint], T | None], records: Iterable[Checkpoint]) -> list[T]:
    """Anybody who may save can write what is no entry: it is left out, and breaks nothing else."""
    parsed = []
    for record in records:
        with suppress(KeyError, TypeError, ValueError, OverflowError, AttributeError):
            if (entry := parse(record)) is not None:
                parsed.append(entry)
    return parsed


@router.post("/queues/retry")
async def retry(
    request: Request,
    access: Writer,
    queue: Annotated[str, Form(max_length=128)],
    run: Annotated[str, Form(max_length=128)],
) -> Response:
    await access.ask(lambda store: Queue(queue, store=store).retry(run))
    return see(request, "/queues", f"{run} is in queue {queue} again.")


@router.post("/queues/schedule")
async def change_schedule(
    request: Request,
    access: Writer,
    queue: Annotated[str, Form(max_length=128)],
    name: Annotated[str, Form(max_length=128)],
    do: Annotated[str, Form(pattern="^(pause|resume)$")],
) -> Response:
    change: Any = pause if do == "pause" else resume
    await access.ask(lambda store: change(store, queue, name))
    return see(request, "/queues", f"{name} is {'paused' if do == 'pause' else 'resumed'}.")
