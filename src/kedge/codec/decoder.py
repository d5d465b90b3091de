"""Loading: from a tree, and a function that returns its buffers, to the state or its outline.

ormsgpack reads the tree with each Ext left closed, as a tuple (tag, payload). So nothing native nests: a hostile tree
meets explicit limits instead of the end of the stack. The walk over the result opens the Exts one by one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ormsgpack

from kedge.blobs import shelter
from kedge.chunks import DeviceMemory, StoredStream
from kedge.errors import CheckpointError, Corrupted, Validation
from kedge.ports import Buffer

from .encoder import is_native, key_segment
from .kinds import (
    FIRST_FREE_TAG,
    LEAF_DEPTH,
    PART_DEPTH,
    DeviceTargets,
    Fetch,
    Leaf,
    Problem,
    Raw,
    Shape,
    Structure,
    Tag,
    TooDeep,
    by_tag,
    key_name,
    kind_for,
    layouts,
    leaf_outlines,
    structure_outlines,
)

_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_END = b"\xcf" + os.urandom(8)
_END_VALUE = int.from_bytes(_END[1:], "big")


class Foreign(Exception):
    """An error of the disk or the application, passed unchanged through the decoders."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


# Exceptions of a decoder that do not mean a wrong payload. Warnings may be turned into errors.
_NOT_ITS_FAULT = (Problem, Foreign, MemoryError, RecursionError, Warning)


def read(data: Buffer) -> Raw:
    """Read one msgpack value, which must be all of `data`, with every Ext closed."""
    # ormsgpack ignores what follows a value. So read an array of two, whose second item must be our mark.
    try:
        value, end = ormsgpack.unpackb(b"".join((b"\x92", data, _END)), ext_hook=lambda tag, payload: (tag, payload))
    except ValueError as error:
        _raise_interrupt(data, error)
        raise Problem(f"not a msgpack value ({error})") from error
    if end != _END_VALUE:
        raise Problem("bytes follow the end of the value")
    return value


def _raise_interrupt(data: Buffer, error: ValueError) -> None:
    """Raise KeyboardInterrupt if a signal handler interrupted our hook: ormsgpack reports only that the hook failed.

    That is not damage: read again without signals, the data is a value. Ctrl-C is by far the likeliest.
    """
    if not shelter.is_exposed():
        return
    try:
        shelter.run(read, data)
    except Problem:
        return
    raise KeyboardInterrupt("a signal handler raised while a state was decoded") from error


class Unpacker:
    """One decoding in progress (a DecodeContext)."""

    def __init__(self, fetch: Fetch | None, device: DeviceTargets | None = None) -> None:
        """Prepare a decoding; without `fetch`, of an outline: summaries replace buffers and registered types."""
        self._fetch = fetch
        self.device = device
        self.shared: dict[int, Any] = {}
        self._depth = 0
        self._limit = PART_DEPTH
        self.parts: object = None  # of a deep state, those that nothing has taken yet

    @property
    def is_in_leaf(self) -> bool:
        return self._limit > PART_DEPTH

    # --- for decoders of leaves ---

    def fetch(self, ordinal: object, size_bytes: int | None = None) -> memoryview:
        buffer = self.ask(ordinal)
        if type(buffer) is memoryview:
            view = buffer
        elif isinstance(buffer, StoredStream | DeviceMemory):
            raise Problem(f"buffer {ordinal} is not in main memory")
        else:
            view = memoryview(buffer)
        if size_bytes is not None and view.nbytes != size_bytes:
            raise Problem(f"buffer {ordinal} has {view.nbytes:,} bytes where {size_bytes:,} belong")
        return view

    def stream(self, ordinal: object) -> StoredStream:
        source = self.ask(ordinal)
        if not isinstance(source, StoredStream):
            raise Problem(f"buffer {ordinal} is not a stream")
        return source

    def ask(self, ordinal: object) -> Buffer | DeviceMemory | StoredStream:
        if type(ordinal) is not int or ordinal < 0 or self._fetch is None:
            raise Problem(f"{ordinal!r} is not the number of a buffer")
        try:
            return self._fetch(ordinal)
        except CheckpointError as error:
            raise Foreign(error) from error
        except (IndexError, KeyError) as error:
            raise Problem(f"it names buffer {ordinal}, which does not exist") from error
        except Exception as error:
            raise Foreign(error) from error

    def bytes_of(self, reference: object, size_bytes: int) -> memoryview:
        if type(reference) is not bytes:
            return self.fetch(reference, size_bytes)
        if len(reference) != size_bytes:
            raise Problem(f"{len(reference):,} bytes where {size_bytes:,} belong")
        return memoryview(bytearray(reference))

    def unpack(self, payload: bytes) -> Any:
        depth, limit = self._depth, self._limit
        self._limit = PART_DEPTH + LEAF_DEPTH
        value = self.lift(read(payload), depth)
        self._depth, self._limit = depth, limit
        return value

    # --- the walk ---

    def lift(self, raw: Raw, depth: int) -> Any:
        """Return the value of `raw`, changing its containers in place."""
        kind = type(raw)
        if kind is dict:
            return self._lift_dict(raw, depth)
        if kind is list:
            return self._lift_list(raw, depth)
        if kind is tuple:
            if raw[0] in layouts:
                return self._lift_structure(raw, depth)
            return self._lift_leaf(raw, depth)
        return raw

    def _lift_dict(self, raw: dict[str, Raw], depth: int) -> dict[str, Any]:
        if depth >= self._limit:
            raise TooDeep(Corrupted, PART_DEPTH)
        key = ""
        try:
            for key, item in raw.items():
                if type(item) not in _SCALARS:
                    raw[key] = self.lift(item, depth + 1)
        except Problem as problem:
            problem.under(key_segment(key))
            raise
        return raw

    def _lift_list(self, raw: list[Raw], depth: int) -> list[Any]:
        if depth >= self._limit:
            raise TooDeep(Corrupted, PART_DEPTH)
        if len(raw) > 16 and _SCALARS.issuperset(map(type, raw)):
            return raw
        index = 0
        try:
            for index, item in enumerate(raw):
                if type(item) not in _SCALARS:
                    raw[index] = self.lift(item, depth + 1)
        except Problem as problem:
            problem.under(f"[{index}]")
            raise
        return raw

    def _lift_structure(self, raw: tuple[int, Any], depth: int) -> object:
        tag = raw[0]
        head, children = self.open(raw, depth)
        if layouts[tag][0] is Shape.ITEMS:
            return self.build(tag, head, self._lift_list(children, depth) if children else children, depth)
        is_attributes = layouts[tag][0] is Shape.FIELDS
        pairs = []
        for key, child in zip(children[::2], children[1::2], strict=True):
            key = self.lift_key(key, depth, is_attributes)
            try:
                pairs.append((key, self.lift(child, depth + 1)))
            except Problem as problem:
                problem.under(f".{key}" if is_attributes else key_segment(key))
                raise
        return self.build(tag, head, pairs, depth)

    def lift_key(self, raw: Raw, depth: int, is_attribute: bool) -> Any:
        if is_attribute and type(raw) is not str:
            raise Problem("a field without a name")
        return self.lift(raw, depth + 1)

    def open(self, raw: tuple[int, Any], depth: int) -> tuple[list[Raw], list[Raw]]:
        """Return the head and the children, or flat pairs, of a structure, all raw."""
        tag, payload = raw
        shape, head = layouts[tag]
        if depth >= self._limit:
            raise TooDeep(Corrupted, PART_DEPTH)
        values = read(payload) if type(payload) is bytes else payload
        if type(values) is not list or len(values) < head:
            raise Problem(f"the content of Ext {tag} is not a list of {head} or more")
        children = values[head:]
        if shape is not Shape.ITEMS and len(children) % 2:
            raise Problem(f"the content of Ext {tag} has a key without a value")
        return values[:head], children

    def build(self, tag: int, raw_head: Sequence[Raw], children: list[Any], depth: int) -> object:
        """Return the value of a structure whose children, or pairs, are lifted."""
        head = [value if type(value) in _SCALARS else self.lift(value, depth + 1) for value in raw_head]
        outline = structure_outlines.get(tag) if self._fetch is None else None
        kind = by_tag.get(tag) or kind_for(tag) if outline is None else None
        try:
            if outline is not None:
                return outline(head, children)
            assert isinstance(kind, Structure)
            return kind.build(head, children)
        except _NOT_ITS_FAULT:
            raise
        except Exception as error:
            raise Problem(f"{{path}} cannot be a {name_of(tag)}: {error}") from error

    def _lift_leaf(self, raw: tuple[int, bytes], depth: int) -> Any:
        tag, payload = raw
        if tag >= FIRST_FREE_TAG:
            kind_for(tag)  # Kedge's own kinds bring their outline
        decode = leaf_outlines.get(tag) if self._fetch is None else None
        if decode is None:
            kind = by_tag.get(tag) or kind_for(tag)
            assert isinstance(kind, Leaf)
            decode = kind.decode
        return self.call(tag, decode, payload, depth)

    def call(self, tag: int, decode: Any, payload: bytes, depth: int, *more: object) -> Any:
        """Run a leaf's function; its errors mean a wrong payload."""
        self._depth = depth + 1
        try:
            return decode(payload, self, *more)
        except Problem as problem:
            problem.steps.clear()  # steps inside the payload mean nothing to the user
            raise
        except _NOT_ITS_FAULT:
            raise
        except Exception as error:
            raise Problem(f"{{path}} cannot be a {name_of(tag)}: {error}") from error

    def children_of(self, raw: Raw, depth: int) -> Iterator[tuple[str, Raw]]:
        """Yield (name, raw child) of a container, for walks that do not build it."""
        if depth >= self._limit:
            raise TooDeep(Corrupted, PART_DEPTH)
        if type(raw) is dict:
            yield from raw.items()
        elif type(raw) is list:
            yield from ((str(index), item) for index, item in enumerate(raw))
        elif type(raw) is tuple and raw[0] in layouts:
            shape = layouts[raw[0]][0]
            _, children = self.open(raw, depth)
            if shape is Shape.ITEMS:
                yield from ((str(index), item) for index, item in enumerate(children))
            else:
                for key, child in zip(children[::2], children[1::2], strict=True):
                    yield key_name(self.lift_key(key, depth, shape is Shape.FIELDS)), child


def name_of(tag: int) -> str:
    kind = by_tag.get(tag)
    return kind.name if kind is not None else f"value of Ext {tag}"


def load(
    tree: Buffer,
    fetch: Fetch | None,
    walk: Callable[[Raw, Unpacker], Any] | None = None,
    device: DeviceTargets | None = None,
    make: Callable[[Fetch | None, DeviceTargets | None], Unpacker] = Unpacker,
) -> Any:
    """Return the value of `tree`, or the result of `walk`. Raises only errors.* and what `fetch` raises.

    `make` creates the Unpacker if another class is needed.
    """
    try:
        raw = read(tree)
        if walk is None and is_native((raw,), _SCALARS, PART_DEPTH):
            return raw
        unpacker = make(fetch, device)
        if type(raw) is tuple and raw[0] == Tag.DEEP:
            from .deep import open_deep

            raw = open_deep(raw[1], unpacker)
        return unpacker.lift(raw, 0) if walk is None else walk(raw, unpacker)
    except Problem as problem:
        raise problem.typed() from problem.__cause__
    except Foreign as foreign:
        raise foreign.error from foreign.error.__cause__
    except RecursionError as error:
        raise Validation(
            "the state is too deep for what is left of the Python stack",
            hint="load it from a function that is called less deeply",
        ) from error
