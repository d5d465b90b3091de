"""Types of the application: registered under a name and a version, saved as data, rebuilt by the name (I7).

A dataclass, pydantic model, msgspec Struct, namedtuple or Enum is saved by its fields. It comes back with exactly
these, and with the defaults of fields that were added since: constructors, validators and `__post_init__` do not run,
because a state that could be saved must be loadable. Only data that an `upgrade` has touched is validated by pydantic.
Any other class brings `encode` and `decode`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, Flag
from typing import Any, TypeVar

from kedge.errors import UnsupportedType, Validation
from kedge.model import parse_name

from .kinds import Problem, Shape, Structure, Tag, add, by_class
from .plain import distinct
from .refusals import has_fields, is_namedtuple, is_pydantic, is_struct, qualified

_T = TypeVar("_T")
Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Registration:
    name: str
    version: int
    cls: type
    restore: Callable[[Any, Any, bool], object]  # (fields or value, more, was it upgraded) → the object
    upgrade: Callable[[Any, int], Any] | None


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
    """Class decorator: states may hold instances of exactly this class, saved under `name` and `version`.

    A new field that has a default needs no new version. For other changes raise `version`: what an older version saved
    goes through `upgrade(fields, old_version)`, which answers the fields of the current version. For a class without
    fields, `encode(obj)` answers any value the codec knows and `decode` takes it back; `upgrade` is then given that
    value. The same class may be registered again (a module was reloaded); another class under a used name, or a class
    that could not come back exactly, is a Validation error.
    """
    parse_name("type name", name)
    if type(version) is not int or version < 1:
        raise Validation(f"version {version!r} of type {name!r} is not a whole number from 1 on")
    if (encode is None) != (decode is None):
        raise Validation(f"type {name!r} has only one of encode and decode", hint="give both")

    def enter(cls: type[_T]) -> type[_T]:
        kind, restore = _kind(cls, name, version, encode, decode)
        with _lock:
            _make_room(name, cls)
            _registered[name] = Registration(name, version, cls, restore, upgrade)
            by_class[cls] = kind
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


def _kind(
    cls: type, name: str, version: int, encode: Any, decode: Any
) -> tuple[Structure, Callable[[Any, Any, bool], object]]:
    if not isinstance(cls, type):
        raise Validation(f"{cls!r} is not a class", hint="use @kedge.register on classes")
    if encode is not None:
        return _by_value(name, version, encode), lambda value, more, upgraded: decode(value)
    if issubclass(cls, Enum):
        return _by_value(name, version, _take_member), functools.partial(_restore_member, cls)
    if not has_fields(cls):
        raise Validation(
            f"{qualified(cls)} has no fields to save by",
            hint="give encode= and decode=, or put @kedge.register above @dataclass",
        )
    if is_pydantic(cls):
        return _by_fields(name, version, _take_model), functools.partial(_restore_model, cls)
    if is_struct(cls):
        if hasattr(cls, "__post_init__"):
            raise _unfit(cls, "has a __post_init__, which msgspec would run on every load")
        return _by_fields(name, version, _take_struct), functools.partial(_restore_struct, cls)
    if is_namedtuple(cls):
        return _by_fields(name, version, _take_namedtuple), functools.partial(_restore_namedtuple, cls)
    _check_dataclass(cls)
    return _by_fields(name, version, _take_dataclass), functools.partial(_restore_dataclass, cls)


def _by_fields(name: str, version: int, take: Callable[[Any], tuple[object, Fields]]) -> Structure:
    def take_all(value: Any) -> tuple[Sequence[object], Sequence[Any]]:
        more, fields = take(value)
        return (name, version, more), list(fields.items())

    return Structure(Tag.FIELDS, name, Shape.FIELDS, 3, take_all, _build_fields)


def _by_value(name: str, version: int, take: Callable[[Any], object]) -> Structure:
    def take_all(value: Any) -> tuple[Sequence[object], Sequence[Any]]:
        try:
            return (name, version, take(value)), ()
        except Exception as error:
            raise Problem(
                f"{{path}}: encode of type {name!r} failed: {type(error).__name__}: {error}", "", UnsupportedType
            ) from error

    return Structure(Tag.VALUE, name, Shape.ITEMS, 3, take_all, _build_value)


# --- loading ---


def _build_fields(head: Sequence[Any], pairs: list[Any]) -> object:
    name, version, more = head
    return _restore(name, version, distinct(pairs), more)


def _build_value(head: Sequence[Any], items: list[Any]) -> object:
    name, version, value = head
    if items:
        raise ValueError("more than one value")
    return _restore(name, version, value, None)


def _restore(name: object, version: object, content: Any, more: Any) -> object:
    if type(name) is not str or type(version) is not int:
        raise ValueError("no name and version")
    registration = _registered.get(name)
    if registration is None:
        raise Problem(
            f"{{path}} is of type {name!r}, which is not registered in this program",
            f'import the module that has @kedge.register("{name}"); kedge show works without it',
            UnsupportedType,
        )
    if version > registration.version:
        raise Problem(
            f"{{path}} is version {version} of type {name!r}, this program has version {registration.version}",
            "load it with the newer program",
            UnsupportedType,
        )
    if version < registration.version:
        if registration.upgrade is None:
            raise Problem(
                f"{{path}} is version {version} of type {name!r}, this program has version {registration.version}",
                f'add upgrade= to @kedge.register("{name}", version={registration.version})',
                UnsupportedType,
            )
        content = _call("upgrade", name, registration.upgrade, content, version)
    value = _call("decode", name, registration.restore, content, more, version < registration.version)
    if not isinstance(value, registration.cls):
        raise Problem(f"decode of type {name!r} answered a {qualified(type(value))}", error=Validation)
    return value


def _call(role: str, name: str, function: Callable[..., Any], *arguments: object) -> Any:
    try:
        return function(*arguments)
    except (Problem, MemoryError, RecursionError):
        raise
    except Exception as error:
        raise Problem(f"{role} of type {name!r} failed: {type(error).__name__}: {error}", error=Validation) from error


def _check_names(cls: type, fields: object, expected: Iterable[str], defaults: Collection[str]) -> Fields:
    """`fields` in the order of the class, if it has all of them now, and the others have `defaults`."""
    if not isinstance(fields, Mapping):
        raise Problem(f"{{path}} has no fields for {qualified(cls)} but a {type(fields).__name__}", "", Validation)
    names = list(expected)
    missing = [name for name in names if name not in fields and name not in defaults]
    unknown = [name for name in fields if name not in names]
    if missing or unknown:
        differences = [f"lacks {', '.join(missing)}"] * bool(missing)
        differences += [f"has {', '.join(map(str, unknown))}"] * bool(unknown)
        raise Problem(
            f"{{path}} does not fit {qualified(cls)}: what was saved {' and '.join(differences)}",
            "give a new field a default; for other changes raise version= and give upgrade=",
            Validation,
        )
    return {name: fields[name] for name in names if name in fields}


# --- the forms: what to take from an object, and how to make it again ---


def _unfit(cls: type, why: str) -> Validation:
    return Validation(f"{qualified(cls)} {why}", hint="give encode= and decode=")


def _extras(value: object, fields: Iterable[str]) -> list[str]:
    """Attributes that are neither fields nor caches."""
    cls = type(value)
    return [
        name
        for name in getattr(value, "__dict__", ())
        if name not in fields
        and name != "__orig_class__"
        and not isinstance(inspect.getattr_static(cls, name, None), functools.cached_property)
    ]


def _take(value: object, names: Sequence[str]) -> Fields:
    if extras := _extras(value, names):
        raise Problem(
            f"{{path}} is a {qualified(type(value))} with the attribute {extras[0]!r}, which is not a field",
            "declare it as a field, or register the class with encode= and decode=",
            UnsupportedType,
        )
    try:
        return {name: getattr(value, name) for name in names}
    except AttributeError as error:
        raise Problem(f"{{path}} has a field without a value: {error}", "set it", UnsupportedType) from error


def _check_dataclass(cls: type) -> None:
    names = {field.name for field in dataclasses.fields(cls)}
    try:
        object.__new__(cls)
    except TypeError as error:
        raise _unfit(cls, f"cannot be made from its fields alone ({error})") from error
    slots = {
        slot
        for base in cls.__mro__
        for slot in _slots(base)
        if slot not in ("__dict__", "__weakref__") and slot not in names
    }
    if slots:
        raise _unfit(cls, f"keeps {min(slots)!r} outside its fields")
    for name in names:
        attribute = inspect.getattr_static(cls, name, None)
        if hasattr(type(attribute), "__set__") and not isinstance(attribute, types.MemberDescriptorType):
            raise _unfit(cls, f"has code behind its field {name!r}")


def _slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else slots


def _take_dataclass(value: Any) -> tuple[object, Fields]:
    return None, _take(value, [field.name for field in dataclasses.fields(value)])


def _restore_dataclass(cls: type, fields: Any, more: object, upgraded: bool) -> object:
    value: object = object.__new__(cls)
    declared = {field.name: field for field in dataclasses.fields(cls)}
    defaults = {name for name, field in declared.items() if _has_default(field)}
    given = _check_names(cls, fields, declared, defaults)
    for name, field in declared.items():
        object.__setattr__(value, name, given[name] if name in given else _default(field))  # also past frozen
    return value


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _default(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _take_namedtuple(value: Any) -> tuple[object, Fields]:
    _take(value, ())
    return None, dict(zip(value._fields, value, strict=True))


def _restore_namedtuple(cls: Any, fields: Any, more: object, upgraded: bool) -> object:
    given = _check_names(cls, fields, cls._fields, cls._field_defaults)
    return tuple.__new__(cls, ({**cls._field_defaults, **given}[name] for name in cls._fields))


def _take_struct(value: Any) -> tuple[object, Fields]:
    return None, _take(value, value.__struct_fields__)


def _restore_struct(cls: Any, fields: Any, more: object, upgraded: bool) -> object:
    names, defaults = cls.__struct_fields__, cls.__struct_defaults__  # of the last fields
    required = sys.modules["msgspec"].NODEFAULT
    optional = {
        name for name, default in zip(reversed(names), reversed(defaults), strict=False) if default is not required
    }
    return cls(**_check_names(cls, fields, names, optional))


def _take_model(value: Any) -> tuple[object, Fields]:
    fields = _take(value, list(type(value).model_fields))
    extra, private = value.__pydantic_extra__, value.__pydantic_private__
    more = {
        "fields_set": sorted(value.__pydantic_fields_set__),
        "extra": None if extra is None else list(extra),
        "private": None if private is None else list(private),
    }
    return more, {**fields, **(extra or {}), **(private or {})}


def _restore_model(cls: Any, fields: Any, more: Any, upgraded: bool) -> object:
    if not isinstance(fields, Mapping) or not isinstance(more, Mapping):
        return cls.model_validate(fields, by_alias=False, by_name=True)
    fields = dict(fields)
    extra, private = (
        None if names is None else {name: fields.pop(name) for name in names if name in fields}
        for names in (more["extra"], more["private"])
    )
    if upgraded:
        value = cls.model_validate({**fields, **(extra or {})}, by_alias=False, by_name=True)
        if private and value.__pydantic_private__ is not None:
            value.__pydantic_private__.update(private)
        return value
    value = cls.__new__(cls)
    optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
    given = _check_names(cls, fields, cls.model_fields, optional)
    state = {
        "__dict__": {
            name: given[name] if name in given else field.get_default(call_default_factory=True, validated_data=given)
            for name, field in cls.model_fields.items()
        },
        "__pydantic_fields_set__": set(more["fields_set"]),
        "__pydantic_extra__": extra,
        "__pydantic_private__": private,
    }
    sys.modules["pydantic"].BaseModel.__setstate__(value, state)
    return value


def _take_member(value: Enum) -> object:
    return value.value if isinstance(value, Flag) else value.name


def _restore_member(cls: Any, content: object, more: object, upgraded: bool) -> object:
    if isinstance(content, cls):
        return content
    try:
        return cls(content) if issubclass(cls, Flag) else cls.__members__[content]
    except (KeyError, ValueError, TypeError):
        raise Problem(
            f"{{path}} is {content!r}, which {qualified(cls)} does not have",
            "when members change, raise version= and give upgrade=",
            Validation,
        ) from None


# Loading finds these by their tags; what is saved comes from each class's own Structure above.
add(Structure(Tag.FIELDS, "registered type", Shape.FIELDS, 3, lambda value: ((), ()), _build_fields))
add(Structure(Tag.VALUE, "registered type", Shape.ITEMS, 3, lambda value: ((), ()), _build_value))
