"""A state drawn as a tree: small values completely, containers by content, arrays by type and shape."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from kedge.codec import BufferSummary, TypeSummary
from kedge.codec.json_view import written
from kedge.codec.summaries import numbers_of
from kedge.diff.outline import SEQUENCES, children

from .text import clip, count_of, safe, size, style, width_of

_INLINE = 60  # columns up to which a container of plain values is written on one line


@dataclass(frozen=True, slots=True)
class Limits:
    depth: int
    items: int


def draw(value: object, limits: Limits, width: int | None, *, name: str = "state") -> Iterator[str]:
    """Yield the lines of the tree below `name`."""
    yield _line("", "", name, value, width)
    yield from _below(value, limits, width, "", 1)


def _below(value: object, limits: Limits, width: int | None, indent: str, depth: int) -> Iterator[str]:
    is_listed = depth == 1 or not is_plain(value)  # one line says enough of a list of numbers
    inner = list(children(value)) if is_listed and not is_short(value) else []
    if not inner or depth > limits.depth:
        return
    shown = inner if len(inner) <= limits.items + 1 else inner[: limits.items]
    for n, (name, child) in enumerate(shown):
        is_last = n + 1 == len(inner)
        yield _line(indent, "└── " if is_last else "├── ", name, child, width)
        yield from _below(child, limits, width, indent + ("    " if is_last else "│   "), depth + 1)
    if len(shown) < len(inner):
        yield indent + style(f"└── … {len(inner) - len(shown):,} more", "dim")


def _line(indent: str, branch: str, name: str, value: object, width: int | None) -> str:
    label = safe(name)
    text, look = describe(value)
    text = safe(text)
    if width is not None:
        label = clip(label, max(12, width // 2 - len(indent)))
        text = clip(text, max(4, width - width_of(indent + branch + label) - 2))
    return f"{style(indent + branch, 'dim')}{style(label, 'name')}{style(':', 'dim')} {style(text, look)}"


def describe(value: object) -> tuple[str, str]:
    """Return a value in one line, and its look."""
    if isinstance(value, BufferSummary):
        return describe_buffer(value), "type"
    if isinstance(value, TypeSummary):
        version = f" v{value.version}" if value.version != 1 else ""
        return f"{value.name}{version}", "type"
    if isinstance(value, bytes):
        return f"bytes · {size(len(value))} · {value[:16].hex(' ')}{' …' if len(value) > 16 else ''}", "type"
    if isinstance(value, str):
        text = repr(value) if len(value) <= 2000 else repr(value[:2000])
        return (f"{text} · {count_of(len(value), 'character')}" if len(value) > 200 else text), "value"
    if is_short(value):
        return short(value), "value"
    if isinstance(value, Mapping):
        kind = type(value).__name__
        return f"{'' if kind == 'dict' else kind + ' of '}{count_of(len(value), 'key')}", "dim"
    if isinstance(value, SEQUENCES):
        first = ", ".join(written(item) for item in islice(value, 6)) if is_plain(value) else ""
        return f"{type(value).__name__} of {len(value):,}" + (f" · {first}, …" if first else ""), "dim"
    text = written(value, repr if isinstance(value, int | float | complex | bool | None) else str)
    return text if len(text) <= 2000 else f"{text[:2000]}…", "value"


def describe_buffer(summary: BufferSummary) -> str:
    if summary.kind == "Tree":
        return f"Tree · {count_of(summary.shape[0], 'entry', 'entries')} · {size(summary.size_bytes)}"
    if summary.kind in ("bytes", "bytearray", "File"):
        return f"{summary.kind} · {size(summary.size_bytes)}"
    values = numbers_of(summary, 8)
    if summary.kind == "numpy scalar":
        return f"{values[0] if values else '?'} ({type_of(summary)})"
    lengths = " × ".join(map(str, summary.shape)) or "one value"
    if "." in summary.kind:  # a polars or pyarrow table
        return f"{summary.kind} · {lengths} · {size(summary.size_bytes)}"
    shown = "" if values is None else f" · {values}"
    return f"{summary.kind} {type_of(summary)} · {lengths} · {size(summary.size_bytes)}{shown}"


_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex"}
_NUMBER = re.compile(r"([<>|])([fiuc])(\d+)")


def type_of(summary: BufferSummary) -> str:
    """Return the type of an array's elements, as named by numpy and torch."""
    if (number := _NUMBER.fullmatch(summary.dtype)) is not None:
        order, kind, size_bytes = number.groups()
        return f"{_KINDS[kind]}{8 * int(size_bytes)}{' big-endian' if order == '>' else ''}"
    return {"|b1": "bool"}.get(summary.dtype, summary.dtype)


_PLAIN = (str, int, float, type(None))


def is_plain(value: object) -> bool:
    """Return whether a value is a list of numbers and texts, nothing nested."""
    return isinstance(value, SEQUENCES) and all(isinstance(item, _PLAIN) for item in value)


def is_short(value: object) -> bool:
    """Return whether a value is a container of few plain values, which fits on one line."""
    if type(value) is dict:
        items = [*value.keys(), *value.values()]
    elif isinstance(value, SEQUENCES):
        items = list(value)
    else:
        return False
    if len(items) > 12 or not all(isinstance(item, _PLAIN) for item in items):
        return False
    return len(short(value)) <= _INLINE


def short(value: object) -> str:
    return written(list(value) if isinstance(value, deque) else value)
