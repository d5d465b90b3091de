"""Filters of memories: {"colour": "blue", "age": {"$gte": 18}, "user.name": "Ann"}.

The row of an item has the plain fields of its value in its metadata, so that a search reads few of the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from kedge.errors import Validation

_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"$eq": eq, "$ne": ne, "$gt": gt, "$gte": ge, "$lt": lt, "$lte": le}
_ATOMS = frozenset({type(None), bool, int, float, str})
_NOTHING: Mapping[str, Any] = {}
_MOST_FIELDS = 32
_MOST_CHARACTERS = 128


def told_of(value: Mapping[str, Any]) -> dict[str, Any]:
    """What a row tells of a value: its plain fields, and whether these are all."""
    plain = {key: item for key, item in value.items() if _is_plain(key, item)}
    if len(plain) > _MOST_FIELDS:
        return {}
    return {"fields": plain, "is_whole": len(plain) == len(value)}


def _is_plain(key: object, item: object) -> bool:
    if type(key) is not str or len(key) > _MOST_CHARACTERS or not key.isprintable():
        return False
    if type(item) is float:
        return item - item == 0  # finite
    is_number = type(item) is int and abs(item) < 1 << 53
    return (
        item is None
        or type(item) is bool
        or is_number
        or (type(item) is str and len(item) <= _MOST_CHARACTERS and item.isprintable())
    )


class Filter:
    """What a search asks for."""

    def __init__(self, wanted: Mapping[str, Any]) -> None:
        for name in wanted:
            if name.startswith("$"):
                raise Validation(
                    f"the filter has {name!r} in the place of a field", hint='for example {"age": {"$gt": 5}}'
                )
        self._tests = [(name, _test(expected)) for name, expected in wanted.items()]

    def fits(self, value: Any) -> bool:
        return all(is_fitting(_at(value, name)) for name, is_fitting in self._tests)

    def by_row(self, metadata: Mapping[str, Any]) -> bool | None:
        """Whether the item of a row fits; None when only its value can tell."""
        fields, is_whole = metadata.get("fields", _NOTHING), metadata.get("is_whole", False)
        is_known = True
        for name, is_fitting in self._tests:
            if name not in fields and not is_whole:
                is_known = False
            elif not is_fitting(fields.get(name)):
                return False
        return True if is_known else None


def _at(value: Any, name: str) -> Any:
    """A field of a value; where there is none of that name, a path to one: "user.name"."""
    if name not in value and "." in name:
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value
    return value.get(name)


def _test(expected: Any) -> Callable[[Any], bool]:
    """`fits` for one filter and many values."""
    if isinstance(expected, Mapping) and len(expected) == 1:
        ((name, operand),) = expected.items()
        if name in _COMPARE:
            return partial(_compares, name=name, operand=operand)
    return partial(fits, filter=expected)


def fits(value: Any, filter: Any) -> bool:
    """Whether a value has what a filter asks for: equality by key, and comparisons such as {"age": {"$gte": 18}}."""
    if type(filter) in _ATOMS:
        return bool(value == filter)
    if isinstance(filter, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(filter) and all(map(fits, value, filter))
    if not isinstance(filter, Mapping):
        return bool(value == filter)
    if any(str(name).startswith("$") for name in filter):
        return all(_compares(value, name, operand) for name, operand in filter.items())
    return isinstance(value, Mapping) and all(fits(value.get(name), expected) for name, expected in filter.items())


def _compares(value: Any, name: str, operand: Any) -> bool:
    if name not in _COMPARE:
        raise Validation(f"the filter has {name!r}", hint=f"use one of {', '.join(_COMPARE)}")
    try:
        return bool(_COMPARE[name](value, operand))
    except TypeError:
        return False  # of kinds that have no order: a text is not greater than 5
