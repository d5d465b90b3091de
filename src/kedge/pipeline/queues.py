"""Queues: runs to be carried out by workers, on this machine or on others.

A queue is the job `queue:<name>`. What is submitted is an entry: a checkpoint with the pipeline's name and arguments.
Its tag `state` says where it is, and is all that workers search by, so that no look costs more than what it finds (I6):

    ready0 … ready9    to be taken, higher priorities first, in the order of submission
    delayed            to be taken from `due_at` on
    running            a worker has it: it holds the lease of the run, and all that the run writes is fenced by it (I5)
    dead               given up, to be looked at; `Queue.retry` makes it ready again

An entry is deleted when its run has ended, after the end of the run is durable. The run itself stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from kedge.errors import Cancelled, Conflict, InvalidName, NotFound, StepTimeout, Validation
from kedge.manager import CheckpointManager
from kedge.model import QUEUE_PREFIX, Checkpoint, RunStatus, parse_name

from .declaration import Pipeline
from .failure import Failure
from .history import cancel, run_of
from .inbox import CANCEL, StoreLike, opened, parse_run_key, post
from .keys import digest_of
from .owner import newest_status
from .retry import parse_count
from .wait import parse_seconds

DELAYED, RUNNING, DEAD = "delayed", "running", "dead"
PRIORITIES = range(10)
LOOK_EVERY_S = 0.1
_SCHEDULES = ":schedules"
_FIELDS = {"run": str, "pipeline": str, "priority": int, "due_at": float, "attempts": int, "retries": int}


def ready(priority: int) -> str:
    return f"ready{priority}"


def queue_job(name: str) -> str:
    if name.endswith(_SCHEDULES):
        raise InvalidName(f"queue {name!r}: the name is taken by schedules", hint="use another name")
    return parse_name("queue", QUEUE_PREFIX + name)


def schedule_job(name: str) -> str:
    """The job that holds the schedules of a queue."""
    return parse_name("queue", queue_job(name) + _SCHEDULES)


@dataclass(frozen=True, slots=True)
class Entry:
    """What was submitted, and where it is."""

    id: str
    seq: int
    key: str  # of the run
    pipeline: str
    state: str
    priority: int
    due_at: float
    attempts: int  # that failed
    retries: int
    takeovers: int  # of workers that died at it
    note: str  # why it is dead

    @classmethod
    def of(cls, record: Checkpoint) -> Entry | None:
        """None for a record that is no entry: anybody who may save can write one, and it disturbs nobody."""
        about: Any = record.metadata
        tags = record.tags
        takeovers = tags.get("takeovers", "0")
        if about.get("kind") != "entry" or not takeovers.isdecimal():
            return None
        values = [about.get(name) for name in ("run", "pipeline", "priority", "due_at", "attempts", "retries")]
        if not all(
            isinstance(value, kind) for value, kind in zip(values, (str, str, int, float, int, int), strict=True)
        ):
            return None
        key, pipeline, priority, due_at, attempts, retries = values
        return cls(
            record.id, record.seq, key, pipeline, tags.get("state", ""), priority, due_at, attempts, retries,
            int(takeovers), tags.get("note", ""),
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


def entries_of(records: Iterable[Checkpoint]) -> Iterator[Entry]:
    return (entry for record in records if (entry := Entry.of(record)) is not None)


class Queue:
    """What `kedge.queue(…)` gives: submits runs and says what became of them. `kedge worker` carries them out."""

    def __init__(self, name: str, *, store: StoreLike | None = None) -> None:
        self.name = name
        self._job = queue_job(name)
        self._stack = ExitStack()
        self.store = self._stack.enter_context(opened(store, create=True))

    def submit(
        self,
        pipeline: Pipeline[..., Any],
        *args: Any,
        key: str | None = None,
        priority: int = 5,
        delay_s: float = 0.0,
        deduplicate: bool = True,
        retries: int = 0,
        **kwargs: Any,
    ) -> Handle:
        """Have a worker call `pipeline(*args, **kwargs)`; durable when this returns.

        The run's key is `key`, else made of the pipeline and its arguments, so that the same call is the same run, and
        submitting it again changes nothing. With deduplicate=False each submission is a run of its own. Higher
        priorities (0 to 9) go first. A run that fails is tried again `retries` times, after waits that grow.
        """
        if not isinstance(pipeline, Pipeline):
            raise Validation(f"{pipeline!r:.100} is no pipeline", hint="decorate the function with @kedge.pipeline")
        if priority not in PRIORITIES or isinstance(priority, bool):
            raise Validation(f"priority must be a whole number from 0 to 9 (got {priority!r})")
        parse_seconds("delay_s", delay_s)
        parse_count("retries", retries)
        name = pipeline.key_of(*args, **kwargs) if key is None else key
        name = parse_run_key(name if deduplicate else f"{name}-{os.urandom(6).hex()}")
        inputs = digest_of([pipeline.name, list(args), kwargs], f"pipeline {pipeline.name}").hex()
        handle = Handle(self.store, name, self._job)
        if (earlier := self.store.list(self._job, tags={"run": name}, limit=1)) and deduplicate:
            if earlier[0].metadata.get("inputs") != inputs:
                raise Conflict(f"run {name} was submitted with other arguments", hint="use another key=")
            return handle
        entry = {
            "run": name,
            "pipeline": pipeline.name,
            "inputs": inputs,
            "priority": priority,
            "due_at": time.time() + delay_s if delay_s else 0.0,
            "attempts": 0,
            "retries": retries,
        }
        save_entry(self.store, self._job, entry, {"args": list(args), "kwargs": kwargs})
        return handle

    def handle(self, key: str) -> Handle:
        """Of a run that was submitted before, by whatever process."""
        return Handle(self.store, parse_run_key(key), self._job)

    def entries(self, state: str | None = None) -> Iterator[Entry]:
        """What has not ended, in the order of submission; only what is dead with state="dead"."""
        return entries_of(self.store.walk(self._job, tags=None if state is None else {"state": state}))

    def __len__(self) -> int:
        """How much has not ended."""
        job = self.store.store.job(self._job)
        return 0 if job is None else job.checkpoints

    def retry(self, key: str) -> None:
        """Have a run that was given up carried out again, from where it stopped."""
        for entry in self.entries(DEAD):
            if entry.key == key:
                self.store.tag(entry.id, state=ready(entry.priority), takeovers="0", note=None)
                return
        raise NotFound(f"queue {self.name} has no dead run {key}", hint=f"kedge queue list {self.name} shows them")

    def close(self) -> None:
        """Close the store, if this has opened it."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def save_entry(
    store: CheckpointManager,
    job: str,
    entry: Mapping[str, Any],
    call: object,
    *,
    after: str = "",
    tags: Mapping[str, str] | None = None,
    state: str | None = None,
) -> None:
    """Make an entry durable, once: `after` is the ID of the one it replaces."""
    if state is None:
        state = DELAYED if entry["due_at"] > time.time() else ready(entry["priority"])
    store.save(
        job,
        entry["pipeline"],
        call,
        level="pipeline",
        tags={"state": state, "run": entry["run"], **(tags or {})},
        metadata={**entry, "kind": "entry"},
        idempotency_key=after_key(after) if after else None,
    )


def drop_entry(store: CheckpointManager, entry_id: str) -> None:
    """Delete an entry; nothing happens if somebody did before."""
    store.store.delete([entry_id], actor=store.actor)


def after_key(entry_id: str) -> str:
    """The idempotency key of the entry that takes the place of another."""
    return f"after:{entry_id}"


class Handle:
    """A run that was submitted: its status and result, from anywhere. Also awaitable."""

    def __init__(self, store: CheckpointManager, key: str, job: str) -> None:
        self.key = key
        self._store = store
        self._job = job

    @property
    def status(self) -> str:
        """queued, running, paused, completed, failed (also while another attempt is due), cancelled or abandoned."""
        run = run_of(self._store, self.key)
        return "queued" if run is None else str(run.status)

    def result(self, timeout_s: float | None = None) -> Any:
        """What the pipeline returned, or raise what it failed with for good; waits for it, for `timeout_s` at most."""
        wait = self._wait(timeout_s)
        while True:
            try:
                time.sleep(next(wait))
            except StopIteration as end:
                return end.value

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Any:
        from asyncio import sleep, to_thread

        while (outcome := await to_thread(self._outcome)) is None:
            await sleep(LOOK_EVERY_S)
        return outcome[0]

    def _wait(self, timeout_s: float | None) -> Generator[float, None, Any]:
        until = None if timeout_s is None else time.monotonic() + parse_seconds("timeout_s", timeout_s)
        while (outcome := self._outcome()) is None:
            if until is not None and time.monotonic() >= until:
                raise StepTimeout(
                    f"run {self.key} has not ended within {timeout_s:g} s", hint="it goes on; ask again later"
                )
            yield LOOK_EVERY_S
        return outcome[0]

    def _outcome(self) -> tuple[Any] | None:
        """The result; None while the run has not ended. Raises what it failed with for good."""
        entries = list(entries_of(self._store.list(self._job, tags={"run": self.key}, limit=1)))
        newest = newest_status(self._store, self.key)
        status = None if newest is None else newest.metadata.get("status")
        if newest is not None and status == RunStatus.COMPLETED:
            state: Any = self._store.load(newest.id)
            if "result" not in state:
                raise Conflict(f"run {self.key} was not completed by a worker: it keeps no result")
            return (state["result"],)
        if status == RunStatus.CANCELLED:
            raise Cancelled(f"run {self.key} was cancelled", hint="use another key to start anew")
        if entries and entries[0].state != DEAD:
            return None
        if not entries and newest is None:
            raise NotFound(f"run {self.key} is not in the queue", hint="submit it")
        if newest is not None and status == RunStatus.FAILED:
            failed: Any = self._store.load(newest.id)
            raise Failure.from_state(failed["failure"]).rebuild()
        note = entries[0].note if entries else ""
        raise Conflict(f"run {self.key} was given up: {note or status}", hint="kedge queue retry tries it again")

    def cancel(self) -> None:
        """End the run for good: before it begins, between steps, or in a step after its grace period."""
        if run_of(self._store, self.key) is None:
            post(self._store, self.key, CANCEL, "")
        else:
            cancel(self._store, self.key)

    def __repr__(self) -> str:
        return f"<kedge run {self.key} of {self._job}>"
