"""The chunks of states, for kedge.client, which saves and loads as the store itself does. Not in the OpenAPI document:
what they take and give changes with the format of the store (`kedge.store.wire`)."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi import Path as InPath
from starlette.responses import Response

from kedge.errors import Validation
from kedge.manager import CheckpointManager
from kedge.server import schemas
from kedge.server.auth import Reads, Writes
from kedge.server.gate import GatedRoute
from kedge.server.responses import stream
from kedge.server.transfers import local_of, pack_stored, read_chunks
from kedge.store.transfer import lacking
from kedge.store.wire import CHUNKS_TYPE, DIGEST_BYTES, MANIFEST_TYPE, MAX_DIGESTS, split_digests

from . import API

router = APIRouter(prefix=API, include_in_schema=False, route_class=GatedRoute)


async def _digests(request: Request) -> list[bytes]:
    """BLAKE3 digests, 32 bytes each."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_DIGESTS * DIGEST_BYTES:
            break
    try:
        return split_digests(bytes(body))
    except ValueError as error:
        raise Validation(str(error), hint=f"send up to {MAX_DIGESTS}, {DIGEST_BYTES} bytes each") from None


@router.post("/chunks/missing", response_class=Response)
async def find_missing(access: Writes, request: Request) -> Response:
    """Which of these chunks the namespace lacks: the digests of those that a save has to bring."""
    digests = await _digests(request)
    missing = await access.service.in_thread(lambda: lacking(local_of(access), digests))
    return Response(b"".join(missing), media_type="application/octet-stream")


@router.post("/chunks/read", response_class=Response)
async def get_chunks(access: Reads, request: Request) -> Response:
    """These chunks of the namespace, each with its length, in the order asked for."""
    digests = await _digests(request)
    pieces = await access.service.in_thread(lambda: read_chunks(local_of(access), digests))
    return stream(access, pieces, CHUNKS_TYPE, None)


@router.get("/checkpoints/{checkpoint_id}/manifest", response_class=Response)
async def get_manifest(access: Reads, checkpoint_id: Annotated[schemas.CheckpointId, InPath()]) -> Response:
    """A checkpoint with its manifest, which names the chunks of its state."""

    def read(store: CheckpointManager) -> bytes:
        checkpoint, packed = store.catalogue.read(checkpoint_id)
        store.counters["loads"] += 1
        store.counters["loaded_bytes"] += checkpoint.size_bytes
        key, request_digest = local_of(access).index.keys_of([checkpoint_id]).get(checkpoint_id, (None, b""))
        return pack_stored(checkpoint, packed, {"key": key, "request_digest": request_digest.hex()})

    return Response(await access.ask(read), media_type=MANIFEST_TYPE)
