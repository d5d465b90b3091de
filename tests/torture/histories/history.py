"""What was asked of a store and what it answered, as its users heard it; kept outside it, and outlives them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

CHANGES = frozenset({"save", "branch", "copy_job", "delete", "apply", "cleanup", "pin", "tag"})
REFUSALS = frozenset({"NotFound", "Conflict", "LeaseHeld", "LeaseLost", "Validation", "InvalidName", "UnsupportedType"})


@dataclass(frozen=True, slots=True)
class Seen:
    """A checkpoint as somebody was shown it."""

    id: str
    job: str
    seq: int
    mark: str  # names the save it comes from
    parent: str | None
    size_bytes: int
    digest: str  # "" where a change of keys may change it
    status: str

    @property
    def identity(self) -> tuple[object, ...]:
        """What never changes."""
        return self.job, self.seq, self.mark, self.parent, self.size_bytes, self.digest


@dataclass(slots=True)
class Operation:
    """One call: what was asked, when it began, and the answer, if one came."""

    worker: str
    number: int
    name: str
    args: dict[str, Any]
    began: float
    ended: float = math.inf
    result: dict[str, Any] = field(default_factory=dict)
    error: str = ""  # the name of the class
    text: str = ""

    @property
    def is_done(self) -> bool:
        return self.ended < math.inf and not self.error

    @property
    def is_refused(self) -> bool:
        """Certainly nothing was changed. An operation neither done nor refused is in doubt."""
        return self.error in REFUSALS

    @property
    def seen(self) -> list[Seen]:
        shown: list[Seen] = self.result.get("seen", [])
        return shown

    def mentions(self, subject: str) -> bool:
        return (
            subject in (self.args.get("id"), self.args.get("other"), self.result.get("id"), self.args.get("job"))
            or subject in self.result.get("ids", ())
            or any(shown.id == subject for shown in self.seen)
        )

    def line(self, start: float) -> str:
        end = f"{self.ended - start:8.3f}" if self.ended < math.inf else "   never"
        answer = f"{self.error}: {self.text}" if self.error else str(self.result.get("ids", self.result.get("id", "")))
        if self.seen:
            answer += f" [{len(self.seen)} seen]"
        told = " ".join(f"{name}={value}" for name, value in self.args.items() if value is not None)
        return f"{self.began - start:8.3f} … {end}  {self.worker:12} {self.name:10} {told}  → {answer or 'done'}"


class History:
    """Every operation of every worker, in the order in which they began."""

    def __init__(self, *, is_deferred: bool = False) -> None:
        self.operations: list[Operation] = []
        self.outages: list[tuple[float, float]] = []  # when servers were down
        self.failures: list[str] = []
        self.is_deferred = is_deferred  # changes are durable when the store is closed: memory:DIR

    def outline(self, subject: str | None = None) -> list[str]:
        """All that concerned a checkpoint or a job, or just all, a line for each operation."""
        operations = sorted(self.operations, key=lambda op: op.began)
        chosen = [op for op in operations if subject is None or op.mentions(subject)]
        return [op.line(operations[0].began) for op in chosen]


class Listener:
    """Takes in what one worker says."""

    def __init__(self, history: History, worker: str) -> None:
        self._history = history
        self._worker = worker
        self._under_way: dict[int, Operation] = {}
        self._unkept: list[Operation] = []

    def note(self, message: tuple[Any, ...], moment: float = 0) -> None:
        match message:
            case "begin", int(number), str(name), dict(args):
                operation = Operation(self._worker, number, name, args, moment)
                self._under_way[number] = operation
                self._history.operations.append(operation)
            case "end", int(number), dict(result):
                self._end(self._under_way.pop(number), result, moment)
            case "error", int(number), str(error), str(text):
                operation = self._under_way.pop(number)
                operation.error, operation.text, operation.ended = error, text, moment
            case "failed", str(text):
                self._history.failures.append(f"{self._worker}: {text}")

    def _end(self, operation: Operation, result: dict[str, Any], moment: float) -> None:
        operation.result = result
        if self._history.is_deferred and operation.name in CHANGES:
            self._unkept.append(operation)
            return
        operation.ended = moment
        if operation.name == "close":
            for change in self._unkept:
                change.ended = moment
            self._unkept = []
