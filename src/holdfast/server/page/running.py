"""Pages of runs: steps in order, items of maps as a grid, approvals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from holdfast.errors import Corrupted
from holdfast.llm.bills import Bill, totals
from holdfast.llm.pricing import dollars
from holdfast.manager import CheckpointManager
from holdfast.model import Checkpoint
from holdfast.pipeline.history import Explanation, bills_of, cancel, explain, find_run, find_runs, logs_of
from holdfast.pipeline.progress import duration
from holdfast.workflow import Workflows

from .asking import MOST_JOBS, asked, forget_count, settle
from .rendering import PageRoute, Reader, Writer, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_CELLS = 1500
_RECORDS = 5000
_FAILURES = 50
_EXECUTIONS = 100


@router.get("/runs")
async def runs(request: Request, access: Reader, prefix: Annotated[str, Query(max_length=128)] = "") -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        found = list(find_runs(store, prefix, 200, most_jobs=MOST_JOBS))
        found.sort(key=lambda run: run.updated_at, reverse=True)
        return {"runs": found, "executions": Workflows(store).list_executions()[:_EXECUTIONS]}

    return await answer(request, access, "runs.html", facts)


@dataclass(frozen=True, slots=True)
class StepRow:
    name: str
    depth: int
    verdict: str
    reason: str
    checkpoint: str | None
    attempts: int
    took: str
    bar: Markup


@dataclass(frozen=True, slots=True)
class Cell:
    look: str  # done, failed, some
    title: str
    address: str | None


@dataclass(slots=True)
class Grid:
    """The items of a map."""

    name: str
    done: int = 0
    failed: int = 0
    per_cell: int = 1
    cells: list[Cell] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)


@router.get("/runs/{key}")
async def run(request: Request, access: Reader, key: str) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        found = find_run(store, key)
        steps = explain(store, key)
        return {
            "run": found,
            "steps": step_rows(steps),
            "grids": grids(store, key),
            "asks": asked(store, key),
            "logs": logs_of(store, key),
            "progress": found.progress,
            "money": [("Models", str(bills_of(store, key).get("", "")))],
        }

    return await answer(request, access, "run.html", facts)


@router.post("/runs/{key}/cancel")
async def cancel_run(request: Request, access: Writer, key: str) -> Response:
    is_done = await access.ask(lambda store: cancel(store, key))
    text = "The run is cancelled." if is_done else "The run stops before its next step."
    return see(request, f"/runs/{quote(key, safe='')}", text)


def step_rows(steps: Sequence[Explanation]) -> list[StepRow]:
    longest = max((step.seconds or 0 for step in steps), default=0)
    rows = []
    for step in steps:
        *above, name = step.path.split("/")
        took = "" if step.seconds is None else duration(step.seconds)
        rows.append(
            StepRow(
                name or step.path,
                min(len(above), 3),
                step.verdict,
                step.reason,
                step.checkpoint,
                step.attempts,
                took,
                _bar((step.seconds or 0) / longest) if longest and step.seconds is not None else Markup(""),
            )
        )
    return rows


def _bar(part: float) -> Markup:
    width = max(1.0, part * 100)
    return Markup(  # nosec B704
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rest" width="100" height="8" rx="2"/><rect width="{width:.1f}" height="8" rx="2"/></svg>'
    )


def grids(store: CheckpointManager, key: str) -> list[Grid]:
    """One grid for each map of the run, from the records its workers wrote."""
    records: dict[str, list[Checkpoint]] = {}
    after = 0
    while page := store.list(key, after=after, limit=_RECORDS, level="substep"):
        after = page[-1].seq
        for record in page:
            if record.metadata.get("kind") == "items" and isinstance(path := record.metadata.get("path"), list):
                records.setdefault("/".join(map(str, path)), []).append(record)
    return [_grid(store, name, found) for name, found in records.items()]


def _grid(store: CheckpointManager, name: str, records: Sequence[Checkpoint]) -> Grid:
    grid = Grid(name)
    failing: dict[str, tuple[Checkpoint, dict[str, Any]]] = {}
    for record in records:
        grid.done += _number(record.metadata.get("items"))
        if record.metadata.get("failed"):
            for failure in _failures(store, record):
                failing[str(failure.get("key"))] = record, failure
    grid.failed = len(failing)
    grid.per_cell = max(1, -(-grid.done // _CELLS))
    for record in records:
        items = _number(record.metadata.get("items"))
        title = f"#{record.seq}: {items:,} items done"
        grid.cells += [Cell("done", title, record.id if n == 0 else None) for n in range(-(-items // grid.per_cell))]
    for label, (record, failure) in list(failing.items())[:_CELLS]:
        grid.cells.append(Cell("failed", f"{label}: {failure.get('error')}"[:300], record.id))
    grid.failures = [failure for _, failure in list(failing.values())[:_FAILURES]]
    return grid


def _failures(store: CheckpointManager, record: Checkpoint) -> list[dict[str, Any]]:
    try:
        state: Any = store.load(record.id, only="failed/*")
    except Corrupted as error:
        return [{"key": f"record {record.id}", "error": error.message, "traceback": ""}]
    found = state.get("failed", []) if isinstance(state, dict) else []
    return [each for each in found if isinstance(each, dict)]


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


@router.get("/models")
async def models(request: Request, access: Reader) -> Response:
    """What calls of models cost: spent and saved, never mixed."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        by_model = {model: bill for (model,), bill in totals(store, by=("model",)).items()}
        by_run = {run: bill for (run,), bill in totals(store, by=("run",)).items()}
        return {"by_model": by_model, "by_run": by_run, "total": sum(by_model.values(), Bill()), "dollars": dollars}

    return await answer(request, access, "models.html", facts)


@router.get("/approvals")
async def approvals(request: Request, access: Reader) -> Response:
    return await answer(request, access, "approvals.html", lambda store: {"asks": asked(store)})


@router.post("/approvals")
async def decide(
    request: Request,
    access: Writer,
    key: Annotated[str, Form(max_length=128)],
    name: Annotated[str, Form(max_length=2000)],
    decision: Annotated[str, Form(pattern="^(approve|deny)$")],
    comment: Annotated[str, Form(max_length=2000)] = "",
) -> Response:
    def work(store: CheckpointManager) -> None:
        settle(store, key, name, decision == "approve", comment)
        forget_count(store)

    await access.ask(work)
    return see(request, "/approvals", f"{name} of {key} is {'approved' if decision == 'approve' else 'denied'}.")
