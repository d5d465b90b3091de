"""Saving over HTTP."""

from __future__ import annotations

import sys
from typing import Annotated

from fastapi import APIRouter, Header, Request

from kedge.server import schemas
from kedge.server.auth import Writes
from kedge.server.gate import takes_states
from kedge.server.limits import body_of, headers_of
from kedge.server.responses import JsonAnswer
from kedge.server.route import DirectRoute
from kedge.server.transfers import save_in_chunks
from kedge.server.uploads import UploadedSave, receive, save_alone
from kedge.store.wire import SAVE_TYPE

from . import API, PROBLEMS

router = APIRouter(prefix=API, tags=["checkpoints"], responses=PROBLEMS, route_class=DirectRoute)

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
@takes_states
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
) -> object:
    """Save a state as the next checkpoint of a job. Durable when this answers.

    As JSON, or as multipart/form-data: the part `checkpoint` is that JSON, other parts are buffers, which the state
    names as {"$part": "name"}. Parts are streamed to disk. What kedge.client sends, a manifest with the chunks that the
    store lacks, may have any size.
    """
    service = access.service
    if headers_of(request).get(b"content-type") == SAVE_TYPE.encode():
        body_of(request.scope).open(sys.maxsize, service.limits.receive_s)  # taken in as it comes, in bounded memory
        return await save_in_chunks(access, job, request)
    upload = await receive(request, service.limits)
    save = UploadedSave(access, job, idempotency_key, upload)
    try:
        if upload.is_small:
            saved = await service.saves.ask(save)
        else:
            saved = await service.in_thread(lambda: save_alone(save))
    finally:
        await upload.close()
    service.note_saved()
    return JsonAnswer(saved.to_json(), 201)
