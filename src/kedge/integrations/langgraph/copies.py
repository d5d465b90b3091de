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
    extra = value.__pydantic_extra__
    was_set = set(value.__pydantic_fields_set__)
    return types.new_message(kind, copied(value.__dict__), was_set, None if extra is None else copied(extra))


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
    return (
        _same_fields(ours.__dict__, other.__dict__)
        and ours.__pydantic_fields_set__ == other.__pydantic_fields_set__
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
