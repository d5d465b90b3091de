"""Unregistered classes: saved as `module:qualname`, version 0, and rebuilt only if that is allowed (I7).

Loading looks a class up in the modules that the program has imported, by their dictionaries, and imports nothing.
Allowed are the packages given to `allow`, with `allow_own_modules` everything the program has not installed, and the
classes this process has saved itself. Constructors and validators do not run. A value that is not rebuilt is loaded as
an `Unrestored`, which says what it was and is saved again as that.

Only `encode(…, by_name=True)` saves so: elsewhere a class is registered, or refused.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import sysconfig
import types
import warnings
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from enum import Flag
from functools import lru_cache, partial
from typing import Any

from kedge.errors import CheckpointError, Validation

from . import exceptions
from .forms import ByValue, Fields, Form, form_of
from .refusals import has_fields, is_attrs, is_older_pydantic, is_pydantic, is_struct

VERSION = 0
_IMMUTABLE: tuple[type, ...] = (str, bytes, int, float, tuple, frozenset)
_BUILTINS: tuple[type, ...] = (*_IMMUTABLE, list, dict, set)
_SPECIAL = (OrderedDict, defaultdict, Counter)  # have further content beside that of a dict
_FRESH = (list, dict, set)  # default factories that are not code of the application
_PLAIN = (type(None), bool, int, float, str, bytes)  # default values that objects may share

_allowed: set[str] = set()
_are_own_allowed = False
_saved: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, slots=True)
class Unrestored:
    """A value whose class is not allowed, missing, or changed: what it was, and its content as data."""

    name: str  # module:qualname
    content: Any  # its fields, or its one value
    more: object = None
    is_value: bool = False

    def __hash__(self) -> int:  # it may replace an Enum member that was a key
        return hash(self.name)

    def __getattr__(self, attribute: str) -> Any:
        raise AttributeError(f"no attribute {attribute!r}: {_explain(self.name)}")


def allow(*names: str) -> None:
    """Allow classes of these packages, modules, or names (`module:qualname`) to be rebuilt in this process."""
    for name in names:
        if not isinstance(name, str) or not name:
            raise Validation(f"allow: {name!r} names no package", hint='use its name: "myapp", or "myapp.state:Plan"')
    _allowed.update(names)


def allow_own_modules() -> None:
    """Allow classes of the program's own modules to be rebuilt: of all that is neither installed nor Python's."""
    global _are_own_allowed
    _are_own_allowed = True


# --- saving ---


def form_by_name(cls: type) -> tuple[str, Form] | None:
    """Return the name and form for objects of this class; None if they could not be restored exactly."""
    form = _form(cls)
    if form is None or not isinstance(cls.__module__, str):
        return None
    name = f"{cls.__module__}:{cls.__qualname__}"
    _saved[name] = cls
    return name, form


@lru_cache(maxsize=1024)
def _form(cls: type) -> Form | None:
    if hasattr(cls, "__del__"):
        return None
    if issubclass(cls, BaseException):
        return None if _has_slots(cls) else ByValue(_take_exception, partial(_restore_exception, cls))
    if cls is memoryview:
        return ByValue(_take_view, _restore_view)
    if has_fields(cls):
        if issubclass(cls, Flag) and any(
            "_missing_" in vars(base) for base in cls.__mro__ if base.__module__ != "enum"
        ):
            return None  # code of the application, which a member's look-up would run
        try:
            return form_of(cls)
        except Validation:
            return None
    if _has_slots(cls):
        return None
    for base in _BUILTINS:
        if issubclass(cls, base) and not issubclass(cls, _SPECIAL):
            return ByValue(partial(_take_builtin, base), partial(_restore_builtin, cls, base))
    return None


def _has_slots(cls: type) -> bool:
    return any(base.__dict__.get("__slots__") for base in cls.__mro__)


def _take_exception(error: BaseException) -> object:
    return exceptions.take(error, _can_save)


def _can_save(value: object) -> bool:
    from .encoder import encode

    try:
        encode(value, out_of_band_bytes=sys.maxsize, by_name=True)
    except CheckpointError:
        return False
    return True


def _take_view(view: memoryview) -> object:
    content = [view.tobytes(), view.format, list(view.shape or ()), view.readonly]
    _restore_view(content, None, False)  # not every format can be created from bytes
    return content


def _take_builtin(base: type, value: Any) -> object:
    plain: object
    if base in (str, int, float):
        plain = {str: str.__str__, int: int.__int__, float: float.__float__}[base](value)
    elif base is bytes:
        plain = bytes.__getitem__(value, slice(None))
    else:
        plain = base(dict.items(value) if base is dict else base.__iter__(value))  # type: ignore[attr-defined]
    return [plain, getattr(value, "__dict__", None) or None]


# --- loading ---


def restore(name: str, content: Any, more: Any, *, is_value: bool) -> object:
    """Return the object, or an Unrestored with a warning."""
    cls = _find(name)
    form = None if cls is None else _form(cls)
    if cls is not None and form is not None and isinstance(form, ByValue) is is_value:
        if (is_pydantic(cls) or is_older_pydantic(cls)) and not isinstance(more, Mapping):
            form = None  # its validators would run
        try:
            if form is not None:
                return form.restore(content if is_value else _with_defaults(cls, content), more, False)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - anything that does not fit: the class has changed, or the state is hostile
            pass  # nosec B110 # reported below
    warnings.warn(_explain(name), stacklevel=2)
    return Unrestored(name, content, more, is_value)


def _explain(name: str) -> str:
    package = name.partition(":")[0].partition(".")[0]
    return (
        f"a value of {name} came back as data, because its class is not imported, not allowed, or has changed since; "
        f'import it and allow its package: KedgeSaver(…, allow=["{package}"])'
    )


def _find(name: str) -> type | None:
    """Return the class with this name if it may be used; runs no code."""
    if (saved := _saved.get(name)) is not None:
        return saved
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    if type(module) is not types.ModuleType or not _is_allowed(name, module_name, module):
        return None
    value: object = module
    for part in qualname.split("."):
        if not isinstance(value, type) and value is not module:
            return None
        value = vars(value).get(part)
    is_named_so = isinstance(value, type) and (value.__module__, value.__qualname__) == (module_name, qualname)
    return value if is_named_so else None  # type: ignore[return-value]


def _is_allowed(name: str, module_name: str, module: types.ModuleType) -> bool:
    if name in _allowed:
        return True
    parts = module_name.split(".")
    if any(".".join(parts[:length]) in _allowed for length in range(1, len(parts) + 1)):
        return True
    return _are_own_allowed and (module_name == "__main__" or _is_own(vars(module).get("__file__")))


@lru_cache(maxsize=4096)
def _is_own(file: object) -> bool:
    """Return whether a module's file is neither installed nor Python's."""
    if not isinstance(file, str):
        return False
    path = os.path.realpath(file)
    if {"site-packages", "dist-packages"} & set(path.split(os.sep)):
        return False
    places = sysconfig.get_paths()
    return not any(path.startswith(os.path.realpath(places[key]) + os.sep) for key in ("stdlib", "platstdlib"))


def _with_defaults(cls: Any, fields: Fields) -> Fields:
    """Return the fields, with plain defaults for those the class has got since.

    Raises ValueError if code would make a default.
    """
    added: Fields = {}
    for name, (default, factory) in _declared(cls).items():
        if name in fields:
            continue
        if factory in _FRESH:
            added[name] = factory()
        elif factory is not None:
            raise ValueError(f"its field {name!r} was not saved")
        elif isinstance(default, _PLAIN):
            added[name] = default
    return fields | added


def _declared(cls: Any) -> Mapping[str, tuple[object, object]]:
    """Return the fields of a class, each with its default and its default factory or None."""
    if is_pydantic(cls):
        return {name: (field.default, field.default_factory) for name, field in cls.model_fields.items()}
    if is_older_pydantic(cls):
        return {name: (field.default, field.default_factory) for name, field in cls.__fields__.items()}
    if is_attrs(cls):
        return {field.name: (field.default, getattr(field.default, "factory", None)) for field in cls.__attrs_attrs__}
    if is_struct(cls):
        last = zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False)
        return {name: (default, getattr(default, "factory", None)) for name, default in last}
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return {
            field.name: (field.default, None if field.default_factory is missing else field.default_factory)
            for field in dataclasses.fields(cls)
        }
    return {}


def _restore_exception(cls: Any, content: object, more: object, upgraded: bool) -> object:
    return exceptions.restore(cls, content)


def _restore_view(content: Any, more: object, upgraded: bool) -> memoryview:
    data, format, shape, is_readonly = content
    if type(data) is not bytes:  # a number would be a size
        raise ValueError("not bytes")
    view = memoryview(data if is_readonly else bytearray(data))
    return view if (format, len(shape)) == ("B", 1) else view.cast("B").cast(format, shape)


def _restore_builtin(cls: Any, base: Any, content: Any, more: object, upgraded: bool) -> object:
    plain, attributes = content
    if type(plain) is not base:
        raise ValueError(f"not a {base.__name__}")
    make: Any = base.__new__
    value: Any = make(cls, plain) if base in _IMMUTABLE else make(cls)
    if base is dict:
        dict.update(value, plain)
    elif base not in _IMMUTABLE:
        base.__init__(value, plain)
    return _with_attributes(value, attributes)


def _with_attributes(value: Any, attributes: object) -> object:
    if attributes is not None:
        object.__getattribute__(value, "__dict__").update(attributes)
    return value
