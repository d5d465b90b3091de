"""What a session of a run has done, waits for and paid, as the records of the run tell it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, NotRequired, TypedDict

from .keys import Path

if TYPE_CHECKING:
    from kedge.llm.bills import Bill, Charge

MAX_LISTED = 10_000  # steps named in the record of a session

# For what a run or an execution of a workflow waits, as its status record says it
Waiting = TypedDict(
    "Waiting",
    {
        "for": str,  # approval, signal, run or time
        "name": str,  # a path, or the name of an execution's checkpoint
        "prompt": str,
        "id": NotRequired[str],  # of an execution's checkpoint, as names may repeat there
        "asked_at": NotRequired[str],
        "expires_at": NotRequired[str],
    },
)


class Account:
    """Kept by the run; steps of several threads write into it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.executed = 0
        self._reused = 0
        self._names: dict[str, list[str]] = {"ran": [], "reused": []}
        self._waiting: dict[Path, Waiting] = {}
        self._bills: dict[Path, Bill] = {}  # () is that of the whole session
        self.progress: Mapping[str, int | None] | None = None

    def ran(self, path: str, pieces: int = 1) -> None:
        """A step, or so many items of a map."""
        with self._lock:
            self.executed += pieces
            self._name("ran", path)

    def reused(self, path: str) -> None:
        with self._lock:
            self._reused += 1
            self._name("reused", path)

    def _name(self, what: str, path: str) -> None:
        if len(self._names[what]) < MAX_LISTED:
            self._names[what].append(path)

    def waits(self, path: Path, waiting: Waiting) -> None:
        with self._lock:
            self._waiting[path] = waiting

    def waits_no_more(self, path: Path) -> None:
        with self._lock:
            self._waiting.pop(path, None)

    def charge(self, path: Path, charge: Charge) -> None:
        """Count an LLM call for the step that made it, and for all that this is part of."""
        from kedge.llm.bills import Bill

        with self._lock:
            for length in range(len(path) + 1):
                self._bills[path[:length]] = self._bills.get(path[:length], Bill()).add(charge)

    def bill(self, path: Path = ()) -> Bill | None:
        return self._bills.get(path)

    def money(self, path: Path = ()) -> str:
        """What LLM calls cost in this session, as text; "" when there were none."""
        return str(self._bills.get(path, ""))

    def close_bill(self, path: Path) -> None:
        """Of an item: it is in that of its map."""
        with self._lock:
            self._bills.pop(path, None)

    def names(self) -> dict[str, object]:
        """The steps by name, as many as are listed."""
        with self._lock:
            return {what: list(names) for what, names in self._names.items()}

    def facts(self) -> dict[str, object]:
        with self._lock:
            facts: dict[str, object] = {
                "ran": self.executed,
                "reused": self._reused,
                "waiting": list(self._waiting.values()),
                "progress": self.progress,
            }
            if bill := self._bills.get(()):
                facts["llm"] = bill.to_json()
            return facts
