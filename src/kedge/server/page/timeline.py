"""A run over time: its stages, steps and maps as a tree, each with bars on one axis, for a span that people choose."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from kedge.model import Checkpoint, number_of
from kedge.pipeline.history import Explanation, StepHistory
from kedge.pipeline.items import MapItems
from kedge.pipeline.keys import show
from kedge.pipeline.progress import duration

from .charts import Bar, ticked_axis, track

_SHORTEST_S = 0.001  # that can be zoomed into
_LONGEST_S = 1e10  # that a record is believed to have taken
_TICKS = 6
_STEPS_S = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400)
_DEEPEST = 6  # how far rows are indented


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of time, in seconds since the run began."""

    begin: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.begin

    def zoomed(self, factor: float) -> Span:
        """The same middle, so much longer or shorter."""
        middle, half = (self.begin + self.end) / 2, max(self.length * factor, _SHORTEST_S) / 2
        return Span(middle - half, middle + half)

    def moved(self, by: float) -> Span:
        return Span(self.begin + by * self.length, self.end + by * self.length)


@dataclass(frozen=True, slots=True)
class Row:
    """A stage, a step or a map."""

    name: str
    path: str
    depth: int
    verdict: str  # as of `explain`; "stage"
    reason: str
    checkpoint: str | None
    attempts: int
    took: str
    track: Markup
    span: Span | None  # in which it worked


@dataclass(slots=True)
class _Node:
    name: str
    path: str
    step: Explanation | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)

    def all_bars(self) -> Iterator[Bar]:
        yield from self.bars
        for child in self.children.values():
            yield from child.all_bars()


@dataclass(frozen=True, slots=True)
class Timeline:
    rows: Sequence[Row]
    shown: Span | None  # None: nothing has ended yet
    whole: Span | None
    sessions: Mapping[int, Span]
    axis: Markup


def timeline(
    steps: Sequence[Explanation],
    records: Mapping[tuple[str, ...], StepHistory],
    maps: Sequence[MapItems],
    *,
    session: int | None = None,
    chosen: Span | None = None,
) -> Timeline:
    """All rows in the span of a session, by default the newest; of a span that was chosen only what happened in it."""
    bars = _bars(records, maps)
    times = [bar for some in bars.values() for bar in some]
    origin = min((bar.begin for bar in times), default=0.0)
    sessions: dict[int, Span] = {}
    for bar in times:
        begin, end = bar.begin - origin, bar.end - origin
        known = sessions.get(bar.session, Span(begin, end))
        sessions[bar.session] = Span(min(known.begin, begin), max(known.end, end))
    whole = Span(0.0, max(span.end for span in sessions.values())) if sessions else None
    default = sessions.get(session or 0) or (sessions[max(sessions)] if sessions else None)
    shown = chosen if chosen is not None and sessions else default
    rows = list(_rows(_tree(steps, bars), -1, origin, shown, only_shown=chosen is not None))
    axis = ticked_axis(list(_ticks(shown)), "seconds since the run began") if shown else Markup("")
    return Timeline(rows, shown, whole, dict(sorted(sessions.items())), axis)


def _bars(records: Mapping[tuple[str, ...], StepHistory], maps: Sequence[MapItems]) -> dict[str, list[Bar]]:
    """When each path was at work, in all sessions, in seconds since the epoch."""
    bars: dict[str, list[Bar]] = {}
    for path, history in records.items():
        some = [_bar(record, "failed") for record in history.failures] + [_bar(r, "ran") for r in history.results]
        bars[show(path)] = sorted(some, key=lambda bar: bar.begin)
    for items in maps:
        by_session: dict[int, list[float]] = {}
        for record in items.records:
            by_session.setdefault(_session(record), []).append(record.created_at.timestamp())
        bars[items.path] = [
            Bar(moments[0], moments[-1], "map", f"session {session}", session)
            for session, moments in by_session.items()
        ]
    return bars


def _bar(record: Checkpoint, look: str) -> Bar:
    seconds = record.metadata.get("seconds")
    took = float(seconds) if isinstance(seconds, int | float) and 0 <= seconds <= _LONGEST_S else 0.0
    end = record.created_at.timestamp()
    title = f"{look} in {duration(took)}, session {_session(record)}"
    return Bar(end - took, end, look, title, _session(record))


def _session(record: Checkpoint) -> int:
    return number_of(record.metadata.get("session"))


def _tree(steps: Sequence[Explanation], bars: Mapping[str, list[Bar]]) -> _Node:
    """Steps below the stages, maps and steps they are in; a part that is none of these is a stage."""
    root = _Node("", "")
    for step in steps:
        node = root
        for part in step.path.split("/"):
            path = f"{node.path}/{part}" if node is not root else part
            node = node.children.setdefault(part, _Node(part, path))
        node.step, node.bars = step, bars.get(step.path, [])
    return root


def _rows(node: _Node, depth: int, origin: float, shown: Span | None, *, only_shown: bool) -> Iterator[Row]:
    bars = list(node.all_bars())
    span = Span(min(b.begin for b in bars) - origin, max(b.end for b in bars) - origin) if bars else None
    if only_shown and shown is not None and (span is None or span.end < shown.begin or span.begin > shown.end):
        return
    if depth >= 0:
        yield _row(node, min(depth, _DEEPEST), origin, shown, span)
    for child in node.children.values():
        yield from _rows(child, depth + 1, origin, shown, only_shown=only_shown)


def _row(node: _Node, depth: int, origin: float, shown: Span | None, span: Span | None) -> Row:
    step = node.step
    bars = node.bars
    if step is None:  # a stage: from the first to the last of what is in it
        inner = [bar for bar in node.all_bars() if shown is None or bar.end - origin >= shown.begin]
        inner = [bar for bar in inner if shown is None or bar.begin - origin <= shown.end]
        bars = [Bar(min(b.begin for b in inner), max(b.end for b in inner), "stage", node.name)] if inner else []
    seconds = step.seconds if step is not None else None
    if seconds is None and bars:
        seconds = bars[-1].end - bars[-1].begin
    return Row(
        node.name or node.path,
        node.path,
        depth,
        "stage" if step is None else step.verdict,
        "" if step is None else step.reason,
        None if step is None else step.checkpoint,
        0 if step is None else step.attempts,
        "" if seconds is None else duration(seconds),
        track(bars, origin + shown.begin, origin + shown.end) if shown is not None else Markup(""),
        span,
    )


def _ticks(span: Span) -> Iterator[tuple[float, str]]:
    """Round moments of a span: (which part of it, text)."""
    length = span.length or _SHORTEST_S
    rough = length / _TICKS
    step = next((float(step) for step in _STEPS_S if step >= rough), math.ceil(rough / 86_400) * 86_400.0)
    if rough < _STEPS_S[0] / 2:  # 1, 2 or 5 of something
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)
    first = math.ceil(span.begin / step - 1e-6)
    for number in range(first, first + 3 * _TICKS):
        moment = number * step
        if moment > span.end + length * 1e-6:
            return
        yield (moment - span.begin) / length, _moment(moment, step, span)


def _moment(seconds: float, step: float, span: Span) -> str:
    """As exact as the step between two ticks."""
    sign, seconds = ("−" if seconds < -step / 2 else ""), abs(seconds)
    if step >= 86_400:
        return f"{sign}{seconds / 86_400:.0f} d"
    if step >= 60 and max(abs(span.begin), abs(span.end)) < 3600:
        return f"{sign}{round(seconds / 60)} min"
    if step >= 60:
        hours, minutes = divmod(round(seconds / 60), 60)
        return f"{sign}{hours}:{minutes:02d} h"
    if span.end < 1:
        factor, unit = (1e3, "ms") if span.end >= 1e-3 else (1e6, "µs")
        return f"{sign}{seconds * factor:.{_decimals(step * factor)}f} {unit}"
    decimals = _decimals(step)
    if seconds < 60:
        return f"{sign}{seconds:.{decimals}f} s"
    minutes = int(seconds + step / 2) // 60
    return f"{sign}{minutes}:{abs(seconds - 60 * minutes):0{decimals + 3 if decimals else 2}.{decimals}f} min"


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))
