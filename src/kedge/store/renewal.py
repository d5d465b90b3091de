"""When leases are renewed. Most work ends before that: a thread for each would take longer than a short run does.

So one thread of the process waits for all of them. A lease that lasts gets a thread of its own when it is first due,
because one renewal may wait for a store that others do not need.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Callable
from itertools import count

_IDLE_S = 5.0  # then the thread that waits ends
_LEAST_SWEPT = 128

_numbers = count()


class Renewal:
    """What is to begin, in a thread, when it is due; unless it is ended before."""

    __slots__ = ("begin", "name", "thread")

    def __init__(self, begin: Callable[[], None], name: str) -> None:
        self.begin: Callable[[], None] | None = begin
        self.name = name
        self.thread: threading.Thread | None = None

    def drop(self) -> bool:
        """End it without a lock; whether it had not begun. Should it begin just now, it knows that it is to end."""
        self.begin = None  # and nothing is kept alive by it
        return self.thread is None


class Renewals:
    """Those that are not due yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._coming: list[tuple[float, int, Renewal]] = []
        self._sweep_at = _LEAST_SWEPT
        self._is_watched = False

    def add(self, begin: Callable[[], None], name: str, in_s: float) -> Renewal:
        """`begin` must not raise. RuntimeError when the system gives no thread to wait for it."""
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
        """It does not begin any more; if it has, wait for its thread, which knows that it is to end."""
        with self._changed:
            renewal.drop()
        if renewal.thread is not None:
            renewal.thread.join()

    def _sweep(self) -> None:
        """Forget those that have ended, before there are many."""
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
        except RuntimeError:  # the system gives no more threads just now
            self._push(renewal, _IDLE_S / 50)
        else:
            renewal.thread = thread


_renewals = Renewals()


def renewals() -> Renewals:
    """Those of this process."""
    return _renewals


def _renew_in_child() -> None:
    global _renewals  # the thread that waits, and who has the lock, may not exist in a child
    _renewals = Renewals()


os.register_at_fork(after_in_child=_renew_in_child)
