"""Differences for the page: short values beside each other, long texts in two columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.cli.text import size
from holdfast.cli.tree import describe
from holdfast.diff import Change, ChangeKind, TextDelta
from holdfast.diff.values import weigh

_SIGNS = {ChangeKind.ADDED: "+", ChangeKind.REMOVED: "−"}
_LONG = 400


@dataclass(frozen=True, slots=True)
class Cell:
    text: str
    look: str = ""  # minus, plus, hunk


@dataclass(frozen=True, slots=True)
class ShownChange:
    path: str
    kind: str
    sign: str
    old: str
    new: str
    note: str
    sizes: str
    lines: Sequence[tuple[Cell, Cell]]


def shown_changes(changes: Iterable[Change]) -> list[ShownChange]:
    return [_shown(change) for change in changes]


def _shown(change: Change) -> ShownChange:
    has_old, has_new = change.kind is not ChangeKind.ADDED, change.kind is not ChangeKind.REMOVED
    weights = [weigh(each) for each, is_there in ((change.old, has_old), (change.new, has_new)) if is_there]
    is_text = isinstance(change.detail, TextDelta)
    return ShownChange(
        change.path,
        str(change.kind),
        _SIGNS.get(change.kind, "~"),
        _brief(change.old) if has_old else "",
        _brief(change.new) if has_new else "",
        "" if is_text else str(change.detail),
        " → ".join(dict.fromkeys(map(size, weights))) if any(weights) else "",
        side_by_side(change.detail) if isinstance(change.detail, TextDelta) else (),
    )


def _brief(value: object) -> str:
    text = describe(value)[0]
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"


def side_by_side(delta: TextDelta) -> list[tuple[Cell, Cell]]:
    """A unified diff in two columns: removed and added lines that belong together share a row."""
    rows: list[tuple[Cell, Cell]] = []
    minus: list[str] = []
    plus: list[str] = []

    def flush() -> None:
        for n in range(max(len(minus), len(plus))):
            left = Cell(minus[n], "minus") if n < len(minus) else Cell("")
            right = Cell(plus[n], "plus") if n < len(plus) else Cell("")
            rows.append((left, right))
        minus.clear()
        plus.clear()

    for line in delta.lines:
        mark, text = line[:1], line[1:]
        if mark == "-":
            minus.append(text)
        elif mark == "+":
            plus.append(text)
        else:
            flush()
            cell = Cell(line, "hunk") if mark == "@" else Cell(text)
            rows.append((cell, cell))
    flush()
    if delta.lines_left_out:
        more = Cell(f"… {delta.lines_left_out:,} more lines", "hunk")
        rows.append((more, more))
    return rows
