"""The forms of classes: what is taken from an object to save it, and how it is rebuilt from that.

A dataclass, pydantic model, attrs class, msgspec Struct, namedtuple or Enum is taken apart by its fields. Constructors,
validators and `__post_init__` do not run when it is rebuilt: a state that could be saved must be loadable (I7).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum, Flag
from typing import Any

from kedge.errors import Validation

from .kinds import Problem, unsupported
from .refusals import has_fields, is_attrs, is_namedtuple, is_older_pydantic, is_pydantic, is_struct, qualified

Fields = dict[str, Any]
Restore = Callable[[Any, object, bool], object]  # (fields or value, more, was it upgraded) → the object


@dataclasses.dataclass(frozen=True, slots=True)
class ByFields:
    take: Callable[[Any], tuple[object, Fields]]  # → (more, fields)
    restore: Restore


@dataclasses.dataclass(frozen=True, slots=True)
class ByValue:
    take: Callable[[Any], object]
    restore: Restore


Form = ByFields | ByValue


def form_of(cls: type) -> Form:
    """Return the form of a class with fields. Raises Validation if its objects could not be restored exactly."""
    if issubclass(cls, Enum):
        return ByValue(_take_member, functools.partial(_restore_member, cls))
    if not has_fields(cls):
        raise Validation(
            f"{qualified(cls)} has no fields to save by",
            hint="give encode= and decode=, or put @kedge.register above @dataclass",
        )
    if is_pydantic(cls):
        return ByFields(_take_model, functools.partial(_restore_model, cls))
    if is_older_pydantic(cls):
        return ByFields(_take_older_model, functools.partial(_restore_older_model, cls))
    if is_struct(cls):
        if hasattr(cls, "__post_init__"):
            raise _unfit(cls, "has a __post_init__, which msgspec would run on every load")
        return ByFields(_take_struct, functools.partial(_restore_struct, cls))
    if is_namedtuple(cls):
        return ByFields(_take_namedtuple, functools.partial(_restore_namedtuple, cls))
    declared = _attrs_defaults(cls) if is_attrs(cls) else _dataclass_defaults(cls)
    _check_declared(cls, set(declared))
    return ByFields(
        lambda value: (None, _take(value, [*declared])), functools.partial(_restore_declared, cls, declared)
    )


def _check_names(cls: type, fields: object, expected: Iterable[str], defaults: Collection[str]) -> Fields:
    """Return `fields` in the order of the class. Raises Problem for unknown ones, or missing ones without defaults."""
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


def _unfit(cls: type, why: str) -> Validation:
    return Validation(f"{qualified(cls)} {why}", hint="give encode= and decode=")


def _extras(value: object, fields: Iterable[str]) -> list[str]:
    """Return attributes that are neither fields nor caches."""
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
        raise unsupported(
            f"is a {qualified(type(value))} with the attribute {extras[0]!r}, which is not a field",
            "declare it as a field, or register the class with encode= and decode=",
        )
    try:
        return {name: getattr(value, name) for name in names}
    except AttributeError as error:
        raise unsupported(f"has a field without a value: {error}", "set it") from error


def _check_declared(cls: type, names: set[str]) -> None:
    """Check a dataclass or an attrs class."""
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


def _restore_declared(
    cls: type, declared: Mapping[str, Callable[[], object] | None], fields: Any, more: object, upgraded: bool
) -> object:
    """Rebuild an object. `declared` has its fields, with a function for the default of those that have one."""
    value: object = object.__new__(cls)
    given = _check_names(cls, fields, declared, {name for name, default in declared.items() if default is not None})
    for name, default in declared.items():
        # Works for frozen classes, too.
        object.__setattr__(value, name, given[name] if default is None or name in given else default())
    return value


def _dataclass_defaults(cls: Any) -> dict[str, Callable[[], object] | None]:
    defaults: dict[str, Callable[[], object] | None] = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory
        else:
            has_default = field.default is not dataclasses.MISSING
            defaults[field.name] = functools.partial(_same, field.default) if has_default else None
    return defaults


def _attrs_defaults(cls: Any) -> dict[str, Callable[[], object] | None]:
    attr = sys.modules["attr"]
    defaults: dict[str, Callable[[], object] | None] = {}
    for field in cls.__attrs_attrs__:
        if isinstance(field.default, attr.Factory):
            defaults[field.name] = None if field.default.takes_self else field.default.factory
        else:
            defaults[field.name] = None if field.default is attr.NOTHING else functools.partial(_same, field.default)
    return defaults


def _same(value: object) -> object:
    return value


def _take_namedtuple(value: Any) -> tuple[object, Fields]:
    _take(value, ())
    return None, dict(zip(value._fields, value, strict=True))


def _restore_namedtuple(cls: Any, fields: object, more: object, upgraded: bool) -> object:
    given = _check_names(cls, fields, cls._fields, cls._field_defaults)
    return tuple.__new__(cls, ({**cls._field_defaults, **given}[name] for name in cls._fields))


def _take_struct(value: Any) -> tuple[object, Fields]:
    return None, _take(value, value.__struct_fields__)


def _restore_struct(cls: Any, fields: object, more: object, upgraded: bool) -> object:
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


def _restore_model(cls: Any, fields: object, more: object, upgraded: bool) -> object:
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


def _take_older_model(value: Any) -> tuple[object, Fields]:
    private = [name for name in value.__private_attributes__ if hasattr(value, name)]
    more = {"fields_set": sorted(value.__fields_set__), "private": private}
    return more, {**value.__dict__, **{name: getattr(value, name) for name in private}}


def _restore_older_model(cls: Any, fields: Any, more: Any, upgraded: bool) -> object:
    if upgraded or not isinstance(more, Mapping):
        return cls.parse_obj(fields)
    fields = dict(fields)
    private = {name: fields.pop(name) for name in more["private"]}
    allowed = fields if cls.__config__.extra == "allow" else cls.__fields__  # an extra field is the object's own
    optional = {name for name, field in cls.__fields__.items() if not field.required}
    given = _check_names(cls, fields, {**cls.__fields__, **allowed}, optional)
    value = cls.__new__(cls)
    missing = {name: cls.__fields__[name].get_default() for name in optional - given.keys()}
    object.__setattr__(value, "__dict__", given | missing)
    object.__setattr__(value, "__fields_set__", set(more["fields_set"]))
    for name in private.keys() & cls.__private_attributes__.keys():
        object.__setattr__(value, name, private[name])
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
