"""Series drawn with braille characters: eight dots each, so that a terminal can show a curve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .series import Series, place_between
from .text import style

_LOOKS = ("id", "warn", "type", "good", "bad", "dim")
MOST_SERIES = len(_LOOKS)
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of a character


def number(value: float) -> str:
    """Format a number in at least four digits, with separators for thousands."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def draw(series: Sequence[Series], width: int, height: int) -> Iterator[str]:
    """Yield lines of text: series of one metric over sequence numbers, each in its own look."""
    points = [point for line in series for point in line.points]
    low, high = min(p.value for p in points), max(p.value for p in points)
    first, last = min(p.seq for p in points), max(p.seq for p in points)
    labels = [number(high), number(low)]
    margin = max(map(len, labels)) + 1
    columns = max(10, width - margin - 1)
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for line, look in zip(series, _LOOKS, strict=False):
        for x, y in _dots(line, (first, last), (low, high), 2 * columns, 4 * height):
            place = (y // 4, x // 2)
            cells[place] = cells.get(place, (0, look))[0] | _DOTS[y % 4][x % 2], look
    for row in range(height):
        label = labels[0] if row == 0 else labels[1] if row == height - 1 else ""
        drawn = (cells.get((row, column)) for column in range(columns))
        text = "".join(" " if cell is None else style(chr(0x2800 + cell[0]), cell[1]) for cell in drawn)
        yield f"{label:>{margin - 1}} │{text.rstrip()}"
    ends = f"#{first:,}", f"#{last:,}"
    yield " " * margin + "└" + "─" * columns
    yield " " * (margin + 1) + ends[0] + ends[1].rjust(columns - len(ends[0]))


def legend(series: Sequence[Series]) -> list[str]:
    return [style("━━", look) + f" {line.job}" for line, look in zip(series, _LOOKS, strict=False)]


def _dots(
    series: Series, seqs: tuple[int, int], values: tuple[float, float], width: int, height: int
) -> Iterator[tuple[int, int]]:
    """Yield the dots of a curve, including those between its points."""
    before: tuple[int, int] | None = None
    for point in series.thinned(width):
        x = _scaled(point.seq, seqs, width)
        y = height - 1 - _scaled(point.value, values, height)
        if before is not None:
            steps = max(abs(x - before[0]), abs(y - before[1]))
            for n in range(1, steps):
                yield before[0] + (x - before[0]) * n // steps, before[1] + (y - before[1]) * n // steps
        yield x, y
        before = x, y


def _scaled(value: float, span: tuple[float, float], size: int) -> int:
    return round(place_between(*span, value) * (size - 1))
