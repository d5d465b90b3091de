"""A checkpoint: its facts, its state level by level, and what can be done with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Form, Query, Request
from starlette.responses import Response

from kedge.diff.outline import children, inside
from kedge.errors import Corrupted, NotFound, TooLarge, UnsupportedFormat, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.server.runner import resume

from . import states, tables
from .conversation import conversation_in
from .kinds import Kind, named_kind
from .memory import memory_of
from .templates import Number, PageRoute, Reader, Writer, answer, pretty, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_LOOKED_AT = 200  # checkpoints behind this one, for those that follow it
_CHILDREN = 10
_FACTS, _FACT_CHARACTERS = 12, 80  # of metadata that is shown unfolded
_EDITABLE_BYTES = 64 << 20  # the whole state is held in memory while a value of it is replaced

Text = Annotated[str, Query(max_length=4096)]


@router.get("/checkpoints/{checkpoint_id}")
async def checkpoint(
    request: Request, access: Reader, checkpoint_id: str, messages: Annotated[Number | None, Query()] = None
) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        record = store.get(checkpoint_id)
        level, problem, conversation = None, "", None
        try:
            state = memory_of(request).outlines.open(store, record.id)
            level, conversation = states.level_at(state, ""), conversation_in(record, state.outline, messages)
        except Corrupted as error:
            problem = str(error)
        level_beside = record.level if named_kind(record.job) is Kind.THREAD else None  # not what its tasks wrote
        before = store.list(record.job, limit=1, before=record.seq, level=level_beside)
        behind = store.list(record.job, limit=_LOOKED_AT, after=record.seq, level=level_beside)
        return {
            "c": record,
            "level": level,
            "conversation": conversation,
            "problem": problem,
            "previous": before[0] if before else None,
            "next": behind[0] if behind else None,
            "parent": _parent(store, record),
            "children": [child for child in behind if child.parent == record.id][:_CHILDREN],
            "metadata": _in_lines(record.metadata),
            "metadata_json": pretty(dict(record.metadata)),
        }

    return await answer(request, access, "checkpoint.html", facts)


def _parent(store: CheckpointManager, record: Checkpoint) -> Checkpoint | None:
    try:
        return store.get(record.parent) if record.parent else None
    except NotFound:  # deleted: its children keep its ID
        return None


def _in_lines(metadata: Mapping[str, object]) -> list[tuple[str, str]] | None:
    """Metadata that is short enough to be read at a glance; None for any other."""
    if len(metadata) > _FACTS:
        return None
    texts = [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in metadata.items()
    ]
    return texts if all(len(text) <= _FACT_CHARACTERS for _, text in texts) else None


@router.get("/checkpoints/{checkpoint_id}/level")
async def level(
    request: Request, access: Reader, checkpoint_id: str, path: Text = "", start: Annotated[int, Query(ge=0)] = 0
) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        state = memory_of(request).outlines.open(store, checkpoint_id)
        return {"c": state.checkpoint, "level": states.level_at(state, path, start)}

    return await answer(request, access, "level.html", facts)


@router.get("/checkpoints/{checkpoint_id}/array")
async def array(request: Request, access: Reader, checkpoint_id: str, path: Text) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        state = memory_of(request).outlines.open(store, checkpoint_id)
        return {"c": state.checkpoint, "facts": states.array_at(state, path)}

    return await answer(request, access, "array.html", facts)


@router.get("/checkpoints/{checkpoint_id}/table")
async def table(request: Request, access: Reader, checkpoint_id: str, path: Text) -> Response:
    def facts(store: CheckpointManager) -> dict[str, object]:
        state = memory_of(request).outlines.open(store, checkpoint_id)
        has_tree = any(True for _ in children(inside(state.outline, path)))
        shown: dict[str, object] = {"c": state.checkpoint, "path": path, "has_tree": has_tree}
        try:
            return {**shown, "table": tables.table_at(state, path), "problem": ""}
        except (Validation, UnsupportedFormat) as error:
            return {**shown, "table": None, "problem": str(error)}

    return await answer(request, access, "table.html", facts)


@router.get("/checkpoints/{checkpoint_id}/text")
async def text(request: Request, access: Reader, checkpoint_id: str, path: Text) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        shown, length = states.text_at(memory_of(request).outlines.open(store, checkpoint_id), path)
        return {"text": shown, "length": length}

    return await answer(request, access, "text.html", facts)


@router.get("/checkpoints/{checkpoint_id}/thumbnail.png")
async def thumbnail(request: Request, access: Reader, checkpoint_id: str, path: Text) -> Response:
    def draw(store: CheckpointManager) -> bytes:
        return states.thumbnail_at(memory_of(request).outlines.open(store, checkpoint_id), path)

    return Response(await access.ask(draw), media_type="image/png")


@router.post("/checkpoints/{checkpoint_id}/pin")
async def pin(
    request: Request, access: Writer, checkpoint_id: str, pinned: Annotated[str, Form(pattern="^(yes|no)$")]
) -> Response:
    await access.ask(lambda store: store.pin(checkpoint_id, pinned == "yes"))
    return see(request, _address(checkpoint_id), "Pinned." if pinned == "yes" else "Unpinned.")


@router.post("/checkpoints/{checkpoint_id}/tag")
async def tag(
    request: Request,
    access: Writer,
    checkpoint_id: str,
    name: Annotated[str, Form(max_length=200)],
    value: Annotated[str, Form(max_length=2000)] = "",
    remove: Annotated[str, Form(max_length=3)] = "",
) -> Response:
    await access.ask(lambda store: store.tag(checkpoint_id, **{name: None if remove else value}))
    return see(request, _address(checkpoint_id), f"Tag {name} {'removed' if remove else 'set'}.")


@router.post("/checkpoints/{checkpoint_id}/delete")
async def delete(request: Request, access: Writer, checkpoint_id: str) -> Response:
    def remove(store: CheckpointManager) -> Checkpoint:
        record = store.get(checkpoint_id)
        store.delete(record.job, record.id)
        return record

    gone = await access.ask(remove)
    return see(request, f"/jobs/{quote(gone.job, safe='')}", f"{gone.id} is deleted.")


@router.post("/checkpoints/{checkpoint_id}/branch")
async def branch(
    request: Request,
    access: Writer,
    checkpoint_id: str,
    job: Annotated[str, Form(max_length=200)],
    path: Annotated[str, Form(max_length=4096)] = "",
    value: Annotated[str, Form(max_length=500_000)] = "",
) -> Response:
    """Make a state the newest of a job: as it is, or with the value at `path` replaced by `value`, which is JSON."""

    def make(store: CheckpointManager) -> Checkpoint:
        if path or value:
            return _edit(store, checkpoint_id, job, path, value)
        return store.resume_from(checkpoint_id, job)[0]

    made = await access.ask(make)
    return see(request, _address(made.id), f"This is the newest checkpoint of {made.job} now.")


def _edit(store: CheckpointManager, checkpoint_id: str, job: str, path: str, text: str) -> Checkpoint:
    if not path:
        raise Validation("the new value has no path", hint="say where it belongs, such as optimizer/lr")
    source = store.get(checkpoint_id)
    if source.size_bytes > _EDITABLE_BYTES:
        most = f"up to {_EDITABLE_BYTES >> 20} MiB"
        raise TooLarge(f"{source.id} has {source.size_bytes:,} bytes", hint=f"states are edited here {most}; load it")
    state = states.replaced(store.load(source.id), path, states.parse_value(text))
    metadata = {**source.metadata, "edited": path[:200]}
    made = store.save(job, source.step, state, level=source.level, parent=source.id, metadata=metadata)
    return store.get(made)


@router.post("/checkpoints/{checkpoint_id}/resume")
async def restore_and_resume(request: Request, access: Writer, checkpoint_id: str) -> Response:
    record = await access.ask(lambda store: store.get(checkpoint_id))
    state = await access.ask(lambda store: store.load(record.id))
    await resume(access.service, record.job, state)
    return see(request, _address(record.id), f"{record.job} was resumed from here.")


def _address(checkpoint_id: str) -> str:
    return f"/checkpoints/{quote(checkpoint_id, safe='')}"
