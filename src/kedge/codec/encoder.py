"""Saving: a state becomes msgpack with numbered Ext types, and its large buffers stay outside.

Python lowers values to what ormsgpack writes natively and exactly; containers that already are so stay the same
objects. Then ormsgpack writes everything in one native call. It gets no `default` hook, which would let other threads
run, and change the state, in the middle of that call.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import ormsgpack

from kedge.errors import CheckpointError, UnsupportedType, Validation
from kedge.model import is_utf8

from .kinds import (
    LEAF_DEPTH,
    PART_DEPTH,
    Choice,
    Leaf,
    Problem,
    Shape,
    Source,
    Structure,
    Tag,
    TooDeep,
    by_class,
    kind_of,
    unsupported,
)
from .refusals import refusal
from .registry import kind_by_name
from .shared_memory import Shares

EXACT = (
    ormsgpack.OPT_PASSTHROUGH_BIG_INT
    | ormsgpack.OPT_PASSTHROUGH_DATACLASS
    | ormsgpack.OPT_PASSTHROUGH_DATETIME
    | ormsgpack.OPT_PASSTHROUGH_ENUM
    | ormsgpack.OPT_PASSTHROUGH_SUBCLASS
    | ormsgpack.OPT_PASSTHROUGH_TUPLE
    | ormsgpack.OPT_PASSTHROUGH_UUID
)
_SCALARS = frozenset({type(None), bool, int, float, str})
_ONLY_STR = frozenset({str})
_MANY = 16  # from here on a set operation over the types is faster than a loop


@dataclass(slots=True)
class Encoded:
    """A state as bytes. The buffers are views of the state's own memory: store them before it changes.

    Never mutated, but not frozen: that would make each small save slower.
    """

    tree: bytes
    buffers: list[Source]  # in the tree's order: memoryviews ("B", one dimension), or chunked
    is_private: bool = False  # the buffers are copies that nobody changes


class NeedsCare(Exception):
    """ormsgpack met an int or str it cannot write natively: pack again, checking each one."""


class Packer:
    """One encoding in progress (an EncodeContext)."""

    levels = PART_DEPTH  # packed by recursion
    __slots__ = ("_depth", "_is_by_name", "_is_careful", "_limit", "_native", "buffers", "out_of_band_bytes", "shares")

    def __init__(self, out_of_band_bytes: int, is_careful: bool, is_by_name: bool, shares: Shares) -> None:
        self.buffers: list[Source] = []
        self.shares = shares
        self.out_of_band_bytes = out_of_band_bytes
        self._is_careful = is_careful
        self._is_by_name = is_by_name
        self._native = _SCALARS - {int, str} if is_careful else _SCALARS
        self._depth = 0
        self._limit = self.levels

    def add_buffer(self, source: Source) -> int:
        self.buffers.append(source)
        return len(self.buffers) - 1

    def place_bytes(self, view: memoryview) -> int | bytes:
        if 0 < view.nbytes >= self.out_of_band_bytes:
            return self.add_buffer(view)
        return view.tobytes()

    def pack(self, value: object) -> bytes:
        # A leaf at the deepest level may use a few levels of its own.
        depth, limit = self._depth, self._limit
        self._limit = self.levels + LEAF_DEPTH
        payload = self._write(self.lower(value, depth))
        self._depth, self._limit = depth, limit
        return payload

    def pack_state(self, state: object) -> bytes:
        return self._write(self.lower(state, 0))

    def lower(self, value: Any, depth: int) -> object:
        """Return what ormsgpack writes exactly: `value` itself, or a copy with Exts for what it cannot write."""
        kind = type(value)
        if kind in self._native:
            return value
        if kind is dict:
            return self._lower_dict(value, depth)
        if kind is list:
            return self._lower_items(value, depth, value)
        if kind is bytes and (len(value) < self.out_of_band_bytes or not value):
            return value
        if kind is int or kind is str:  # only when careful
            return _lower_scalar(value)
        codec_kind = by_class.get(kind)
        if codec_kind is None or type(codec_kind) is Choice:
            codec_kind = kind_of(value)
            if codec_kind is None and self._is_by_name:
                codec_kind = kind_by_name(value)
            if codec_kind is None:
                raise refusal(value)
        if type(codec_kind) is Structure:
            return self._lower_structure(value, codec_kind, depth)
        assert type(codec_kind) is Leaf
        self._depth = depth + 1
        return ormsgpack.Ext(codec_kind.tag, _encode_leaf(codec_kind, value, self))

    def _lower_dict(self, value: dict[Any, object], depth: int) -> object:
        if depth >= self._limit:
            raise TooDeep(UnsupportedType)
        if not _ONLY_STR.issuperset(map(type, value)) or (self._is_careful and not all(map(is_utf8, value))):
            return self._lower_structure(value, by_class[dict], depth)
        native = self._native
        lowered = value
        key = ""
        try:
            for key, item in value.items():
                if type(item) in native:
                    continue
                low = self.lower(item, depth + 1)
                if low is not item:
                    if lowered is value:
                        lowered = value.copy()
                    lowered[key] = low
        except Problem as problem:
            problem.under(key_segment(key), value)
            raise
        return lowered

    def _lower_items(self, items: Any, depth: int, container: object) -> Any:
        if depth >= self._limit:
            raise TooDeep(UnsupportedType)
        native = self._native
        if len(items) > 16 and native.issuperset(map(type, items)):  # faster than the loop, for many
            return items
        lowered = items
        index = 0
        try:
            for index, item in enumerate(items):
                if type(item) in native:
                    continue
                low = self.lower(item, depth + 1)
                if low is not item:
                    if lowered is items:
                        lowered = list(items)
                    lowered[index] = low
        except Problem as problem:
            problem.under(f"[{index}]", container)
            raise
        return lowered

    def _lower_unordered(self, items: Any, depth: int, container: object) -> list[Any]:
        """Sort by encoded bytes, with all bytes inline: buffer numbers would depend on the set's order."""
        out_of_band_bytes, self.out_of_band_bytes = self.out_of_band_bytes, sys.maxsize
        try:
            return sorted(self._lower_items(items, depth, container), key=self._write)
        finally:
            self.out_of_band_bytes = out_of_band_bytes

    def _lower_structure(self, value: Any, structure: Any, depth: int) -> ormsgpack.Ext:
        if depth >= self._limit:
            raise TooDeep(UnsupportedType)
        head, children = structure.take(value)
        body: Any
        if structure.is_unordered:
            body = self._lower_unordered(children, depth, value)
        elif structure.shape is Shape.ITEMS:
            body = self._lower_items(children, depth, value)
        else:
            body = self._lower_pairs(children, depth, value, is_attributes=structure.shape is Shape.FIELDS)
        if head:
            body = [*(self.lower(item, depth + 1) for item in head), *body]
        elif type(body) is tuple:
            body = list(body)
        return ormsgpack.Ext(structure.tag, self._write(body))

    def _lower_pairs(self, pairs: Any, depth: int, container: object, *, is_attributes: bool) -> list[object]:
        flat: list[object] = []
        for key, child in pairs:
            try:
                flat.append(self.lower(key, depth + 1))
            except Problem as problem:
                problem.steps.clear()
                problem.under(f"[key {_short(repr(key))}]", container)
                raise
            if not is_attributes and _is_nan(key):
                refused = unsupported("is a NaN key, which no lookup could find", "replace NaN in keys before saving")
                raise refused.under(key_segment(key), container)
            try:
                flat.append(self.lower(child, depth + 1))
            except Problem as problem:
                problem.under(f".{key}" if is_attributes else key_segment(key), container)
                raise
        return flat

    def _write(self, lowered: object) -> bytes:
        try:
            return ormsgpack.packb(lowered, option=EXACT)
        except TypeError as error:
            if self._is_careful:
                raise Problem(f"cannot be written: {error}", error=Validation) from error
            raise NeedsCare from error


def _encode_leaf(leaf: Leaf, value: object, packer: Packer) -> bytes:
    try:
        return leaf.encode(value, packer)
    except Problem as problem:
        problem.steps.clear()  # steps inside the payload mean nothing to the user
        raise
    except (NeedsCare, CheckpointError):
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise unsupported(f"is a {leaf.name} that cannot be saved: {error}", "") from error


def _lower_scalar(value: int | str) -> object:
    if type(value) is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return ormsgpack.Ext(Tag.INT, value.to_bytes((value.bit_length() + 8) // 8, "big", signed=True))
    if is_utf8(value):  # type: ignore[arg-type]
        return value
    return ormsgpack.Ext(Tag.STR, value.encode("utf-8", "surrogatepass"))  # type: ignore[union-attr]


def _is_nan(key: object) -> bool:
    if type(key) is tuple or type(key) is frozenset:
        return any(map(_is_nan, key))
    try:
        return bool(key != key)
    except Exception:  # noqa: BLE001 - a class that cannot compare itself; not a NaN
        return False


def key_segment(key: object) -> str:
    """Return how a path shows a dictionary key: `["model"]`, `[3]`."""
    return f"[{_short(json.dumps(key, ensure_ascii=not is_utf8(key)) if type(key) is str else repr(key))}]"


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"


def _pack(state: object, make_packer: Callable[[Shares], Packer]) -> Encoded:
    """Pack a state, and again if values of it turn out to share memory."""
    packer = make_packer(Shares())
    tree = packer.pack_state(state)
    if (shares := packer.shares.found()) is not None:
        packer = make_packer(shares)
        tree = packer.pack_state(state)
    return Encoded(tree, packer.buffers)


def is_native(values: Iterable[Any], scalars: frozenset[type], depth: int, bytes_below: int = 0) -> bool:
    """Return whether there are only `scalars`, and lists and dictionaries of them, within `depth` levels.

    Byte strings are allowed, too, if they are shorter than `bytes_below`. This is the fast path for plain states: one
    look at each value; ormsgpack does the rest.
    """
    for value in values:
        kind = type(value)
        if kind in scalars:
            continue
        if kind is dict:
            if depth and is_native(value.values(), scalars, depth - 1, bytes_below):
                continue
        elif kind is bytes:
            if len(value) < bytes_below:
                continue
        elif kind is list and depth:
            if len(value) >= _MANY and scalars.issuperset(map(type, value)):
                continue
            if is_native(value, scalars, depth - 1, bytes_below):
                continue
        return False
    return True


def encode(state: object, *, out_of_band_bytes: int = 4096, by_name: bool = False) -> Encoded:
    """Return the tree and buffers of `state`; byte strings and arrays from `out_of_band_bytes` on become buffers.

    With `by_name`, unregistered classes are saved under their own names if possible (`by_name`). Buffers are not
    copied, except arrays that are not contiguous. Raises UnsupportedType with the path of what cannot be saved exactly,
    a cycle, or more than MAX_DEPTH levels.
    """
    try:
        try:
            if is_native((state,), _SCALARS, PART_DEPTH, out_of_band_bytes):
                return Encoded(ormsgpack.packb(state, option=EXACT), [])
        except TypeError:  # a key that is not a str, or an int or str beyond msgpack
            pass
        try:
            try:
                return _pack(state, partial(Packer, out_of_band_bytes, False, by_name))
            except NeedsCare:
                return _pack(state, partial(Packer, out_of_band_bytes, True, by_name))
        except TooDeep as problem:
            if problem.is_cycle:
                raise
        from .deep import DeepPacker

        return _pack(state, partial(DeepPacker, out_of_band_bytes, by_name))
    except Problem as problem:
        raise problem.typed() from problem.__cause__
    except RecursionError as error:
        raise Validation(
            "the state is too deep for what is left of the Python stack",
            hint="save it from a function that is called less deeply",
        ) from error
    except RuntimeError as error:  # "dictionary changed size during iteration", or a library's message about its device
        raise Validation(
            f"the state could not be read: {error}", hint="if another thread changes it meanwhile, save a copy of it"
        ) from error
