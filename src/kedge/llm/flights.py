"""Calls in progress. Of several equal concurrent calls, one is made; the others wait for its answer.

Threads and tasks see each other in a table of this process. Processes see a checkpoint of the job `llm:flights`, which
has the caller and the possible cost. After the call a background thread deletes it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime

from kedge.blobs.workers import Workers
from kedge.errors import CheckpointError, IdempotencyConflict
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.pipeline.owner import is_gone, this_process
from kedge.pipeline.place import payer

from .budget import Budget, Spending, estimate
from .keys import Request

JOB = "llm:flights"
WAIT_S = 600.0  # afterwards, another process's call is neither waited nor reserved for

_Place = tuple[str, str, int, str]  # of a call: store, namespace, identity of one in memory, key


class Flights:
    """The calls in progress of one store."""

    def __init__(self, store: CheckpointManager, counters: Counter[str], write_dropped: Callable[[], None]) -> None:
        self._store = store
        self._counters = counters
        self._write_dropped = write_dropped  # records what forgotten flights paid
        self._spending = Spending(store)
        self.restart()
        _open.add(self)

    def restart(self) -> None:
        """Start empty, as in a forked child: the parent deletes the records of its own flights."""
        self._over: list[str] = []  # records to be deleted
        self._sweeper = Workers(1, "kedge-flights", keep=1)

    def begin(self, request: Request, who: object, budget: Budget | None = None) -> Flight | None:
        """Begin a call; None while somebody else makes it. `who` never waits for itself.

        With a budget, reserves what the call may cost; `check` tells whether that is left.
        """
        if self._over:
            self._sweeper.start(self._sweep)
        is_memory = self._store.url.startswith("memory:")
        place = (self._store.url, self._store.namespace, id(self._store) if is_memory else 0, request.key)
        with _lock:
            other = _under_way.get(place)
            if other is not None and other.who != who:
                return None
            flight = Flight(self, place, who)
            if other is None:
                _under_way[place] = flight
        try:
            if other is None and (budget is not None or not is_memory) and not self._claim(request, flight, budget):
                flight.end()
                return None
        except BaseException:
            flight.end()
            raise
        return flight

    def _claim(self, request: Request, flight: Flight, budget: Budget | None) -> bool:
        """Announce the call to other processes. Skips one that died during its call, or takes too long."""
        about: dict[str, object] = {"owner": _this_process(), "model": request.model, "run": payer()[0]}
        if budget is not None:
            about["estimate"] = format(estimate(request), "f")
        while True:
            try:
                state = {"flight": os.urandom(8)}  # so that it never equals an earlier one
                flight.record = self._store.save(JOB, request.model, state, metadata=about, idempotency_key=request.key)
            except IdempotencyConflict:
                over = list(self._over)  # read first: a record swept after the look is over, too
                other = self._store.get_by_key(JOB, request.key)
                if other is not None and other.id not in over and not self._is_over(request.key, other):
                    self._counters["waits"] += 1
                    return False
                if other is not None:
                    self._store.delete(JOB, other.id)
            else:
                _waiting.pop(request.key, None)
                return True

    def _is_over(self, key: str, record: Checkpoint) -> bool:
        seen, since = _waiting.get(key, ("", 0.0))
        if record.id != seen:
            since = time.monotonic()
            _waiting[key] = record.id, since
        return is_gone(record.metadata.get("owner")) or time.monotonic() - since >= WAIT_S

    def check(self, request: Request, flight: Flight, budget: Budget) -> None:
        """Raise BudgetExceeded if a call may cost more than is left.

        Reads flights first, then the books: a call that ends in between counts twice, never not at all.
        """
        over = {flight.record, *self._over}
        self._write_dropped()
        under_way = []
        for record in self._store.list(JOB):
            if record.id in over:
                continue
            if _is_lost(record):
                self.end(record.id)
            else:
                under_way.append(record)
        self._spending.check(budget, payer()[0], request.model, estimate(request), under_way)

    def end(self, record: str) -> None:
        """Delete the record of a flight soon."""
        self.forget(record)
        self._sweeper.start(self._sweep)

    def forget(self, record: str) -> None:
        """Delete the record later: for finalizers, which must not take a lock."""
        self._over.append(record)

    def _sweep(self) -> None:
        try:
            self._delete_over()
        except CheckpointError:
            pass  # `settle` raises it, if it persists

    def _delete_over(self) -> None:
        over = list(self._over)
        self._write_dropped()
        for record in over:
            self._store.delete(JOB, record)
            with suppress(ValueError):  # two threads may delete it if two flights were the first to end
                self._over.remove(record)

    def settle(self) -> None:
        """Wait until the records of finished flights are deleted."""
        if self._over:
            self._sweeper.submit(self._delete_over).result()

    def close(self) -> None:
        try:
            self.settle()
        finally:
            self._sweeper.shutdown()


class Flight:
    """A call in progress."""

    def __init__(self, flights: Flights, place: _Place, who: object) -> None:
        self._flights = flights
        self._place = place
        self.who = who
        self.record: str | None = None

    def end(self) -> None:
        """Let others continue."""
        self._end(self._flights.end)

    def forget(self) -> None:
        """The same in a finalizer."""
        self._end(self._flights.forget)

    def _end(self, end: Callable[[str], None]) -> None:
        record, self.record = self.record, None
        if record is not None:
            end(record)
        if _under_way.get(self._place) is self:
            del _under_way[self._place]


_lock = threading.Lock()
_under_way: dict[_Place, Flight] = {}
_waiting: dict[str, tuple[str, float]] = {}  # the flight of another process waited for, and since when
_open: weakref.WeakSet[Flights] = weakref.WeakSet()
_me: tuple[int, dict[str, object]] | None = None


def _is_lost(record: Checkpoint) -> bool:
    """Return whether a flight's caller is lost; on another machine only the age tells."""
    owner, age = record.metadata.get("owner"), datetime.now(UTC) - record.created_at
    return is_gone(owner) or (owner != _this_process() and age.total_seconds() > WAIT_S)


def _this_process() -> dict[str, object]:
    global _me
    if _me is None or _me[0] != os.getpid():
        _me = (os.getpid(), this_process())
    return _me[1]


def _after_fork() -> None:
    """Forget the parent's calls, which continue there."""
    global _lock
    _lock = threading.Lock()
    _under_way.clear()
    for flights in list(_open):
        flights.restart()


os.register_at_fork(after_in_child=_after_fork)
