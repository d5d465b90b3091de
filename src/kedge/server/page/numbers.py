"""Numbers over steps: what metadata says of loss and the like, as charts; several jobs in one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.terminal.plot import number
from kedge.terminal.series import MOST_CHECKPOINTS, MOST_POINTS, Point, Series, series_of

from .charts import Curve, Dot, curves
from .kinds import named_kind
from .templates import Number, PageRoute, Reader, answer, find_job, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

MOST_JOBS = 6  # in one chart
_POINTS, _DOTS = 1000, 100  # on one page
_MOST_CHARTS = 24
_OFFERED = 60  # names of other jobs

JobNames = Annotated[list[Annotated[str, Query(max_length=128)]], Query(alias="with", max_length=MOST_JOBS - 1)]


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one job in a chart: the checkpoints one asks for."""

    job: str
    lowest: Point
    highest: Point
    newest: Point


@dataclass(frozen=True, slots=True)
class Chart:
    metric: str
    drawing: Markup
    low: str
    high: str
    first: str
    last: str
    facts: Sequence[Facts]
    lowest: float  # of all its jobs
    highest: float
    is_log: bool


@router.get("/jobs/{job}/numbers")
async def numbers(
    request: Request,
    access: Reader,
    job: str,
    others: JobNames = [],  # noqa: B006 - FastAPI copies it
    metric: Annotated[str, Query(max_length=400)] = "",
    over: Annotated[str, Query(max_length=400)] = "",
    scale: Literal["", "log"] = "",
    part: Literal["", "charts"] = "",
) -> Response:
    """A chart for each number in the metadata of a job's checkpoints; `with` adds other jobs, `metric` chooses one.

    They are drawn over the numbers of the checkpoints, or over another number of the metadata.
    """
    root = request.scope.get("root_path", "")

    def facts(store: CheckpointManager) -> dict[str, Any]:
        find_job(store, job)
        names = list(dict.fromkeys([job, *(other for other in others if other)]))
        by_job = [_series(store, name) for name in names]
        metrics = sorted({name for known in by_job for name in known})
        chosen = [name for name in metrics if name == metric or (not metric and name != over)]
        places = {known[over].job: _places(known[over]) for known in by_job if over in known} if over else None
        wanted = [(name, _placed([known[name] for known in by_job if name in known], places)) for name in chosen]
        wanted = [(name, some) for name, some in wanted if some]
        chosen, wanted = [name for name, _ in wanted], wanted[:_MOST_CHARTS]
        lines = sum(len(some) for _, some in wanted) or 1
        charts = [_chart(root, name, some, _Look(lines, places, scale == "log")) for name, some in wanted]
        return {
            "job": job,
            "jobs": names,
            "missing": [name for name, known in zip(names, by_job, strict=True) if not known],
            "metrics": metrics,
            "metric": metric,
            "charts": charts,
            "charts_left_out": max(0, len(chosen) - _MOST_CHARTS),
            "most": MOST_CHECKPOINTS,
            "most_jobs": MOST_JOBS,
            "number": number,
            "over": over,
            "scale": scale,
            "view": partial(_address, root, job, over, scale),
            "others": [] if part else _others(store, job, names),
        }

    return await answer(request, access, "charts.html" if part else "numbers.html", facts)


def _series(store: CheckpointManager, job: str) -> dict[str, Series]:
    try:
        return series_of(store, job)
    except NotFound:
        return {}


@dataclass(frozen=True, slots=True)
class _Look:
    lines: int  # on the page
    places: Mapping[str, Mapping[int, float]] | None  # of the points of each job; None: their own numbers
    is_log: bool

    def place(self, job: str, point: Point) -> tuple[float, float]:
        across = point.seq if self.places is None else self.places[job][point.seq]
        return across, math.log10(point.value) if self.is_log else point.value


def _places(series: Series) -> dict[int, float]:
    return {point.seq: point.value for point in series.points}


def _placed(series: Sequence[Series], places: Mapping[str, Mapping[int, float]] | None) -> list[Series]:
    """The series as far as their points have places."""
    if places is None:
        return list(series)
    known = [(line, places.get(line.job, {})) for line in series]
    placed = [replace(line, points=[point for point in line.points if point.seq in some]) for line, some in known]
    return [line for line in placed if line.points]


def _others(store: CheckpointManager, job: str, chosen: Sequence[str]) -> list[str]:
    """Jobs that one may want to compare with it: those with similar names first."""
    similar = [*store.jobs(job[:3], _OFFERED), *store.jobs("", _OFFERED)]
    names = dict.fromkeys(other.name for other in similar if named_kind(other.name) is None)
    return [name for name in names if name not in chosen][:_OFFERED]


def _chart(root: str, metric: str, series: Sequence[Series], look: _Look) -> Chart:
    """One of the charts of a page: the more lines it has, the fewer points each of them has."""
    if look.is_log and any(point.value <= 0 for line in series for point in line.points):
        look = replace(look, is_log=False)
    points = [point for line in series for point in line.points]
    values = [point.value for point in points]
    across = [look.place(line.job, point)[0] for line in series for point in line.points]
    points_each, dots_each = (max(least, most // look.lines) for least, most in ((24, _POINTS), (4, _DOTS)))
    drawn = [_curve(root, line, look, min(points_each, MOST_POINTS), dots_each) for line in series]
    facts = [Facts(line.job, line.best("min"), line.best("max"), line.points[-1]) for line in series]
    drawing = curves(drawn, f"{metric} over {len(points):,} checkpoints")
    first, last = (f"#{end:g}" if look.places is None else number(end) for end in (min(across), max(across)))
    low, high = min(values), max(values)
    return Chart(metric, drawing, number(low), number(high), first, last, facts, low, high, look.is_log)


def _curve(root: str, line: Series, look: _Look, most: int, most_dots: int) -> Curve:
    some = line.thinned(most)
    extremes = [line.best("min"), line.best("max"), line.points[-1]]  # which the table below names
    marked = line.points if len(line.points) <= most_dots else dict.fromkeys(extremes)
    dots = [Dot(*look.place(line.job, p), _title(line, p), _link(root, p)) for p in marked]
    at = f"{root}/jobs/{quote(line.job, safe='')}/at?seq="
    return Curve(line.job, at, [look.place(line.job, p) for p in some], [(p.seq, number(p.value)) for p in some], dots)


@router.get("/jobs/{job}/at")
async def at(request: Request, access: Reader, job: str, seq: Number) -> Response:
    """Leads to the checkpoint with this number."""
    checkpoints = await access.ask(lambda store: store.list(job, after=seq - 1, before=seq + 1, limit=1))
    if not checkpoints:
        raise NotFound(f"job {job} has no checkpoint #{seq}", hint="it may have been deleted")
    return see(request, f"/checkpoints/{quote(checkpoints[0].id, safe='')}")


def _title(series: Series, point: Point) -> str:
    return f"{series.job} #{point.seq} {point.step[:80]}: {number(point.value)}"


def _link(root: str, point: Point) -> str:
    return f"{root}/checkpoints/{quote(point.checkpoint, safe='')}"


def _address(
    root: str, job: str, over: str, scale: str, others: Sequence[str], metric: str, part: str = "", **changed: str
) -> str:
    given = {"metric": metric, "over": over, "scale": scale, "part": part, **changed}
    query = urlencode([("with", name) for name in others] + [(name, value) for name, value in given.items() if value])
    return f"{root}/jobs/{quote(job, safe='')}/numbers" + (f"?{query}" if query else "")
