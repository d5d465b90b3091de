"""Columns of stored tables by name, read from the codec's form of a table.

Text names are stored as Arrow, which pyarrow reads. If names are ambiguous or unreadable (they repeat, have several
levels, or pyarrow is missing), columns have their numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType

from kedge.codec import BufferSummary, TypeSummary
from kedge.codec.json_view import written

from .states import StoredState

TABLES = ("polars.DataFrame", "pyarrow.Table")  # one buffer of Arrow each
_FRAME = "pandas.DataFrame"
_NAMES_BYTES = 1 << 20  # of the names of one frame
_TABLE_BYTES = 32 << 20  # of a table that is compared by column
_WHOLE_NUMBERS = {f"{order}{kind}{size}" for order in "<|" for kind in "iu" for size in (1, 2, 4, 8)}
_MOST_NAMED = 5  # columns in one line


def named_columns(state: StoredState, frame: TypeSummary) -> Mapping[str, object] | None:
    """Return a pandas data frame's columns by name; None for anything else, or if names are ambiguous."""
    if frame.name != _FRAME or not isinstance(columns := frame.fields.get("data"), list):
        return None
    names = _names(state, frame.fields.get("columns"), len(columns))
    if len(names) != len(columns) or len(set(names)) < len(names):
        return None
    return dict(zip(names, columns, strict=True))


def _names(state: StoredState, index: object, count: int) -> list[str]:
    """Return the labels of an index as in paths; [] if they are unreadable."""
    if not isinstance(index, TypeSummary):
        return []
    fields = index.fields
    if index.name == "pandas.RangeIndex":
        start, step = fields.get("start"), fields.get("step")
        if not isinstance(start, int) or not isinstance(step, int):
            return []
        return [str(start + n * step) for n in range(count)]
    data = fields.get("data")
    if isinstance(data, dict):
        data = data.get("text")
    if isinstance(data, TypeSummary):
        data = data.fields.get("items")
    if isinstance(data, BufferSummary):
        data = _read(state, data)
    if not isinstance(data, list) or not all(isinstance(label, str | int) for label in data):
        return []
    return [label if isinstance(label, str) else written(label, str) for label in data]


def _read(state: StoredState, summary: BufferSummary) -> list[object]:
    """Return the labels in a buffer: text, or whole numbers; [] for others."""
    if summary.size_bytes > _NAMES_BYTES:
        return []
    if summary.kind == "ndarray" and summary.dtype in _WHOLE_NUMBERS:
        data, size = _bytes_of(state, summary), int(summary.dtype[2:])
        is_signed = summary.dtype[1] == "i"
        parts = (data[at : at + size] for at in range(0, len(data), size))
        return [int.from_bytes(part, "little", signed=is_signed) for part in parts]
    table = _arrow_columns(state, summary) if summary.kind == "pyarrow.Table" else {}
    values = table.get("values")
    labels: list[object] = values.to_pylist() if values is not None else []  # type: ignore[attr-defined]
    return labels


def differing_columns(old: StoredState, was: BufferSummary, new: StoredState, now: BufferSummary) -> str:
    """Return which columns of two Arrow tables differ, in words; "" if that is unknown."""
    if now.kind not in TABLES or was.kind != now.kind or max(was.size_bytes, now.size_bytes) > _TABLE_BYTES:
        return ""
    before, after = _arrow_columns(old, was), _arrow_columns(new, now)
    if not before or not after:
        return ""
    parts = {
        "changed": [name for name in after if name in before and before[name] != after[name]],
        "added": [name for name in after if name not in before],
        "removed": [name for name in before if name not in after],
    }
    return "; ".join(f"columns {what}: {_listed(names)}" for what, names in parts.items() if names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED:,} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _arrow_columns(state: StoredState, summary: BufferSummary) -> dict[str, object]:
    """Return the columns of an Arrow table by name; {} if they repeat or cannot be read."""
    arrow = _arrow()
    if arrow is None:
        return {}
    try:
        with arrow.ipc.open_stream(arrow.py_buffer(_bytes_of(state, summary))) as reader:
            table = reader.read_all()
        table.validate(full=True)  # Arrow trusts offsets it reads
    except (arrow.ArrowException, ValueError, OSError, NotImplementedError):
        return {}
    names = table.column_names
    return dict(zip(names, table.columns, strict=True)) if len(set(names)) == len(names) else {}


def _bytes_of(state: StoredState, summary: BufferSummary) -> bytes:
    return b"".join(bytes(content.read(0, content.size_bytes)) for content in state.contents(summary))


@cache
def _arrow() -> ModuleType | None:
    try:
        return importlib.import_module("pyarrow")
    except ImportError:
        return None
