"""Tokens and money. Prices come from genai-prices; a model it does not know is unpriced, which is not free."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a call took. `input` counts all of the prompt, also what the vendor's cache read or wrote."""

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


def tokens_of(usage: object) -> Tokens | None:
    """The tokens that a vendor's `usage` names, in OpenAI's older and newer form and in Anthropic's."""
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
    if "input_tokens_details" in usage:  # responses
        details = usage["input_tokens_details"]
        return Tokens(_count(usage, "input_tokens"), output, _count(details, "cached_tokens"))
    read, written = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    return Tokens(_count(usage, "input_tokens") + read + written, output, read, written)


def price(model: str, tokens: Tokens | None, url: str = "", at: datetime | None = None) -> Decimal | None:
    """Dollars for a call; None when nobody knows."""
    if tokens is None:
        return None
    try:
        from genai_prices import Usage, calc_price
    except ModuleNotFoundError:
        return None
    usage = Usage(
        input_tokens=tokens.input,
        output_tokens=tokens.output or None,
        cache_read_tokens=tokens.cache_read or None,
        cache_write_tokens=tokens.cache_write or None,
    )
    when = at or datetime.now(UTC)
    for place in (url, None) if url else (None,):  # a gateway of one's own is known by its models alone
        try:
            calculated = calc_price(usage, model, provider_api_url=place, genai_request_timestamp=when)
        except (LookupError, ValueError):
            continue
        return Decimal(calculated.total_price)
    return None


def prepare() -> None:
    """Read the prices while the first call is under way: that takes half a second."""
    global _is_prepared
    if not _is_prepared:
        _is_prepared = True
        threading.Thread(target=price, args=("none", Tokens()), name="kedge-prices", daemon=True).start()


_is_prepared = False


def dollars(amount: Decimal) -> str:
    """An amount for people: cents when there are any, else two digits that say something."""
    if amount >= 1 or not amount:
        return f"${amount:,.2f}"
    places = min(10, 1 - amount.adjusted())
    return f"${amount:.{max(2, places)}f}"


def _count(given: Any, name: str) -> int:
    value = given.get(name) if isinstance(given, dict) else None
    return value if type(value) is int and value > 0 else 0
