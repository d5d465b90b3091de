"""The five routes of the older jobs service: fields, codes, limits and wording as they were."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Body, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from kedge.codec.json_view import to_json_view
from kedge.diff.outline import open_state, with_content
from kedge.errors import NotFound
from kedge.legacy.importers.common import name_of
from kedge.legacy.importers.jobs import MOST_JOB_NAME, old_id_of, old_job_of
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.server import schemas
from kedge.server.auth import Reads, Writes
from kedge.server.gate import GatedRoute
from kedge.server.problems import OLDER_PREFIX
from kedge.server.runner import resume

_DETAIL = {"type": "object", "required": ["detail"], "properties": {"detail": {}}, "additionalProperties": False}
_ERROR = {"description": "What went wrong.", "content": {"application/json": {"schema": _DETAIL}}}

router = APIRouter(prefix=OLDER_PREFIX, tags=["older routes"], responses={"default": _ERROR}, route_class=GatedRoute)

_ARRAYS_BYTES = 16 << 20  # of arrays in one answer
_IN_PARTS = "download it: GET /api/v1/checkpoints/{id}/raw"


OldName = Annotated[str, Field(min_length=1, max_length=1024)]  # any name that the older service took


def _job(job_id: str) -> str:
    return name_of(job_id, most=MOST_JOB_NAME)


class OlderCheckpoint(schemas.Answer):
    checkpoint_id: str
    job_id: str
    step_name: str
    timestamp: str
    workflow_version: str
    workflow_name: str | None
    metadata: dict[str, schemas.Json]


class OlderList(schemas.Answer):
    job_id: str
    checkpoints: list[OlderCheckpoint]
    total: int
    timestamp: str


class OlderState(OlderCheckpoint):
    state_snapshot: schemas.Json


class OlderRestored(schemas.Answer):
    checkpoint_id: str
    job_id: str
    state: schemas.Json
    job_status: str = Field(examples=["restored", "resumed"])
    message: str
    timestamp: str


class OlderCleaned(schemas.Answer):
    job_id: str
    deleted_count: int
    kept_count: int
    timestamp: str


class RestoreRequest(BaseModel):
    resume: bool = False


class CleanupRequest(BaseModel):
    job_id: OldName = Field(examples=["job_9"])
    keep_last: int = Field(default=10, ge=1, le=100)


@router.get("", response_model=OlderList)
async def list_checkpoints(access: Reads, job_id: Annotated[OldName, Query(examples=["job_9"])]) -> object:
    """All checkpoints of a job, oldest first; an unknown job has none."""
    checkpoints = await access.ask(lambda store: store.list(_job(job_id)))
    return {
        "job_id": job_id,
        "checkpoints": [_metadata(checkpoint) for checkpoint in checkpoints],
        "total": len(checkpoints),
        "timestamp": _now(),
    }


@router.get("/{checkpoint_id}", response_model=OlderState)
async def get_checkpoint(access: Reads, checkpoint_id: str) -> object:
    """A checkpoint with its state."""
    checkpoint, state = await access.ask(lambda store: _read(store, checkpoint_id))
    return {**_metadata(checkpoint), "state_snapshot": state}


@router.post("/{checkpoint_id}/restore", response_model=OlderRestored)
async def restore_checkpoint(
    access: Writes, checkpoint_id: str, wish: Annotated[RestoreRequest | None, Body()] = None
) -> object:
    """The state; with `resume`, handed to the job runner, which is called once."""
    checkpoint, state = await access.ask(lambda store: _read(store, checkpoint_id))
    job = old_job_of(checkpoint)
    is_resumed = wish is not None and wish.resume
    if is_resumed:
        await resume(access.service, job, await access.ask(lambda store: store.load(checkpoint.id)))
    outcome = "resumed" if is_resumed else "restored"
    return {
        "checkpoint_id": checkpoint_id,
        "job_id": job,
        "state": state,
        "job_status": outcome,
        "message": f"Job {job} {outcome} from checkpoint {checkpoint_id}",
        "timestamp": _now(),
    }


@router.delete("/{checkpoint_id}", status_code=204, response_class=Response)
async def delete_checkpoint(access: Writes, checkpoint_id: str) -> Response:
    """Delete a checkpoint."""

    def delete(store: CheckpointManager) -> None:
        checkpoint = _find(store, checkpoint_id)
        if not store.delete(checkpoint.job, checkpoint.id):
            raise _missing(checkpoint_id)

    await access.ask(delete)
    return Response(status_code=204)


@router.post("/cleanup", response_model=OlderCleaned)
async def clean_up(access: Writes, wish: CleanupRequest) -> object:
    """Delete all but the newest checkpoints of a job."""

    def clean(store: CheckpointManager) -> tuple[int, int]:
        name = _job(wish.job_id)
        deleted = store.cleanup(name, wish.keep_last)
        job = store.catalogue.job(name)
        return deleted, job.checkpoints if job else 0

    deleted, remaining = await access.ask(clean)
    return {"job_id": wish.job_id, "deleted_count": deleted, "kept_count": remaining, "timestamp": _now()}


def _read(store: CheckpointManager, checkpoint_id: str) -> tuple[Checkpoint, object]:
    checkpoint = _find(store, checkpoint_id)
    state = open_state(store.store, checkpoint.id)
    return checkpoint, to_json_view(state.outline, fields_of=with_content(state, _ARRAYS_BYTES, hint=_IN_PARTS))


def _find(store: CheckpointManager, checkpoint_id: str) -> Checkpoint:
    try:
        return store.get(name_of(checkpoint_id))
    except NotFound:
        raise _missing(checkpoint_id) from None


def _missing(checkpoint_id: str) -> NotFound:
    return NotFound(f"Checkpoint {checkpoint_id[:200]} not found")


def _metadata(checkpoint: Checkpoint) -> dict[str, object]:
    name = checkpoint.metadata.get("workflow_name")
    return {
        "checkpoint_id": old_id_of(checkpoint),
        "job_id": old_job_of(checkpoint),
        "step_name": checkpoint.step,
        "timestamp": checkpoint.timestamp,
        "workflow_version": checkpoint.schema_version,
        "workflow_name": name if isinstance(name, str) else None,
        "metadata": dict(checkpoint.metadata),
    }


def _now() -> str:
    return datetime.now(UTC).isoformat()
