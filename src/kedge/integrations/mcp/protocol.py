"""The Model Context Protocol on stdin and stdout: JSON-RPC 2.0, one message to a line, answered one after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, Protocol

from kedge.codec.json_view import from_json
from kedge.errors import CheckpointError, Validation

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
MAX_MESSAGE_BYTES = 16 << 20
PARSE_ERROR, INVALID_REQUEST, NO_SUCH_METHOD, INVALID_PARAMS = -32700, -32600, -32601, -32602

Document = dict[str, object]


class Tools(Protocol):
    """What a server offers."""

    instructions: str

    def describe(self) -> list[Document]: ...

    def has(self, name: str) -> bool: ...

    def call(self, name: str, arguments: Mapping[str, Any]) -> Document:
        """The result of a tool; a CheckpointError where it refuses."""


class Refused(Exception):
    """A request that is no use to anybody."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def serve(tools: Tools, version: str, incoming: BinaryIO, outgoing: BinaryIO) -> None:
    """Answer messages until there are no more."""
    while line := incoming.readline(MAX_MESSAGE_BYTES + 1):
        if len(line) > MAX_MESSAGE_BYTES:
            while line and not line.endswith(b"\n"):
                line = incoming.readline(MAX_MESSAGE_BYTES)
            answer: Document | None = _failure(
                None, INVALID_REQUEST, f"a message has more than {MAX_MESSAGE_BYTES:,} bytes"
            )
        else:
            answer = respond(tools, version, line) if line.strip() else None
        if answer is not None:
            outgoing.write(json.dumps(answer, separators=(",", ":"), allow_nan=False).encode() + b"\n")
            outgoing.flush()


def respond(tools: Tools, version: str, line: bytes) -> Document | None:
    """The answer to one message; None for a notification."""
    try:
        message = from_json(line)
    except Validation as error:
        return _failure(None, PARSE_ERROR, str(error))
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return _failure(None, INVALID_REQUEST, "not a request: use one JSON object to a line, with a method")
    number, params = message.get("id"), message.get("params", {})
    if number is None:
        return None
    if not isinstance(number, str | int) or isinstance(number, bool) or not isinstance(params, dict):
        return _failure(None, INVALID_REQUEST, "id must be text or an integer, and params an object")
    method = _METHODS.get(message["method"])
    try:
        if method is None:
            raise Refused(NO_SUCH_METHOD, f"there is no method {message['method'][:100]}")
        return {"jsonrpc": "2.0", "id": number, "result": method(tools, version, params)}
    except Refused as refused:
        return _failure(number, refused.code, str(refused))


def _initialize(tools: Tools, version: str, params: Document) -> Document:
    asked = params.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": "kedge", "version": version},
        "instructions": tools.instructions,
    }


def _list_tools(tools: Tools, version: str, params: Document) -> Document:
    return {"tools": tools.describe()}


def _call_tool(tools: Tools, version: str, params: Document) -> Document:
    name, arguments = params.get("name"), params.get("arguments") or {}
    if not isinstance(name, str) or not isinstance(arguments, dict) or not tools.has(name):
        raise Refused(INVALID_PARAMS, f"there is no tool {str(name)[:100]!r}; tools/list names them")
    try:
        return _result(tools.call(name, arguments), is_error=False)
    except CheckpointError as error:
        return _result({"error": error.code, "message": error.message, "hint": error.hint}, is_error=True)


def _result(document: Document, *, is_error: bool) -> Document:
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    return {"content": [{"type": "text", "text": text}], "structuredContent": document, "isError": is_error}


def _failure(number: str | int | None, code: int, message: str) -> Document:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}}


_METHODS: dict[str, Callable[[Tools, str, Document], Document]] = {
    "initialize": _initialize,
    "ping": lambda *_: {},
    "tools/list": _list_tools,
    "tools/call": _call_tool,
}
