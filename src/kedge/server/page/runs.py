"""Pages of runs: steps over time, what each was given and returned, the log, approvals."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request
from starlette.responses import Response

from kedge.errors import Conflict, Corrupted, NotFound
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, LOG_LEVELS, Checkpoint, RunStatus, to_datetime, to_us
from kedge.pipeline.approval import APPROVAL, decide, pending_approvals
from kedge.pipeline.call_values import arguments_of, result_of
from kedge.pipeline.cancellation import cancel
from kedge.pipeline.entries import DEAD
from kedge.pipeline.history import (
    FIRST_TIME,
    Explanation,
    RunSummary,
    bills_of,
    children_of,
    find_run,
    logs_of,
    run_of,
)
from kedge.pipeline.inbox import CANCEL, SIGNAL, send
from kedge.pipeline.items import MapItems
from kedge.pipeline.keys import show
from kedge.pipeline.progress import duration
from kedge.process.workflow import Workflows
from kedge.server.auth import Access
from kedge.server.tokens import Scope
from kedge.terminal.text import count_of

from . import states
from .approvals import as_json, asked, decided
from .items import grid_of
from .kinds import STATUSES, Kind
from .memory import memory_of
from .resumption import can_requeue, can_resume, failed_entry, start_again
from .roster import Entry
from .templates import Number, PageRoute, Reader, Writer, answer, linked, see
from .timeline import Row, Span, timeline

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_ROWS = 60  # steps at once
_TRACEBACKS = 3  # of failed steps among them
_TRACEBACK_END = 4000  # characters: where it was raised
_ATTEMPTS = 20  # of a step
_LINES = 50  # of the log
_APPROVALS = 50
_RUNS = 50
_AT_WORK = {"running", "abandoned"}  # which of them, the process decides: nothing is saved when it ends
_CHILDREN = 50  # runs that a run started
_AWAITED = {APPROVAL: "an approval", SIGNAL: "a signal", "run": "another run", "time": "its time"}
_LONGEST_S = 1e10  # that a timeline shows


@router.get("/runs")
async def runs(
    request: Request,
    access: Reader,
    prefix: Annotated[str, Query(max_length=128)] = "",
    status: Annotated[str, Query(pattern=f"^({'|'.join(STATUSES)}|)$")] = "",
    before: Annotated[str, Query(pattern="^([0-9]{1,17}:.{1,128}|)$")] = "",
) -> Response:
    """Runs and executions, the ones that changed last first; `before` is where an older page begins."""
    moment, _, last = before.partition(":")

    def facts(store: CheckpointManager) -> dict[str, Any]:
        roll = memory_of(request).of(access.namespace).roster.look(store)
        entries = [entry for entry in roll.entries if entry.job.startswith(prefix)]
        if before:
            entries = [entry for entry in entries if entry.place < (to_datetime(int(moment)), last)]
        listed = _listed(store, entries, status)
        return {
            "runs": [(run, _times(store, run)) for run in listed.runs],
            "executions": listed.executions,
            "older": listed.older,
            "is_first": not before,
            "roll": roll,
            "prefix": prefix,
            "status": status,
            "statuses": STATUSES,
            "link": lambda changes: linked(request, changes),
        }

    return await answer(request, access, "runs.html", facts)


@dataclass(slots=True)
class _Listed:
    runs: list[RunSummary] = field(default_factory=list)
    executions: list[dict[str, Any]] = field(default_factory=list)
    older: str = ""  # `before` of the next page


def _listed(store: CheckpointManager, entries: Sequence[Entry], status: str) -> _Listed:
    """A page of them, each as it stands now."""
    listed, last = _Listed(), ""
    for entry in entries:
        is_ = entry.about
        if is_ is None or is_.kind not in (Kind.RUN, Kind.WORKFLOW):
            continue
        if status and is_.status != status and not {is_.status, status} <= _AT_WORK:
            continue
        if len(listed.runs) + len(listed.executions) == _RUNS:
            listed.older = last
            break
        last = f"{to_us(entry.place[0])}:{entry.job}"
        if is_.kind is Kind.WORKFLOW:
            with suppress(NotFound):  # deleted meanwhile
                listed.executions.append(Workflows(store).get_execution_status(entry.job))
        elif (run := run_of(store, entry.job)) is not None and status in ("", run.status):
            listed.runs.append(replace(run, updated_at=entry.place[0]))
    return listed


@router.get("/runs/{key}")
async def run(
    request: Request,
    access: Reader,
    key: str,
    session: Number | None = None,
    begin: Annotated[float | None, Query(alias="from", ge=-_LONGEST_S, le=_LONGEST_S)] = None,
    end: Annotated[float | None, Query(alias="to", ge=-_LONGEST_S, le=_LONGEST_S)] = None,
    start: Number | None = None,
    level: Annotated[str, Query(pattern="^(debug|info|warning|error|)$")] = "",
    before: Number | None = None,
) -> Response:
    """A run; the address holds the span of time, the part of its steps and the level of its log that are shown."""
    chosen = Span(begin, end) if begin is not None and end is not None and begin < end else None

    def facts(store: CheckpointManager) -> dict[str, Any]:
        records = memory_of(request).runs.records(store, key)
        steps, maps = records.explanations, records.maps
        summary = _as_it_stands(store, find_run(store, key), steps)
        line = timeline(steps, records.steps, maps, session=session, chosen=chosen)
        first = max(0, len(line.rows) - _ROWS) if start is None else start
        rows = line.rows[first : first + _ROWS]
        logs = logs_of(store, key, _LINES + 1, level=level, before=before)[::-1]
        return {
            "run": summary,
            **_times(store, summary),
            "values": [("Arguments", arguments_of(store, summary)), ("Result", result_of(store, summary))],
            **_controls(store, access, summary, any(items.failed for items in maps)),
            "line": line,
            "rows": rows,
            "first": first,
            "rows_a_page": _ROWS,
            "obvious": FIRST_TIME if summary.sessions <= 1 else "",
            "tracebacks": _tracebacks(store, rows),
            "is_zoomed": chosen is not None,
            "grids": [grid_of(items) for items in maps],
            "failed": sum(len(items.failed) for items in maps),
            "again": runs_again(steps, maps, summary),
            "kept": sum(1 for step in steps if step.verdict in ("ran", "reused", "kept")),
            "logs": logs[:_LINES],
            "has_older": len(logs) > _LINES,
            "level": level,
            "levels": LOG_LEVELS,
            "children": _children(store, key),
            "link": lambda changes: linked(request, changes),
        }

    return await answer(request, access, "run.html", facts)


def _as_it_stands(store: CheckpointManager, run: RunSummary, steps: Sequence[Explanation]) -> RunSummary:
    """A run with its newest change and, while its session has not ended and counted them, the steps that it ran."""
    newest = store.list(run.key, limit=1)
    moved = replace(run, updated_at=newest[0].created_at) if newest else run
    if run.status not in (RunStatus.RUNNING, RunStatus.ABANDONED):
        return moved
    return replace(moved, steps_run=sum(1 for step in steps if step.verdict == "ran"))


def _times(store: CheckpointManager, run: RunSummary) -> dict[str, object]:
    """When a run began, and how long it took from then to its end: with several sessions, what was between them too."""
    first = store.list(run.key, after=0, limit=1)
    began = first[0].created_at if first else None
    has_ended = run.status in (RunStatus.COMPLETED, RunStatus.FAILED, RunStatus.CANCELLED)
    seconds = (run.updated_at - began).total_seconds() if began and has_ended else 0.0
    return {"began": began, "took": duration(seconds) if seconds > 0 else ""}


def _controls(store: CheckpointManager, access: Access, run: RunSummary, has_failed_items: bool) -> dict[str, object]:
    """What a run waits for, and what can be done with it."""
    key, may_write = run.key, access.caller.scope.includes(Scope.WRITE)
    at_work = run.status is RunStatus.RUNNING
    is_cancelling = at_work and bool(store.list(key + INBOX_SUFFIX, metadata={"kind": CANCEL}, limit=1))
    has_ended = run.status in (RunStatus.COMPLETED, RunStatus.CANCELLED)
    entry = failed_entry(store, run)
    return {
        "at_work": at_work,
        "is_cancelling": is_cancelling,
        "can_cancel": may_write and not has_ended and not is_cancelling,
        "can_signal": may_write and not has_ended,
        "can_resume": can_resume(run, has_failed_items=has_failed_items),
        "can_requeue": can_requeue(run, has_failed_items=has_failed_items),
        "dead": entry if entry is not None and entry.state == DEAD else None,
        "next_try": entry if entry is not None and entry.state != DEAD else None,
        "signals": [wait.get("name", "") for wait in run.waiting if wait.get("for") == SIGNAL],
        "asks": asked(store, pending_approvals(store, key)),
        "decisions": decided(store, key),
        "progress": run.progress,
        "command": f"kedge queue retry {shlex.quote(run.queue)} {key}" if run.queue else f"kedge runs resume {key}",
        "money": [("Models", str(bills_of(store, key).get("", "")))],
    }


def _children(store: CheckpointManager, key: str) -> list[RunSummary]:
    """The runs that a run started last."""
    return [
        child for child_key in children_of(store, key)[-_CHILDREN:] if (child := run_of(store, child_key)) is not None
    ]


def _tracebacks(store: CheckpointManager, rows: Sequence[Row]) -> dict[str, str]:
    """Of the failed steps that are shown, the last few: the others have them on their own pages."""
    failed = [row for row in rows if row.verdict == "failed" and row.checkpoint is not None]
    return {row.path: _traceback(store, str(row.checkpoint))[-_TRACEBACK_END:] for row in failed[-_TRACEBACKS:]}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One execution of a step."""

    record: Checkpoint
    is_result: bool
    took: str
    error: str
    traceback: str


@router.get("/runs/{key}/step")
async def step(request: Request, access: Reader, key: str, path: Annotated[str, Query(max_length=4096)]) -> Response:
    """A step: what it was given, what it returned, and each of its attempts."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        records = memory_of(request).runs.records(store, key)
        histories = {show(entry): history for entry, history in records.steps.items()}
        history = histories.get(path)
        if history is None or not (history.results or history.failures):
            raise NotFound(f"run {key} has no step {path}", hint="the page of the run shows its steps")
        tries = sorted([*history.results, *history.failures], key=lambda record: record.seq, reverse=True)
        result = history.results[-1] if history.results else None
        level, problem = None, ""
        if result is not None:
            try:
                level = states.level_at(memory_of(request).outlines.open(store, result.id), "result")
            except (Corrupted, NotFound) as error:
                problem = str(error)
        return {
            "run": find_run(store, key),
            "path": path,
            "explanation": next(entry for entry in records.explanations if entry.path == path),
            "inputs": inputs_of(tries[0], history.results[-2] if result and len(history.results) > 1 else None),
            "attempts": [_attempt(store, record) for record in tries[:_ATTEMPTS]],
            "last_failure": history.failures[-1].id if history.failures else "",
            "left_out": max(0, len(tries) - _ATTEMPTS),
            "c": result,
            "level": level,
            "problem": problem,
        }

    return await answer(request, access, "step.html", facts)


def inputs_of(record: Checkpoint, earlier: Checkpoint | None) -> list[tuple[str, str, bool]]:
    """What a step was given: (name, in a few words, whether it differs from an earlier result's)."""
    given, digests = record.metadata.get("given"), record.metadata.get("inputs")
    before = earlier.metadata.get("inputs") if earlier is not None else None
    now, then = (side if isinstance(side, dict) else {} for side in (digests, before))
    return [
        (str(name), str(text), bool(then) and now.get(name) != then.get(name))
        for name, text in (given.items() if isinstance(given, dict) else ())
    ]


def _attempt(store: CheckpointManager, record: Checkpoint) -> Attempt:
    is_result = record.metadata.get("kind") == "step"
    seconds = record.metadata.get("seconds")
    took = duration(seconds) if isinstance(seconds, int | float) else ""
    error = "" if is_result else str(record.metadata.get("error", ""))
    return Attempt(record, is_result, took, error, "" if is_result else _traceback(store, record.id))


@router.post("/runs/{key}/resume")
async def resume_run(request: Request, access: Writer, key: str) -> Response:
    """Hand the run to the application's runner, which starts it again; refused where that makes no sense."""
    await start_again(access, key)
    return see(request, f"/runs/{quote(key, safe='')}", f"{key} was resumed.")


@router.post("/runs/{key}/signal")
async def signal_run(
    request: Request,
    access: Writer,
    key: str,
    name: Annotated[str, Form(min_length=1, max_length=1024)],
    value: Annotated[str, Form(max_length=100_000)] = "",
) -> Response:
    """Send a value, given as JSON, to a run that waits, or will wait, for it."""
    sent = states.parse_value(value) if value.strip() else None

    def post(store: CheckpointManager) -> None:
        if find_run(store, key).status in (RunStatus.COMPLETED, RunStatus.CANCELLED):
            raise Conflict(f"run {key} has ended", hint="nobody would take the signal")
        send(store, key, name, sent)

    await access.ask(post)
    return see(request, f"/runs/{quote(key, safe='')}", f"Signal {name} was sent.")


@router.post("/runs/{key}/cancel")
async def cancel_run(request: Request, access: Writer, key: str) -> Response:
    is_done = await access.ask(lambda store: cancel(store, key))
    text = "The run is cancelled." if is_done else "The run stops before its next step."
    return see(request, f"/runs/{quote(key, safe='')}", text)


def runs_again(steps: Sequence[Explanation], maps: Sequence[MapItems], run: RunSummary) -> list[tuple[str, str]]:
    """What resuming the run does again, and why; what it has not come to is not known before."""
    again = [(step.path, step.reason.partition("; it runs again")[0]) for step in steps if step.verdict == "failed"]
    again += [
        (items.path, f"{count_of(len(items.failed), 'item')} failed, {items.done:,} done")
        for items in maps
        if items.failed
    ]
    again += [
        (str(wait.get("name", "")), f"waits for {_AWAITED.get(wait.get('for', ''), 'something')}")
        for wait in run.waiting
    ]
    return again


def _traceback(store: CheckpointManager, checkpoint_id: str) -> str:
    try:
        state: object = store.load(checkpoint_id)
    except Corrupted as error:
        return error.message
    return str(state.get("traceback", "")) if isinstance(state, dict) else ""


@router.get("/executions/{execution_id}")
async def execution(request: Request, access: Reader, execution_id: str) -> Response:
    """An execution of a workflow: its steps, what they were given and gave, who decided what."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        document = Workflows(store).get_execution(execution_id)
        data = as_json(document["global_data"]) if document["global_data"] else ""
        steps = [_execution_step(step) for step in document["checkpoints"]]
        asks = asked(store, pending_approvals(store, execution_id))
        return {"execution": document, "steps": steps, "asks": asks, "data": data}

    return await answer(request, access, "execution.html", facts)


def _execution_step(step: Mapping[str, object]) -> dict[str, object]:
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


@router.get("/approvals")
async def approvals(request: Request, access: Reader) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        roll = memory_of(request).of(access.namespace).roster.look(store)
        pending = roll.approvals
        left_out = max(0, len(pending) - _APPROVALS)
        return {"asks": asked(store, pending[:_APPROVALS]), "left_out": left_out, "roll": roll}

    return await answer(request, access, "approvals.html", facts)


@router.post("/approvals")
async def decide_approval(
    request: Request,
    access: Writer,
    key: Annotated[str, Form(max_length=128)],
    name: Annotated[str, Form(max_length=2000)],
    decision: Annotated[str, Form(pattern="^(approve|deny)$")],
    comment: Annotated[str, Form(max_length=2000)] = "",
) -> Response:
    await access.ask(lambda store: decide(store, key, name, decision == "approve", actor=store.actor, comment=comment))
    return see(request, "/approvals", f"{name} of {key} is {'approved' if decision == 'approve' else 'denied'}.")
