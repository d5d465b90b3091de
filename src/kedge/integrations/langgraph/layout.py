"""How the channels of a LangGraph checkpoint become a tree in parts, and what of them the next save uses again.

A channel that holds a list is a run of its items; a long value is cut. What was saved last is remembered, encoded and
as a copy nobody else has, so that the next save encodes only the items that are new or were changed in place, and the
next load of the same digest decodes nothing.

Older items are joined into blocks (`blocks`): reading a chunk for each would take longer than all the rest. So an item
is stored by itself while it is one of the last, and once more in a block; when an item of a block changes, the block is
stored again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Any

from kedge.codec import Encoded
from kedge.codec.fragments import (
    NotAFragment,
    decode_fragment,
    dict_head,
    encode_fragment,
    is_plain_dict,
    items_at,
    list_head,
    open_fields,
    text_bytes,
    value_at,
)
from kedge.store.rope import PartedTree, Piece, Pieces

from . import types
from .blocks import LARGE_BYTES, Block, Blocks, ends_block
from .copies import Copy, are_same, copy_of

SMALL_BYTES = 256  # less stays in the manifest
LARGE_PIECE_BYTES = 16384
WHOLE_BYTES = 2048  # less is not worth being shared: chunks of it would take as much again
MANY_BYTES = 32768  # of a new value, from which on its fields are laid out as channels are
_AT_ONCE = 64  # items compared
_ALONE = 4  # no more than these are compared one by one

Segment = bytes | Piece  # of an encoded value: joined, the segments are its bytes
Parts = tuple[bytes, Pieces | None, bytes]  # of a value: bytes, a run where it is long enough for one, and bytes again


class Item:
    """One item of a list: encoded, and a copy to compare with and to hand out copies of."""

    __slots__ = ("_ends", "_is_copyable", "_laid", "_piece_bytes", "copy", "data", "is_unused")

    def __init__(self, data: bytes, piece_bytes: int, copy: Copy | None = None) -> None:
        """`data`: the value, encoded; `copy`: the value, where it is known and copyable."""
        self.data = data
        self._piece_bytes = piece_bytes
        self.is_unused = copy is None  # nobody has asked for its value
        self.copy = copy  # what `own` gives
        self._is_copyable = True
        self._ends: bool | None = None
        self._laid: tuple[bytes, list[Piece], bytes] | None = None

    @property
    def ends_block(self) -> bool:
        """Whether a block ends with this item: longer ones are more likely to, so that blocks are alike in size."""
        if self._ends is None:
            self._ends = ends_block(self.data)
        return self._ends

    def own(self) -> Copy | None:
        """The value, as nobody else has it; None if it is neither compared nor copied, but decoded each time."""
        if self.copy is None and self._is_copyable:
            self.copy = copy_of(decode_fragment(self.data))
            self._is_copyable = self.copy is not None
            self.is_unused = False
        return self.copy

    def is_of(self, value: object) -> bool:
        """Whether `value` would be encoded as this item was."""
        own = self.own()
        return own is not None and own.is_of(value)

    def value(self) -> object:
        """The value, shared with nobody. Of the first one no copy is made: most are asked for once."""
        if self.is_unused:
            self.is_unused = False
            return decode_fragment(self.data)
        own = self.copy or self.own()
        return decode_fragment(self.data) if own is None else own.again()

    def laid_after(self, left: bytes) -> tuple[Sequence[Piece], bytes]:
        """Its pieces, where `left` is left over from the items before it, and what is left over after it."""
        if self._laid is None or self._laid[0] != left:
            own = self.own()
            value = decode_fragment(self.data) if own is None else own.value
            self._laid = left, *join([left, *cut(self.data, value, self._piece_bytes)])
        return self._laid[1], self._laid[2]


class ValueChannel:
    """A value by its bytes."""

    def __init__(self, data: bytes, piece_bytes: int, segments: Sequence[Segment] | None = None) -> None:
        self._data = data
        self._piece_bytes = piece_bytes
        self._segments = segments

    def size_bytes(self, most: int) -> int:
        """Of the encoded value; of one that is longer than `most`, at least how much it is."""
        return len(self._data)

    def value(self) -> object:
        """The value, shared with nobody."""
        return decode_fragment(self._data)

    def encoded(self) -> bytes:
        return self._data

    @cached_property
    def parts(self) -> Parts:
        segments = cut(self._data, self.value(), self._piece_bytes) if self._segments is None else self._segments
        return _parts(b"", *join(segments))


class ListChannel:
    """A list by its items."""

    def __init__(self, items: Sequence[Item], earlier: ListChannel | None = None) -> None:
        """`earlier`: a list like this one."""
        self.items = items
        self.run: Pieces | None = None  # once it is laid
        # One that was never laid has nothing to give, and would keep all before it in memory.
        self._earlier = None if earlier is None or earlier.run is None else earlier

    def size_bytes(self, most: int) -> int:
        size = 0
        for item in self.items:
            size += len(item.data)
            if size > most:
                break
        return size

    def value(self) -> object:
        if all(item.is_unused for item in self.items):  # together, as each would be by itself, for less
            for item in self.items:
                item.is_unused = False
            return decode_fragment(self.encoded())
        return [item.value() for item in self.items]

    def encoded(self) -> bytes:
        return b"".join([list_head(len(self.items)), *[item.data for item in self.items]])

    @cached_property
    def parts(self) -> Parts:
        earlier = self._earlier  # another thread may be here too, and through
        run = None if earlier is None else earlier.run
        first, self.run, rest = _parts(list_head(len(self.items)), *self.pieces(), run)
        self._earlier = None  # it, and what came before it, may go
        return first, self.run, rest

    @cached_property
    def blocks(self) -> Blocks[Item]:
        earlier = self._earlier
        return Blocks(self.items, None if earlier is None else earlier.blocks)

    def pieces(self) -> tuple[list[Piece], bytes]:
        """Each item by itself or a whole block of them, and what is left over at the end."""
        pieces: list[Piece] = []
        left = b""
        for unit in self.blocks.units:
            if isinstance(unit, Block):
                pieces += [Piece(left), unit.piece] if left else [unit.piece]
                left = b""
            else:
                more, left = unit.laid_after(left)
                pieces += more
        return pieces, left


Channel = ValueChannel | ListChannel


def _parts(first: bytes, pieces: Sequence[Piece], rest: bytes, earlier: Pieces | None = None) -> Parts:
    if pieces and len(pieces[0].data) < SMALL_BYTES:  # what stands before the first long text stays in the manifest
        first, pieces = first + pieces[0].data, pieces[1:]
    return first, Pieces(pieces, earlier) if pieces else None, rest


def lay_channel(value: Any, piece_bytes: int, earlier: Channel | None = None) -> Channel:
    """Lay a value out, with what it has in common with an earlier one at the same place."""
    if type(value) is list:
        return lay_list(value, piece_bytes, earlier if isinstance(earlier, ListChannel) else None)
    data = encode_fragment(value)
    if earlier is None and len(data) >= MANY_BYTES and type(value) is dict and is_plain_dict(data):
        return ValueChannel(data, piece_bytes, _cut_fields(value, piece_bytes))
    return ValueChannel(data, piece_bytes, cut(data, value, piece_bytes))


def lay_list(values: Sequence[Any], piece_bytes: int, earlier: ListChannel | None = None) -> ListChannel:
    """As `lay_channel`, for a list."""
    known = () if earlier is None else earlier.items
    items = _unchanged(known, values)
    others = [n for n, item in enumerate(items) if item is None]
    # What was moved, as all is when the first items are dropped, is found by its bytes.
    moved = {old.data: old for old in [*[known[n] for n in others], *known[len(items) :]]}
    for n in [*others, *range(len(items), len(values))]:
        copy = copy_of(values[n], is_shared=True)
        data = encode_fragment(values[n] if copy is None else copy.value)  # which nobody can change meanwhile
        items[n : n + 1] = [moved.get(data) or Item(data, piece_bytes, copy)]
    return ListChannel([*filter(None, items)], earlier)


def _unchanged(known: Sequence[Item], values: Sequence[Any]) -> list[Item | None]:
    """Of each value the item that is at its place already, if it is the same; for as many as there are of both."""
    same: list[Item | None] = []
    count = min(len(known), len(values))
    for start in range(0, count, _AT_ONCE):
        end = min(start + _AT_ONCE, count)
        same += _same_items(known[start:end], values[start:end])
    return same


def _same_items(known: Sequence[Item], values: Sequence[object]) -> Sequence[Item | None]:
    """Each item if it is of the value at its place. Nearly always all are: where one is not, it is found by halves."""
    if len(values) <= _ALONE:
        return [item if item.is_of(value) else None for item, value in zip(known, values, strict=True)]
    copies = [*filter(None, [item.copy or item.own() for item in known])]
    if len(copies) == len(known) and are_same(copies, values):
        return known
    half = len(values) // 2
    return [*_same_items(known[:half], values[:half]), *_same_items(known[half:], values[half:])]


def lay_tree(
    head: bytes, channels: Mapping[str, Channel], names: tuple[str, str], *, whole_bytes: int = 0
) -> PartedTree | Encoded:
    """{names[0]: head, names[1]: {channel: value}} as a tree in parts; in one piece up to `whole_bytes` of values, or
    where no value is long enough for a part."""
    plain = dict_head(2) + _name(names[0]) + head + _name(names[1]) + dict_head(len(channels))
    if whole_bytes and sum([channel.size_bytes(whole_bytes) for channel in channels.values()]) <= whole_bytes:
        return Encoded(plain + b"".join([_name(name) + channel.encoded() for name, channel in channels.items()]), [])
    parts: list[bytes | Pieces] = []
    for name, channel in channels.items():
        first, run, rest = channel.parts
        plain += _name(name) + first
        if run is not None:
            parts += [plain, run]
            plain = b""
        plain += rest
    if not parts:
        return Encoded(plain, [])
    return PartedTree([*parts, plain] if plain else parts)


def take_apart(
    tree: bytes, names: tuple[str, str], piece_bytes: int, like: Mapping[str, Channel]
) -> tuple[bytes, dict[str, Channel]]:
    """What `lay_tree` was given; NotAFragment for a tree of another form. What is in channels like these is shared."""
    fields, at = open_fields(tree)
    first, at = value_at(tree, at)
    head, at = value_at(tree, at)
    second, at = value_at(tree, at)
    if (fields, first, second) != (2, _name(names[0]), _name(names[1])):
        raise NotAFragment
    channels: dict[str, Channel] = {}
    fields, at = open_fields(tree, at)
    for _ in range(fields):
        key, at = value_at(tree, at)
        name = _name_of(key)
        items, at = items_at(tree, at)
        if items is None:
            data, at = value_at(tree, at)
            channels[name] = ValueChannel(data, piece_bytes)
        else:
            earlier = like.get(name)
            channels[name] = _known_list(items, piece_bytes, earlier if isinstance(earlier, ListChannel) else None)
    if at != len(tree):
        raise NotAFragment
    return head, channels


def _known_list(items: Sequence[bytes], piece_bytes: int, like: ListChannel | None) -> ListChannel:
    known = () if like is None else like.items
    same = [old if old.data == data else None for old, data in zip(known, items, strict=False)]
    moved = {old.data: old for old, unmoved in zip_longest(known, same) if unmoved is None}
    return ListChannel([old or moved.get(data) or Item(data, piece_bytes) for data, old in zip_longest(items, same)])


_name = lru_cache(maxsize=1024)(encode_fragment)  # of a channel: the same few each time
_name_of = lru_cache(maxsize=1024)(lambda fragment: str(decode_fragment(fragment)))


def cut(data: bytes, value: object, piece_bytes: int) -> list[Segment]:
    """The encoding of a value in segments: long texts become pieces, so that whoever has the same text shares them."""
    if len(data) < SMALL_BYTES:
        return [data]
    segments: list[Segment] = []
    start = 0
    for text in _long_texts(value):
        raw = text_bytes(text)
        begin = data.find(raw, start)
        if begin >= 0:
            segments += [data[start:begin], *_pieces(raw, piece_bytes)]
            start = begin + len(raw)
    rest = data[start:]
    return [*segments, *(_pieces(rest, piece_bytes) if len(rest) >= SMALL_BYTES else [rest])]


def _cut_fields(value: Mapping[str, Any], piece_bytes: int) -> list[Segment]:
    """As `cut`, with lists in the same blocks as in the channels they are for: the input of a graph is such a value."""
    segments: list[Segment] = [dict_head(len(value))]
    for name, field in value.items():
        segments.append(encode_fragment(name))
        if type(field) is list:
            pieces, left = lay_list(field, piece_bytes).pieces()
            segments += [list_head(len(field)), *pieces, left]
        else:
            segments += cut(encode_fragment(field), field, piece_bytes)
    return segments


def join(segments: Sequence[Segment]) -> tuple[list[Piece], bytes]:
    """Segments as pieces, short bytes joined until they are worth one; and what is left over at the end."""
    pieces: list[Piece] = []
    left = b""
    for segment in segments:
        if isinstance(segment, bytes):
            left += segment
            if len(left) < SMALL_BYTES:
                continue
            segment, left = Piece(left), b""
        elif left:
            pieces.append(Piece(left))
            left = b""
        pieces.append(segment)
    return pieces, left


def _pieces(data: bytes, piece_bytes: int) -> list[Piece]:
    size = piece_bytes if len(data) <= LARGE_BYTES else LARGE_PIECE_BYTES
    return [Piece(data[start : start + size]) for start in range(0, len(data), size)]


def _long_texts(value: Any) -> Iterator[str | bytes]:
    """Long texts of a value, in the order of its encoding."""
    kind = type(value)
    if kind is str or kind is bytes:
        if len(value) >= SMALL_BYTES:
            yield value
    elif kind is dict:
        for item in value.values():
            yield from _long_texts(item)
    elif kind is list or kind is tuple:
        for item in value:
            yield from _long_texts(item)
    elif kind in types.message_classes:
        yield from _long_texts(value.content)
