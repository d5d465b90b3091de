"""What is in a checkpoint: as JSON, as it was encoded, or a part of it as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Body, Query
from starlette.responses import Response, StreamingResponse

from kedge.codec import BufferSummary
from kedge.codec.json_view import to_json_view
from kedge.codec.wire import MEDIA_TYPE, size_of_frame, write_frame
from kedge.diff.npy import npy_header
from kedge.diff.outline import StoredState, inside, open_state, split_at_tree, with_content
from kedge.errors import NotFound, TooLarge, Validation
from kedge.files import FilesSummary, Tree
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.server import schemas
from kedge.server.auth import Access, Reads, Writes
from kedge.server.gate import GatedRoute
from kedge.server.responses import JsonAnswer
from kedge.server.runner import resume
from kedge.store import Stored

from . import API, PROBLEMS

router = APIRouter(prefix=API, tags=["states"], responses=PROBLEMS, route_class=GatedRoute)

PathInside = Annotated[str, Query(max_length=4096, description="A part of the state, '/'-joined.", examples=["a/b"])]
_IN_PARTS = "ask for a part with path=, or download it"
_PIECE_BYTES = 1 << 20
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_BYTES: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": _BINARY}}}
_FRAME: dict[int | str, dict[str, Any]] = {200: {"content": {MEDIA_TYPE: _BINARY}}}


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


@router.get("/checkpoints/{checkpoint_id}/raw", response_class=Response, responses=_FRAME)
async def get_raw(
    access: Reads,
    checkpoint_id: schemas.CheckpointId,
    buffers: Annotated[str, Query(max_length=4096, pattern=r"^(all|none|[0-9]+(,[0-9]+)*)$")] = "all",
) -> Response:
    """The state as it was encoded, with all of its buffers, none, or some: what kedge.client loads."""
    head = await access.ask(lambda store: _open(store, checkpoint_id, buffers))
    tree, sizes, read = head
    size = size_of_frame(len(tree), sizes)
    return _stream(access, write_frame(tree, sizes, read), MEDIA_TYPE, size)


def _open(store: CheckpointManager, checkpoint_id: str, buffers: str) -> tuple[bytes, dict[int, int], Any]:
    stored = store.store.read(checkpoint_id)
    tree = store.store.tree(stored)
    sizes = _chosen(store.store.buffer_sizes(stored), buffers)
    store.counters["loads"] += 1
    store.counters["loaded_bytes"] += sum(sizes.values())
    return tree, sizes, lambda number: _buffer(store, stored, number)


def _chosen(every: Sequence[int | None], buffers: str) -> dict[int, int]:
    numbers = range(len(every))
    wanted = (
        list(numbers) if buffers == "all" else [] if buffers == "none" else [int(n[:18]) for n in buffers.split(",")]
    )
    sizes: dict[int, int] = {}
    for number in wanted:
        if number not in numbers:
            raise NotFound(f"the state has no buffer {number}", hint=f"it has {len(every)}")
        size = every[number]
        if size is None:
            raise Validation("files do not travel in states", hint="download them by their path")
        sizes[number] = size
    return sizes


def _buffer(store: CheckpointManager, stored: Stored, number: int) -> Iterator[memoryview]:
    data = store.store.buffers(stored, [number])[number]
    assert isinstance(data, memoryview)  # lazy ones were refused
    yield data


@router.get("/checkpoints/{checkpoint_id}/download", response_class=Response, responses=_BYTES)
async def download(
    access: Reads,
    checkpoint_id: schemas.CheckpointId,
    path: PathInside = "",
    form: Annotated[str, Query(alias="format", pattern="^(raw|npy|json)$", description="npy: of arrays.")] = "raw",
) -> Response:
    """The bytes of an array, byte string or file of the state; as JSON anything."""
    pieces, size = await access.ask(lambda store: _pieces(store, checkpoint_id, path, form))
    name = "".join(c if c.isalnum() or c in "-._" else "_" for c in (path.rpartition("/")[2] or checkpoint_id))[:100]
    suffix = {"npy": ".npy", "json": ".json"}.get(form, "")
    answer = _stream(access, pieces, "application/octet-stream" if form != "json" else "application/json", size)
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
    data = memoryview(state.bytes_of(part)).cast("B")
    cut = (data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))
    return (piece for pieces in ([header], cut) for piece in pieces), len(header) + len(data)


def _stream(access: Access, pieces: Iterator[Any], media_type: str, size: int | None) -> StreamingResponse:
    async def body() -> Any:
        while (piece := await access.service.in_thread(lambda: next(pieces, None))) is not None:
            yield bytes(piece)

    headers = {} if size is None else {"content-length": str(size)}
    return StreamingResponse(body(), media_type=media_type, headers=headers)


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
    found = await access.ask(lambda store: store.diff(old, new))
    return JsonAnswer({"same": found.is_empty, **found.to_json()})
