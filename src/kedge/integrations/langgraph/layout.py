"""How a LangGraph checkpoint becomes a parted tree, and what of it is remembered for the next one.

A channel that holds a list is a run of its items; a long value is cut. What was saved last is remembered, encoded and
as a copy nobody else has, so that the next save encodes only the items that are new or were changed in place, and the
next load of the same digest decodes nothing.

Many items that are new at once become blocks: a chunk for each item would cost more than it shares. A block that is
no longer whole, because an item of it was changed or went, is laid item by item from then on. So what stays in a list
is stored at most twice: in a block, and by itself.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import zip_longest
from operator import itemgetter
from typing import Any

from kedge import codec
from kedge.store.rope import PartedTree, Piece, Pieces

from . import types
from .copies import ATOMS, copied, is_copyable, is_same

SMALL_BYTES = 256  # less stays in the manifest
LARGE_BYTES = 8192  # up to here pieces as a row of the index holds them; beyond, fewer rows, and pages fill anyway
LARGE_PIECE_BYTES = 16384
WHOLE_BYTES = 2048  # less is not worth being shared: chunks of it would take as much again
STREAM_BYTES = 1 << 20  # values beyond are for the store's own streams
MANY_BYTES = 32768  # of new items in a row, from which on they are joined into blocks
BLOCK_BYTES = 16384  # a block ends with the next item that says so, or at three times that
_ENDS = 0x07  # one item in eight says so


class NeedsStreams(Exception):
    """The state holds arrays, files or other large values, which are better kept as the store does it."""


class Block:
    """New items in a row, stored as one piece."""

    __slots__ = ("count", "piece")

    def __init__(self, items: Sequence[Item]) -> None:
        self.count = len(items)
        self.piece = Piece(b"".join([item.data for item in items]))
        for place, item in enumerate(items):
            item.block, item.place = self, place

    def is_at(self, items: Sequence[Item], start: int) -> bool:
        """Whether all of the block is there, from `start` on."""
        found = items[start : start + self.count]
        return len(found) == self.count and all(i.block is self and i.place == n for n, i in enumerate(found))


class Item:
    """One item of a list: encoded, and a copy to compare with and to hand out copies of; cut when it is laid alone."""

    __slots__ = ("_alone", "_copy", "_lead", "_piece_bytes", "_segments", "block", "data", "place")

    def __init__(self, value: object, data: bytes, piece_bytes: int) -> None:
        """`data`: the value, encoded."""
        self.data = data
        self.block: Block | None = None
        self.place = 0  # in the block
        self._piece_bytes = piece_bytes
        self._segments: Sequence[bytes | Piece] | None = None
        self._lead: Piece | None = None
        self._alone: tuple[list[Piece], bytes] | None = None
        self._copy = value if type(value) in ATOMS else _NOT_YET if is_copyable(value) else _NO_COPY

    @property
    def copy(self) -> Any:
        if self._copy is _NOT_YET:
            self._copy = decode(self.data)
        return self._copy

    def is_of(self, value: object) -> bool:
        """Whether `value` would be encoded as this item was."""
        copy = self._copy
        if copy is value:  # nobody else has what could be changed
            return True
        if copy is _NOT_YET:
            copy = self.copy
        return copy is not _NO_COPY and is_same(copy, value)

    @property
    def segments(self) -> Sequence[bytes | Piece]:
        if self._segments is None:
            value = decode(self.data) if self._copy is _NO_COPY else self.copy
            self._segments = cut(self.data, value, self._piece_bytes)
        return self._segments

    def lead(self, data: bytes) -> Piece:
        """What stands between the last long text before this item and its own first one."""
        if self._lead is None or self._lead.data != data:
            self._lead = Piece(data)
        return self._lead

    @property
    def alone(self) -> tuple[list[Piece], bytes]:
        """Its pieces, and what is left after them, where nothing is left over from before it."""
        if self._alone is None:
            run: list[Piece] = []
            self._alone = run, _extend(run, b"", self.segments, self)
        return self._alone

    def value(self) -> object:
        """The value, shared with nobody."""
        if self._copy is _NO_COPY:
            return decode(self.data)
        return copied(self.copy if self._copy is _NOT_YET else self._copy)


_NO_COPY = object()
_NOT_YET = object()


class Channel:
    """The value of a channel, laid out: a list by its items, anything else by its bytes."""

    def __init__(
        self,
        items: Sequence[Item] | None,
        data: bytes = b"",
        segments: Sequence[bytes | Piece] = (),
        *,
        earlier: Channel | None = None,
        same: int = 0,
    ) -> None:
        """`earlier`: a list that begins with the same items, `same` of them."""
        self.items = items
        self._data = data
        self._segments = segments
        self._earlier = earlier if earlier is not None and earlier._run is not None else None
        self._same = same
        self._run: Pieces | None = None
        self._pieces: Sequence[Piece] = ()
        self._marks: Sequence[tuple[int, int, bytes]] = ()  # items laid, pieces they took, what is left over then

    def value(self) -> object:
        return decode(self._data) if self.items is None else [item.value() for item in self.items]

    @property
    def size_bytes(self) -> int:
        return len(self._data) if self.items is None else sum([len(item.data) for item in self.items])

    def whole(self) -> bytes:
        """The value as bytes."""
        return self._data if self.items is None else b"".join([_array(len(self.items)), *[i.data for i in self.items]])

    @cached_property
    def parts(self) -> tuple[bytes, Pieces | None, bytes]:
        """The value as bytes, a run where it is long enough for one, and bytes again."""
        pieces: list[Piece] = []
        if self.items is None:
            first, small = b"", _extend(pieces, b"", self._segments)
        else:
            pieces, small = self._lay(self.items)
            first = _array(len(self.items))
        if pieces and len(pieces[0].data) < SMALL_BYTES:  # what stands before the first long text stays in the manifest
            first, pieces = first + pieces[0].data, pieces[1:]
        if pieces:
            self._run = Pieces(pieces, self._earlier._run if self._earlier is not None else None)
        self._earlier = None  # it, and what came before it, may go
        return first, self._run, small

    def _lay(self, items: Sequence[Item]) -> tuple[list[Piece], bytes]:
        """The pieces of a list, each item by itself or a whole block of them, and what is left over at the end."""
        pieces: list[Piece] = []
        marks: list[tuple[int, int, bytes]] = []
        at, small = 0, b""
        if self._earlier is not None:
            known = self._earlier._marks
            marks = [*known[: bisect_right(known, self._same, key=itemgetter(0))]]
            at, count, small = marks[-1] if marks else (0, 0, b"")
            pieces = [*self._earlier._pieces[:count]]
        while at < len(items):
            item = items[at]
            if item.block is not None and item.place == 0 and item.block.is_at(items, at):
                if small:
                    pieces.append(item.lead(small))
                pieces.append(item.block.piece)
                small = b""
                at += item.block.count
            else:
                if small or not pieces:
                    small = _extend(pieces, small, item.segments, item)
                else:
                    more, small = item.alone
                    pieces += more
                at += 1
            marks.append((at, len(pieces), small))
        self._pieces, self._marks = pieces, marks
        return pieces, small


def _extend(run: list[Piece], small: bytes, segments: Sequence[bytes | Piece], item: Item | None = None) -> bytes:
    """Append segments to a run, small ones joined; answers what is left over at the end."""
    for segment in segments:
        if isinstance(segment, bytes):
            small += segment
            if len(small) < SMALL_BYTES:
                continue
            segment, small = Piece(small), b""
        elif small:
            run.append(Piece(small) if item is None else item.lead(small))
            small = b""
        run.append(segment)
    return small


def lay_channel(value: Any, piece_bytes: int, earlier: Channel | None = None, *, joins: bool) -> Channel:
    """Lay a value out, with what it has in common with an earlier one at the same place.

    With `joins`, many new items in a row become blocks. What may be stored already must not: a block is found again
    only by whoever knows it.
    """
    if type(value) is not list:
        data = encode(value)
        is_new = joins and earlier is None and type(value) is dict and len(data) >= MANY_BYTES
        return Channel(None, data, (_cut_lists if is_new else cut)(data, value, piece_bytes))
    known = earlier.items if earlier is not None and earlier.items is not None else ()
    same = [old if old.is_of(new) else None for old, new in zip(known, value, strict=False)]
    # What was moved, as all is when the first items are dropped, is found by its bytes.
    moved = {old.data: old for old, found in zip_longest(known, same) if found is None}
    items: list[Item] = []
    new: list[list[Item]] = [[]]  # in a row each
    for one, item in zip_longest(value, same):
        if item is None:
            data = encode(one)
            item = moved.get(data)
            if item is None:
                items.append(Item(one, data, piece_bytes))
                new[-1].append(items[-1])
                continue
        items.append(item)
        if new[-1]:
            new.append([])
    for some in new if joins else ():
        _join(some)
    return Channel(items, earlier=earlier, same=same.index(None) if None in same else len(same))


def _join(items: Sequence[Item]) -> None:
    """Make blocks of new items in a row, if there are many."""
    if sum([len(item.data) for item in items]) < MANY_BYTES:
        return
    for some in _blocks(items):
        if len(some) > 1:
            Block(some)


def _blocks(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Where an item says so a block ends, whatever stands before it: the same items elsewhere make the same blocks."""
    block: list[Item] = []
    size = 0
    for item in items:
        is_large = len(item.data) > LARGE_BYTES  # its own pieces will do
        if is_large or size + len(item.data) > 3 * BLOCK_BYTES:
            yield block
            block, size = [], 0
        if is_large:
            continue
        block.append(item)
        size += len(item.data)
        if size >= BLOCK_BYTES and not zlib.crc32(item.data[-64:]) & _ENDS:
            yield block
            block, size = [], 0
    yield block


def lay_tree(
    head: bytes, channels: Mapping[str, Channel], names: tuple[str, str], *, whole_bytes: int = 0
) -> PartedTree | codec.Encoded:
    """{names[0]: head, names[1]: {channel: value}} as a tree in parts; in one piece up to `whole_bytes` of values."""
    parts: list[bytes | Pieces] = []
    plain = _map(2) + _name(names[0]) + head + _name(names[1]) + _map(len(channels))
    if whole_bytes and sum([channel.size_bytes for channel in channels.values()]) <= whole_bytes:
        return codec.Encoded(plain + b"".join([_name(name) + one.whole() for name, one in channels.items()]), [])
    for name, channel in channels.items():
        first, run, rest = channel.parts
        plain += _name(name) + first
        if run is not None:
            parts += [plain, run]
            plain = b""
        plain += rest
    return PartedTree([*parts, plain] if plain else parts)


def cut(data: bytes, value: object, piece_bytes: int) -> list[bytes | Piece]:
    """The encoding of a value in segments: long texts become pieces, so that whoever has the same text shares them."""
    if len(data) < SMALL_BYTES:
        return [data]
    segments: list[bytes | Piece] = []
    start = 0
    for text in _texts(value):
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        begin = data.find(raw, start)
        if begin >= 0:
            segments += [data[start:begin], *_pieces(raw, piece_bytes)]
            start = begin + len(raw)
    rest = data[start:]
    return [*segments, *(_pieces(rest, piece_bytes) if len(rest) >= SMALL_BYTES else [rest])]


def _cut_lists(data: bytes, value: dict[Any, Any], piece_bytes: int) -> list[bytes | Piece]:
    """As `cut`, with lists in the same blocks as in the channels they are for: the input of a graph is such a value."""
    segments: list[bytes | Piece] = []
    start = 0
    for one in value.values():
        items = lay_channel(one, piece_bytes, joins=True).items if type(one) is list else None
        for block in [item.block for item in items or () if item.block is not None and item.place == 0]:
            begin = data.find(block.piece.data, start)
            if begin >= 0:
                segments += [*cut(data[start:begin], value, piece_bytes), block.piece]
                start = begin + len(block.piece.data)
    return [*segments, *cut(data[start:], value, piece_bytes)]


def _pieces(data: bytes, piece_bytes: int) -> list[Piece]:
    size = piece_bytes if len(data) <= LARGE_BYTES else LARGE_PIECE_BYTES
    return [Piece(data[start : start + size]) for start in range(0, len(data), size)]


def _texts(value: Any) -> Iterator[str | bytes]:
    """Long texts of a value, in the order of its encoding."""
    kind = type(value)
    if kind is str or kind is bytes:
        if len(value) >= SMALL_BYTES:
            yield value
    elif kind is dict:
        for item in value.values():
            yield from _texts(item)
    elif kind is list or kind is tuple:
        for item in value:
            yield from _texts(item)
    elif kind in types.message_classes:
        yield from _texts(value.content)


def encode(value: object) -> bytes:
    """`value` as it stands in a tree, at most three levels deep there: one byte for each goes again."""
    encoded = codec.encode([[[value]]], out_of_band_bytes=STREAM_BYTES)
    if encoded.buffers or len(encoded.tree) > STREAM_BYTES:
        raise NeedsStreams
    return encoded.tree[3:]


_name = lru_cache(maxsize=1024)(encode)  # of a channel: the same few each time


def decode(data: bytes) -> Any:
    return codec.decode(data, _no_buffer)


def _no_buffer(number: int) -> bytes:
    raise NeedsStreams


def _map(size: int) -> bytes:
    return bytes([0x80 | size]) if size < 16 else struct.pack(">BI", 0xDF, size)


def _array(size: int) -> bytes:
    return bytes([0x90 | size]) if size < 16 else struct.pack(">BI", 0xDD, size)
