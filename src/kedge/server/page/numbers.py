"""Numbers over steps: what metadata says of loss and the like, as charts; several jobs in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from .charts import Dot, curves
from .templates import PageRoute, Reader, answer, find_job

router = APIRouter(route_class=PageRoute, include_in_schema=False)

MOST_JOBS = 6  # in one chart
_POINTS, _DOTS = 1600, 120  # on one page
_MOST_CHARTS = 24

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
    first: int
    last: int
    facts: Sequence[Facts]


@router.get("/jobs/{job}/numbers")
async def numbers(
    request: Request,
    access: Reader,
    job: str,
    others: JobNames = [],  # noqa: B006 - FastAPI copies it
    metric: Annotated[str, Query(max_length=400)] = "",
    part: Literal["", "charts"] = "",
) -> Response:
    """A chart for each number in the metadata of a job's checkpoints; `with` adds other jobs, `metric` chooses one."""
    root = request.scope.get("root_path", "")

    def facts(store: CheckpointManager) -> dict[str, Any]:
        find_job(store, job)
        names = list(dict.fromkeys([job, *(other for other in others if other)]))
        by_job = [_series(store, name) for name in names]
        metrics = sorted({name for known in by_job for name in known})
        chosen = [name for name in metrics if not metric or name == metric]
        wanted = [(name, [known[name] for known in by_job if name in known]) for name in chosen[:_MOST_CHARTS]]
        lines = sum(len(some) for _, some in wanted) or 1
        charts = [_chart(root, name, some, lines) for name, some in wanted]
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
            "view": partial(_address, root, job),
        }

    return await answer(request, access, "charts.html" if part else "numbers.html", facts)


def _series(store: CheckpointManager, job: str) -> dict[str, Series]:
    try:
        return series_of(store, job)
    except NotFound:
        return {}


def _chart(root: str, metric: str, series: Sequence[Series], lines: int) -> Chart:
    """One of the charts of a page with so many lines: the more there are, the fewer points each of them has."""
    points = [point for line in series for point in line.points]
    values, seqs = [point.value for point in points], [point.seq for point in points]
    points_each, dots_each = (max(least, most // lines) for least, most in ((24, _POINTS), (4, _DOTS)))
    drawn = [
        (
            [(point.seq, point.value) for point in line.thinned(min(points_each, MOST_POINTS))],
            [Dot(point.seq, point.value, _title(line, point), _link(root, point)) for point in line.thinned(dots_each)],
        )
        for line in series
    ]
    facts = [Facts(line.job, line.best("min"), line.best("max"), line.points[-1]) for line in series]
    drawing = curves(drawn, f"{metric} over {len(points):,} checkpoints")
    return Chart(metric, drawing, number(min(values)), number(max(values)), min(seqs), max(seqs), facts)


def _title(series: Series, point: Point) -> str:
    return f"{series.job} #{point.seq} {point.step[:80]}: {number(point.value)}"


def _link(root: str, point: Point) -> str:
    return f"{root}/checkpoints/{quote(point.checkpoint, safe='')}"


def _address(root: str, job: str, others: Sequence[str], metric: str, part: str = "") -> str:
    chosen = [("with", name) for name in others] + [("metric", metric)] * bool(metric) + [("part", part)] * bool(part)
    query = urlencode(chosen)
    return f"{root}/jobs/{quote(job, safe='')}/numbers" + (f"?{query}" if query else "")
