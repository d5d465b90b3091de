"""Exceptions as data: arguments, attributes, notes, and what Python's classes store in C.

Rebuilding one runs no code of the application. An exception that would lose something is saved as data (`Unrestored`)
with its text: for example one with its text in C, or with an attribute that cannot be saved (a connection, a request).
Its traceback, and the exceptions it was raised from, are not saved.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any

_BUILTIN = frozenset(value for value in vars(builtins).values() if isinstance(value, type))
_NOT_SAVED = ("__suppress_context__", "obj")  # how it was raised; the object of a failed attribute look-up
_is_tried = ContextVar("_is_tried", default=False)


def take(error: Any, can_save: Callable[[object], bool]) -> list[object]:
    """Return [arguments, attributes], what Python's classes store beside them, and the text if it is only data."""
    content: list[object] = [error.args, error.__dict__ or None]
    if members := _hidden(error):
        content.append(members)
    if all(map(_is_plain, error.args)) and all(map(_is_plain, error.__dict__.values())):
        is_whole = True
    else:
        is_whole = _is_tried.get() or _try(can_save, content)
    if is_whole and _reads_like(error, content):
        return content
    arguments = tuple(_saved(value, can_save) for value in error.args)
    attributes = {name: _saved(value, can_save) for name, value in error.__dict__.items()} or None
    return [arguments, attributes, members or None, _text(error)]


def restore(cls: Any, content: Any) -> object:
    """Return the exception. Raises ValueError if it was saved as data."""
    if type(content) is not list or not 2 <= len(content) <= 3:
        raise ValueError("it was saved as data")
    args, attributes = content[:2]
    base: Any = next(base for base in cls.__mro__ if base in _BUILTIN)
    error = base.__new__(cls, *args)
    error.args = args
    for name, value in (content[2] if len(content) == 3 else {}).items():
        member = _members(cls)[name]
        member.__set__(error, value)
    if attributes is not None:
        object.__getattribute__(error, "__dict__").update(attributes)
    rebuilt: object = error
    return rebuilt


@lru_cache(maxsize=1024)
def _members(cls: type) -> Mapping[str, MemberDescriptorType]:
    """Return what an exception stores in C."""
    return {
        name: member
        for base in cls.__mro__
        if base in _BUILTIN and base is not object
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType) and name not in _NOT_SAVED
    }


def _hidden(error: Any) -> dict[str, object]:
    """Return what an exception made only from its arguments would lack."""
    cls: type = type(error)
    members = _members(cls)
    if not members:
        return {}
    try:
        fresh = restore(cls, [error.args, None])
    except (TypeError, ValueError):
        return {}
    values = ((name, member.__get__(error), member.__get__(fresh)) for name, member in members.items())
    return {name: value for name, value, without in values if value is not without and value != without}


def _reads_like(error: BaseException, content: object) -> bool:
    try:
        return _text(restore(type(error), content)) == _text(error)
    except (TypeError, ValueError):
        return False


def _text(error: object) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - its own code fails: its text says so
        return f"{type(broken).__name__} while its text was made"


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str, bytes)


def _saved(value: object, can_save: Callable[[object], bool]) -> object:
    return value if _is_plain(value) or _try(can_save, value) else repr(value)


def _try(can_save: Callable[[object], bool], value: object) -> bool:
    token = _is_tried.set(True)  # exceptions in this one need not be tried again
    try:
        return can_save(value)
    finally:
        _is_tried.reset(token)
