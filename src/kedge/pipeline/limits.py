"""Limits of a queue: how many of its runs are carried out at once, how many begin in a second, how many may wait.

They are kept in the store, and hold for all workers together. A place to run is a lease, so that those of dead workers
come free by themselves. The right to begin is a lease that nobody gives back: the next one is granted when it has run
out, by the clock of the store.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from random import shuffle
from typing import Any

from kedge.errors import LeaseHeld, QueueFull, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.store.lease import default_holder

from .entries import RUNNING, limits_job, queue_job
from .owner import take_lease
from .retry import parse_count

REREAD_S = 1.0
_SHORTEST_LEASE_S = 0.1
_LOOK_BACK = 20  # records, for limits that make sense


@dataclass(frozen=True, slots=True)
class Limits:
    """None: there is no such limit."""

    concurrency: int | None = None
    rate_per_s: float | None = None
    max_queued: int | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def parse_limits(concurrency: int | None, rate_per_s: float | None, max_queued: int | None) -> Limits:
    for name, value in (("concurrency", concurrency), ("max_queued", max_queued)):
        if value is not None and parse_count(name, value) < 1:
            raise Validation(f"{name} must be at least 1 (got {value})")
    is_number = isinstance(rate_per_s, int | float) and not isinstance(rate_per_s, bool)
    if rate_per_s is not None and not (is_number and 1e-4 <= rate_per_s <= 1e4):
        raise Validation(f"rate_per_s must be a number from 0.0001 to 10000 (got {rate_per_s!r})")
    return Limits(concurrency, None if rate_per_s is None else float(rate_per_s), max_queued)


def _limits_of(record: Checkpoint) -> Limits:
    values: Any = record.metadata
    return parse_limits(values.get("concurrency"), values.get("rate_per_s"), values.get("max_queued"))


def save_limits(store: CheckpointManager, queue: str, limits: Limits) -> None:
    store.save(limits_job(queue), "limits", limits.to_json(), level="pipeline", metadata=limits.to_json())


class QueueLimits:
    """The limits of one queue, as a process that submits or works keeps to them."""

    def __init__(self, store: CheckpointManager, queue: str, report: Callable[[str], None] = warnings.warn) -> None:
        self._store = store
        self._report = report
        self._queue = queue
        self._job = queue_job(queue)
        self._limits = Limits()
        self._record_id = ""  # of the newest record that was read
        self._read_at = -math.inf
        self._tickets = 0  # runs that may begin now
        self._tickets_until = 0.0

    def current(self) -> Limits:
        """Read again once a second at most."""
        if time.monotonic() >= self._read_at + REREAD_S:
            self._limits = self._read()
            self._read_at = time.monotonic()
        return self._limits

    def _read(self) -> Limits:
        """Anybody who may save can write a record; one that is malformed changes nothing, and somebody reads of it."""
        newest = self._store.list(limits_job(self._queue), limit=1)
        if not newest:
            return Limits()
        if newest[0].id == self._record_id:
            return self._limits
        self._record_id = newest[0].id
        for record in reversed(self._store.list(limits_job(self._queue), limit=_LOOK_BACK)):
            try:
                return _limits_of(record)
            except Validation as error:
                self._report(f"the limits in checkpoint {record.id} are passed over: {error}; set them again")
        return self._limits

    def are_none(self) -> bool:
        limits = self.current()
        return limits.concurrency is None and limits.rate_per_s is None

    def check_room(self) -> None:
        """Raise QueueFull when no more may be submitted. Several who submit at once may exceed the limit by a few."""
        limit = self.current().max_queued
        if limit is None:
            return
        job = self._store.store.job(self._job)
        if job is not None and job.checkpoints >= limit:
            raise QueueFull(
                f"queue {self._queue} holds {job.checkpoints} runs, {limit} at most",
                hint=f"submit it later, start more workers, or see kedge queue list {self._queue} --dead",
            )

    @contextmanager
    def place(self, lease_s: float) -> Iterator[bool]:
        """A place to carry out one run, for as long as the block runs; False when there is none."""
        limit = self.current().concurrency
        with ExitStack() as stack:
            yield limit is None or self._find_place(limit, lease_s, stack)

    def _find_place(self, limit: int, lease_s: float, stack: ExitStack) -> bool:
        numbers = list(range(limit))
        shuffle(numbers)  # several workers look at once
        for number in numbers:
            try:
                stack.enter_context(take_lease(self._store, f"{self._job}:place-{number}", lease_s))
            except LeaseHeld:
                continue
            return True
        return False

    def may_begin(self) -> bool:
        """Whether one more run may begin now, which counts as begun."""
        rate = self.current().rate_per_s
        if rate is None:
            return True
        if not self._tickets or time.monotonic() >= self._tickets_until:
            count = math.ceil(rate * _SHORTEST_LEASE_S)
            try:
                self._store.take_lease(f"{self._job}:rate", default_holder(), count / rate)
            except LeaseHeld:
                return False
            self._tickets, self._tickets_until = count, time.monotonic() + count / rate
        self._tickets -= 1
        return True

    def is_full(self) -> bool:
        """Whether as many are at work as may be, by a look that takes no place."""
        limit = self.current().concurrency
        return limit is not None and len(self._store.list(self._job, tags={"state": RUNNING}, limit=limit)) >= limit
