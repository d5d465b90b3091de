"""Tokens and money. Prices come from genai-prices; a model it does not know is unpriced, not free."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from genai_prices import Usage


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a call. `input` is the whole prompt, including what the vendor's cache read or wrote."""

    input: int = 0
    output: int = 0
    cache_read: int = 0
    cache_write: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(
            self.input + other.input,
            self.output + other.output,
            self.cache_read + other.cache_read,
            self.cache_write + other.cache_write,
        )

    def to_json(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, document: object) -> Self:
        given = document if isinstance(document, Mapping) else {}
        return cls(*(_count(given, name) for name in ("input", "output", "cache_read", "cache_write")))


def tokens_of(document: Mapping[str, object]) -> Tokens | None:
    """Return the tokens in an answer of OpenAI (two forms), Anthropic or Gemini; None if it has none."""
    usage = document.get("usage")
    if isinstance(document.get("usageMetadata"), Mapping):  # Gemini
        usage = document["usageMetadata"]
        output = _count(usage, "candidatesTokenCount") + _count(usage, "thoughtsTokenCount")
        prompt = _count(usage, "promptTokenCount") + _count(usage, "toolUsePromptTokenCount")
        return Tokens(prompt, output, _count(usage, "cachedContentTokenCount"))
    if not isinstance(usage, Mapping):
        return None
    if "prompt_tokens" in usage:  # chat completions, embeddings
        details = usage.get("prompt_tokens_details")
        return Tokens(
            _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), _count(details, "cached_tokens")
        )
    if "input_tokens" not in usage:
        return None
    output = _count(usage, "output_tokens")
    if "input_tokens_details" in usage:  # responses, images
        details = usage["input_tokens_details"]
        return Tokens(_count(usage, "input_tokens"), output, _count(details, "cached_tokens"))
    read, written = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    return Tokens(_count(usage, "input_tokens") + read + written, output, read, written)


def cost_of(document: Mapping[str, object], model: str, url: str = "") -> Decimal | None:
    """Return an answer's cost in dollars: for its tokens, by kind and cache lifetime, and for its searches.

    Uses the model named in the answer; if its price is unknown, the requested one.
    """
    usage = _usage_of(document)
    if usage is None:
        return None
    answering = document.get("model", document.get("modelVersion"))
    names = dict.fromkeys(name for name in (answering, model) if isinstance(name, str) and name)
    return next((cost for name in names if (cost := _calculated(name, usage, url)) is not None), None)


def price(model: str, tokens: Tokens, url: str = "") -> Decimal | None:
    """Return the price of these tokens in dollars; None if unknown."""
    try:
        from genai_prices import Usage
    except ModuleNotFoundError:
        return None
    usage = Usage(
        input_tokens=tokens.input,
        output_tokens=tokens.output or None,
        cache_read_tokens=tokens.cache_read or None,
        cache_write_tokens=tokens.cache_write or None,
    )
    return _calculated(model, usage, url)


def _usage_of(document: Mapping[str, object]) -> Usage | None:
    """Return what is charged for, as genai-prices reads it from each vendor's answers."""
    if tokens_of(document) is None:
        return None
    try:
        from genai_prices import extract_usage
    except ModuleNotFoundError:
        return None
    vendor, flavor = _form_of(document)
    counted = {name: document[name] for name in ("usage", "usageMetadata") if name in document}
    try:
        usage = extract_usage(counted, provider_id=vendor, api_flavor=flavor).usage
    except (LookupError, ValueError):
        return None  # not in the vendor's form
    output = document.get("output")
    searches = [item for item in output if _is_search(item)] if isinstance(output, list) else []
    if searches:  # OpenAI lists them only in the answer
        usage.web_searches = len(searches)
    return usage


def _form_of(document: Mapping[str, object]) -> tuple[str, str]:
    """Return the vendor whose form an answer has, whoever sent it, and which of its forms."""
    usage = document.get("usage")
    if not isinstance(usage, Mapping):
        return "google", "default"
    if "prompt_tokens" in usage:
        return "openai", "chat" if "completion_tokens" in usage else "embeddings"
    details = usage.get("input_tokens_details")
    if details is None:
        return "anthropic", "default"
    return "openai", "images" if isinstance(details, Mapping) and "image_tokens" in details else "responses"


def _is_search(item: object) -> bool:
    if not isinstance(item, Mapping) or item.get("type") != "web_search_call":
        return False
    action = item.get("action")  # pages that are opened or searched cost nothing extra
    return not isinstance(action, Mapping) or action.get("type", "search") == "search"


def _calculated(model: str, usage: Usage, url: str) -> Decimal | None:
    from genai_prices import calc_price

    for place in (url, None) if url else (None,):  # a private gateway is known only by its models
        try:
            return Decimal(calc_price(usage, model, provider_api_url=place).total_price)
        except (LookupError, ValueError):
            continue
    return None


def prepare() -> None:
    """Read the prices during the first call, because that takes half a second."""
    global _is_prepared
    if not _is_prepared:
        _is_prepared = True
        threading.Thread(target=price, args=("none", Tokens()), name="kedge-prices", daemon=True).start()


_is_prepared = False


def dollars(amount: Decimal) -> str:
    """Format an amount for people: with cents, or for small ones with two significant digits."""
    if amount >= 1 or not amount:
        return f"${amount:,.2f}"
    places = min(10, 1 - amount.adjusted())
    return f"${amount:.{max(2, places)}f}"


def _count(given: object, name: str) -> int:
    value = given.get(name) if isinstance(given, dict) else None
    return value if type(value) is int and value > 0 else 0
