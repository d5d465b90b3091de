"""The types of LangGraph and LangChain that a state may hold: an allow-list, nothing is looked up by name on load (I7).

Messages are saved by the fields that differ from their defaults, the text first, so that two messages with the same
text share it even when one has got its ID in between.
"""

from __future__ import annotations

import builtins
import ipaddress
import re
import types
from array import array
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pydantic
from langchain_core import agents, documents, messages  # noqa: F401 - agents: its classes are found imported
from langchain_core.messages import BaseMessage
from langgraph import types as graph_types
from langgraph.checkpoint.serde import types as channel_types
from langgraph.store.base import Item, SearchItem

from kedge.codec import by_name, register
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

_ADDRESSES = ("IPv4Address", "IPv4Interface", "IPv4Network", "IPv6Address", "IPv6Interface", "IPv6Network")
_URLS = (
    "AmqpDsn", "AnyHttpUrl", "AnyUrl", "AnyWebsocketUrl", "ClickHouseDsn", "CockroachDsn", "FileUrl", "FtpUrl",
    "HttpUrl", "KafkaDsn", "MariaDBDsn", "MongoDsn", "MySQLDsn", "NatsDsn", "PostgresDsn", "RedisDsn", "SnowflakeDsn",
    "WebsocketUrl",
)  # fmt: skip
# Modules of data alone, whose classes are rebuilt by name (kedge.codec.by_name) where the program has imported them.
_WELL_KNOWN = (
    "asyncio.exceptions", "json.decoder:JSONDecodeError", "langchain_core.exceptions", "langgraph.errors",
    "pydantic.types:ByteSize", "subprocess:CalledProcessError", "subprocess:TimeoutExpired",
    "anthropic.types", "builtins:memoryview", "google.genai.types", "langchain_core.agents", "langchain_core.documents",
    "langchain_core.messages", "langchain_core.outputs", "langchain_core.prompt_values", "langgraph.store.base",
    "langgraph.types", "mcp.types", "openai.types", "pydantic_ai.messages",
)  # fmt: skip

message_classes: frozenset[type] = frozenset()


def register_all() -> None:
    """Enter all of them, leaving alone what the application has registered itself."""
    global message_classes
    classes = [getattr(messages, name) for name in _MESSAGES if hasattr(messages, name)]
    for cls in classes:
        _enter(f"langchain.{cls.__name__}", cls, *_by_difference(cls))
    message_classes = frozenset(classes)
    by_name.allow(*_WELL_KNOWN)
    _enter("langchain.Document", documents.Document)
    for module, name in _GRAPH_TYPES:
        if hasattr(module, name):
            _enter(f"langgraph.{name.removeprefix('_')}", getattr(module, name))
    _enter("langgraph.Send", graph_types.Send, _take_send, _make_send)
    for item in (Item, SearchItem):
        _enter(f"langgraph.{item.__name__}", item, _take_item, partial(_make_item, item))
    _enter("re.Pattern", re.Pattern, lambda pattern: [pattern.pattern, pattern.flags], lambda saved: re.compile(*saved))
    for module, by_text in ((ipaddress, _ADDRESSES), (pydantic, _URLS)):
        for cls in (getattr(module, name) for name in by_text if hasattr(module, name)):
            _enter(f"{module.__name__}.{cls.__name__}", cls, str, cls)
    _enter("types.SimpleNamespace", types.SimpleNamespace, vars, lambda saved: types.SimpleNamespace(**saved))
    _enter("array.array", array, lambda saved: [saved.typecode, saved.tolist()], lambda saved: array(*saved))
    _register_exceptions()


def _register_exceptions() -> None:
    """Python's own, which are saved by name; older stores have them under these names, with their arguments alone."""
    for cls in vars(builtins).values():
        if isinstance(cls, type) and issubclass(cls, BaseException):
            by_name.allow(f"builtins:{cls.__name__}")
            if cls not in by_class and issubclass(cls, Exception) and not issubclass(cls, BaseExceptionGroup):
                _enter(f"builtins.{cls.__name__}", cls, attrgetter("args"), _exception_maker(cls))
                del by_class[cls]


def _enter(
    name: str, cls: Any, encode: Callable[[Any], object] | None = None, decode: Callable[[Any], object] | None = None
) -> None:
    if cls not in by_class:
        register(name, encode=encode, decode=decode)(cls)


def _by_difference(cls: type[BaseMessage]) -> tuple[Callable[[Any], object], Callable[[Any], object]]:
    fields = cls.model_fields
    required = {name for name, field in fields.items() if field.is_required()}
    names = ["content", *(name for name in fields if name != "content")]
    defaults = {name: fields[name].get_default(call_default_factory=True) for name in names if name not in required}
    template = {name: defaults.get(name) for name in names}
    mutable = [(name, default.copy) for name, default in defaults.items() if isinstance(default, dict | list)]
    is_open = cls.model_config.get("extra") == "allow"

    def take(message: BaseMessage) -> object:
        if message.__pydantic_private__ is not None or message.__dict__.keys() != fields.keys():
            raise ValueError("it has attributes that are not fields")
        values = message.__dict__
        taken = {name: values[name] for name in names if name in required or not _equal(values[name], defaults[name])}
        was_set = message.__pydantic_fields_set__
        return [taken, None if was_set == taken.keys() else sorted(was_set), message.__pydantic_extra__ or None]

    def make(saved: Any) -> object:
        saved_fields, was_set, extra = saved
        if not saved_fields.keys() <= fields.keys() or not saved_fields.keys() >= required:
            raise ValueError("its fields are not those of the class")
        values = {**template, **saved_fields}
        for name, new in mutable:
            if name not in saved_fields:
                values[name] = new()
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


def _equal(value: object, default: object) -> bool:
    return type(value) is type(default) and (value is default or bool(value == default))


def _take_send(send: Any) -> object:
    return {"node": send.node, "arg": send.arg, "timeout": getattr(send, "timeout", None)}


def _make_send(fields: Any) -> object:
    send = graph_types.Send(fields["node"], fields["arg"])
    if fields["timeout"] is not None:
        send.timeout = fields["timeout"]
    return send


def _take_item(item: Item) -> object:
    return {name: getattr(item, name) for name in (*Item.__slots__, "score") if hasattr(item, name)}


def _make_item(cls: Any, fields: Any) -> object:
    return cls(**fields)


def _exception_maker(cls: type[Exception]) -> Callable[[Any], object]:
    return lambda args: cls(*args)
