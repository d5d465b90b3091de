"""A stored state as the command line sees it: its outline, what is at a path in it, and the bytes of its arrays.

Nothing here needs the libraries or the registered types of the application that saved the state, and no array is
read before somebody asks for its bytes.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from glob import escape
from typing import TYPE_CHECKING, Any

from holdfast.codec import BufferSummary, TypeSummary
from holdfast.codec.kinds import Tag
from holdfast.codec.summaries import array_parts, dtype_text
from holdfast.codec.unpacking import Unpacker, load
from holdfast.errors import NotFound, Validation
from holdfast.files import File, FilesSummary, Tree
from holdfast.jsonview import _View

if TYPE_CHECKING:
    from holdfast.manager import CheckpointManager
    from holdfast.manifest import Manifest
    from holdfast.model import Checkpoint


SEQUENCES = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True, slots=True)
class ArraySummary(BufferSummary):
    """An array with what its bytes mean exactly: the stored dtype, and whether rows or columns lie together."""

    stored_dtype: Any = None
    is_fortran: bool = False


class _Outliner(Unpacker):
    """The codec's outline, but arrays keep their order and exact dtype."""

    def __init__(self) -> None:
        super().__init__(None)

    def _lift_leaf(self, raw: tuple[int, bytes], depth: int) -> Any:
        if raw[0] == Tag.NDARRAY:
            return self.call(raw[0], _summarise_array, raw[1], depth)
        return super()._lift_leaf(raw, depth)


def _summarise_array(payload: bytes, unpacker: Unpacker) -> ArraySummary:
    dtype, shape, order, reference, size_bytes = array_parts(unpacker.unpack(payload))
    is_inline = isinstance(reference, bytes)
    return ArraySummary(
        "ndarray",
        dtype_text(dtype),
        shape,
        size_bytes,
        ordinals=() if is_inline else (reference,),
        data=reference if is_inline else b"",
        stored_dtype=dtype,
        is_fortran=order == "F",
    )


@dataclass(frozen=True, slots=True)
class StoredState:
    """One checkpoint, opened: verified tree, arrays still in the store."""

    checkpoint: Checkpoint
    outline: object
    _manager: CheckpointManager
    _manifest: Manifest

    def bytes_of(self, summary: BufferSummary) -> bytes | memoryview:
        """The bytes of an array or byte string, verified (I2)."""
        if not summary.ordinals:
            return summary.data
        found = self._manager._store.read_buffers(self.checkpoint, self._manifest, summary.ordinals)
        views = [view for n in summary.ordinals if isinstance(view := found[n], memoryview)]
        return views[0] if len(views) == 1 else b"".join(views)

    def files_at(self, path: str) -> Tree | File:
        """The tree or file at a path, its content still in the store."""
        loaded = self._manager.load(self.checkpoint.id, only=escape(path) if path else None)
        found = inside(loaded, path)
        assert isinstance(found, Tree | File)  # the outline said so  # nosec B101
        return found


def open_state(manager: CheckpointManager, checkpoint_id: str) -> StoredState:
    """The state of a checkpoint without its arrays; Corrupted where it is not what was saved."""
    store = manager._store
    checkpoint, packed = store.index.read(checkpoint_id)
    manifest = store.open(checkpoint, packed)
    outline = load(store.tree(checkpoint, manifest), None, lambda raw, _: _Outliner().lift(raw, 0))
    return StoredState(checkpoint, outline, manager, manifest)


def children(value: object) -> Iterator[tuple[str, object]]:
    """(name, child) of a container; nothing for anything else."""
    if isinstance(value, Mapping):
        yield from ((key_name(key), child) for key, child in value.items())
    elif isinstance(value, TypeSummary):
        yield from value.fields.items()
    elif isinstance(value, SEQUENCES):
        yield from ((str(n), child) for n, child in enumerate(value))


def key_name(key: object) -> str:
    return key if isinstance(key, str) else str(key)


def inside(value: object, path: str) -> object:
    """What is at a '/'-joined path. A key that holds a '/' itself is found too: names are tried as they are."""
    found, rest = _walk(value, path)
    if rest:
        raise NotFound(f"there is nothing at {path}", hint=f"{path[: -len(rest)].strip('/')} is a tree of files")
    return found


def split_at_tree(value: object, path: str) -> tuple[object, str, str]:
    """What is at a path as far as the state goes, that part of the path, and the rest of it inside a tree of files."""
    found, rest = _walk(value, path)
    whole = path.strip("/")
    return found, whole[: len(whole) - len(rest)].rstrip("/"), rest


def _walk(value: object, path: str) -> tuple[object, str]:
    rest = path.strip("/")
    walked = ""
    while rest and not (isinstance(value, FilesSummary) and value.kind == "Tree"):
        names: list[str] = []
        for name, child in children(value):
            if rest == name or rest.startswith(name + "/"):
                value, rest, walked = child, rest[len(name) + 1 :], f"{walked}/{name}".lstrip("/")
                break
            names.append(name)
        else:
            raise _nothing_at(path, walked, rest, names)
    return value, rest


def _nothing_at(path: str, walked: str, rest: str, names: list[str]) -> NotFound:
    wanted = rest.partition("/")[0]
    where = f"at {walked}" if walked else "at the top of the state"
    if not names:
        return NotFound(f"there is nothing at {path}", hint=f"{walked or 'the state'} is a single value")
    near = get_close_matches(wanted, names, n=3) or names[:5]
    return NotFound(f"there is no {wanted!r} {where}", hint=f"there is: {', '.join(near)}")


def files_in(value: object, path: str = "") -> Iterator[tuple[str, FilesSummary]]:
    """(path, summary) of every tree and file in an outline."""
    if isinstance(value, FilesSummary):
        yield path, value
    for name, child in children(value):
        yield from files_in(child, f"{path}/{name}" if path else name)


# --- as JSON ---

BufferFields = Callable[[BufferSummary], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class _ViewWithBuffers(_View):
    """The project's JSON view, with more about arrays than their shape."""

    fields_of: BufferFields

    def buffer(self, value: BufferSummary) -> object:
        shown = _View.buffer(self, value)
        if value.kind == "numpy scalar" or not isinstance(shown, dict) or "base64" in shown:
            return shown
        if isinstance(value, FilesSummary):
            shown = {"$type": value.kind, "entries": value.shape[0], "size_bytes": value.size_bytes}
        return {**shown, **self.fields_of(value)}


def _nothing(_: BufferSummary) -> Mapping[str, object]:
    return {}


def to_view(value: object, fields_of: BufferFields = _nothing) -> object:
    """A part of an outline for json.dumps (see holdfast.jsonview); `fields_of` answers what else to say of arrays."""
    return _ViewWithBuffers(None, None, fields_of).show(value)


def with_content(state: StoredState, limit_bytes: int, *, hint: str) -> BufferFields:
    """Arrays and byte strings with their content, as base64, up to a limit for all of them together."""
    room = limit_bytes

    def content_of(summary: BufferSummary) -> Mapping[str, object]:
        nonlocal room
        room -= summary.size_bytes
        if isinstance(summary, FilesSummary) or room < 0:
            what = "files" if isinstance(summary, FilesSummary) else f"more than {limit_bytes >> 20} MiB of arrays"
            raise Validation(
                f"this state holds {what}, which do not go into JSON",
                hint=hint,
            )
        data = base64.b64encode(state.bytes_of(summary)).decode()
        is_fortran = isinstance(summary, ArraySummary) and summary.is_fortran
        return {"order": "F", "base64": data} if is_fortran else {"base64": data}

    return content_of
