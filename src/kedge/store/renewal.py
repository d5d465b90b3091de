"""When leases are renewed. Most work ends earlier: a thread for each lease would take longer than a short run.

So one thread of the process waits for all of them. A lease gets its own thread when it is first due, because a renewal
may wait for a store that other leases do not need.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Callable
from itertools import count

_IDLE_S = 5.0  # then the waiting thread ends
_LEAST_SWEPT = 128

_numbers = count()


class Renewal:
    """A function to start in a thread when it is due, unless it is dropped before."""

    __slots__ = ("begin", "name", "thread")

    def __init__(self, begin: Callable[[], None], name: str) -> None:
        self.begin: Callable[[], None] | None = begin
        self.name = name
        self.thread: threading.Thread | None = None

    def drop(self) -> bool:
        """Cancel without a lock. Return whether it had not started; one that starts just now knows that it must end."""
        self.begin = None  # also frees what it refers to
        return self.thread is None


class Renewals:
    """The renewals that are not due yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._coming: list[tuple[float, int, Renewal]] = []
        self._sweep_at = _LEAST_SWEPT
        self._is_watched = False

    def add(self, begin: Callable[[], None], name: str, in_s: float) -> Renewal:
        """Schedule `begin`, which must not raise. Raises RuntimeError if the system gives no thread to wait for it."""
        renewal = Renewal(begin, name)
        with self._changed:
            if len(self._coming) >= self._sweep_at:
                self._sweep()
            self._push(renewal, in_s)
            if not self._is_watched:
                threading.Thread(target=self._watch, name="kedge-leases", daemon=True).start()
                self._is_watched = True
            elif self._coming[0][2] is renewal:
                self._changed.notify()
        return renewal

    def end(self, renewal: Renewal) -> None:
        """Cancel a renewal; if it has started, wait for its thread, which knows that it must end."""
        with self._changed:
            renewal.drop()
        if renewal.thread is not None:
            renewal.thread.join()

    def _sweep(self) -> None:
        """Remove ended renewals before there are many."""
        self._coming = [entry for entry in self._coming if entry[2].begin is not None]
        heapq.heapify(self._coming)
        self._sweep_at = max(_LEAST_SWEPT, 2 * len(self._coming))

    def _push(self, renewal: Renewal, in_s: float) -> None:
        heapq.heappush(self._coming, (time.monotonic() + in_s, next(_numbers), renewal))

    def _watch(self) -> None:
        with self._changed:
            idle_until = time.monotonic() + _IDLE_S
            while True:
                now = time.monotonic()
                while self._coming and (self._coming[0][0] <= now or self._coming[0][2].begin is None):
                    self._begin(heapq.heappop(self._coming)[2])
                if self._coming:
                    idle_until = now + _IDLE_S
                elif now >= idle_until:
                    self._is_watched = False
                    return
                self._changed.wait((self._coming[0][0] if self._coming else idle_until) - now)

    def _begin(self, renewal: Renewal) -> None:
        begin = renewal.begin
        if begin is None:
            return
        thread = threading.Thread(target=begin, name=renewal.name, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no threads left for now
            self._push(renewal, _IDLE_S / 50)
        else:
            renewal.thread = thread


_renewals = Renewals()


def renewals() -> Renewals:
    """Return the renewals of this process."""
    return _renewals


def _renew_in_child() -> None:
    global _renewals  # the waiting thread, or the lock's owner, may not exist in a child
    _renewals = Renewals()


os.register_at_fork(after_in_child=_renew_in_child)
