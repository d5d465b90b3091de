"""Tables and lists of facts that fit the terminal. IDs are never cut: other columns shrink, or the row is split."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, TypeVar

import click

from .text import clip, pad, pieces, safe, style, terminal_width, width_of

_GAP = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A title, and the text of each value below it.

    `drop`: higher columns are dropped first if space is short; 0 stays. `is_whole`: never cut. `looks`: other looks
    than `look` for cells with that content.
    """

    title: str
    text: Callable[[T], str]
    align: str = "<"
    look: str = ""
    drop: int = 0
    least: int = 6
    is_whole: bool = False
    looks: Mapping[str, str] = field(default_factory=dict)


def print_table(columns: Sequence[Column[T]], values: Iterable[T], *, has_titles: bool = True) -> None:
    """Print a row for each value, with cells made harmless. Empty columns are omitted."""
    cells = [[safe(column.text(value)) for column in columns] for value in values]
    lines = layout(columns, cells, terminal_width())
    for line in lines if has_titles else islice(lines, 1, None):
        click.echo(line)


def layout(columns: Sequence[Column[Any]], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    shown = [n for n in range(len(columns)) if any(row[n] for row in rows)]
    if not shown:
        return
    natural = {n: max(width_of(columns[n].title), *(width_of(row[n]) for row in rows)) for n in shown}
    if width is None:
        yield from _lines(columns, rows, natural)
        return
    while True:
        fitted = _fit(columns, {n: natural[n] for n in shown}, width)
        if fitted is not None:
            yield from _lines(columns, rows, fitted)
            return
        droppable = [n for n in shown if columns[n].drop]
        if not droppable or (len(droppable) == 1 and _is_filled(columns, {n: natural[n] for n in shown}, width)):
            yield from _broken(columns, rows, natural, width)
            return
        shown.remove(max(droppable, key=lambda n: columns[n].drop))


def _fit(columns: Sequence[Column[object]], widths: dict[int, int], width: int) -> dict[int, int] | None:
    """Return widths that fit, shrinking the widest shrinkable columns first; None if that is not enough."""
    excess = sum(widths.values()) + _GAP * (len(widths) - 1) - width
    while excess > 0:
        elastic = [n for n, w in widths.items() if not columns[n].is_whole and w > columns[n].least]
        if not elastic:
            return None
        widest = max(elastic, key=lambda n: widths[n])
        widths[widest] -= 1
        excess -= 1
    return widths


def _lines(columns: Sequence[Column[object]], rows: Sequence[Sequence[str]], widths: dict[int, int]) -> Iterator[str]:
    gap = " " * _GAP
    yield gap.join(style(pad(columns[n].title, w, columns[n].align), "head") for n, w in widths.items()).rstrip()
    last = list(widths)[-1]
    for row in rows:
        shown = []
        for n, w in widths.items():
            text = clip(row[n], w)
            if n != last or columns[n].align == ">":
                text = pad(text, w, columns[n].align)
            shown.append(style(text, columns[n].looks.get(row[n], columns[n].look)))
        yield gap.join(shown).rstrip()


def _is_filled(columns: Sequence[Column[object]], widths: Mapping[int, int], width: int) -> bool:
    """Return whether only an ID and similar columns would remain without the last droppable column."""
    is_rest_whole = all(columns[n].is_whole or columns[n].drop for n in widths)
    return is_rest_whole and max(w for n, w in widths.items() if columns[n].is_whole) > width // 2


def _broken(
    columns: Sequence[Column[object]], rows: Sequence[Sequence[str]], natural: Mapping[int, int], width: int
) -> Iterator[str]:
    """Yield rows whose IDs leave no space beside them: the ID on its own lines, the rest of the row below."""
    widest = max((n for n in natural if columns[n].is_whole), key=lambda n: natural[n])
    others = [n for n in natural if n != widest]
    below = list(layout([columns[n] for n in others], [[row[n] for n in others] for row in rows], width - 2))
    yield style(columns[widest].title, columns[widest].look)
    if below:
        yield "  " + below[0]
    for row, rest in zip(rows, below[1:] or [""] * len(rows), strict=True):
        for start in range(0, len(row[widest]), width):
            yield style(row[widest][start : start + width], columns[widest].look)
        if rest:
            yield "  " + rest


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print `label  value` lines with aligned and wrapped values; empty values are omitted."""
    for line in facts_layout([(label, safe(value)) for label, value in facts if value], terminal_width()):
        click.echo(line)


def facts_layout(facts: Sequence[tuple[str, str]], width: int | None) -> Iterator[str]:
    indent = max((width_of(label) for label, _ in facts), default=0) + _GAP
    for label, value in facts:
        lines = list(pieces(value, width - indent)) if width else [value]
        yield style(pad(label, indent), "dim") + lines[0]
        for line in lines[1:]:
            yield " " * indent + line
