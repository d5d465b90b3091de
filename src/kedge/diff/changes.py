"""The result of a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .values import brief, weigh


class ChangeKind(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    TYPE_CHANGED = "type_changed"


@dataclass(frozen=True, slots=True)
class ArrayDelta:
    """How an array, table or byte string changed. None if that is unknown, for example without numpy."""

    elements: int  # of the newer one
    elements_changed: int | None
    bytes_changed: int
    max_abs_difference: float | None = None  # without NaN; only of numbers
    note: str = ""  # further changes: shape, dtype

    def __str__(self) -> str:
        parts = [self.note] if self.note else []
        if self.elements_changed is not None:
            parts.append(f"{self.elements_changed:,} of {self.elements:,} elements differ")
        elif not self.note:
            parts.append(f"{self.bytes_changed:,} bytes differ")
        if self.max_abs_difference is not None:
            parts.append(f"by up to {self.max_abs_difference:.6g}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """How a long text changed: the lines of a unified diff."""

    lines: tuple[str, ...]
    lines_left_out: int = 0

    def __str__(self) -> str:
        more = [f"… {self.lines_left_out:,} more lines"] if self.lines_left_out else []
        return "\n".join([*self.lines, *more])


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. `old` and `new` are values of the outlines; None if there is none."""

    path: str  # "" is the state itself
    kind: ChangeKind
    old: object = None
    new: object = None
    detail: ArrayDelta | TextDelta | str = ""  # str() of it is for people

    def to_json(self) -> dict[str, object]:
        entry: dict[str, object] = {"path": self.path, "kind": str(self.kind)}
        if self.kind is not ChangeKind.ADDED:
            entry |= {"old": brief(self.old), "old_bytes": weigh(self.old)}
        if self.kind is not ChangeKind.REMOVED:
            entry |= {"new": brief(self.new), "new_bytes": weigh(self.new)}
        if isinstance(self.detail, ArrayDelta):
            entry["elements"] = self.detail.elements
            entry["elements_changed"] = self.detail.elements_changed
            entry["bytes_changed"] = self.detail.bytes_changed
            entry["max_abs_difference"] = brief(self.detail.max_abs_difference)
        if self.detail:
            entry["detail"] = str(self.detail)
        return entry


@dataclass(frozen=True, slots=True)
class Diff:
    """All differences, counted; the first `max_changes` of them in full."""

    changes: tuple[Change, ...]
    left_out: int  # changes counted but not listed
    added: int
    removed: int
    changed: int  # including those of another type
    bytes_changed: int  # of arrays and byte strings: added, removed, or different
    shared_bytes: int  # of arrays and byte strings: the same in both
    old_id: str = ""
    new_id: str = ""

    @property
    def is_empty(self) -> bool:
        return not self.changes

    def to_json(self) -> dict[str, object]:
        """Return data for json.dumps."""
        return {
            "old": self.old_id,
            "new": self.new_id,
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "bytes_changed": self.bytes_changed,
            "shared_bytes": self.shared_bytes,
            "changes": [change.to_json() for change in self.changes],
            "left_out": self.left_out,
        }
