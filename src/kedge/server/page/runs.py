"""Pages of runs: steps in order, items of maps as a grid, approvals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from kedge.errors import Conflict, Corrupted, NotFound
from kedge.llm.bills import Bill, totals
from kedge.llm.pricing import dollars
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, RunStatus
from kedge.pipeline.approval import decide
from kedge.pipeline.cancellation import cancel
from kedge.pipeline.history import (
    Explanation,
    RunSummary,
    StepHistory,
    bills_of,
    check_resumable,
    explain,
    find_run,
    find_runs,
    logs_of,
    steps_of,
)
from kedge.pipeline.inbox import CANCEL
from kedge.pipeline.items import FailedItem, MapItems, failures_in, maps_of
from kedge.pipeline.keys import show
from kedge.pipeline.progress import duration
from kedge.process.workflow import Workflows
from kedge.server.runner import resume
from kedge.server.tokens import Scope

from .approvals import MOST_JOBS, as_json, asked, decided
from .charts import span_bar
from .memory import memory_of
from .templates import PageRoute, Reader, Writer, answer, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_CELLS = 1500
_STEPS = 500
_FAILURES = 50
_EXECUTIONS = 100


@router.get("/runs")
async def runs(request: Request, access: Reader, prefix: Annotated[str, Query(max_length=128)] = "") -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        found = list(find_runs(store, prefix, 200, most_jobs=MOST_JOBS))
        found.sort(key=lambda run: run.updated_at, reverse=True)
        executions = [] if prefix else Workflows(store).list_executions(limit=_EXECUTIONS, most_jobs=MOST_JOBS)
        return {"runs": found, "executions": executions, "prefix": prefix}

    return await answer(request, access, "runs.html", facts)


@dataclass(frozen=True, slots=True)
class StepRow:
    name: str
    path: str
    depth: int
    verdict: str
    reason: str
    checkpoint: str | None
    attempts: int
    took: str
    bar: Markup
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    look: str  # done, failed
    title: str
    checkpoint: str | None
    item: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """The items of a map as cells."""

    name: str
    done: int
    failed: int
    per_cell: int
    cells: Sequence[Cell]
    failures: Sequence[FailedItem]


@router.get("/runs/{key}")
async def run(request: Request, access: Reader, key: str) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        found = find_run(store, key)
        records = steps_of(store, key)
        steps = explain(store, key, records)
        maps = maps_of(store, key)
        failed = sum(len(each.failed) for each in maps)
        at_work = found.status is RunStatus.RUNNING
        is_cancelling = at_work and bool(store.list(key + INBOX_SUFFIX, metadata={"kind": CANCEL}, limit=1))
        has_ended = found.status in (RunStatus.COMPLETED, RunStatus.CANCELLED)
        return {
            "run": found,
            "at_work": at_work,
            "is_cancelling": is_cancelling,
            "can_cancel": access.caller.scope.includes(Scope.WRITE) and not has_ended and not is_cancelling,
            "steps": step_rows(store, steps[-_STEPS:], records, maps, found),
            "steps_left_out": max(0, len(steps) - _STEPS),
            "grids": [_grid(each) for each in maps],
            "failed": failed,
            "can_resume": not at_work
            and not found.queue
            and found.status is not RunStatus.CANCELLED
            and not found.is_denied
            and (found.status is not RunStatus.COMPLETED or failed > 0),
            "again": runs_again(steps, maps, found),
            "kept": sum(1 for step in steps if step.verdict in ("ran", "reused", "kept")),
            "asks": asked(store, key),
            "decisions": decided(store, key),
            "logs": logs_of(store, key),
            "progress": found.progress,
            "command": f"kedge runs resume {key}",
            "money": [("Models", str(bills_of(store, key).get("", "")))],
        }

    return await answer(request, access, "run.html", facts)


@router.get("/runs/{key}/failure")
async def failure(
    request: Request,
    access: Reader,
    key: str,
    checkpoint: Annotated[str, Query(max_length=128)],
    item: Annotated[str, Query(max_length=2000)],
) -> Response:
    """The attempt in which an item failed."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        record = store.get(checkpoint)
        told = [each for each in failures_in(store, record) if each.key == item] if record.job == key else []
        if not told:
            raise NotFound(f"item {item} has not failed there", hint="the page of the run shows what failed")
        return {"key": key, "record": record, "failure": told[-1]}

    return await answer(request, access, "failure.html", facts)


@router.post("/runs/{key}/resume")
async def resume_run(request: Request, access: Writer, key: str) -> Response:
    """Hand the run to the application's runner, which starts it again; refused where that makes no sense."""

    def state_of(store: CheckpointManager) -> object:
        found = find_run(store, key)
        if found.status is RunStatus.RUNNING:
            raise Conflict(f"run {key} is at work", hint="it can be resumed when it has stopped")
        check_resumable(store, found)
        newest = store.load_latest(key)
        return None if newest is None else newest[1]

    await resume(access.service, key, await access.ask(state_of))
    return see(request, f"/runs/{quote(key, safe='')}", f"{key} was resumed.")


@router.post("/runs/{key}/cancel")
async def cancel_run(request: Request, access: Writer, key: str) -> Response:
    is_done = await access.ask(lambda store: cancel(store, key))
    text = "The run is cancelled." if is_done else "The run stops before its next step."
    return see(request, f"/runs/{quote(key, safe='')}", text)


def runs_again(steps: Sequence[Explanation], maps: Sequence[MapItems], run: RunSummary) -> list[tuple[str, str]]:
    """What resuming the run does again, and why; what it has not come to is not known before."""
    again = [(step.path, step.reason.partition("; it runs again")[0]) for step in steps if step.verdict == "failed"]
    again += [
        (each.path, f"{len(each.failed):,} of its items failed; {each.done:,} are kept") for each in maps if each.failed
    ]
    again += [(str(wait.get("name", "")), f"it waits for {wait.get('for')}") for wait in run.waiting]
    return again


def step_rows(
    store: CheckpointManager,
    steps: Sequence[Explanation],
    records: Mapping[tuple[str, ...], StepHistory],
    maps: Sequence[MapItems],
    run: RunSummary,
) -> list[StepRow]:
    """The steps in the order of their records, those of the newest session on one line of time."""
    by_path = {show(path): history for path, history in records.items()}
    by_map = {each.path: each for each in maps}
    spans = {
        step.path: span for step in steps if (span := _span(step, by_path.get(step.path), by_map.get(step.path), run))
    }
    begin = min((span[0] for span in spans.values()), default=0.0)
    whole = max((span[1] for span in spans.values()), default=0.0) - begin
    rows = []
    for step in steps:
        *above, name = step.path.split("/")
        span = spans.get(step.path)
        reason, found = step.reason, by_map.get(step.path)
        if found is not None:
            reason = f"{found.done:,} items kept" + (f", {len(found.failed):,} failed" if found.failed else "")
        seconds = step.seconds if step.seconds is not None else span[1] - span[0] if span and found else None
        is_failed = step.verdict == "failed" and step.checkpoint is not None
        rows.append(
            StepRow(
                name or step.path,
                step.path,
                min(len(above), 3),
                step.verdict,
                reason,
                step.checkpoint,
                step.attempts,
                "" if seconds is None else duration(seconds),
                span_bar((span[0] - begin) / whole, (span[1] - begin) / whole) if span and whole else Markup(""),
                _traceback(store, step.checkpoint) if is_failed and step.checkpoint else "",
            )
        )
    return rows


def _span(
    step: Explanation, history: StepHistory | None, items: MapItems | None, run: RunSummary
) -> tuple[float, float] | None:
    """When a step of the newest session began and ended, in seconds since the epoch."""
    if items is not None:
        made = [c.created_at.timestamp() for c in items.records if c.metadata.get("session") == run.sessions]
        return (made[0], made[-1]) if made else None
    made_by = history.results[-1:] if history and step.verdict == "ran" else history.failures[-1:] if history else []
    if step.verdict not in ("ran", "failed") or not made_by:
        return None
    end = made_by[0].created_at.timestamp()
    return end - (step.seconds or 0), end


def _traceback(store: CheckpointManager, checkpoint_id: str) -> str:
    try:
        state: Any = store.load(checkpoint_id)
    except Corrupted as error:
        return error.message
    return str(state.get("traceback", "")) if isinstance(state, dict) else ""


def _grid(items: MapItems) -> Grid:
    per_cell = max(1, -(-items.done // _CELLS))
    cells: list[Cell] = []
    seen = 0
    for record in items.records:
        count = record.metadata.get("items")
        done = count if isinstance(count, int) else 0
        seen += done
        title = f"#{record.seq}: {done:,} items done"
        new = -(-seen // per_cell) - len(cells)  # a cell may stand for items of many records, and shows the first
        cells += [Cell("done", title, record.id if n == 0 else None) for n in range(new)]
    failed = list(items.failed.values())
    cells += [Cell("failed", f"{each.key}: {each.error}"[:300], each.checkpoint, each.key) for each in failed[:_CELLS]]
    return Grid(items.path, items.done, len(failed), per_cell, cells, failed[:_FAILURES])


@router.get("/executions/{execution_id}")
async def execution(request: Request, access: Reader, execution_id: str) -> Response:
    """An execution of a workflow: its steps, what they were given and gave, who decided what."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        document = Workflows(store).get_execution(execution_id)
        data = as_json(document["global_data"]) if document["global_data"] else ""
        steps = [_execution_step(step) for step in document["checkpoints"]]
        return {"execution": document, "steps": steps, "asks": asked(store, execution_id), "data": data}

    return await answer(request, access, "execution.html", facts)


def _execution_step(step: Mapping[str, Any]) -> dict[str, Any]:
    approval = str(step["approval_status"] or "") if step["approval_required"] else ""
    if step["approval_actor"]:
        comment = f": {step['approval_comment']}" if step["approval_comment"] else ""
        approval = f"{approval} by {step['approval_actor']}{comment}"
    labels = (("Input", "input_data"), ("Output", "output_data"))
    return {
        "id": step["checkpoint_id"],
        "name": step["checkpoint_name"],
        "state": step["state"],
        "agent": step["agent_id"],
        "approval": approval,
        "error": step["error_details"] or "",
        "data": [(label, as_json(step[name])) for label, name in labels if step[name] is not None],
    }


@router.get("/models")
async def models(request: Request, access: Reader) -> Response:
    """What LLM calls cost: spent and saved, never mixed."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        by_model = {model: bill for (model,), bill in totals(store, by=("model",)).items()}
        by_run = {run: bill for (run,), bill in totals(store, by=("run",)).items()}
        return {"by_model": by_model, "by_run": by_run, "total": sum(by_model.values(), Bill()), "dollars": dollars}

    return await answer(request, access, "models.html", facts)


@router.get("/approvals")
async def approvals(request: Request, access: Reader) -> Response:
    return await answer(request, access, "approvals.html", lambda store: {"asks": asked(store)})


@router.post("/approvals")
async def decide_approval(
    request: Request,
    access: Writer,
    key: Annotated[str, Form(max_length=128)],
    name: Annotated[str, Form(max_length=2000)],
    decision: Annotated[str, Form(pattern="^(approve|deny)$")],
    comment: Annotated[str, Form(max_length=2000)] = "",
) -> Response:
    def work(store: CheckpointManager) -> None:
        decide(store, key, name, decision == "approve", actor=store.actor, comment=comment)
        memory_of(request).forget_count(access.namespace)

    await access.ask(work)
    return see(request, "/approvals", f"{name} of {key} is {'approved' if decision == 'approve' else 'denied'}.")
