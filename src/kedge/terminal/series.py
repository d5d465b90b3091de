"""Numbers over a job's checkpoints, such as the loss in their metadata, for charts and terminals."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kedge.errors import NotFound
from kedge.manager import CheckpointManager

MOST_CHECKPOINTS = 2000  # of a job: the newest
MOST_POINTS = 240  # of a drawn series; the extremes of each part stay
_DEPTH = 4
_LARGEST = sys.float_info.max

Goal = Literal["min", "max"]


@dataclass(frozen=True, slots=True)
class Point:
    seq: int
    step: str
    checkpoint: str
    value: float

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Series:
    """One number of one job, in the order of its checkpoints."""

    job: str
    metric: str  # a path in the metadata: "loss", "eval.accuracy"
    points: Sequence[Point]

    def best(self, goal: Goal) -> Point:
        """Return the lowest or highest point, the first of equal ones."""
        return (min if goal == "min" else max)(self.points, key=lambda point: point.value)

    def thinned(self, most: int = MOST_POINTS) -> Sequence[Point]:
        """Return at most so many points: the lowest and highest of each part, and both ends of the series."""
        if len(self.points) <= most:
            return self.points
        part = -(-len(self.points) // ((most - 2) // 2))
        chosen = [self.points[0]]
        for start in range(0, len(self.points), part):
            section = self.points[start : start + part]
            extremes = {min(section, key=_value), max(section, key=_value)}
            chosen += sorted(extremes, key=lambda point: point.seq)
        return list(dict.fromkeys([*chosen, self.points[-1]]))


def series_of(store: CheckpointManager, job: str, *, most: int = MOST_CHECKPOINTS) -> dict[str, Series]:
    """Return the numbers in the metadata of a job's newest checkpoints, by path. Raises NotFound if it has none."""
    checkpoints = store.list(job, limit=most)
    if not checkpoints:
        raise NotFound(f"job {job} has no checkpoint", hint="kedge jobs lists the jobs")
    points: dict[str, list[Point]] = {}
    for checkpoint in checkpoints:
        for path, value in numbers_in(checkpoint.metadata):
            points.setdefault(path, []).append(Point(checkpoint.seq, checkpoint.step, checkpoint.id, value))
    return {path: Series(job, path, points[path]) for path in sorted(points)}


def numbers_in(metadata: Mapping[str, object], above: str = "", depth: int = _DEPTH) -> Iterator[tuple[str, float]]:
    """Yield numbers that a float can hold, with their paths: neither infinite ones nor booleans."""
    for name, value in metadata.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping) and depth > 1:
            yield from numbers_in(value, f"{path}.", depth - 1)
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
            yield path, float(value)


def place_between(low: float, high: float, value: float) -> float:
    """Return how far from `low` to `high` a value lies, as a part of 1; 0.5 if they are equal."""
    if math.isinf(high - low):  # both are finite: of numbers this large, half of each says the same
        low, high, value = low / 2, high / 2, value / 2
    return (value - low) / (high - low) if high > low else 0.5


def _value(point: Point) -> float:
    return point.value
