"""Values of outlines, for people."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from kedge.codec import BufferSummary, TypeSummary
from kedge.codec.json_view import LONG_INT_BITS, written
from kedge.codec.summaries import numbers_of

SHOWN_CHARACTERS = 200


def brief(value: object) -> str | int | float | bool | None:
    """Return a value as JSON: plain ones unchanged, long text cut off, anything else in words."""
    if isinstance(value, int) and value.bit_length() > LONG_INT_BITS:
        return clip(hex(value))
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, str):
        return clip(value)
    if isinstance(value, BufferSummary):
        if not value.shape and (numbers := numbers_of(value, 1)):
            return brief(numbers[0])
        if value.kind in ("bytes", "bytearray"):
            return f"{value.kind}, {value.size_bytes:,} bytes"
        return f"{value.kind} of {value.dtype}, shape {shape_text(value.shape)}, {value.size_bytes:,} bytes"
    if isinstance(value, TypeSummary):
        return f"{value.name} (version {value.version})"
    if isinstance(value, dict | list | tuple | deque | set | frozenset):
        return f"{type_name(value)} of {len(value):,}"
    return clip(written(value))


def shape_text(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "()"


def type_name(value: object) -> str:
    """Return the type that a value of an outline had when it was saved."""
    if isinstance(value, BufferSummary):
        return value.kind
    return value.name if isinstance(value, TypeSummary) else type(value).__name__


def summary_of(value: BufferSummary | bytes) -> BufferSummary:
    """Return a summary of any byte string: short ones are themselves in outlines, long ones summarised."""
    if isinstance(value, BufferSummary):
        return value
    return BufferSummary("bytes", "uint8", (len(value),), len(value), data=value)


def weigh(value: object) -> int:
    """Return the bytes of all arrays and byte strings in a value of an outline."""
    if isinstance(value, BufferSummary):
        return value.size_bytes
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, TypeSummary):
        return sum(map(weigh, value.fields.values()))
    if isinstance(value, dict):
        return sum(map(weigh, value)) + sum(map(weigh, value.values()))
    if isinstance(value, list | tuple | deque | set | frozenset):
        return sum(map(weigh, value))
    return 0


def clip(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"
