"""Queues: what waits, what is being worked on, what was given up, what comes by the clock; and the workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Form, Request
from starlette.responses import Response

from kedge.errors import InvalidName
from kedge.manager import CheckpointManager
from kedge.model import QUEUE_PREFIX, Checkpoint
from kedge.pipeline.entries import (
    DEAD,
    DELAYED,
    HELD,
    READY,
    RUNNING,
    Entry,
    queue_job,
    queue_of,
    schedule_job,
    workers_job,
)
from kedge.pipeline.heartbeat import find_workers
from kedge.pipeline.limits import Limits
from kedge.pipeline.queues import Queue
from kedge.pipeline.schedules import Schedule, pause, resume

from .templates import PageRoute, Reader, Writer, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

T = TypeVar("T")

_QUEUES = 100
_ENTRIES = 500  # of a queue that are looked at
_SHOWN, _WAITING = 50, 20
_SCHEDULES = 100


@dataclass(frozen=True, slots=True)
class QueueRow:
    name: str
    total: int
    states: Counter[str]  # of the first entries
    running: Sequence[Entry]
    dead: Sequence[Entry]
    waiting: Sequence[Entry]  # those that come next
    left_out: int  # others that wait
    schedules: Sequence[Schedule]
    limits: Sequence[str]
    lacks_worker: bool  # though runs or schedules wait for one


@router.get("/queues")
async def queues(request: Request, access: Reader) -> Response:
    def look(store: CheckpointManager) -> dict[str, Any]:
        workers = find_workers(store)
        rows = _queues(store, {name for worker in workers if worker.status == "alive" for name in worker.queues})
        begun = store.catalogue.newest([entry.key for row in rows for entry in row.waiting], ("kind", "run"))
        return {
            "queues": rows,
            "workers": workers,
            "begun": begun,
            "most": _ENTRIES,
            "due": _due,
            "interval": _interval,
        }

    return await answer(request, access, "queues.html", look)


def _queues(store: CheckpointManager, served: Collection[str]) -> list[QueueRow]:
    jobs = (job.name for job in store.jobs(QUEUE_PREFIX, 2 * _QUEUES) if job.name != workers_job())
    names = dict.fromkeys(map(queue_of, jobs))
    return [_row(store, name, served) for name in islice((name for name in names if _is_usable(name)), _QUEUES)]


def _is_usable(name: str) -> bool:
    """Anybody who may save can make jobs of other names."""
    try:
        queue_job(name)
    except InvalidName:
        return False
    return bool(name)


def _row(store: CheckpointManager, name: str, served: Collection[str]) -> QueueRow:
    job = queue_job(name)
    entries = _parsed(Entry.of, store.list(job, after=0, limit=_ENTRIES))
    by_state = {state: [entry for entry in entries if entry.state == state][:_SHOWN] for state in (RUNNING, DEAD)}
    waiting = sorted((entry for entry in entries if entry.state not in by_state), key=_turn)
    states = Counter(entry.state for entry in entries)
    planned = _parsed(Schedule.of, store.list(schedule_job(name), after=0, limit=_SCHEDULES))
    queue = Queue(name, store=store)
    total = len(queue)
    left_out = total - states[RUNNING] - states[DEAD] - min(_WAITING, len(waiting))
    shown = waiting[:_WAITING]
    limits = _in_words(queue.limits)
    lacks = name not in served and bool(waiting or by_state[RUNNING] or any(not plan.is_paused for plan in planned))
    return QueueRow(name, total, states, by_state[RUNNING], by_state[DEAD], shown, left_out, planned, limits, lacks)


_TURNS = {READY: 0, DELAYED: 1, HELD: 2}


def _turn(entry: Entry) -> tuple[float, ...]:
    """What is ready goes by priority, what is delayed by its time."""
    return _TURNS.get(entry.state, 3), entry.due_at if entry.state == DELAYED else -entry.priority, entry.seq


def _due(entry: Entry) -> datetime | None:
    with suppress(ValueError, OverflowError, OSError):  # a forged one
        return datetime.fromtimestamp(entry.due_at, UTC) if entry.due_at else None
    return None


def _in_words(limits: Limits) -> list[str]:
    texts = {
        "{:,} at once": limits.concurrency,
        "{:g} a second": limits.rate_per_s,
        "{:,} in the queue": limits.max_queued,
        "{:,} of a group at once": limits.group_concurrency,
        "{:g} of a group a second": limits.group_rate_per_s,
    }
    return [text.format(value) for text, value in texts.items() if value is not None]


def _interval(seconds: float) -> str:
    """`hour`, `5 min`: behind "every"."""
    for length, unit, single in (
        (86400, "days", "day"),
        (3600, "h", "hour"),
        (60, "min", "minute"),
        (1, "s", "second"),
    ):
        if seconds >= length and seconds % length == 0:
            return single if seconds == length else f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


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
