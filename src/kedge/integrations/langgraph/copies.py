"""Copies of values, to compare with later and to copy again. Comparing is strict: 1, 1.0 and True differ."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import ormsgpack

from kedge.codec.encoder import EXACT

from . import types

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_COMPARABLE = ATOMS - {float}  # of the same type, what is equal is the same
_CONTAINERS = (dict, list)
_NOTHING = object()
_NONE = type(None)
_fields = attrgetter("__dict__")
_fields_set = attrgetter("__pydantic_fields_set__")
_extra = attrgetter("__pydantic_extra__")
_is_packable = attrgetter("is_packable")
_private = attrgetter("__pydantic_private__")


def copy_of(value: Any, *, is_shared: bool = False) -> Copy | None:
    """A copyable value to compare with and to copy again; it is copied now if others may change it."""
    try:
        return Copy(copied(value) if is_shared else value) if _is_copyable(value) else None
    except RuntimeError:  # it contains itself, or is being changed: whoever encodes it says so
        return None


def _is_copyable(value: Any) -> bool:
    """Whether a value is made of what is compared and copied here."""
    kind = type(value)
    if kind in ATOMS:
        return True
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(_is_copyable, value.values()))
    if kind is list or kind is tuple:
        return all(map(_is_copyable, value))
    if kind in types.message_classes:
        is_whole = value.__pydantic_private__ is None  # other messages cannot be saved
        return is_whole and _is_copyable(value.__dict__) and _is_copyable(value.__pydantic_extra__)
    return False


def copied(value: Any) -> Any:
    """The value again, sharing nothing that could be changed."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is dict:
        return {key: item if type(item) in ATOMS else copied(item) for key, item in value.items()} if value else {}
    if kind is list:
        return [copied(item) for item in value] if value else []
    if kind is tuple:
        return tuple(copied(item) for item in value)
    return _message_like(value, copied(value.__dict__))


def _message_like(message: Any, fields: dict[str, Any]) -> Any:
    extra, was_set = message.__pydantic_extra__, message.__pydantic_fields_set__
    return types.new_message(type(message), fields, was_set.copy(), extra if extra is None else copied(extra))


class Copy:
    """A copyable value that nobody else has. Of messages, which are most, it knows what to look at."""

    __slots__ = ("_containers", "_is_flat", "_is_message", "_is_packable", "_types", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._is_message = type(value) in types.message_classes
        self._is_packable: bool | None = None
        if self._is_message:
            fields = value.__dict__
            self._types = tuple(map(type, fields.values()))
            containers = {name: item for name, item in fields.items() if type(item) not in ATOMS}
            self._containers = [(name, _packed(item)) for name, item in containers.items()]
            # Then equality decides: of values of the same type, it is strict.
            self._is_flat = float not in self._types and not any(
                item or type(item) not in _CONTAINERS for item in containers.values()
            )

    @property
    def is_packable(self) -> bool:
        """Whether only the same value has its bytes (`_packed`)."""
        if self._is_packable is None:
            plain = self.value.__dict__ if self._is_message else self.value
            self._is_packable = _packed(plain) is not None and not _has_bytes(plain)
        return self._is_packable

    def is_of(self, other: Any) -> bool:
        """Whether a value is the same."""
        if not self._is_message or not self._is_flat or type(other) is not type(self.value):
            return is_same(self.value, other)
        ours, fields = self.value.__dict__, other.__dict__
        if tuple(fields) != tuple(ours) or tuple(map(type, fields.values())) != self._types:
            return is_same(self.value, other)
        return bool(fields == ours) and _same_beside_fields(self.value, other)

    def again(self) -> Any:
        """The value, sharing nothing that could be changed."""
        if not self._is_message:
            return copied(self.value)
        fields = self.value.__dict__.copy()
        for name, packed in self._containers:
            fields[name] = copied(fields[name]) if packed is None else ormsgpack.unpackb(packed)
        return _message_like(self.value, fields)


def are_same(ours: Sequence[Copy], others: Sequence[Any]) -> bool:
    """Whether all of these are the same; False where that cannot be said of all at once."""
    values = [copy.value for copy in ours]
    kinds = {*map(type, values)}
    if [*map(type, values)] != [*map(type, others)]:
        return False
    if kinds <= _COMPARABLE:
        return values == [*others]
    if not all(map(_is_packable, ours)):
        return False
    if kinds <= types.message_classes:
        if [*map(_fields_set, values)] != [*map(_fields_set, others)] or any(map(_extra, [*values, *others])):
            return False
        if {*map(type, map(_private, others))} != {_NONE}:
            return False
        values, others = [*map(_fields, values)], [*map(_fields, others)]
    packed = _packed(values)
    return packed is not None and packed == _packed([*others])


def _packed(value: Any) -> bytes | None:
    """Bytes that only the same value has, if it has no byte strings; None if it is not plain."""
    try:
        return ormsgpack.packb(value, option=EXACT)
    except (TypeError, ValueError):  # MsgpackEncodeError is a TypeError
        return None


def _has_bytes(value: Any) -> bool:
    """Of a plain value."""
    kind = type(value)
    if kind is dict:
        return any(map(_has_bytes, value.values()))
    return any(map(_has_bytes, value)) if kind is list else kind is bytes


def is_same(ours: Any, other: Any) -> bool:
    """Equal in type and value, all the way down."""
    kind = type(ours)
    if kind is not type(other):
        return False
    if kind in ATOMS:
        return bool(ours == other) and (kind is not float or repr(ours) == repr(other))
    if kind is dict:
        if len(ours) != len(other):
            return False
        for (key, item), (other_key, other_item) in zip(ours.items(), other.items(), strict=True):
            if key != other_key or type(other_key) is not str:
                return False
            if item is not other_item and not is_same(item, other_item):
                return False
        return True
    if kind is list or kind is tuple:
        return len(ours) == len(other) and all(map(is_same, ours, other))
    return _same_fields(ours.__dict__, other.__dict__) and _same_beside_fields(ours, other)


def _same_beside_fields(ours: Any, other: Any) -> bool:
    """Of messages."""
    return (
        ours.__pydantic_fields_set__ == other.__pydantic_fields_set__
        and is_same(ours.__pydantic_extra__ or None, other.__pydantic_extra__ or None)
        and other.__pydantic_private__ is None
    )


def _same_fields(ours: dict[str, Any], other: dict[str, Any]) -> bool:
    """As `is_same`, for fields, whose order means nothing."""
    if len(ours) != len(other):
        return False
    for name, value in ours.items():
        theirs = other.get(name, _NOTHING)
        if value is theirs or (type(value) in _CONTAINERS and type(value) is type(theirs) and not value and not theirs):
            continue  # nearly always: the same text, or nothing in either
        if not is_same(value, theirs):
            return False
    return True
