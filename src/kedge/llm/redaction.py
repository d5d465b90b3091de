"""The credentials in a request: recognised by name, at any depth, and never stored.

Credentials in a body are for the vendor's tools: a mailbox, a search index, an MCP server. Their owner decides what the
model sees. So they are part of a call's key, as a hash that only their holder can compute.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from kedge.pipeline.credentials import has_credentials, is_credential, plain_name

HIDDEN = "…"

_IN_URLS = ("auth", "code", "sig", "sas")
_SCHEMAS = ("parameters", "inputschema", "schema", "jsonschema")
_TOOLS = ("tools", "mcp_servers")


def redact(body: dict[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return the body as it may be stored, and what is hidden in it, by path."""
    hidden: dict[str, object] = {}
    shown = {
        name: _member(name, value, f"/{name}", hidden, is_tool=name.lower() in _TOOLS) for name, value in body.items()
    }
    return shown, hidden


def public_url(parts: SplitResult) -> str:
    """Return a URL without user, password, fragment and apparent credentials, with sorted parameters."""
    query = [
        (name, value)
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
        if not (is_credential(name) or plain_name(name) in _IN_URLS)
    ]
    place = parts.netloc.rpartition("@")[2].lower()
    return urlunsplit((parts.scheme.lower(), place, parts.path, urlencode(sorted(query)), ""))


@lru_cache(maxsize=256)
def slow_hash(secrets: bytes) -> bytes:
    """Hash credentials for a stored key, slowly, so that short ones cannot be guessed."""
    return hashlib.scrypt(secrets, salt=b"kedge llm credentials", n=1 << 14, r=8, p=1, dklen=32)


def _member(name: str, value: object, path: str, hidden: dict[str, object], *, is_tool: bool) -> object:
    plain = plain_name(name)
    if value is None or isinstance(value, bool):
        return value
    if has_credentials(name):
        hidden[path] = value
        return _blank(value)
    if plain in _SCHEMAS and isinstance(value, dict) and ("properties" in value or value.get("type") == "object"):
        return value  # a description of parameters: their names reveal no secret
    if plain.endswith(("url", "uri", "endpoint")) and isinstance(value, str) and value.startswith(("http:", "https:")):
        parts = urlsplit(value)
        # A tool's address is often its credential; other addresses only lose what looks like one.
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{HIDDEN}" if is_tool else public_url(parts)
        if shown != value:
            hidden[path] = value
        return shown
    return _inside(value, path, hidden, is_tool=is_tool)


def _inside(value: object, path: str, hidden: dict[str, object], *, is_tool: bool) -> object:
    if isinstance(value, list):
        return [_inside(inner, f"{path}/{n}", hidden, is_tool=is_tool) for n, inner in enumerate(value)]
    if isinstance(value, dict):
        return {name: _member(name, inner, f"{path}/{name}", hidden, is_tool=is_tool) for name, inner in value.items()}
    return value


def _blank(value: object) -> object:
    """Return the names of a value without its content."""
    if isinstance(value, dict):
        return {name: _blank(inner) for name, inner in value.items()}
    return HIDDEN
