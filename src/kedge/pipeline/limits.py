"""Limits of a queue: how many of its runs are carried out at once, how many begin in a second, how many may wait; and
the first two for each of its groups.

They are kept in the store, and hold for all workers together. A place to run is a lease, so that those of dead workers
come free by themselves. The right to begin is a lease that nobody gives back: the next one is granted when it has run
out, by the clock of the store. How many runs of a group are carried out at once is decided in `groups`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from random import SystemRandom
from typing import Any

from kedge.errors import LeaseHeld, QueueFull, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.store.lease import default_holder

from .entries import RUNNING, limits_job, queue_job
from .groups import group_digest
from .owner import take_lease
from .retry import parse_count

REREAD_S = 1.0
_SHORTEST_LEASE_S = 0.1
_LOOK_EVERY_S = 0.2  # for a right to begin that somebody else has
_LOOK_FOR_PLACE_EVERY_S = 5.0
_MOST_GROUPS = 1000  # whose rates are remembered
_LOOK_BACK = 20  # records, for limits that make sense
_dice = SystemRandom()  # not the generator that users seed


@dataclass(frozen=True, slots=True)
class Limits:
    """None: there is no such limit; runs of a group are then carried out one after another."""

    concurrency: int | None = None
    rate_per_s: float | None = None
    max_queued: int | None = None
    group_concurrency: int | None = None
    group_rate_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_queued", "group_concurrency"):
            value = getattr(self, name)
            if value is not None and parse_count(name, value) < 1:
                raise Validation(f"{name} must be at least 1 (got {value})")
        for name in ("rate_per_s", "group_rate_per_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and 1e-4 <= value <= 1e4):
                raise Validation(f"{name} must be a number from 0.0001 to 10000 (got {value!r})")

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def _limits_of(record: Checkpoint) -> Limits:
    values: Any = record.metadata
    return Limits(**{field.name: values.get(field.name) for field in fields(Limits)})


def save_limits(store: CheckpointManager, queue: str, limits: Limits) -> None:
    store.save(limits_job(queue), "limits", limits.to_json(), level="pipeline", metadata=limits.to_json())


class _Rate:
    """The right to begin so many runs in a second."""

    def __init__(self, store: CheckpointManager, job: str) -> None:
        self._store = store
        self._job = job
        self._tickets = 0  # runs that may begin now
        self.until = 0.0  # the tickets are good; when there are none: not worth another look

    def may_begin(self, per_s: float) -> bool:
        if self.is_used_up():
            return False
        if not self._tickets or time.monotonic() >= self.until:
            count = math.ceil(per_s * _SHORTEST_LEASE_S)
            try:
                self._store.take_lease(self._job, default_holder(), count / per_s)
            except LeaseHeld:
                self._tickets, self.until = 0, time.monotonic() + min(1 / per_s, _LOOK_EVERY_S)
                return False
            self._tickets, self.until = count, time.monotonic() + count / per_s
        self._tickets -= 1
        return True

    def take_back(self) -> None:
        """The run that was to begin does not."""
        self._tickets += 1

    def is_used_up(self) -> bool:
        return not self._tickets and time.monotonic() < self.until


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
        self._rate = _Rate(store, f"{self._job}:rate")
        self._group_rates: dict[str, _Rate] = {}
        self._look_for_place_at = -math.inf  # although all seem to be taken

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
        return limits.concurrency is None and limits.rate_per_s is None and limits.group_rate_per_s is None

    def check_room(self) -> None:
        """Raise QueueFull when no more may be submitted. Several who submit at once may exceed the limit by a few."""
        limit = self.current().max_queued
        if limit is None:
            return
        job = self._store.catalogue.job(self._job)
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
        _dice.shuffle(numbers)  # several workers look at once
        for number in numbers:
            try:
                stack.enter_context(take_lease(self._store, f"{self._job}:place-{number}", lease_s))
            except LeaseHeld:
                continue
            return True
        return False

    def may_begin(self, group: str = "") -> bool:
        """Whether one more run may begin now, which counts as begun."""
        limits = self.current()
        if limits.rate_per_s is not None and not self._rate.may_begin(limits.rate_per_s):
            return False
        if not group or limits.group_rate_per_s is None or self._rate_of(group).may_begin(limits.group_rate_per_s):
            return True
        self._rate.take_back()
        return False

    def _rate_of(self, group: str) -> _Rate:
        if group not in self._group_rates:
            if len(self._group_rates) >= _MOST_GROUPS:  # one that is forgotten costs a look at the store
                del self._group_rates[next(iter(self._group_rates))]
            self._group_rates[group] = _Rate(self._store, f"{self._job}:rate-{group_digest(group)}")
        return self._group_rates[group]

    def holds_back(self, group: str) -> bool:
        """Whether no run of this group may begin now, by what is known without a look at the store."""
        return group in self._group_rates and self._group_rates[group].is_used_up()

    def waits_s(self) -> float:
        """How long until it is worth while to ask again for the right to begin."""
        waits = [
            rate.until - time.monotonic() for rate in (self._rate, *self._group_rates.values()) if rate.is_used_up()
        ]
        return max(0.0, min(waits, default=math.inf))

    def is_full(self) -> bool:
        """Whether as many are at work as may be, by a look that takes no place.

        Now and then False all the same, so that a place is looked for: an entry that says that it is at work may be
        that of a worker that died, and whose pipeline no other worker has.
        """
        limit = self.current().concurrency
        if limit is None or len(self._store.list(self._job, tags={"state": RUNNING}, limit=limit)) < limit:
            return False
        if is_due := time.monotonic() >= self._look_for_place_at:
            self._look_for_place_at = time.monotonic() + _LOOK_FOR_PLACE_EVERY_S
        return not is_due
