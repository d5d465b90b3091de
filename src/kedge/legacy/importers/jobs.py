"""jobs: a JSON file for each checkpoint, one for each workflow execution, and one for each job of an older form."""

from __future__ import annotations

from typing import Any

from kedge.model import Checkpoint, CheckpointLevel, CheckpointStatus, list_of, mapping_of
from kedge.process.execution import ApprovalStatus, ExecutionState, Step, StepState

from .common import (
    SALVAGED,
    Document,
    Draft,
    Drafts,
    Finding,
    Fragment,
    Options,
    Verdict,
    clean,
    digest,
    digest_of_document,
    legacy,
    microseconds,
    name_of,
    step_of,
)

FORM = "jobs"
EXECUTION_PREFIX = "exec_"
MOST_JOB_NAME = 118
_MOST = 112  # characters of an execution's name: its inbox has a name, too


def kind_of(document: object) -> str | None:
    if not isinstance(document, dict):
        return None
    keys = document.keys()
    if {"execution_id", "workflow_name"} <= keys:
        return "execution"
    if {"checkpoint_id", "job_id", "step_name"} <= keys:
        return "checkpoint"
    if "job_id" in keys and "checkpoint_id" not in keys and isinstance(document.get("state"), dict):
        return "job"
    about = mapping_of(document.get("metadata"))
    return "state" if {"job_id", "workflow_id", "status"} <= about.keys() and "inputs" in keys else None


def old_id_of(checkpoint: Checkpoint) -> str:
    """The ID by which the jobs system knew a checkpoint: its own, where that is no name of Kedge."""
    old = mapping_of(checkpoint.metadata.get("legacy"))
    return str(old["id"]) if old.get("format") == FORM and "id" in old else checkpoint.id


def old_job_of(checkpoint: Checkpoint) -> str:
    old = mapping_of(checkpoint.metadata.get("legacy"))
    return str(old["job"]) if old.get("format") == FORM and "job" in old else checkpoint.job


def time_of(document: Document) -> int:
    """The time of a checkpoint; where that is unreadable, the seconds in its ID, which is parsed from the right."""
    about = mapping_of(document.get("metadata"))
    at_us = microseconds(document.get("timestamp") or document.get("started_at") or about.get("updated_at"))
    if at_us is None:
        parts = str(document.get("checkpoint_id") or document.get("execution_id", "")).rsplit("_", 2)
        digits = [part for part in parts[1:] if part.isdecimal() and part.isascii()]
        at_us = microseconds(int(digits[0][:18])) if digits else None
    return at_us or 0


def drafts(document: Document, source: str, options: Options, cut: Fragment | None = None) -> Drafts:
    kind = kind_of(document)
    is_cut = cut is not None
    if kind == "execution":
        yield from _execution(document, source, options, cut)
        return
    if kind == "state":
        yield from _job_state(document, source, options, is_cut)
        return
    job = name_of(document["job_id"], most=MOST_JOB_NAME, prefix=options.job_prefix)
    step = document.get("step_name") if kind == "checkpoint" else _of(document["state"], "current_step")
    if "state" not in document:
        yield Finding(Verdict.CORRUPTED, source, "the file is cut off before its state; nothing of it can be used")
        return
    if is_cut:
        names = sorted(document["state"]) if isinstance(document["state"], dict) else []
        where = f"what is left of its state is in job {job}{SALVAGED}"
        yield Finding(Verdict.CORRUPTED, source, f"the file is cut off; {where}", tuple(map(clean, names)))
    yield Draft(
        FORM,
        source,
        job + SALVAGED if is_cut else job,
        step_of(step, "checkpoint"),
        document["state"],
        key=digest_of_document(document),
        id=None if is_cut or kind == "job" else name_of(document["checkpoint_id"]),
        created_us=time_of(document) or None,
        level=CheckpointLevel.STEP if kind == "checkpoint" else CheckpointLevel.PIPELINE,
        metadata={
            "legacy": legacy(
                FORM, kind=kind, id=document.get("checkpoint_id"), job=document["job_id"],
                step=document.get("step_name"), time=document.get("timestamp"),
                version=document.get("workflow_version"),
            )
        },
        schema_version=clean(document.get("workflow_version"), 64) or "1.0",
    )  # fmt: skip


def _job_state(document: Document, source: str, options: Options, is_cut: bool) -> Drafts:
    """`.jobs/<job>/state.json`: all that the job engine knew of a job, its steps included."""
    about = document["metadata"]
    job = name_of(about["job_id"], most=MOST_JOB_NAME, prefix=options.job_prefix)
    if is_cut:
        why = f"the file is cut off; what is left of its state is in job {job}{SALVAGED}"
        yield Finding(Verdict.CORRUPTED, source, why, tuple(document))
    yield Draft(
        FORM,
        source,
        job + SALVAGED if is_cut else job,
        step_of(about.get("current_step"), "state"),
        document,
        key=digest_of_document(document),
        created_us=time_of(document) or None,
        level=CheckpointLevel.PIPELINE,
        metadata={"legacy": legacy(FORM, kind="state", job=about["job_id"], status=about["status"])},
        status=CheckpointStatus.ARCHIVED if about["status"] == "archived" else CheckpointStatus.CREATED,
    )


def _execution(document: Document, source: str, options: Options, cut: Fragment | None) -> Drafts:
    """An execution that `kedge.workflow` continues with, approvals included."""
    old_id = str(document["execution_id"])
    job = name_of(old_id.removeprefix(EXECUTION_PREFIX), most=_MOST, prefix=EXECUTION_PREFIX + options.job_prefix)
    state = _text_in(document.get("state"), ExecutionState, "running" if cut is None else "paused")
    entries = document.get("checkpoints")
    whole = list(list_of(entries))
    if cut is not None:
        whole = _up_to_the_cut(whole, cut.open_at, document.get("current_checkpoint"), is_paused=state == "paused")
    steps = [_step(entry, place, job) for place, entry in enumerate(whole)]
    if cut is not None:
        what = [f"checkpoints[{n}] {clean(s['checkpoint_name'])}" for n, s in enumerate(steps)]
        lost = "the file is cut off; what is left is kept, later checkpoints and global_data are lost"
        yield Finding(Verdict.CORRUPTED, source, lost, tuple(what))
    named = [s["checkpoint_id"] for s in steps if s["checkpoint_name"] == document.get("current_checkpoint")]
    execution: Document = {
        "execution_id": job,
        "correlation_id": document.get("correlation_id", ""),
        "workflow_name": document["workflow_name"],
        "state": state,
        "started_at": document.get("started_at"),
        "completed_at": document.get("completed_at"),
        "current_checkpoint": named[-1] if named else None,
        "checkpoints": steps,
        "global_data": document.get("global_data") or {},
    }
    yield Draft(
        FORM,
        source,
        job,
        "import",
        execution,
        key=digest_of_document(document),
        created_us=time_of(document) or None,
        level=CheckpointLevel.PIPELINE,
        metadata={
            "kind": "execution",
            "state": state,
            "workflow": clean(document["workflow_name"]),
            "actor": "import",
            "waiting": [
                {"for": "approval", "name": clean(step["checkpoint_name"]), "id": step["checkpoint_id"], "prompt": ""}
                for step in steps
                if step["approval_status"] == "pending"
            ],
            "legacy": legacy(FORM, kind="execution", id=old_id, salvaged=cut is not None or None),
        },
    )


_WAITING = {"state": "paused", "approval_required": True, "approval_status": "pending"}


def _up_to_the_cut(
    entries: list[Any], open_at: tuple[str | int, ...], current: object, *, is_paused: bool
) -> list[object]:
    """The checkpoints of a cut execution. The one that the cut is in counts as active, whatever it had become.

    A paused execution may have waited for an approval, so the checkpoint it was at waits for one, read or not.
    """
    if len(open_at) > 1 and open_at[0] == "checkpoints":
        *entries, torn = entries
        if isinstance(name := mapping_of(torn).get("checkpoint_name"), str):
            current = current or name
            entries.append(torn | (_WAITING if is_paused and name == current else {"state": "active"}))
    known = [entry for entry in entries if isinstance(entry, dict)]
    is_read = any(entry.get("checkpoint_name") == current and _state_of(entry) == "paused" for entry in known)
    if is_paused and not is_read:
        entries.append({"checkpoint_name": current or "unknown", **_WAITING})
    return entries


def _state_of(fields: Document) -> str:
    return _text_in(fields.get("state"), StepState, "active")


def _step(entry: Any, place: int, job: str) -> Document:
    """A checkpoint of an execution with all that approvals need; each gets an ID of its own, as names may repeat."""
    fields = mapping_of(entry)
    approval = fields.get("approval_status")
    known = approval if approval in list(ApprovalStatus) else None
    state = _state_of(fields)
    is_required = bool(fields.get("approval_required")) or known is not None
    if is_required and known is None:
        known = "pending" if state in ("paused", "pending") else "approved"
    if known == "pending" and state in ("active", "pending"):
        state = "paused"
    return Step(
        checkpoint_id=digest(f"{job}/{place}")[:32],
        checkpoint_name=fields.get("checkpoint_name", f"checkpoint {place}"),
        agent_id=fields.get("agent_id"),  # type: ignore[arg-type] # old files may lack any of these
        correlation_id=fields.get("correlation_id"),  # type: ignore[arg-type]
        state=state,
        started_at=fields.get("started_at"),  # type: ignore[arg-type]
        completed_at=fields.get("completed_at"),
        input_data=fields.get("input_data"),
        output_data=fields.get("output_data"),
        error_details=fields.get("error_details"),
        approval_required=is_required,
        approval_status=known,
        approval_actor="import" if known in ("approved", "denied") else None,
        metadata=fields.get("metadata"),
    ).document()


def _text_in(value: object, kind: type[ExecutionState | StepState], default: str) -> str:
    """Old files have "paused", and some "CheckpointState.PAUSED"."""
    word = str(value).rpartition(".")[2].lower()
    return word if word in list(kind) else default


def _of(state: Document, name: str) -> object:
    value = state.get(name)
    return value if isinstance(value, str) else f"step {value}" if isinstance(value, int) else None
