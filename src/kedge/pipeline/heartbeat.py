"""Which workers there are, and what they do.

A worker has a record, which it marks as seen every half minute and deletes at its end. What it is at is not written
there: the status records of runs name their owner. So being seen costs a worker two writes in a minute, busy or not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from kedge.errors import InvalidName, NotFound, StorageError
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, RunStatus

from .entries import RUNNING, drop_entry, entries_of, queue_job, workers_job
from .owner import is_gone, newest_status, this_process

BEAT_S = 30.0
SILENT_S = 3 * BEAT_S  # since it was seen: it may be suspended, or cut off
FORGET_S = 3600.0  # one that died without a word is shown for so long
_MOST_WORKERS = 1000
_MOST_RUNS = 1000  # at work in one queue, that are looked at
_SEEN = "seen_at"


class Heartbeat:
    """The record of one worker."""

    def __init__(self, store: CheckpointManager, queues: Sequence[str], concurrency: int) -> None:
        self._store = store
        self._metadata = {
            "kind": "worker", "owner": this_process(), "queues": list(queues), "concurrency": concurrency,
        }  # fmt: skip
        self._record = ""
        self._due_at = 0.0

    def beat(self) -> None:
        """Say that the worker is there, every half minute. Called often."""
        if time.monotonic() < self._due_at:
            return
        self._due_at = time.monotonic() + BEAT_S
        seen = {_SEEN: f"{time.time():.0f}"}
        if self._record:
            with suppress(NotFound):  # it was taken for dead
                self._store.tag(self._record, **seen)
                return
        self._record = self._store.save(
            workers_job(), "worker", {}, level="pipeline", metadata=self._metadata, tags=seen
        )
        for record in self._store.list(workers_job(), limit=_MOST_WORKERS):
            worker = _worker(record)
            if worker is not None and time.time() - worker.seen_at.timestamp() > FORGET_S:
                drop_entry(self._store, record.id)

    def end(self) -> None:
        if self._record:
            with suppress(StorageError):  # it is forgotten later
                drop_entry(self._store, self._record)


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """A run that a worker is at."""

    key: str
    pipeline: str
    queue: str
    since: datetime


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as its record tells it."""

    id: str
    host: str
    pid: int
    queues: Sequence[str]
    concurrency: int
    started_at: datetime
    seen_at: datetime
    status: str  # alive, silent (no heartbeat), gone (its process does not exist any more)
    runs: Sequence[WorkerRun] = ()

    def to_json(self) -> dict[str, object]:
        runs = [{name: str(getattr(run, name)) for name in run.__slots__} for run in self.runs]
        facts = {name: getattr(self, name) for name in self.__slots__}
        return {
            **facts, "started_at": self.started_at.isoformat(), "seen_at": self.seen_at.isoformat(), "runs": runs,
        }  # fmt: skip


def find_workers(store: CheckpointManager, queue: str | None = None) -> list[WorkerInfo]:
    """The workers, or those of one queue, with the runs they are at; the oldest first."""
    records = store.list(workers_job(), limit=_MOST_WORKERS)
    workers = [(record, worker) for record in records if (worker := _worker(record)) is not None]
    if queue is not None:
        workers = [(record, worker) for record, worker in workers if queue in worker.queues]
    runs: dict[str, list[WorkerRun]] = {}
    for name in dict.fromkeys(name for _, worker in workers for name in worker.queues):
        for owner, run in _runs_of(store, name):
            runs.setdefault(owner, []).append(run)
    return [replace(worker, runs=runs.get(_identity(record), [])) for record, worker in workers]


def _worker(record: Checkpoint) -> WorkerInfo | None:
    """None for a record that is none: anybody who may save can write one, and it disturbs nobody."""
    about: Any = record.metadata
    owner, queues, concurrency = about.get("owner"), about.get("queues"), about.get("concurrency")
    seen = record.tags.get(_SEEN, "")
    if not isinstance(owner, Mapping) or not isinstance(owner.get("pid"), int) or not isinstance(concurrency, int):
        return None
    if not isinstance(queues, list) or not all(map(_is_queue, queues)) or not (seen.isdecimal() and len(seen) < 11):
        return None
    status = "alive" if time.time() - int(seen) < SILENT_S else "silent"
    return WorkerInfo(
        record.id, str(owner.get("host")), owner["pid"], queues, concurrency, record.created_at,
        datetime.fromtimestamp(int(seen), UTC), "gone" if is_gone(owner) else status,
    )  # fmt: skip


def _is_queue(name: object) -> bool:
    try:
        return isinstance(name, str) and bool(queue_job(name))
    except InvalidName:
        return False


def _runs_of(store: CheckpointManager, queue: str) -> Iterator[tuple[str, WorkerRun]]:
    """The runs of a queue that are at work, and the process that is at each."""
    for entry in entries_of(islice(store.walk(queue_job(queue), tags={"state": RUNNING}), _MOST_RUNS)):
        newest = newest_status(store, entry.key)
        if newest is not None and newest.metadata.get("status") in (RunStatus.RUNNING, RunStatus.PAUSED):
            began_at = newest.metadata.get("session_began_at")
            since = datetime.fromtimestamp(began_at, UTC) if isinstance(began_at, float) else newest.created_at
            yield _identity(newest), WorkerRun(entry.key, entry.pipeline, queue, since)


def _identity(record: Checkpoint) -> str:
    """The process that a record is of."""
    owner = record.metadata.get("owner")
    return repr(sorted(owner.items())) if isinstance(owner, Mapping) else record.id
