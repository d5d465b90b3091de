"""A failure as data: how it is shown, kept in the store, sent between processes, and raised again.

An exception is written down by the name of its class, its message, arguments and attributes, as far as the codec knows
them; a group with its members. It is raised again as an instance of that class if the program has loaded the class; no
module is imported, and no constructor of the class runs (I7). Otherwise a `StepFailed` with the same text stands in.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge import codec

MAX_ERROR_CHARACTERS = 500
MAX_TRACEBACK_CHARACTERS = 20_000
MAX_VALUE_BYTES = 64 * 1024  # of one argument or attribute
MAX_MEMBERS = 1000  # of a group of exceptions


def one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {_text(str, error)}".strip()
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]


def traceback_of(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TRACEBACK_CHARACTERS else "…\n" + text[-MAX_TRACEBACK_CHARACTERS:]


class StepFailed(Exception):
    """Stands in for an exception whose class this program has not loaded. Retry rules match it by the class's name."""

    type_names: tuple[str, ...] = ()  # of the class and its bases, nearest first: "module:name"


class WorkerTraceback(Exception):
    """The traceback of an exception in the process where it was raised; its cause here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as data."""

    type_names: tuple[str, ...]
    message: str
    args: tuple[Any, ...]
    attributes: Mapping[str, object]
    traceback: str  # "": that of the group it is a member of shows it
    members: tuple[Failure, ...] = ()  # of a group

    @classmethod
    def of(cls, error: BaseException, *, is_member: bool = False) -> Failure:
        names = tuple(type_name(kind) for kind in type(error).__mro__ if issubclass(kind, BaseException))
        made_of, about = _parts(error)
        attributes = {name: value for name, value in about.items() if _is_plain(value)}
        args = tuple(value if _is_plain(value) else _text(repr, value) for value in made_of)
        group = error.exceptions[:MAX_MEMBERS] if isinstance(error, BaseExceptionGroup) else ()
        members = tuple(cls.of(member, is_member=True) for member in group)
        trace = "" if is_member else traceback_of(error)
        return cls(names, _text(str, error), args, attributes, trace, members)

    def state(self) -> dict[str, object]:
        """For the codec."""
        return {
            "type": list(self.type_names),
            "message": self.message,
            "args": list(self.args),
            "attributes": dict(self.attributes),
            "traceback": self.traceback,
            **({"members": [member.state() for member in self.members]} if self.members else {}),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Failure:
        return cls(
            tuple(state["type"]), state["message"], tuple(state["args"]), state["attributes"], state["traceback"],
            tuple(cls.from_state(member) for member in state.get("members", ())),
        )  # fmt: skip

    def rebuild(self) -> Exception:
        """The exception, to be raised; its class as far as it is loaded here."""
        kind = _loaded_class(self.type_names[0]) if self.type_names else None
        error = None if kind is None else self._instance(kind)
        if error is None:
            error = StepFailed(f"{self.type_names[0].rpartition(':')[2]}: {self.message}")
            error.type_names = self.type_names
        if self.traceback:
            error.__cause__ = WorkerTraceback(self.traceback)
        return error

    def _instance(self, kind: type[Exception]) -> Exception | None:
        members = [member.rebuild() for member in self.members]
        error = _new(kind, (*self.args[:1], members) if members else self.args)
        if error is None:
            return None
        if kind.__module__ == "builtins":
            error.__setstate__(dict(self.attributes))
        else:
            error.__dict__.update(self.attributes)
        if _text(str, error) == self.message:
            return error
        try:  # its text is made of what could not be kept
            shown = type(kind.__name__, (kind,), {"__str__": lambda _: self.message, "__module__": kind.__module__})
            error.__class__ = shown
        except Exception:  # noqa: BLE001 - whatever the class does when somebody inherits from it
            return None
        return error


def type_name(kind: type) -> str:
    """One that all processes of a program share, whether they run its file or import it, as workers do."""
    is_main = kind.__module__ in ("__main__", "__mp_main__")
    return f"{(_main_name() or '__main__') if is_main else kind.__module__}:{kind.__qualname__}"


def _main_name() -> str:
    """Under which others import the file that this process runs; "": it runs none."""
    return Path(getattr(sys.modules.get("__main__"), "__file__", None) or "").stem


def _loaded_class(name: str) -> type[Exception] | None:
    """A class by its name, if its module is loaded; found in namespaces only, so that nothing is executed (I7)."""
    module, _, qualified = name.partition(":")
    homes = [module, "__main__"] if module == _main_name() else [module]
    for home in homes:
        value: Any = sys.modules.get(home)
        for part in qualified.split("."):
            value = None if value is None else vars(value).get(part)
            if not isinstance(value, type):
                value = None
        if value is not None and issubclass(value, Exception):
            return value  # type: ignore[no-any-return]
    return None


def _parts(error: BaseException) -> tuple[tuple[object, ...], Mapping[str, object]]:
    """The arguments an exception is made of, and its attributes. Built-in ones have some that are not in their
    dictionary: the name of a file, or of a module."""
    if type(error).__module__ != "builtins":
        return error.args, vars(error)
    parts: Any = error.__reduce__()  # (class, arguments), or also the attributes
    return parts[1], (parts[2] if len(parts) > 2 else None) or {}


def _new(kind: type[Exception], args: tuple[Any, ...]) -> Exception | None:
    """An instance by the constructor of the built-in class below it."""
    for base in kind.__mro__:
        if base.__module__ == "builtins":
            try:
                error: Exception = base.__new__(kind, *args)
                if kind is base:
                    error.__init__(*args)  # type: ignore[misc]
                else:
                    error.args = args
            except (TypeError, ValueError):
                continue  # it is made by another of the built-in classes, or not by these arguments
            return error
    return None


def _is_plain(value: object) -> bool:
    """Whether a value is small, and can be saved."""
    try:
        encoded = codec.encode(value)
    except Exception:  # noqa: BLE001 - whatever the code of others does when it is looked at
        return False
    return not encoded.buffers and len(encoded.tree) <= MAX_VALUE_BYTES


def _text(show: Callable[[object], str], value: object) -> str:
    try:
        return show(value)[:MAX_TRACEBACK_CHARACTERS].encode("utf-8", "replace").decode()
    except Exception as error:  # noqa: BLE001 - whatever the code of others does when it is asked for text
        return f"<{type(value).__name__}, whose text cannot be made: {type(error).__name__}>"


@dataclass(frozen=True, slots=True)
class ItemError:
    """What stands in the place of a result where an item failed and on_error says to go on. May be saved, and sent."""

    key: str
    error: str
    traceback: str
    attempts: int = 1
    exception: Exception | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, key: str, error: Exception, attempts: int) -> ItemError:
        return cls(key, one_line(error), traceback_of(error), attempts, error)

    def state(self) -> dict[str, object]:
        failure = None if self.exception is None else Failure.of(self.exception).state()
        return {"key": self.key, "error": self.error, "traceback": self.traceback, "attempts": self.attempts,
                "exception": failure}  # fmt: skip

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> ItemError:
        failure = state["exception"]
        exception = None if failure is None else Failure.from_state(failure).rebuild()
        return cls(state["key"], state["error"], state["traceback"], state["attempts"], exception)

    def __reduce__(self) -> tuple[object, ...]:
        """Between processes the exception travels as data, too: many cannot be unpickled."""
        return (ItemError.from_state, (self.state(),))


codec.register("kedge.ItemError", encode=ItemError.state, decode=ItemError.from_state)(ItemError)
