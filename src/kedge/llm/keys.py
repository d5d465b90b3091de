"""What makes two LLM calls equal: method, URL and body as canonical JSON, and the sample number.

The body has model, parameters, messages and tools. Headers and credentials in the URL never count, because they only
pay. Credentials in the body do: they decide what its tools see (`redaction`). No credentials are stored.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from kedge.errors import Validation
from kedge.model import is_utf8
from kedge.pipeline.place import sample as sample_here

from .redaction import public_url, redact, slow_hash

MAX_BODY_BYTES = 64 << 20

# Calls that only compute an answer. Others with a body (files, batches, threads) have effects at the vendor.
_CALLS = ("/chat/completions", "/completions", "/responses", "/messages", "/embeddings", "/audio/speech")
_CALLS_OF_DEFAULT_MODELS = ("/moderations", "/images/generations")
# What is free at all vendors that have it: their endings are those of paid calls elsewhere (/complete, /conversations).
_FREE = re.compile(
    r".*(?:/uploads(?:/[^/]+/(?:complete|parts))?|/files|/cancel|/count_tokens|:countTokens|/responses/input_tokens)"
)
_GEMINI = re.compile(r".*/models/([^/:]+):(?:generateContent|streamGenerateContent|embedContent|batchEmbedContents)")


@contextmanager
def sample(number: int) -> Iterator[None]:
    """Separate the calls inside from equal ones elsewhere: for several answers to one prompt.

    Includes the items of a `map` inside, whether threads, processes or other machines work on them.
    """
    token = sample_here.set(parse_sample(number))
    try:
        yield
    finally:
        sample_here.reset(token)


def parse_sample(number: int) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 1 << 31:
        raise Validation(f"sample must be a whole number from 0 on (got {number!r})")
    return number


@dataclass(frozen=True)
class Request:
    """A call as it is cached: `kind` is the HTTP method, or another caller; `where` the URL, or a name."""

    kind: str
    where: str
    body: Any  # plain JSON
    sample: int = 0
    hidden: Mapping[str, object] = field(
        default_factory=dict, repr=False
    )  # credentials of the body, which are not stored

    @cached_property
    def key(self) -> str:
        asked = canonical([self.kind, self.where, self.body, self.sample])
        if not self.hidden:
            return "llm:" + hashlib.sha256(asked).hexdigest()
        return "llm:" + hmac.digest(slow_hash(canonical(self.hidden)), asked, "sha256").hex()

    @property
    def model(self) -> str:
        model = self.body.get("model") if isinstance(self.body, dict) else None
        if model is None and (named := _GEMINI.fullmatch(urlsplit(self.where).path)):
            model = named[1]
        return model[:200] if isinstance(model, str) and model and is_utf8(model) else "unknown"

    def document(self) -> dict[str, Any]:
        """Return the request as it is stored and exported."""
        return {"method": self.kind, "url": self.where, "body": self.body, "sample": self.sample}


def is_call(method: str, path: str) -> bool:
    """Return whether this may be a call to cache; its body decides."""
    return method == "POST" and (path.endswith(_CALLS) or _names_itself(path))


def may_cost(method: str, path: str) -> bool:
    """Return whether a call that is not cached may cost money: whatever is sent, unless it is known to be free."""
    return method == "POST" and _FREE.fullmatch(path) is None


def _names_itself(path: str) -> bool:
    """Return whether the path alone identifies the kind of call. For others the model does.

    Some vendors' routes for stored conversations have the same endings.
    """
    return path.endswith(_CALLS_OF_DEFAULT_MODELS) or _GEMINI.fullmatch(path) is not None


def http_request(method: str, url: str, body: bytes) -> Request | None:
    """Return the request of an HTTP call that may be cached; None for all others."""
    parts = urlsplit(url)
    if not is_call(method, parts.path) or len(body) > MAX_BODY_BYTES:
        return None
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict) or not ("model" in fields or _names_itself(parts.path)):
            return None
        shown, hidden = redact(fields)
        request = Request("POST", public_url(parts), shown, sample_here.get(), hidden)
        return request if request.key else None  # refuses what is not JSON, such as NaN
    except (ValueError, RecursionError):
        return None


_write = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode


def canonical(value: object) -> bytes:
    """Return JSON text in the one form that equal values share: sorted names, no spaces, 1.0 written as 1."""
    try:
        return _write(_whole(value)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Validation(
            f"a call cannot be told from others: {error}", hint="use plain JSON values for models, messages and tools"
        ) from error


def _whole(value: Any) -> object:
    """Return the value with whole floats as integers, because JSON does not distinguish them."""
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
