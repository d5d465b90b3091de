"""Checkpoints: finding them, and changing what may change."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query
from pydantic import Field
from starlette.responses import Response

from kedge.codec.json_view import from_json
from kedge.errors import NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Lease
from kedge.server import schemas
from kedge.server.auth import Reads, Writes
from kedge.server.gate import GatedRoute
from kedge.server.responses import JsonAnswer
from kedge.server.route import DirectRoute

from . import API, PROBLEMS
from .jobs import PageSize

router = APIRouter(prefix=API, tags=["checkpoints"], responses=PROBLEMS, route_class=GatedRoute)

Cursor = Annotated[int | None, Query(ge=0, le=(1 << 53) - 1, description="Continue listing from here: next_cursor.")]

_Tag = Annotated[str, Field(pattern=f"{schemas.NAME_PATTERN[:-1]}=[^\\x00]{{0,1024}}$")]
_Key = Annotated[str, Field(min_length=1, max_length=256)]
_Filter = Annotated[str, Field(pattern=r'^[^=".\x00]+(\.[^=".\x00]+)*=[^\x00]{0,1024}$')]


async def get_checkpoint(access: Reads, checkpoint_id: schemas.CheckpointId) -> Response:
    """One checkpoint without its state."""
    checkpoint = await access.service.lookups.ask((access.namespace, checkpoint_id))
    return JsonAnswer(checkpoint.to_json())


router.add_api_route(
    "/checkpoints/{checkpoint_id}", get_checkpoint, response_model=schemas.Checkpoint, route_class_override=DirectRoute
)


@router.get("/jobs/{job}/checkpoints", response_model=schemas.CheckpointPage)
async def list_checkpoints(
    access: Reads,
    job: schemas.Name,
    level: Annotated[schemas.Level | None, Query()] = None,
    tag: Annotated[list[_Tag] | None, Query(description="name=value; repeatable.", examples=[["kind=best"]])] = None,
    metadata: Annotated[
        list[_Filter] | None,
        Query(
            description='path=value, such as model.name=small, epoch=3 or id="7"; repeatable.',
            examples=[["epoch=3"]],
        ),
    ] = None,
    order: Annotated[str, Query(pattern="^(newest|oldest)$", description="Which come first.")] = "newest",
    limit: PageSize = 50,
    cursor: Cursor = None,
) -> object:
    """The checkpoints of a job, without their states; an unknown job has none."""
    tags = _pairs(tag or [])
    wanted = {path: _value(text) for path, text in _pairs(metadata or []).items()}

    def find(store: CheckpointManager) -> list[Checkpoint]:
        if order == "oldest":
            return store.list(job, level=level, tags=tags, metadata=wanted, limit=limit + 1, after=cursor or 0)
        return store.list(job, level=level, tags=tags, metadata=wanted, limit=limit + 1, before=cursor)[::-1]

    checkpoints = await access.ask(find)
    page = checkpoints[:limit]
    following = str(page[-1].seq) if len(checkpoints) > limit else None
    return JsonAnswer({"checkpoints": [c.to_json() for c in page], "next_cursor": following})


@router.get("/jobs/{job}/keys", response_model=schemas.KeyList)
async def find_keys(
    access: Reads,
    job: schemas.Name,
    key: Annotated[list[_Key] | None, Query(max_length=100, description="Idempotency keys; repeatable.")] = None,
    after: Annotated[int, Query(ge=0, le=(1 << 53) - 1, description="Only what is above this number.")] = 0,
    limit: PageSize = 50,
) -> object:
    """What was saved under idempotency keys: under these, or under any among the next sequence numbers."""

    def find(store: CheckpointManager) -> list[dict[str, object]]:
        stored = store.catalogue.find(job, key or range(after + 1, after + 1 + limit))
        above = [(name, checkpoint) for name, (checkpoint, _) in stored.items() if checkpoint.seq > after]
        return [{"key": name, "checkpoint": checkpoint.to_json()} for name, checkpoint in above]

    return JsonAnswer({"found": await access.ask(find)})


@router.delete("/checkpoints/{checkpoint_id}", status_code=204, response_class=Response)
async def delete_checkpoint(access: Writes, checkpoint_id: schemas.CheckpointId) -> Response:
    """Delete a checkpoint; a pinned one is a conflict. Its bytes go with the next gc."""

    def delete(store: CheckpointManager) -> None:
        if not store.delete(store.get(checkpoint_id).job, checkpoint_id):
            raise NotFound(f"checkpoint {checkpoint_id} not found", hint="somebody else deleted it just now")

    await access.ask(delete)
    return Response(status_code=204)


@router.patch("/checkpoints/{checkpoint_id}/tags", response_model=schemas.Checkpoint)
async def change_tags(access: Writes, checkpoint_id: schemas.CheckpointId, wish: schemas.TagChange) -> object:
    """Set tags, or remove those given as null; others stay."""
    return JsonAnswer((await access.ask(lambda store: store.tag(checkpoint_id, **wish.tags))).to_json())


@router.put("/checkpoints/{checkpoint_id}/pin", response_model=schemas.Checkpoint)
async def change_pin(access: Writes, checkpoint_id: schemas.CheckpointId, wish: schemas.PinChange) -> object:
    """Keep a checkpoint from every cleanup and delete, or let go of it."""
    return JsonAnswer((await access.ask(lambda store: store.pin(checkpoint_id, wish.pinned))).to_json())


@router.put("/checkpoints/{checkpoint_id}/status", response_model=schemas.Checkpoint)
async def change_status(access: Writes, checkpoint_id: schemas.CheckpointId, wish: schemas.StatusChange) -> object:
    """Mark a checkpoint: `latest` passes a corrupted one over."""
    changed = await access.ask(lambda store: store.set_status(checkpoint_id, wish.status))
    return JsonAnswer(changed.to_json())


@router.post("/checkpoints/{checkpoint_id}/condemn", response_model=schemas.Checkpoint)
async def condemn(access: Writes, checkpoint_id: schemas.CheckpointId) -> Any:
    """Read all of a checkpoint that somebody found damaged and, if it is, mark it and its damaged chunks."""
    return JsonAnswer((await access.ask(lambda store: store.condemn(checkpoint_id))).to_json())


@router.post("/checkpoints/{checkpoint_id}/branch", status_code=201, response_model=schemas.Checkpoint)
async def branch(
    access: Writes, checkpoint_id: schemas.CheckpointId, wish: Annotated[schemas.Branch | None, Body()] = None
) -> Any:
    """Make this state the newest of its job, or of another one, with this checkpoint as parent. Nothing is copied."""

    def resume(store: CheckpointManager) -> Checkpoint:
        job = wish.job if wish and wish.job else store.get(checkpoint_id).job
        lease = Lease(job, wish.lease, "", 0) if wish and wish.lease is not None else None
        return store.resume_from(checkpoint_id, job, lease=lease)[0]

    return JsonAnswer((await access.ask(resume)).to_json(), 201)


@router.post("/jobs/{job}/copy", status_code=201, response_model=schemas.Copied)
async def copy_job(access: Writes, job: schemas.Name, wish: schemas.Copy) -> object:
    """Copy a job's history to a new name; both share all bytes. Safe to repeat."""
    return {"job": wish.to, "checkpoints": len(await access.ask(lambda store: store.copy(job, wish.to)))}


def _pairs(texts: list[str]) -> dict[str, str]:
    """Of texts whose form was checked before."""
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _value(text: str) -> Any:
    """A number, a boolean, null or a text in quotes as JSON writes it; else the text as it is."""
    try:
        value = from_json(text)
    except Validation:
        return text
    return text if isinstance(value, list | dict) else value
