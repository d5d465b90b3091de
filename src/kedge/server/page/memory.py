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


class NamespaceMemory:
    def __init__(self) -> None:
        self.growth = Growth()
        self.spending = Spending()
        self.roster = Roster()


class PageMemory:
    """Thread-safe; one for an application."""

    def __init__(self) -> None:
        self.outlines = Outlines()
        self.runs = RunMemory()
        self.previews = Previews()
        self._namespaces: dict[str, NamespaceMemory] = {}
        self._lock = Lock()

    def of(self, namespace: str) -> NamespaceMemory:
        with self._lock:
            return self._namespaces.setdefault(namespace, NamespaceMemory())

    def pending_count(self, access: Access) -> int:
        """How many approvals wait, for the menu."""
        return len(self.of(access.namespace).roster.look(access.store).approvals)


def memory_of(request: Request) -> PageMemory:
    memory = request.app.state.page
    assert isinstance(memory, PageMemory)
    return memory
