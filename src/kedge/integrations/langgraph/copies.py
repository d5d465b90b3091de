"""Copies of values, to compare with later and to copy again. Comparing is strict: 1, 1.0 and True differ."""

from __future__ import annotations

from typing import Any

from . import types

ATOMS = frozenset({type(None), bool, int, float, str, bytes})
_CONTAINERS = (dict, list)
_NOTHING = object()


def is_copyable(value: Any) -> bool:
    """Whether a value is made of what is compared and copied here."""
    kind = type(value)
    if kind in ATOMS:
        return True
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_copyable, value.values()))
    if kind is list or kind is tuple:
        return all(map(is_copyable, value))
    if kind in types.message_classes:
        return is_copyable(value.__dict__) and is_copyable(value.__pydantic_extra__)
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
    extra = message.__pydantic_extra__
    was_set = set(message.__pydantic_fields_set__)
    return types.new_message(type(message), fields, was_set, None if extra is None else copied(extra))


class Copy:
    """A copyable value that nobody else has. Of messages, which are most, it knows what to look at."""

    __slots__ = ("_containers", "_is_flat", "_names", "_types", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._names: tuple[str, ...] | None = None
        if type(value) in types.message_classes:
            fields = value.__dict__
            self._names, self._types = tuple(fields), tuple(map(type, fields.values()))
            self._containers = [name for name, item in fields.items() if type(item) not in ATOMS]
            # Then equality decides: of values of the same type, it is strict.
            self._is_flat = float not in self._types and not any(
                fields[name] or type(fields[name]) not in _CONTAINERS for name in self._containers
            )

    def is_of(self, other: Any) -> bool:
        """Whether a value is the same."""
        if self._names is None or not self._is_flat or type(other) is not type(self.value):
            return is_same(self.value, other)
        fields = other.__dict__
        if tuple(fields) != self._names or tuple(map(type, fields.values())) != self._types:
            return is_same(self.value, other)
        return bool(fields == self.value.__dict__) and _same_beside_fields(self.value, other)

    def again(self) -> Any:
        """The value, sharing nothing that could be changed."""
        if self._names is None:
            return copied(self.value)
        fields = {**self.value.__dict__}
        for name in self._containers:
            item = fields[name]
            fields[name] = copied(item) if item else type(item)()
        return _message_like(self.value, fields)


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
