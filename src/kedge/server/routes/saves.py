"""Saving over HTTP."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request

from kedge.manager import CheckpointManager
from kedge.server import schemas
from kedge.server.auth import Writes
from kedge.server.responses import JsonAnswer
from kedge.server.uploads import Upload, options_of, receive

from . import API, PROBLEMS

router = APIRouter(prefix=API, tags=["checkpoints"], responses=PROBLEMS)

MAX_KEY = 256
_SAVE = {"$ref": "#/components/schemas/Save"}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _SAVE, "example": {"step": "outline", "state": {"current_step": 1}}},
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["checkpoint"],
                    "properties": {"checkpoint": _SAVE},
                    "additionalProperties": False,
                    "description": "Besides, a file part for each buffer that the state names.",
                },
                "encoding": {"checkpoint": {"contentType": "application/json"}},
            },
        },
    }
}


@router.post("/jobs/{job}/checkpoints", status_code=201, response_model=schemas.Checkpoint, openapi_extra=_BODY)
async def save_checkpoint(
    access: Writes,
    job: schemas.Name,
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            min_length=1, max_length=MAX_KEY, description="The same again answers the first; with another state: 409."
        ),
    ] = None,
) -> Any:
    """Save a state as the next checkpoint of a job. Durable when this answers.

    As JSON, or as multipart/form-data: the part `checkpoint` is that JSON, other parts are buffers, which the state
    names as {"$part": "name"}. Parts are streamed to disk.
    """
    upload = await receive(request, access.service.limits)
    try:
        saved = await access.ask(lambda store: _save(store, job, upload, idempotency_key))
    finally:
        await upload.close()
    return JsonAnswer(saved.to_json(), 201)


def _save(store: CheckpointManager, job: str, upload: Upload, key: str | None) -> Any:
    with ExitStack() as stack:
        wish, encoded = upload.open(stack)
        return store.save_encoded(job, wish.step, encoded, **options_of(wish, job), idempotency_key=key)
