"""Export: checkpoints as the files that the jobs system and artemis write, so that these can continue with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from kedge.errors import Validation
from kedge.legacy.artemis_models import CheckpointStatus, PipelineCheckpoint, StageCheckpoint
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, RunStatus, mapping_of, number_of
from kedge.pipeline.owner import newest_status

from .artemis import MACHINE
from .common import SAVED_HERE, Document, texts
from .folder import is_plain_name

View = Callable[[Checkpoint], Any]  # the state of a checkpoint as plain JSON
File = tuple[str, object]  # a path of names only, and the document to write there

_MOST_NAME_BYTES = 250  # with .json, what a file system takes

_ARTEMIS_STATUS = {
    RunStatus.RUNNING: "active",
    RunStatus.PAUSED: "paused",
    RunStatus.COMPLETED: "completed",
    RunStatus.FAILED: "failed",
    RunStatus.CANCELLED: "failed",
}
_OF_STEPS = (
    "checkpoint_name", "agent_id", "correlation_id", "state", "started_at", "completed_at", "input_data", "output_data",
    "error_details", "approval_required", "approval_status", "metadata",
)  # fmt: skip


def jobs_files(checkpoints: Iterable[Checkpoint], view: View) -> Iterator[File]:
    """`<job>/<checkpoint>.json` of each checkpoint, `<execution>.json` as it is now: what the system looks for.

    What it wrote keeps the name and the layout it had there; what was saved since lies beside it.
    """
    old_names = {c.job: old for c in checkpoints if (old := _old(c)).get("id" if _is_execution(c) else "job")}
    executions = {c.job: c for c in checkpoints if _is_execution(c)}
    whole = {c.job: c for c in checkpoints if _old(c).get("kind") in ("job", "state")}
    for newest in executions.values():
        old = old_names.get(newest.job, {})
        yield f"{_file_name(old.get('id'), newest.job)}.json", _execution(view(newest), old)
    for checkpoint in checkpoints:
        job = old_names.get(checkpoint.job, {}).get("job", checkpoint.job)
        folder = _file_name(job, checkpoint.job)
        old = _old(checkpoint)
        if checkpoint.job in executions or (
            old.get("kind") in ("job", "state") and checkpoint != whole[checkpoint.job]
        ):
            continue
        if old.get("kind") == "state":
            yield f"{folder}/state.json", view(checkpoint)
        elif old.get("kind") == "job":
            at = old.get("time", checkpoint.timestamp)
            yield f"{folder}.json", {"job_id": job, "state": view(checkpoint), "timestamp": at}
        else:
            own_id = old.get("id", checkpoint.id)
            yield (
                f"{folder}/{_file_name(own_id, checkpoint.id)}.json",
                {
                    "checkpoint_id": own_id,
                    "job_id": job,
                    "step_name": old.get("step", checkpoint.step),
                    "state": view(checkpoint),
                    "timestamp": old.get("time", checkpoint.timestamp),
                    "workflow_version": checkpoint.schema_version,
                },
            )


def _is_execution(checkpoint: Checkpoint) -> bool:
    return checkpoint.metadata.get("kind") == "execution"


def _old(checkpoint: Checkpoint) -> Document:
    """What the jobs system knew of a checkpoint; {} for one that it did not write."""
    old = mapping_of(checkpoint.metadata.get("legacy"))
    return old if old.get("format") == "jobs" else {}


def _file_name(old: object, name: str, ending: str = "") -> str:
    """A name as the old system has it, where that can be the name of a file that ends so."""
    fits = isinstance(old, str) and is_plain_name(old) and len(os.fsencode(old + ending)) <= _MOST_NAME_BYTES
    return str(old) if fits else name


def _execution(state: Document, old: Document) -> Document:
    names = {s["checkpoint_id"]: s["checkpoint_name"] for s in state["checkpoints"]}
    return {
        "execution_id": old.get("id", state["execution_id"]),
        "correlation_id": state["correlation_id"],
        "workflow_name": state["workflow_name"],
        "started_at": state["started_at"],
        "current_checkpoint": names.get(state["current_checkpoint"]),
        "state": state["state"],
        "checkpoints": [{name: step.get(name) for name in _OF_STEPS} for step in state["checkpoints"]],
        "global_data": state["global_data"],
        "completed_at": state["completed_at"],
    }


def artemis_files(manager: CheckpointManager, job: str, view: View) -> Iterator[File]:
    """The files of a run in each layout that it came from, with what was done since; else `<card>.json`.

    Of a job of the state machine: `<card>_state.json`, as it was.
    """
    if job.endswith(MACHINE):
        machine = manager.list(job, limit=1)[0]
        card = _file_name(mapping_of(machine.metadata.get("legacy")).get("job"), job.removesuffix(MACHINE), "_state")
        yield f"{card}_state.json", view(machine)
        return
    document = artemis_card(manager, job, view)
    card, status = _file_name(document["card_id"], job, "_checkpoints"), document["status"]
    records = manager.list(job, tags={"kind": "run"})
    origins = {str(kind): r for r in records if (kind := mapping_of(r.metadata.get("legacy")).get("kind"))}
    if "card" in origins or not origins.keys() & _LAYOUTS.keys():
        yield f"{_file_name(document['card_id'], job)}.json", document
    for kind, (name, continued) in _LAYOUTS.items():
        if kind in origins:
            old = view(origins[kind])
            stages = _stages_since(manager, job, origins[kind].seq, view)
            own_id = _file_name(old.get("checkpoint_id"), job)
            yield name.format(card=card, id=own_id), continued(old, stages, status if stages else None)


def _stages_since(manager: CheckpointManager, job: str, since: int, view: View) -> list[Document]:
    """The records of stages that no import brought, the latest attempt at each."""
    stages: dict[str, Document] = {}
    for checkpoint in manager.list(job, after=since):
        path, old = checkpoint.metadata.get("path"), mapping_of(checkpoint.metadata.get("legacy"))
        if not isinstance(path, list) or checkpoint.metadata.get("kind") not in ("step", "attempt"):
            continue
        if path and (not old or SAVED_HERE in old):
            stages.pop(str(path[0]), None)
            stages[str(path[0])] = _stage(checkpoint, str(path[0]), view(checkpoint))
    return list(stages.values())


def _continued_state(old: Document, stages: list[Document], status: str | None) -> Document:
    """`<card>_state.json`: what artemis resumes from by its state store."""
    done = [*texts(old.get("stages_completed")), *(s["stage_name"] for s in stages if s["status"] != "failed")]
    results = {s["stage_name"]: s["result"] for s in stages if s["status"] != "failed"}
    if status is None:
        return old
    return {
        **old,
        "status": {"active": "running", "resumed": "running"}.get(status, status),
        "stages_completed": list(dict.fromkeys(done)),
        "stage_results": {**mapping_of(old.get("stage_results")), **results},
        "updated_at": stages[-1]["end_time"],
        "completed_at": stages[-1]["end_time"] if status == "completed" else old.get("completed_at"),
        "error": stages[-1]["error_message"],
    }


def _continued_attempts(old: Document, stages: list[Document], status: str | None) -> list[Document]:
    """`<card>_checkpoints.json`: the array of attempts."""
    return [
        *old["stages"],
        *(
            {
                "card_id": old["card_id"],
                "stage_name": stage["stage_name"],
                "status": "failed" if stage["status"] == "failed" else "completed",
                "started_at": stage["start_time"],
                "completed_at": stage["end_time"],
                "result": stage["result"],
                "error": stage["error_message"],
            }
            for stage in stages
        ),
    ]


def _continued_results(old: Document, stages: list[Document], status: str | None) -> Document:
    """`checkpoint-<8 hex>.json`."""
    document = {**old, "stage_results": dict(mapping_of(old.get("stage_results")))}
    for stage in stages:
        name, word = stage["stage_name"], "failed" if stage["status"] == "failed" else "completed"
        document["stage_results"][name] = {
            "status": word, "artifacts": {}, "result": stage["result"], "error": stage["error_message"],
        }  # fmt: skip
        for other in ("completed", "failed"):
            listed = [n for n in texts(document.get(f"{other}_stages")) if n != name]
            document[f"{other}_stages"] = [*listed, name] if word == other else listed
    if status is not None:
        at = datetime.fromisoformat(stages[-1]["end_time"]).astimezone(UTC).replace(tzinfo=None)
        document |= {"status": {"active": "in_progress"}.get(status, status), "updated_at": f"{at.isoformat()}Z"}
    return document


def _continued_index(old: Document, stages: list[Document], status: str | None) -> Document:
    """`<card>_checkpoint.json`: results in order, and the place of the last one that is done."""
    done = {s["stage_name"]: s["result"] for s in stages if s["status"] != "failed"}
    if not done:
        return old
    known = dict(list(mapping_of(old["results"]).items())[: number_of(old["last_completed_stage"], -1) + 1])
    results = {**known, **done}
    return {**old, "results": results, "last_completed_stage": len(results) - 1, "timestamp": stages[-1]["end_time"]}


_Continued = Callable[[Document, list[Document], str | None], object]
_LAYOUTS: dict[str, tuple[str, _Continued]] = {  # the kind of a document → its file, and how it continues
    "state": ("{card}_state.json", _continued_state),
    "stages": ("{card}_checkpoints.json", _continued_attempts),
    "results": ("{id}.json", _continued_results),
    "index": ("{card}_checkpoint.json", _continued_index),
}


def artemis_card(manager: CheckpointManager, job: str, view: View) -> Document:
    """A run as a card: the card as it was imported, if it was one, and what was done since."""
    newest = newest_status(manager, job)
    if newest is None:
        raise Validation(f"job {job} is not a run", hint="artemis kept pipelines: export it with --format jobs instead")
    document, since = _base(manager, job, view)
    history = manager.list(job, after=since)
    for checkpoint in history:
        path = checkpoint.metadata.get("path")
        if isinstance(path, list) and path and checkpoint.metadata.get("kind") in ("step", "attempt"):
            _add_stage(document, str(path[0]), _stage(checkpoint, str(path[0]), view(checkpoint)))
    if history:
        _sum_up(document, newest)
    return document


def _base(manager: CheckpointManager, job: str, view: View) -> tuple[Document, int]:
    """The newest card that is stored as such, and its number; else an empty one."""
    card = job
    for record in reversed(manager.list(job, tags={"kind": "run"})):
        old = mapping_of(record.metadata.get("legacy"))
        card = str(old.get("job", card))
        if old.get("kind") == "card":
            return view(record), record.seq
    first = manager.list(job, after=0, limit=1)[0]
    began = _local(first.created_at)
    own_id = f"checkpoint-{card}-{int(first.created_at.timestamp())}"
    return PipelineCheckpoint(own_id, card, CheckpointStatus.ACTIVE, began, began).to_dict(), 0


def _stage(checkpoint: Checkpoint, name: str, state: Document) -> Document:
    record = mapping_of(state.get("record"))
    if "stage_name" in record and "duration_seconds" in record:
        return record
    about = checkpoint.metadata
    seconds = about.get("seconds")
    took = float(seconds) if isinstance(seconds, int | float) else 0.0
    result = state.get("result")
    is_done = about.get("kind") == "step"
    return StageCheckpoint(
        name,
        "completed" if is_done else "failed",
        _local(checkpoint.created_at - timedelta(seconds=took)),
        _local(checkpoint.created_at),
        took,
        result=result if isinstance(result, dict) or result is None else {"result": result},
        error_message=None if is_done else about.get("error"),  # type: ignore[arg-type]
        retry_count=max(0, int(about.get("attempts") or 1) - 1),  # type: ignore[call-overload]
    ).to_dict()


def _add_stage(document: Document, name: str, stage: Document) -> None:
    """A stage is in one list only, that of its latest attempt."""
    document.setdefault("stage_checkpoints", {})[name] = stage
    for word in ("completed", "failed", "skipped"):
        listed = [n for n in texts(document.get(f"{word}_stages")) if n != name]
        document[f"{word}_stages"] = [*listed, name] if stage["status"] == word else listed


def _sum_up(document: Document, newest: Checkpoint) -> None:
    stages = document["stage_checkpoints"].values()
    done = len(document["completed_stages"])
    document |= {
        "status": _ARTEMIS_STATUS[RunStatus(str(newest.metadata["status"]))],
        "updated_at": _local(newest.created_at).isoformat(),
        "current_stage": None,
        "stages_completed": done,
        "total_stages": max(document.get("total_stages") or 0, done),
        "total_duration_seconds": sum(mapping_of(stage).get("duration_seconds") or 0.0 for stage in stages),
    }


def _local(at: datetime) -> datetime:
    """As artemis has times: local, without a zone."""
    return at.astimezone().replace(tzinfo=None)
