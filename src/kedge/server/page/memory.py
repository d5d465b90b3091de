"""What the page remembers from one request to the next: part of the application, so that two of them share nothing."""

from __future__ import annotations

import time
from threading import Lock

from fastapi import Request

from kedge.server.auth import Access

from .approvals import asked
from .growth import Growth
from .spending import Spending
from .states import Outlines

_COUNTED_S = 5.0


class PageMemory:
    """Thread-safe; one for an application."""

    def __init__(self) -> None:
        self.outlines = Outlines()
        self._growth: dict[str, Growth] = {}  # by namespace
        self._spending: dict[str, Spending] = {}
        self._pending: dict[str, tuple[float, int]] = {}  # by namespace: when it was counted, and how many
        self._lock = Lock()

    def growth(self, namespace: str) -> Growth:
        with self._lock:
            return self._growth.setdefault(namespace, Growth())

    def spending(self, namespace: str) -> Spending:
        with self._lock:
            return self._spending.setdefault(namespace, Spending())

    def pending_count(self, access: Access) -> int:
        """How many approvals wait, for the menu: looked up every few seconds only, because every page shows it."""
        with self._lock:
            known = self._pending.get(access.namespace)
        if known is not None and time.monotonic() - known[0] < _COUNTED_S:
            return known[1]
        count = len(asked(access.store))
        with self._lock:
            self._pending[access.namespace] = time.monotonic(), count
        return count

    def forget_count(self, namespace: str) -> None:
        with self._lock:
            self._pending.pop(namespace, None)


def memory_of(request: Request) -> PageMemory:
    memory = request.app.state.page
    assert isinstance(memory, PageMemory)
    return memory
