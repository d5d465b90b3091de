"""States with more levels than msgpack and the Python stack can take, cut into parts of bounded depth.

    Ext 43, the whole tree   [[first buffer, [size of each buffer…], part], …]     the first part is the state's top
    Ext 44, in a part        the number of the part that belongs here, always a later one

Parts are packed and unpacked one by one, never inside each other, so nothing recurses with the depth of the state.
Shallow states are not affected.
"""

from __future__ import annotations

import hashlib
from typing import Any

import ormsgpack

from kedge.chunks import DeviceMemory
from kedge.errors import Corrupted, UnsupportedType

from .decoder import Unpacker, read
from .encoder import Packer
from .kinds import (
    LEAF_DEPTH,
    MAX_DEPTH,
    PART_DEPTH,
    BufferSummary,
    DecodeContext,
    EncodeContext,
    Leaf,
    Problem,
    Source,
    Structure,
    Tag,
    TooDeep,
    TypeSummary,
    add,
    kind_of,
    leaf_outlines,
    unsupported,
)
from .shared_memory import Shares

_LEVELS = PART_DEPTH // 2  # of a part: the search for cycles needs frames of its own
_MAX_PARTS_ABOVE = MAX_DEPTH // _LEVELS
NAME = f"value more than {_LEVELS} levels down"


class DeepPacker(Packer):
    """Packs whatever is too deep for one part as further parts, and finds cycles."""

    levels = _LEVELS
    __slots__ = ("_above", "_path", "_pending")

    def __init__(self, out_of_band_bytes: int, is_by_name: bool, shares: Shares) -> None:
        super().__init__(out_of_band_bytes, True, is_by_name, shares)
        self._path: set[int] = set()  # IDs of all containers around the current value, including those in parts above
        self._above = 0  # parts above this one
        self._pending: list[tuple[Any, frozenset[int], int]] = []  # (value, path, parts above), by part number

    def pack_state(self, state: object) -> bytes:
        parts: list[object] = []
        self._pending.append((state, frozenset(), 0))
        for value, path, above in self._pending:  # grows during the loop
            self._path, self._above = set(path), above
            first = len(self.buffers)
            try:
                part = self._write(self.lower(value, 0))
            except Problem as problem:
                if self._above:
                    problem.under("…")  # the path is the one inside the part
                raise
            parts.append([first, [_size_of(source) for source in self.buffers[first:]], part])
        return self._write(ormsgpack.Ext(Tag.DEEP, self._write(parts)))

    def lower(self, value: Any, depth: int) -> object:
        if type(value) in self._native or type(value) in (int, str, bytes):
            return super().lower(value, depth)
        identity = id(value)
        if identity in self._path:
            raise unsupported("contains itself", "remove the cycle before saving")
        self._path.add(identity)
        try:
            if depth >= self._limit and (_is_container(value) or depth >= _LEVELS + LEAF_DEPTH):
                return self._defer(value, identity)
            return super().lower(value, depth)
        finally:
            self._path.discard(identity)

    def _defer(self, value: object, identity: int) -> ormsgpack.Ext:
        if self._above + 1 >= _MAX_PARTS_ABOVE:
            raise TooDeep(UnsupportedType)
        self._pending.append((value, frozenset(self._path - {identity}), self._above + 1))
        return ormsgpack.Ext(Tag.PART, self._write(len(self._pending) - 1))


def _is_container(value: object) -> bool:
    return type(value) in (dict, list) or type(kind_of(value)) is Structure


def _size_of(source: Source) -> int:
    """Return the size of a buffer that is read into memory; -1 for others."""
    if isinstance(source, memoryview):
        return source.nbytes
    return source.size_bytes if isinstance(source, DeviceMemory) else -1


class _Part:
    """An unpacked part that the one above it has not taken yet."""

    def __init__(self, value: object, digest: bytes, buffers: list[BufferSummary], height: int) -> None:
        self.value = value
        self.digest = digest
        self.buffers = buffers
        self.height = height

    @property
    def summary(self) -> TypeSummary:
        """A summary that is equal for equal content, like that of an array."""
        return TypeSummary(NAME, 1, {"sha256": self.digest.hex(), "buffers": self.buffers})


class Parts:
    """The parts of a tree that nothing has taken yet. Each is taken once: a hostile tree cannot multiply one."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Part] = {}
        self._taken: list[_Part] = []

    def take(self, payload: bytes) -> _Part:
        number = read(payload)
        part = self._waiting.pop(number, None) if type(number) is int else None
        if part is None:
            raise Problem(f"it names part {number!r}, which is not there, or not any more")
        self._taken.append(part)
        return part

    def add(self, number: int, entry: list[Any], value: object) -> None:
        first, sizes, packed = entry
        below, self._taken = self._taken, []
        height = 1 + max((part.height for part in below), default=0)
        if height >= _MAX_PARTS_ABOVE:
            raise TooDeep(Corrupted)
        digest = hashlib.sha256(packed + b"".join(part.digest for part in below)).digest()
        buffers = [
            BufferSummary("bytes", "uint8", (size,), size, (first + n,)) for n, size in enumerate(sizes) if size >= 0
        ]
        for part in below:
            buffers += part.buffers
        self._waiting[number] = _Part(value, digest, buffers, height)


def open_deep(payload: bytes, unpacker: Unpacker) -> Any:
    """Return the first part, raw, after unpacking those below it from the last to the first."""
    entries = read(payload)
    if type(entries) is not list or not entries or not all(map(_is_entry, entries)):
        raise Problem("the parts of the state are not a list of parts")
    parts = unpacker.parts = Parts()
    for number in range(len(entries) - 1, 0, -1):
        try:
            parts.add(number, entries[number], unpacker.lift(read(entries[number][2]), 0))
        except Problem as problem:
            problem.under("…")
            raise
    return read(entries[0][2])


def _is_entry(entry: object) -> bool:
    return (
        type(entry) is list
        and [type(field) for field in entry] == [int, list, bytes]
        and all(type(size) is int for size in entry[1])
    )


def _parts(ctx: DecodeContext) -> Parts:
    parts = getattr(ctx, "parts", None)
    if not isinstance(parts, Parts):
        raise Problem("a part of a state outside of one")
    return parts


def _outline(payload: bytes, ctx: DecodeContext) -> object:
    part = _parts(ctx).take(payload)
    # A leaf parses its own payload, and needs the value for that.
    return part.value if getattr(ctx, "is_in_leaf", False) else part.summary


def _inside(payload: bytes, ctx: DecodeContext) -> object:
    raise Problem("the parts of a state inside of one")


def _encode(value: object, ctx: EncodeContext) -> bytes:
    raise AssertionError("no value is of this kind")


add(Leaf(Tag.DEEP, NAME, _encode, _inside))
add(Leaf(Tag.PART, NAME, _encode, lambda payload, ctx: _parts(ctx).take(payload).value))
leaf_outlines[Tag.DEEP] = _inside
leaf_outlines[Tag.PART] = _outline
