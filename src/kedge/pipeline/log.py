"""Log lines of a run: what is not plain JSON in them is written down as text, because no run fails by a log line."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kedge.errors import Validation
from kedge.model import LOG_LEVELS

_MOST_CHARACTERS = 2000  # of a text
_MOST_VALUES = 100  # of a mapping or a list
_DEPTH = 4
_MOST_BITS = 63  # of a number that is no text


def line_of(text: object, level: str, fields: Mapping[str, object]) -> dict[str, object]:
    """The metadata of a line; Validation for a level that there is not."""
    if level not in LOG_LEVELS:
        raise Validation(f"log level {level!r:.100} is unknown", hint=f"use one of: {', '.join(LOG_LEVELS)}")
    return {"kind": "log", "level": level, "text": _text(text), "fields": _plain(fields, _DEPTH)}


def _plain(value: object, depth: int) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and value.bit_length() <= _MOST_BITS:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if depth and isinstance(value, Mapping):
        return {_text(name): _plain(part, depth - 1) for name, part in list(value.items())[:_MOST_VALUES]}
    if depth and isinstance(value, list | tuple):
        return [_plain(part, depth - 1) for part in value[:_MOST_VALUES]]
    return _text(value)


def _text(value: object) -> str:
    return str(value)[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()
