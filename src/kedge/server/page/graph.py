"""A job's history as a graph, like that of commits: a lane for each line of checkpoints, newest on top.

A checkpoint without a parent follows the one saved before it. One with a parent follows that: where another one
follows the same parent, a line branches off. Rows are laid out one by one, so the next page of a history goes on
with the lanes that the last one left open, whatever its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kedge.model import Checkpoint

MAX_LANES = 8  # more are drawn on top of each other in the last one

_WIDTH, _HEIGHT, _RADIUS = 16, 44, 4.5


@dataclass(frozen=True, slots=True)
class Row:
    """Where a checkpoint is drawn, and the lines that pass it or end at it."""

    checkpoint: Checkpoint
    lane: int
    above: tuple[int, ...]  # lanes of lines that come from above and end here
    through: tuple[int, ...]  # lanes of lines that pass
    has_below: bool  # its own line goes on to an older one


def lay_out(newest_first: Sequence[Checkpoint], lanes: Sequence[str], older: str | None) -> tuple[list[Row], list[str]]:
    """The rows, and the lanes still open below them: in each the ID that its line leads to, or "".

    `lanes` are those open above; `older` is the checkpoint saved before the last row, if there is one.
    """
    open_lanes = list(lanes)
    rows = []
    for n, checkpoint in enumerate(newest_first):
        ends = [lane for lane, wanted in enumerate(open_lanes) if wanted == checkpoint.id]
        lane = ends[0] if ends else _free(open_lanes)
        for end in ends:
            open_lanes[end] = ""
        through = tuple(other for other, wanted in enumerate(open_lanes) if wanted)
        before = newest_first[n + 1].id if n + 1 < len(newest_first) else older
        follows = checkpoint.parent or before
        if follows:
            _put(open_lanes, lane, follows)
        rows.append(Row(checkpoint, min(lane, MAX_LANES - 1), _clip(ends), _clip(through), bool(follows)))
        while open_lanes and not open_lanes[-1]:
            open_lanes.pop()
    return rows, open_lanes[:MAX_LANES]


def _free(lanes: list[str]) -> int:
    return lanes.index("") if "" in lanes else len(lanes)


def _put(lanes: list[str], lane: int, wanted: str) -> None:
    lanes.extend([""] * (lane + 1 - len(lanes)))
    lanes[lane] = wanted


def _clip(lanes: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted({min(lane, MAX_LANES - 1) for lane in lanes}))


def lanes_of(rows: Sequence[Row]) -> int:
    """How many lanes the widest row has."""
    return max((lane + 1 for row in rows for lane in (row.lane, *row.above, *row.through)), default=1)


def draw(row: Row, lanes: int) -> Markup:
    """The piece of the graph beside one row, `lanes` wide."""
    x, middle = _x(row.lane), _HEIGHT / 2
    lines = [_line(lane, 0, _HEIGHT, lane) for lane in row.through]
    lines += [_curve(lane, row.lane) for lane in row.above]
    if row.has_below:
        lines.append(_line(row.lane, middle, _HEIGHT, row.lane))
    pin = " pinned" if row.checkpoint.is_pinned else ""
    dot = f'<circle class="dot lane-{row.lane}{pin}" cx="{x:g}" cy="{middle:g}" r="{_RADIUS}"/>'
    # Everything put together here is a number of ours.
    return Markup(  # nosec B704
        f'<svg class="graph" width="{lanes * _WIDTH}" height="{_HEIGHT}" aria-hidden="true">{"".join(lines)}{dot}</svg>'
    )


def _x(lane: int) -> float:
    return lane * _WIDTH + _WIDTH / 2


def _line(lane: int, top: float, bottom: float, colour: int) -> str:
    x = _x(lane)
    return f'<path class="line lane-{colour}" d="M{x:g} {top:g}V{bottom:g}"/>'


def _curve(lane: int, to: int) -> str:
    """From the top of a lane to the dot; straight in its own lane."""
    if lane == to:
        return _line(lane, 0, _HEIGHT / 2, lane)
    x, end, bend = _x(lane), _x(to), _HEIGHT / 2
    return f'<path class="line lane-{lane}" d="M{x:g} 0C{x:g} {bend:g} {end:g} {bend * 0.3:g} {end:g} {bend:g}"/>'
