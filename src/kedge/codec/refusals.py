"""Why a value is not saved, and what its owner can do: the texts of all UnsupportedType errors on save."""

from __future__ import annotations

import dataclasses
import io
import sys
import types
from enum import Enum

from kedge.errors import InvalidName
from kedge.model import parse_name

from .kinds import Problem, unsupported

_BUILTINS = (str, int, float, complex, bytes, bytearray, list, tuple, dict, set, frozenset)


def refusal(value: object) -> Problem:
    """Return the problem for a value whose class the codec does not know."""
    cls = type(value)
    return unsupported(f"has type {qualified(cls)}, which cannot be saved", _hint(value, cls))


def qualified(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def _hint(value: object, cls: type) -> str:
    if isinstance(value, memoryview):
        return "save bytes(view), or the array it looks at"
    if isinstance(value, type):
        return "classes are code, not data: save the name of the class"
    if isinstance(value, BaseException):
        return f"save its text, or {_add_line(cls, needs_functions=True)}"
    if callable(getattr(cls, "state_dict", None)):
        return "save its state_dict()"
    if hint := _library_hint(value, cls) or _live_hint(value, cls):
        return hint
    if has_fields(cls):
        return f"{_add_line(cls)} above the class, which makes its fields part of the format"
    for base in _BUILTINS:
        if isinstance(value, base):
            return f"convert it with {base.__name__}(…), or {_add_line(cls, needs_functions=True)}"
    return _add_line(cls, needs_functions=True)


def _live_hint(value: object, cls: type) -> str:
    """Return the hint for code, or what belongs to the running process."""
    random = sys.modules.get("random")
    if random is not None and isinstance(value, random.Random):
        return "save rng.getstate() and restore it with rng.setstate(state)"
    if isinstance(value, io.BytesIO | io.StringIO):
        return "save its content: buffer.getvalue()"
    if isinstance(value, io.IOBase):
        return "save its path and file.tell(), or its content: kedge.File(path)"
    if hasattr(cls, "__next__"):
        return "save list(…) of it, or how many items were taken, and skip those after loading"
    if hasattr(cls, "__await__"):
        return "await it and save the result"
    if isinstance(value, types.ModuleType) or (callable(value) and not has_fields(cls)):
        return "code is not saved: save a name, and look the function up by that name after loading"
    if hasattr(cls, "__exit__") and not has_fields(cls):
        return "it belongs to the running process: save what is needed to make it again"
    return ""


def _library_hint(value: object, cls: type) -> str:
    package = cls.__module__.partition(".")[0]
    numpy = sys.modules.get("numpy")
    if package == "numpy" and (hint := _random_hint(value)):
        return hint
    if numpy is not None and isinstance(value, numpy.ndarray):
        if isinstance(value, numpy.ma.MaskedArray):
            return "save its .data and .mask as two arrays"
        return "a subclass of ndarray would lose its class: save numpy.asarray(…)"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return "a subclass of Tensor would lose its class: save value.detach().as_subclass(torch.Tensor)"
    if torch is not None and isinstance(value, torch.Generator):
        return "save generator.get_state() and restore it with generator.set_state(state)"
    if package == "pandas":
        return "of pandas, DataFrame, Series, Index, Timestamp, Timedelta, NaT and NA can be saved"
    if package in ("polars", "pyarrow"):
        return f"of {package}, tables can be saved; for other values, their Python form"
    return ""


def _random_hint(value: object) -> str:
    """Return the hint for numpy's random sources, whose classes and seeds are not their whole state."""
    if hasattr(value, "bit_generator"):
        return "save rng.bit_generator.state and restore it with rng.bit_generator.state = state"
    if hasattr(value, "random_raw"):
        return "save its .state and restore it by assigning to .state"
    if hasattr(value, "get_state"):
        return "save rng.get_state() and restore it with rng.set_state(state)"
    return ""


def has_fields(cls: type) -> bool:
    """Return whether `register` can save this class by its fields, without functions from the application."""
    return dataclasses.is_dataclass(cls) or issubclass(cls, Enum) or is_namedtuple(cls) or is_model(cls)


def is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def is_model(cls: type) -> bool:
    return is_pydantic(cls) or is_older_pydantic(cls) or is_struct(cls) or is_attrs(cls)


def is_pydantic(cls: type) -> bool:
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def is_struct(cls: type) -> bool:
    msgspec = sys.modules.get("msgspec")
    return msgspec is not None and issubclass(cls, msgspec.Struct)


def _add_line(cls: type, *, needs_functions: bool = False) -> str:
    name = cls.__name__ if cls.__module__ in ("__main__", "builtins") else f"{cls.__module__}.{cls.__name__}"
    try:
        parse_name("type", name)
    except InvalidName:
        name = f"app.{cls.__name__}".encode("ascii", "replace").decode().replace("?", "-")[:128]
    functions = ", encode=…, decode=…" if needs_functions else ""
    return f'add @kedge.register("{name}"{functions})'


def is_older_pydantic(cls: type) -> bool:
    """Return whether it is a model of pydantic 1, which pydantic 2 includes."""
    pydantic = sys.modules.get("pydantic.v1.main")
    return pydantic is not None and issubclass(cls, pydantic.BaseModel)


def is_attrs(cls: type) -> bool:
    return "__attrs_attrs__" in vars(cls) and not issubclass(cls, BaseException)
