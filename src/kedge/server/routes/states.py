"""What is in a checkpoint: as JSON, as it was encoded, or a part of it as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Body, Query
from starlette.responses import Response

from kedge.codec import BufferSummary
from kedge.codec.json_view import to_json_view
from kedge.diff.npy import npy_header
from kedge.diff.outline import StoredState, inside, open_state, split_at_tree, with_content
from kedge.errors import TooLarge, Validation
from kedge.files import FilesSummary, Tree
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.server import schemas
from kedge.server.archives import arrays_in, npz, safetensors
from kedge.server.auth import Reads, Writes
from kedge.server.gate import GatedRoute
from kedge.server.responses import JsonAnswer, stream
from kedge.server.runner import resume

from . import API, PROBLEMS

router = APIRouter(prefix=API, tags=["states"], responses=PROBLEMS, route_class=GatedRoute)

PathInside = Annotated[str, Query(max_length=4096, description="A part of the state, '/'-joined.", examples=["a/b"])]
_IN_PARTS = "ask for a part with path=, or download it"
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": _BINARY}}}


@router.get("/checkpoints/{checkpoint_id}/state", response_model=schemas.StateView)
async def get_state(
    access: Reads,
    checkpoint_id: schemas.CheckpointId,
    path: PathInside = "",
    max_items: Annotated[int | None, Query(ge=0, le=1 << 31, description="Of each container.")] = None,
    max_string: Annotated[int | None, Query(ge=0, le=1 << 31, description="Characters of each text.")] = None,
    content: Annotated[bool, Query(description="Arrays and long byte strings with their bytes, as base64.")] = False,
) -> Any:
    """The state, or a part of it, as JSON. Arrays are described, not shown, unless their content is asked for."""
    limits = access.service.limits

    def view(store: CheckpointManager) -> Response:
        state = open_state(store.store, checkpoint_id)
        if state.checkpoint.size_bytes > 4 * limits.json_bytes and not path and max_items is None:
            raise TooLarge(f"a state of {state.checkpoint.size_bytes:,} bytes", hint=f"{_IN_PARTS}, or give max_items=")
        fields = {"fields_of": with_content(state, limits.json_bytes, hint=_IN_PARTS)} if content else {}
        shown = to_json_view(inside(state.outline, path), max_items=max_items, max_string=max_string, **fields)
        return JsonAnswer({"checkpoint": checkpoint_id, "path": path, "state": shown})

    return await access.ask(view)


@router.get("/checkpoints/{checkpoint_id}/download", response_class=Response, responses=_BYTES)
async def download(
    access: Reads,
    checkpoint_id: schemas.CheckpointId,
    path: PathInside = "",
    form: Annotated[
        str,
        Query(
            alias="format",
            pattern="^(raw|npy|json|npz|safetensors)$",
            description="npy: of an array; npz, safetensors: of all arrays there.",
        ),
    ] = "raw",
) -> Response:
    """The bytes of an array, byte string or file of the state; as JSON anything; as an archive all arrays."""
    pieces, size = await access.ask(lambda store: _pieces(store, checkpoint_id, path, form))
    name = "".join(c if c.isalnum() or c in "-._" else "_" for c in (path.rpartition("/")[2] or checkpoint_id))[:100]
    suffix = "" if form == "raw" else f".{form}"
    answer = stream(access, pieces, "application/octet-stream" if form != "json" else "application/json", size)
    plain = name.encode("ascii", "replace").decode().replace("?", "_")  # a header is Latin-1; the star form says more
    answer.headers["content-disposition"] = (
        f"attachment; filename=\"{plain}{suffix}\"; filename*=UTF-8''{quote(name + suffix)}"
    )
    return answer


def _pieces(store: CheckpointManager, checkpoint_id: str, path: str, form: str) -> tuple[Iterator[Any], int | None]:
    state = open_state(store.store, checkpoint_id)
    if form == "json":
        limit = 64 << 20
        view = to_json_view(inside(state.outline, path), fields_of=with_content(state, limit, hint=_IN_PARTS))
        body = JsonAnswer(view).body
        return iter([body]), len(body)
    if form == "npz":
        return npz(state, arrays_in(state, path)), None
    if form == "safetensors":
        return safetensors(state, arrays_in(state, path))
    part, place, rest = split_at_tree(state.outline, path)
    if isinstance(part, FilesSummary):
        files = state.files_at(place)
        if not isinstance(files, Tree):
            return iter(files.stream()), files.size_bytes
        if not rest:
            raise Validation("a tree of files has no bytes of its own", hint="name one of its files")
        return iter(files.stream(rest)), None
    return _plain(state, part, form)


def _plain(state: StoredState, part: object, form: str) -> tuple[Iterator[Any], int]:
    if isinstance(part, bytes) and form == "raw":
        return iter([part]), len(part)
    header = npy_header(part) if form == "npy" and isinstance(part, BufferSummary) else b""
    if not isinstance(part, BufferSummary) or header is None:
        raise Validation(f"a {type(part).__name__} has no {form} form", hint="use format=json")
    return chain([header] if header else [], state.pieces_of(part)), len(header) + part.size_bytes


@router.post("/checkpoints/{checkpoint_id}/restore", response_model=schemas.Restored)
async def restore(
    access: Writes, checkpoint_id: schemas.CheckpointId, wish: Annotated[schemas.Restore | None, Body()] = None
) -> Any:
    """The state as JSON; with `resume`, also handed to the job runner, which is called once."""

    def view(store: CheckpointManager) -> tuple[Checkpoint, Any]:
        state = open_state(store.store, checkpoint_id)
        return state.checkpoint, to_json_view(state.outline)

    checkpoint, shown = await access.ask(view)
    is_resumed = wish is not None and wish.resume
    if is_resumed:
        await resume(access.service, checkpoint.job, await access.ask(lambda store: store.load(checkpoint.id)))
    status = "resumed" if is_resumed else "restored"
    return JsonAnswer({"checkpoint": checkpoint.to_json(), "status": status, "state": shown})


@router.get("/diff", response_model=schemas.Diff, tags=["diff"])
async def diff(access: Reads, old: schemas.CheckpointId, new: schemas.CheckpointId) -> Any:
    """What changed from one checkpoint to another, by path."""
    difference = await access.ask(lambda store: store.diff(old, new))
    return JsonAnswer({"same": difference.is_empty, **difference.to_json()})
