"""Small drawings, made here so that the page needs no script for them: sparklines, histograms, timelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from markupsafe import Markup, escape

from kedge.terminal.series import place_between

CELLS_IN_ROW, CELL_PITCH = 60, 16  # page.js counts with them, too


def _svg(width: float, height: float, label: str, inner: str, kind: str) -> Markup:
    # `inner` is put together below from numbers and escaped text only.
    return Markup(  # nosec B704
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">{inner}</svg>'
    )


def sparkline(values: Sequence[float], label: str) -> Markup:
    """A line over the last values, filled below; a dot at the newest."""
    width, height, edge = 96.0, 24.0, 2.0
    if len(values) < 2:
        return Markup("")
    high = max(values) or 1  # from nought: a tenth more is not twice as high
    step = (width - 2 * edge) / (len(values) - 1)
    points = [(edge + n * step, height - edge - value / high * (height - 2 * edge)) for n, value in enumerate(values)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    x, y = points[-1]
    inner = (
        f'<polygon class="fill" points="{points[0][0]:.1f},{height} {line} {x:.1f},{height}"/>'
        f'<polyline class="stroke" points="{line}"/><circle class="end" cx="{x:.1f}" cy="{y:.1f}" r="2"/>'
    )
    return _svg(width, height, label, inner, "sparkline")


def histogram(counts: Sequence[int], low: str, high: str) -> Markup:
    """Bars, with the ends of the range below."""
    width, height = 320.0, 72.0
    most = max(counts, default=0) or 1
    step = width / max(len(counts), 1)
    bars = "".join(
        f'<rect x="{n * step + 0.5:.2f}" y="{height - count / most * height:.2f}" width="{max(step - 1, 0.5):.2f}" '
        f'height="{count / most * height:.2f}"><title>{count:,}</title></rect>'
        for n, count in enumerate(counts)
    )
    inner = (
        f"{bars}"
        f'<text x="0" y="{height + 14}">{escape(low)}</text>'
        f'<text x="{width}" y="{height + 14}" text-anchor="end">{escape(high)}</text>'
    )
    return _svg(width, height + 18, f"distribution from {low} to {high}", inner, "histogram")


def timeline(moments: Sequence[tuple[datetime, str, bool]]) -> Markup:
    """When each checkpoint was made: (moment, title, is_marked), oldest first. As wide as there is room."""
    if len(moments) < 2:
        return Markup("")
    first, last = moments[0][0], moments[-1][0]
    for moment, _, _ in moments:
        first, last = min(first, moment), max(last, moment)  # clocks only decorate (I4)
    whole = (last - first).total_seconds() or 1
    dots = "".join(
        f'<circle class="{"marked" if is_marked else "plain"}" r="{5 if is_marked else 3.5}" '
        f'cx="{1 + (moment - first).total_seconds() / whole * 98:.2f}%" cy="8"><title>{escape(title)}</title></circle>'
        for moment, title, is_marked in moments
    )
    begin, end = (f"{moment:%Y-%m-%d %H:%M:%S}" for moment in (first, last))
    return Markup(  # nosec B704 # numbers and escaped text
        f'<svg class="timeline" role="img" aria-label="{len(moments)} checkpoints over time">'
        f'<line class="axis" x1="1%" x2="99%" y1="8" y2="8"/>{dots}</svg>'
        f'<figcaption class="ends quiet"><span>{begin}</span><span>{end} UTC</span></figcaption>'
    )


def stacked_bars(
    columns: Sequence[tuple[str, Sequence[int]]], label: str, show: Callable[[int], str] = "{:,}".format
) -> Markup:
    """A bar for each column, its parts on top of each other; nothing when all are empty. As wide as there is room.

    `show` says how much the lines of the scale stand for.
    """
    height = 120.0
    most = max((sum(parts) for _, parts in columns), default=0)
    if not most:
        return Markup("")
    step = 100 / len(columns)
    bars = []
    for n, (title, parts) in enumerate(columns):
        top = height
        inner = ""
        for number, part in enumerate(parts):
            if part:
                tall = max(1.0, part / most * (height - 4))
                top -= tall
                inner += f'<rect class="part-{number}" y="{top:.1f}" height="{tall:.1f}" {_across(n, step)}/>'
        if inner:
            bars.append(f"<g><title>{escape(title)}</title>{inner}</g>")
    marks = ((4.0, show(most)), (height / 2 + 2, show(most // 2)))
    grid = "".join(f'<line class="grid" x1="0" x2="100%" y1="{y:g}" y2="{y:g}"/>' for y, _ in marks)
    texts = "".join(f'<text x="0" y="{y + 11:g}">{escape(text)}</text>' for y, text in marks)
    return Markup(  # nosec B704 # numbers and escaped text
        f'<svg class="bars" role="img" aria-label="{escape(label)}">{grid}{"".join(bars)}{texts}'
        f'<line class="axis" x1="0" x2="100%" y1="{height}" y2="{height}"/></svg>'
    )


def _across(number: int, step: float) -> str:
    return f'x="{(number + 0.1) * step:.2f}%" width="{step * 0.8:.2f}%"'


@dataclass(frozen=True, slots=True)
class Bar:
    """A time during which something was at work."""

    begin: float
    end: float
    look: str
    title: str
    session: int = 0


def track(bars: Sequence[Bar], begin: float, end: float) -> Markup:
    """Bars on a line from `begin` to `end`, as far as they are in it. As wide as there is room."""
    whole = (end - begin) or 1.0
    inner = ""
    for bar in bars:
        if bar.end < begin or bar.begin > end:
            continue
        left, right = (100 * (min(max(moment, begin), end) - begin) / whole for moment in (bar.begin, bar.end))
        width = max(right - left, 0.8)
        inner += (
            f'<rect class="{bar.look}" x="{min(left, 100 - width):.2f}%" width="{width:.2f}%" height="8" rx="3">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
    return Markup(f'<svg class="track" aria-hidden="true">{inner}</svg>')  # nosec B704 # numbers and escaped text


def ticked_axis(ticks: Sequence[tuple[float, str]], label: str) -> Markup:
    """Moments on a line: (which part of it, text). As wide as there is room."""
    inner = "".join(
        f'<line class="axis" x1="{100 * part:.2f}%" x2="{100 * part:.2f}%" y1="16" y2="22"/>'
        f'<text x="{100 * part:.2f}%" y="12" text-anchor="{_anchor(part)}">{escape(text)}</text>'
        for part, text in ticks
    )
    return Markup(  # nosec B704 # numbers and escaped text
        f'<svg class="track ticks" role="img" aria-label="{escape(label)}"><rect class="chosen" height="22"/>'
        f'<line class="axis" x1="0" x2="100%" y1="21" y2="21"/>{inner}</svg>'
    )


def _anchor(part: float) -> str:
    return "start" if part < 0.04 else "end" if part > 0.93 else "middle"


def cells(looks: Sequence[str], label: str) -> Markup:
    """A cell for each look, in rows of `CELLS_IN_ROW`: one path for all of a look, however many they are."""
    pitch = CELL_PITCH
    columns, rows = min(len(looks), CELLS_IN_ROW) or 1, -(-len(looks) // CELLS_IN_ROW)
    paths: dict[str, str] = {}
    at = 0
    while at < len(looks):
        row, column = divmod(at, CELLS_IN_ROW)
        length = 1
        while column + length < CELLS_IN_ROW and at + length < len(looks) and looks[at + length] == looks[at]:
            length += 1
        piece = f"M{column * pitch} {row * pitch + pitch // 2}h{length * pitch}"
        paths[looks[at]] = paths.get(looks[at], "") + piece
        at += length
    inner = "".join(f'<path class="{escape(look)}" d="{d}"/>' for look, d in paths.items())
    width, height = columns * pitch, rows * pitch
    return Markup(  # nosec B704 # numbers and escaped text
        f'<svg class="cells" width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(label)}">{inner}</svg>'
    )


@dataclass(frozen=True, slots=True)
class Dot:
    """A point of a line that leads somewhere."""

    x: float
    y: float
    title: str
    address: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A line: its points, what a pointer over them is told, and the dots on it."""

    name: str
    address: str  # of a point, without its number
    points: Sequence[tuple[float, float]]
    labels: Sequence[tuple[int, str]]  # of each point: its number, its value in words
    dots: Sequence[Dot]


def curves(lines: Sequence[Curve], label: str) -> Markup:
    """Lines over a common span, with dots on them. As wide as there is room. page.js tells what is under a pointer."""
    width, height, edge = 600.0, 150.0, 5.0
    points = [point for line in lines for point in line.points]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = place_between(left, right, x), place_between(low, high, y)
        return edge + across * (width - 2 * edge), height - edge - up * (height - 2 * edge)

    inner = "".join(
        f'<line class="grid" x1="0" x2="{width:g}" y1="{height * part:g}" y2="{height * part:g}"/>'
        for part in (0.25, 0.5, 0.75)
    )
    for number, line in enumerate(lines):
        drawn = " ".join("{:.0f},{:.1f}".format(*place(*point)) for point in line.points)
        labels = " ".join(f"{seq}:{text}" for seq, text in line.labels)
        inner += (
            f'<g class="lane-{number}"><polyline class="line" data-name="{escape(line.name)}" '
            f'data-at="{escape(line.address)}" data-labels="{escape(labels)}" points="{drawn}"/>'
        )
        for dot in line.dots:
            x, y = place(dot.x, dot.y)
            # Not in the order of the Tab key: there may be many, and the extremes have links beside the drawing.
            inner += (
                f'<a href="{escape(dot.address)}" tabindex="-1"><circle class="dot" cx="{x:.0f}" cy="{y:.1f}" r="3">'
                f"<title>{escape(dot.title)}</title></circle></a>"
            )
        inner += "</g>"
    return _svg(width, height, label, inner, "curves")
