"""Types of the application: registered under a name and a version, saved as data, rebuilt by the name (I7).

A class with fields is saved by them (`forms`). pydantic validates only data that an `upgrade` has changed. Any other
class needs `encode` and `decode`. Version 0 is for unregistered classes (`by_name`).
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kedge.errors import UnsupportedType, Validation
from kedge.model import parse_name

from . import by_name
from .forms import ByFields, ByValue, Fields, Form, Restore, form_of
from .kinds import Choice, Problem, Shape, Structure, Tag, add, by_class, unsupported
from .plain import distinct
from .refusals import qualified

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    name: str
    version: int
    cls: type
    restore: Restore
    upgrade: Callable[[Any, int], object] | None


_registered: dict[str, Registration] = {}
_lock = threading.Lock()


def register(
    name: str,
    *,
    version: int = 1,
    upgrade: Callable[[Any, int], Any] | None = None,
    encode: Callable[[Any], object] | None = None,
    decode: Callable[[Any], object] | None = None,
) -> Callable[[type[_T]], type[_T]]:
    """Class decorator: allow states to contain instances of exactly this class, saved under `name` and `version`.

    A new field with a default needs no new version. For any other change, raise `version`: when an older version is
    loaded, `upgrade(fields, old_version)` returns the fields of the current version. For a class without fields,
    `encode(obj)` returns any value that a state can hold and `decode` turns it back into an object; `upgrade` is then
    given that value. Of your code, a load calls only these functions. The same class may be registered again (after
    a reload). Another class under a used name, or a class that could not be restored exactly, is a Validation error.
    """
    parse_name("type name", name)
    if type(version) is not int or version < 1:
        raise Validation(f"version {version!r} of type {name!r} is not a whole number from 1 on")
    if (encode is None) != (decode is None):
        raise Validation(f"type {name!r} has only one of encode and decode", hint="give both")

    def enter(cls: type[_T]) -> type[_T]:
        form = _form(cls, encode, decode)
        with _lock:
            _make_room(name, cls)
            _registered[name] = Registration(name, version, cls, form.restore, upgrade)
            by_class[cls] = structure_of(name, version, form)
        return cls

    return enter


def _make_room(name: str, cls: type) -> None:
    previous = _registered.get(name)
    if previous is not None and qualified(previous.cls) != qualified(cls):
        raise Validation(
            f"the type name {name!r} belongs to {qualified(previous.cls)}", hint="choose another name for this class"
        )
    current = by_class.get(cls)
    if current is not None and (previous is None or previous.cls is not cls):
        raise Validation(f"{qualified(cls)} is known to the codec already", hint="register each class once")
    if previous is not None:
        by_class.pop(previous.cls, None)


def _form(cls: type, encode: Any, decode: Any) -> Form:
    if not isinstance(cls, type):
        raise Validation(f"{cls!r} is not a class", hint="use @kedge.register on classes")
    return form_of(cls) if encode is None else ByValue(encode, lambda value, more, upgraded: decode(value))


def structure_of(name: str, version: int, form: Form) -> Structure:
    """Return how objects of a form are saved under this name and version."""
    return _by_fields(name, version, form.take) if isinstance(form, ByFields) else _by_value(name, version, form.take)


def kind_by_name(value: object) -> Structure | None:
    """Return how to save a value of an unregistered class; None if that is impossible."""
    cls = type(value)
    named = by_name.form_by_name(cls)
    return None if named is None else _structure_by_name(*named)


@functools.lru_cache(maxsize=1024)
def _structure_by_name(name: str, form: Form) -> Structure:
    return structure_of(name, by_name.VERSION, form)


def _kind_of_unrestored(value: by_name.Unrestored) -> Structure:
    if value.is_value:
        return _by_value(value.name, by_name.VERSION, lambda value: value.content)
    return _by_fields(value.name, by_name.VERSION, lambda value: (value.more, value.content))


def _by_fields(name: str, version: int, take: Callable[[Any], tuple[object, Fields]]) -> Structure:
    def take_all(value: Any) -> tuple[Sequence[object], Sequence[object]]:
        more, fields = take(value)
        return (name, version, more), list(fields.items())

    return Structure(Tag.FIELDS, name, Shape.FIELDS, 3, take_all, _build_fields)


def _by_value(name: str, version: int, take: Callable[[Any], object]) -> Structure:
    def take_all(value: Any) -> tuple[Sequence[object], Sequence[object]]:
        try:
            return (name, version, take(value)), ()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise Problem(f"encode of type {name!r} failed: {why}", error=UnsupportedType) from error

    return Structure(Tag.VALUE, name, Shape.ITEMS, 3, take_all, _build_value)


# --- loading ---


def _build_fields(head: Sequence[Any], pairs: list[Any]) -> object:
    name, version, more = head
    if version == by_name.VERSION and type(name) is str:
        return by_name.restore(name, distinct(pairs), more, is_value=False)
    return _restore(name, version, distinct(pairs), more)


def _build_value(head: Sequence[Any], items: list[object]) -> object:
    name, version, value = head
    if items:
        raise ValueError("more than one value")
    if version == by_name.VERSION and type(name) is str:
        return by_name.restore(name, value, None, is_value=True)
    return _restore(name, version, value, None)


def _restore(name: object, version: object, content: Any, more: object) -> object:
    if type(name) is not str or type(version) is not int:
        raise ValueError("no name and version")
    registration = _registered.get(name)
    if registration is None:
        raise unsupported(
            f"is of type {name!r}, which is not registered in this program",
            f'import the module that has @kedge.register("{name}"); kedge show works without it',
        )
    difference = f"is version {version} of type {name!r}, this program has version {registration.version}"
    if version > registration.version:
        raise unsupported(difference, "load it with the newer program")
    if version < registration.version:
        if registration.upgrade is None:
            hint = f'add upgrade= to @kedge.register("{name}", version={registration.version})'
            raise unsupported(difference, hint)
        content = _call("upgrade", name, registration.upgrade, content, version)
    value = _call("decode", name, registration.restore, content, more, version < registration.version)
    if not isinstance(value, registration.cls):
        raise Problem(f"decode of type {name!r} returned a {qualified(type(value))}", error=Validation)
    return value


def _call(role: str, name: str, function: Callable[..., Any], *arguments: object) -> Any:
    try:
        return function(*arguments)
    except (Problem, MemoryError, RecursionError):
        raise
    except Exception as error:
        raise Problem(f"{role} of type {name!r} failed: {type(error).__name__}: {error}", error=Validation) from error


# Loading finds these by their tags; for saving, each class has its own Structure above.
add(Structure(Tag.FIELDS, "registered type", Shape.FIELDS, 3, lambda value: ((), ()), _build_fields))
add(Structure(Tag.VALUE, "registered type", Shape.ITEMS, 3, lambda value: ((), ()), _build_value))
by_class[by_name.Unrestored] = Choice(_kind_of_unrestored)
