"""The types of LangGraph and LangChain that a state may hold: an allow-list, nothing is looked up by name on load (I7).

Messages are saved by the fields that differ from their defaults, the text first, so that two messages with the same
text share it even when one has got its ID in between.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from langchain_core import documents, messages
from langchain_core.messages import BaseMessage
from langgraph import types as graph_types
from langgraph.checkpoint.serde import types as channel_types

from kedge.codec import register
from kedge.codec.kinds import by_class

_MESSAGES = (
    "AIMessage", "AIMessageChunk", "ChatMessage", "ChatMessageChunk", "FunctionMessage", "FunctionMessageChunk",
    "HumanMessage", "HumanMessageChunk", "RemoveMessage", "SystemMessage", "SystemMessageChunk", "ToolMessage",
    "ToolMessageChunk",
)  # fmt: skip
_GRAPH_TYPES = (
    (graph_types, "Command"), (graph_types, "Interrupt"), (graph_types, "Overwrite"), (graph_types, "TimeoutPolicy"),
    (channel_types, "_DeltaSnapshot"),  # has no public name, and stands in checkpoints
)  # fmt: skip

message_classes: frozenset[type] = frozenset()


def register_all() -> None:
    """Enter all of them, leaving alone what the application has registered itself."""
    global message_classes
    classes = [getattr(messages, name) for name in _MESSAGES if hasattr(messages, name)]
    for cls in classes:
        _enter(f"langchain.{cls.__name__}", cls, *_by_difference(cls))
    message_classes = frozenset(classes)
    _enter("langchain.Document", documents.Document)
    for module, name in _GRAPH_TYPES:
        if hasattr(module, name):
            _enter(f"langgraph.{name.removeprefix('_')}", getattr(module, name))
    _enter("langgraph.Send", graph_types.Send, _take_send, _make_send)
    for cls in vars(builtins).values():
        if isinstance(cls, type) and issubclass(cls, Exception) and not issubclass(cls, BaseExceptionGroup):
            _enter(f"builtins.{cls.__name__}", cls, _take_exception, _exception_maker(cls))


def _enter(
    name: str, cls: Any, encode: Callable[[Any], object] | None = None, decode: Callable[[Any], object] | None = None
) -> None:
    if cls not in by_class:
        register(name, encode=encode, decode=decode)(cls)


def _by_difference(cls: type[BaseMessage]) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    fields = cls.model_fields
    required = [name for name, field in fields.items() if field.is_required()]
    names = ["content", *(name for name in fields if name != "content")]
    defaults = {name: fields[name].get_default(call_default_factory=True) for name in names if name not in required}

    def take(message: BaseMessage) -> object:
        if message.__pydantic_private__ is not None or message.__dict__.keys() != fields.keys():
            raise ValueError("it has attributes that are not fields")
        values = message.__dict__
        taken = {name: values[name] for name in names if name in required or not _equal(values[name], defaults[name])}
        was_set = message.__pydantic_fields_set__
        return [taken, None if was_set == taken.keys() else sorted(was_set), message.__pydantic_extra__ or None]

    def make(saved: Any) -> object:
        saved_fields, was_set, extra = saved
        if not saved_fields.keys() <= fields.keys() or not saved_fields.keys() >= set(required):
            raise ValueError("its fields are not those of the class")
        values = {name: saved_fields[name] if name in saved_fields else _fresh(defaults[name]) for name in names}
        is_open = cls.model_config.get("extra") == "allow"
        return new_message(
            cls, values, set(saved_fields if was_set is None else was_set), extra or ({} if is_open else None)
        )

    return take, make


def new_message(cls: Any, values: dict[str, Any], was_set: set[str], extra: dict[str, Any] | None) -> BaseMessage:
    """A message with exactly these fields; no validator runs."""
    message: BaseMessage = cls.__new__(cls)
    put = object.__setattr__
    put(message, "__dict__", values)
    put(message, "__pydantic_fields_set__", was_set)
    put(message, "__pydantic_extra__", extra)
    put(message, "__pydantic_private__", None)
    return message


def _fresh(default: Any) -> Any:
    return default.copy() if isinstance(default, dict | list) else default


def _equal(value: object, default: object) -> bool:
    return type(value) is type(default) and (value is default or bool(value == default))


def _take_send(send: Any) -> object:
    return {"node": send.node, "arg": send.arg, "timeout": getattr(send, "timeout", None)}


def _make_send(fields: Any) -> object:
    send = graph_types.Send(fields["node"], fields["arg"])
    if fields["timeout"] is not None:
        send.timeout = fields["timeout"]
    return send


def _take_exception(error: Exception) -> object:
    return error.args


def _exception_maker(cls: type[Exception]) -> Callable[[Any], object]:
    return lambda args: cls(*args)
