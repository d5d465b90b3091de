"""What makes two calls of a model the same call: method, URL and body as canonical JSON, and which sample is meant.

The body holds model, parameters, messages and tools. Headers never count, and credentials neither count nor are kept:
not those in a URL, nor those that requests carry for tools of the vendor's side.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from kedge.errors import Validation
from kedge.model import is_utf8

HIDDEN = "…"
MAX_BODY_BYTES = 64 << 20

# Calls that only compute an answer. Others with a body (files, batches, threads) change something at the vendor's.
_CALLS = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings")
_SECRETS = {
    "access_token", "api-key", "api_key", "apikey", "authorization", "authorization_token", "client_secret",
    "password", "secret", "token", "x-api-key",
}  # fmt: skip
_SECRETS_IN_URLS = _SECRETS | {"auth", "code", "key", "sig", "signature", "subscription-key"}
_WITH_SECRETS = ("tools", "mcp_servers")  # parts of a body that carry credentials for others

_sample: ContextVar[int] = ContextVar("kedge_llm_sample", default=0)


@contextmanager
def sample(number: int) -> Iterator[None]:
    """Calls inside are kept apart from the same calls elsewhere: for several answers to one prompt."""
    token = _sample.set(parse_sample(number))
    try:
        yield
    finally:
        _sample.reset(token)


def current_sample() -> int:
    return _sample.get()


def parse_sample(number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 31:
        raise Validation(f"sample must be a whole number from 0 on (got {number!r})")
    return number


@dataclass(frozen=True)
class Request:
    """A call as it is known: `kind` is the HTTP method, or what else makes calls; `where` the URL, or a name."""

    kind: str
    where: str
    body: Any  # plain JSON
    sample: int = 0

    @cached_property
    def key(self) -> str:
        return "llm:" + hashlib.sha256(canonical([self.kind, self.where, self.body, self.sample])).hexdigest()

    @property
    def model(self) -> str:
        model = self.body.get("model") if isinstance(self.body, dict) else None
        return model[:200] if isinstance(model, str) and model and is_utf8(model) else "unknown"

    def document(self) -> dict[str, Any]:
        """The request as it is stored and exported."""
        return {"method": self.kind, "url": self.where, "body": self.body, "sample": self.sample}


def is_call(method: str, path: str) -> bool:
    """Whether this may be a call that is kept; its body tells."""
    return method == "POST" and path.endswith(_CALLS)


def http_request(method: str, url: str, body: bytes) -> Request | None:
    """The request of an HTTP call that may be kept; None for all others."""
    parts = urlsplit(url)
    if not is_call(method, parts.path) or len(body) > MAX_BODY_BYTES:
        return None
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict) or "model" not in fields:
            return None
        request = Request("POST", _public(parts), _without_secrets(fields), current_sample())
        return request if request.key else None  # which refuses what is no JSON, such as NaN
    except (ValueError, RecursionError):
        return None


_write = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


def canonical(value: Any) -> bytes:
    """JSON text in the one form that equal values share: sorted names, no spaces, 1.0 written as 1."""
    try:
        return _write(_whole(value)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Validation(
            f"a call cannot be told from others: {error}", hint="use plain JSON values for models, messages and tools"
        ) from error


def _whole(value: Any) -> Any:
    """The value with whole floats as integers, as JSON does not tell them apart."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if kind is dict:
        for name in value:
            if type(name) is not str:
                raise TypeError("a name in it is not text")
        return {name: _whole(inner) for name, inner in value.items()}
    if kind is list or kind is tuple:
        return [_whole(inner) for inner in value]
    if kind is float:
        return int(value) if value.is_integer() and abs(value) < 1 << 53 else value
    return value


def _without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: _hide(value) if name in _WITH_SECRETS else value for name, value in fields.items()}


def _hide(value: Any) -> Any:
    """Parts of tools that are credentials, or headers that may be, without their content.

    Descriptions of parameters are left alone: what a parameter is called says nothing about a secret.
    """
    if isinstance(value, list):
        return [_hide(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    shown: dict[str, Any] = {}
    for name, inner in value.items():
        low = name.lower()
        if low in ("headers", "env") and isinstance(inner, dict):
            shown[name] = dict.fromkeys(inner, HIDDEN)
        elif low in _SECRETS and isinstance(inner, str):
            shown[name] = HIDDEN
        elif low in ("url", "server_url") and isinstance(inner, str):
            shown[name] = _public(urlsplit(inner))
        elif low in ("parameters", "input_schema", "schema"):
            shown[name] = inner
        else:
            shown[name] = _hide(inner)
    return shown


def _public(parts: SplitResult) -> str:
    """A URL without user, password, fragment and what looks like a credential; parameters in order."""
    query = [(n, v) for n, v in parse_qsl(parts.query, keep_blank_values=True) if n.lower() not in _SECRETS_IN_URLS]
    place = parts.netloc.rpartition("@")[2].lower()
    return urlunsplit((parts.scheme.lower(), place, parts.path, urlencode(sorted(query)), ""))
