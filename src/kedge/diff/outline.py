"""A stored state for browsing: its outline, the value at a path, and the bytes of its arrays.

Nothing here needs the libraries or registered types of the application that saved the state. No array is read before
its bytes are requested.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from glob import escape
from typing import TYPE_CHECKING, Any

from kedge import diff
from kedge.codec import BufferSummary, TypeSummary
from kedge.codec.decoder import Unpacker, load
from kedge.codec.json_view import BufferFields
from kedge.codec.kinds import Tag, key_name
from kedge.errors import NotFound, Validation
from kedge.files import File, FilesSummary, Tree
from kedge.store.local import LocalStore

if TYPE_CHECKING:
    from kedge.model import Checkpoint
    from kedge.store import Store, Stored


SEQUENCES = (list, tuple, set, frozenset, deque)


@dataclass(frozen=True, slots=True)
class ArraySummary(BufferSummary):
    """An array with its stored dtype: .npy files describe where in a record each field is."""

    stored_dtype: object = None


class _Outliner(Unpacker):
    """The codec's outline, with the stored dtypes of arrays."""

    def _lift_leaf(self, raw: tuple[int, bytes], depth: int) -> Any:
        leaf = super()._lift_leaf(raw, depth)
        if raw[0] != Tag.NDARRAY:
            return leaf
        values = {field.name: getattr(leaf, field.name) for field in fields(BufferSummary)}
        return ArraySummary(**values, stored_dtype=self.unpack(raw[1])[0])


@dataclass(frozen=True, slots=True)
class StoredState:
    """One opened checkpoint: verified tree, arrays still in the store."""

    checkpoint: Checkpoint
    outline: object
    tree_bytes: int  # of the encoded tree
    _store: Store
    _stored: Stored

    def bytes_of(self, summary: BufferSummary) -> bytes | memoryview:
        """Return the bytes of an array or byte string, verified (I2)."""
        if not summary.ordinals:
            return summary.data
        buffers = self._store.buffers(self._stored, summary.ordinals)
        views = [view for n in summary.ordinals if isinstance(view := buffers[n], memoryview)]
        return views[0] if len(views) == 1 else b"".join(views)

    def pieces_of(self, summary: BufferSummary) -> Iterator[bytes | memoryview]:
        """The same, yielded chunk by chunk."""
        if not summary.ordinals:
            yield summary.data
        for ordinal in summary.ordinals:
            yield from self._store.pieces(self._stored, ordinal)

    def beginning_of(self, summary: BufferSummary, limit_bytes: int) -> bytes | memoryview:
        """Return at most the first `limit_bytes` of an array or byte string, without reading the rest."""
        is_small = not summary.ordinals or summary.size_bytes <= limit_bytes
        if is_small or not isinstance(self._store, LocalStore):
            return self.bytes_of(summary)[:limit_bytes]
        return diff.states.StoredState(self._store, *self._stored).contents(summary)[-1].read(0, limit_bytes)

    def load(self, path: str) -> object:
        """Return the state with only the value at a path; this needs the libraries of its types."""
        return self._store.load(self._stored, only=[escape(path)] if path else None)

    def files_at(self, path: str) -> Tree | File:
        """Return the tree or file at a path, its content still in the store."""
        value = inside(self.load(path), path)
        assert isinstance(value, Tree | File)  # the outline said so  # nosec B101
        return value


def open_state(store: Store, checkpoint_id: str) -> StoredState:
    """Return the state of a checkpoint without its arrays. Raises Corrupted if it is not what was saved."""
    stored = store.catalogue.read(checkpoint_id)
    tree = store.tree(stored)
    outline = load(tree, None, make=_Outliner)
    return StoredState(stored[0], outline, len(tree), store, stored)


def children(value: object) -> Iterator[tuple[str, object]]:
    """Yield (name, child) of a container; nothing for anything else."""
    if isinstance(value, Mapping):
        yield from ((key_name(key), child) for key, child in value.items())
    elif isinstance(value, TypeSummary):
        yield from value.fields.items()
    elif isinstance(value, SEQUENCES):
        yield from ((str(n), child) for n, child in enumerate(value))


def inside(value: object, path: str) -> object:
    """Return the value at a '/'-joined path. Keys may contain '/': names are compared as they are."""
    child, rest = _walk(value, path)
    if rest:
        raise NotFound(f"there is nothing at {path}", hint=f"{path[: -len(rest)].strip('/')} is a tree of files")
    return child


def split_at_tree(value: object, path: str) -> tuple[object, str, str]:
    """Return the value at a path as far as the state goes, that part of the path, and the rest in a tree of files."""
    child, rest = _walk(value, path)
    whole = path.strip("/")
    return child, whole[: len(whole) - len(rest)].rstrip("/"), rest


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
    name = rest.partition("/")[0]
    where = f"at {walked}" if walked else "at the top of the state"
    if not names:
        return NotFound(f"there is nothing at {path}", hint=f"{walked or 'the state'} is a single value")
    near = get_close_matches(name, names, n=3) or names[:5]
    return NotFound(f"there is no {name!r} {where}", hint=f"there is: {', '.join(near)}")


def files_in(value: object, path: str = "") -> Iterator[tuple[str, FilesSummary]]:
    """Yield (path, summary) of every tree and file in an outline."""
    if isinstance(value, FilesSummary):
        yield path, value
    for name, child in children(value):
        yield from files_in(child, f"{path}/{name}" if path else name)


def with_content(state: StoredState, limit_bytes: int, *, hint: str) -> BufferFields:
    """Return fields for arrays and byte strings: their content as base64, up to a total limit."""
    room = limit_bytes

    def content_of(summary: BufferSummary) -> Mapping[str, object]:
        nonlocal room
        room -= summary.size_bytes
        if isinstance(summary, FilesSummary) or room < 0:
            obstacle = "files" if isinstance(summary, FilesSummary) else f"more than {limit_bytes >> 20} MiB of arrays"
            raise Validation(f"this state holds {obstacle}, which do not go into JSON", hint=hint)
        data = base64.b64encode(state.bytes_of(summary)).decode()
        return {"base64": data}

    return content_of
