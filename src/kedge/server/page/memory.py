"""What the page remembers from one request to the next: part of the application, so that two of them share nothing."""

from __future__ import annotations

from threading import Lock

from fastapi import Request

from kedge.server.auth import Access

from .growth import Growth
from .previews import Previews
from .roster import Roster
from .run_records import RunMemory
from .spending import Spending
from .states import Outlines


class PageMemory:
    """Thread-safe; one for an application."""

    def __init__(self) -> None:
        self.outlines = Outlines()
        self.runs = RunMemory()
        self.previews = Previews()
        self._growth: dict[str, Growth] = {}  # by namespace
        self._spending: dict[str, Spending] = {}
        self._rosters: dict[str, Roster] = {}
        self._lock = Lock()

    def growth(self, namespace: str) -> Growth:
        with self._lock:
            return self._growth.setdefault(namespace, Growth())

    def spending(self, namespace: str) -> Spending:
        with self._lock:
            return self._spending.setdefault(namespace, Spending())

    def roster(self, namespace: str) -> Roster:
        with self._lock:
            return self._rosters.setdefault(namespace, Roster())

    def pending_count(self, access: Access) -> int:
        """How many approvals wait, for the menu."""
        return len(self.roster(access.namespace).look(access.store).approvals)


def memory_of(request: Request) -> PageMemory:
    memory = request.app.state.page
    assert isinstance(memory, PageMemory)
    return memory
