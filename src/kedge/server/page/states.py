"""States for the page: one level of a tree at a time, and what arrays hold without showing every number.

A checkpoint never changes, so the outlines opened last are kept: unfolding a node reads nothing again.
"""

from __future__ import annotations

import struct
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from kedge.codec import BufferSummary
from kedge.codec.json_view import from_json
from kedge.diff.outline import StoredState, children, inside, open_state
from kedge.errors import NotFound, Validation
from kedge.files import FilesSummary
from kedge.manager import CheckpointManager
from kedge.terminal.tree import describe, is_plain, is_short, type_of

from .charts import histogram
from .tables import Table, is_table, of_array

if TYPE_CHECKING:
    import numpy

LEVEL_NODES = 100  # children shown at once
TEXT_CHARACTERS = 20_000  # of a long text
SAMPLE_BYTES = 32 << 20  # of an array
_KEPT_BYTES = 64 << 20  # of encoded trees whose outlines are kept
_BINS = 48
_FEW = 10  # elements that say more than their distribution
_NUMBERS = "biufc"  # numpy's kinds of them
_THUMBNAIL = 256


class Outlines:
    """The states opened last. Thread-safe."""

    def __init__(self) -> None:
        self._states: OrderedDict[tuple[str, str], StoredState] = OrderedDict()
        self._lock = Lock()

    def open(self, manager: CheckpointManager, checkpoint_id: str) -> StoredState:
        key = (manager.namespace, checkpoint_id)
        with self._lock:
            if (known := self._states.get(key)) is not None:
                self._states.move_to_end(key)
        if known is not None:
            manager.get(checkpoint_id)  # deleted ones are gone here too
            return known
        state = open_state(manager.store, checkpoint_id)
        with self._lock:
            self._states[key] = state
            while len(self._states) > 1 and sum(outline.tree_bytes for outline in self._states.values()) > _KEPT_BYTES:
                self._states.popitem(last=False)
        return state


@dataclass(frozen=True, slots=True)
class Node:
    """One line of the tree."""

    name: str
    path: str
    text: str
    look: str  # value, type, dim
    kind: str  # leaf, branch, array, text, table, files


@dataclass(frozen=True, slots=True)
class Level:
    """Children of a node, from `start` on."""

    path: str
    nodes: tuple[Node, ...]
    start: int
    total: int

    @property
    def next_start(self) -> int | None:
        shown = self.start + len(self.nodes)
        return shown if shown < self.total else None


def level_at(state: StoredState, path: str, start: int = 0) -> Level:
    """The children of what is at `path`."""
    value = inside(state.outline, path)
    every = list(children(value))
    if not every and start == 0:
        return Level(path, (_node("", path, value),), 0, 1)
    shown = [_node(name, f"{path}/{name}" if path else name, child) for name, child in every[start:][:LEVEL_NODES]]
    return Level(path, tuple(shown), start, len(every))


def parse_value(text: str) -> Any:
    """The value that somebody typed as JSON."""
    try:
        return from_json(text)
    except Validation as error:
        raise Validation(f"the value: {error.message}", hint='texts need quotes: "yes"') from None


def replaced(state: Any, path: str, value: object) -> Any:
    """The state with another value at a path of dicts and lists, where something is already; NotFound elsewhere."""
    *above, last = path.split("/")
    inner = state
    for name in above:
        inner = inner[_place(inner, name, path)]
    inner[_place(inner, last, path)] = value
    return state


def _place(parent: object, name: str, path: str) -> Any:
    if isinstance(parent, dict) and name in parent:
        return name
    if isinstance(parent, list) and name.isdecimal() and name.isascii() and int(name) < len(parent):
        return int(name)
    raise NotFound(f"nothing to replace at {path}", hint="a path goes through dicts and lists, such as model/layers/0")


def _node(name: str, path: str, value: object) -> Node:
    text, look = describe(value)
    if len(text) > 240:
        text = text[:239] + "…"
    return Node(name, path, text, look, _kind(value))


def _kind(value: object) -> str:
    if isinstance(value, FilesSummary):
        return "files"
    if is_table(value):
        return "table"
    if isinstance(value, BufferSummary):
        return "array" if value.kind in ("ndarray", "tensor") and value.size_bytes else "leaf"
    if isinstance(value, str):
        return "text" if len(value) > 200 else "leaf"
    if is_short(value) or (is_plain(value) and not any(islice(children(value), 1))):
        return "leaf"
    return "branch" if any(True for _ in islice(children(value), 1)) else "leaf"


def text_at(state: StoredState, path: str) -> tuple[str, int]:
    """A long text as far as it is shown, and its whole length."""
    value = inside(state.outline, path)
    if not isinstance(value, str):
        raise NotFound(f"there is no text at {path}", hint="the tree shows what is there")
    return value[:TEXT_CHARACTERS], len(value)


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """What can be said of an array in a few lines."""

    path: str
    facts: tuple[tuple[str, str], ...]
    chart: str = ""  # Markup
    has_image: bool = False
    table: Table | None = None


def array_at(state: StoredState, path: str) -> ArrayFacts:
    """Shape, range, distribution; of a large array from its beginning."""
    summary = _array_summary(state, path)
    facts = [("shape", " × ".join(map(str, summary.shape)) or "one value"), ("type", type_of(summary))]
    values = _values(state, summary, _NUMBERS + "US")
    if values is None:
        return ArrayFacts(path, tuple(facts))
    table = of_array(values, summary)
    if values.dtype.kind in "US":
        return ArrayFacts(path, tuple(facts), table=table)
    import numpy

    is_part = values.size < prod(summary.shape)
    if is_part:
        facts.append(("looked at", f"the first {values.size:,} of {prod(summary.shape):,} elements"))
    if values.dtype.kind == "b":
        facts.append(("true", f"{int(values.sum()):,} of {values.size:,}"))
        return ArrayFacts(path, tuple(facts), has_image=is_image(summary), table=table)
    if values.dtype.kind == "c":
        values = numpy.abs(values)
        facts.append(("of", "the absolute values"))
    finite = values[numpy.isfinite(values)] if values.dtype.kind == "f" else values
    if finite.size < values.size:
        facts.append(("not finite", f"{values.size - finite.size:,}"))
    if not finite.size:
        return ArrayFacts(path, tuple(facts), table=table)
    low, high = finite.min(), finite.max()
    mean = finite.astype("float64").mean()
    facts += [("min", _number(low)), ("max", _number(high)), ("mean", _number(mean))]
    chart = Markup("")
    if low != high and finite.size > _FEW:
        counts = numpy.histogram(finite.astype("float64"), bins=_BINS)[0]
        chart = histogram([int(count) for count in counts], _number(low), _number(high))
    return ArrayFacts(path, tuple(facts), chart, is_image(summary), table)


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{float(value):.6g}"


def _array_summary(state: StoredState, path: str) -> BufferSummary:
    summary = inside(state.outline, path)
    if not isinstance(summary, BufferSummary) or summary.kind not in ("ndarray", "tensor"):
        raise NotFound(f"there is no array at {path}", hint="the tree shows what is there")
    return summary


def _values(state: StoredState, summary: BufferSummary, kinds: str = _NUMBERS) -> numpy.ndarray[Any, Any] | None:
    """The elements as numpy sees them, or of a large array the first ones; None for types of other kinds."""
    try:
        import numpy
    except ImportError:
        return None
    try:
        dtype = numpy.dtype(summary.dtype)
    except TypeError:
        return None
    if dtype.kind not in kinds or not dtype.itemsize:
        return None
    data = memoryview(state.beginning_of(summary, SAMPLE_BYTES)).cast("B")
    whole = len(data) - len(data) % dtype.itemsize
    return numpy.frombuffer(data[:whole], dtype)


# --- thumbnails ---


def is_image(summary: BufferSummary) -> bool:
    """Whether an array is shown as a picture."""
    shape = summary.shape
    is_flat = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))
    return is_flat and summary.order == "C" and min(shape[:2]) >= 8 and summary.size_bytes <= SAMPLE_BYTES


def thumbnail_at(state: StoredState, path: str) -> bytes:
    """A PNG of a two-dimensional array: grey by its range, or as it is where it has colours."""
    return _png(_scaled(_picture_at(state, path)))


def difference_at(old: StoredState, new: StoredState, path: str) -> bytes:
    """A PNG of how far two pictures of the same shape are apart: black where they agree."""
    import numpy

    first, second = _picture_at(old, path), _picture_at(new, path)
    if first.shape != second.shape:
        raise Validation(f"the pictures at {path} differ in shape", hint="only pictures of one shape are compared")
    apart = numpy.abs(second.astype("float64") - first.astype("float64"))
    if apart.ndim == 3:
        apart = apart[:, :, :3].max(axis=2)  # whatever an alpha channel says
    return _png(_scaled(apart, low=0.0))


def _picture_at(state: StoredState, path: str) -> numpy.ndarray[Any, Any]:
    summary = _array_summary(state, path)
    values = _values(state, summary) if is_image(summary) else None
    if values is None:
        raise Validation(f"the array at {path} is no picture", hint="its shape is not that of one")
    step = max(1, -(-max(summary.shape[:2]) // _THUMBNAIL))
    return values.reshape(summary.shape)[::step, ::step]


def _scaled(picture: numpy.ndarray[Any, Any], low: float | None = None) -> numpy.ndarray[Any, Any]:
    import numpy

    if picture.dtype != numpy.uint8:
        wide = numpy.nan_to_num(picture.astype("float64"), posinf=0.0, neginf=0.0)
        least, high = wide.min() if low is None else low, wide.max()
        picture = ((wide - least) * (255 / ((high - least) or 1))).astype(numpy.uint8)
    if picture.ndim == 3 and picture.shape[2] == 1:
        picture = picture[:, :, 0]
    return numpy.ascontiguousarray(picture)


def _png(picture: numpy.ndarray[Any, Any]) -> bytes:
    height, width = picture.shape[:2]
    colour = {1: 0, 3: 2, 4: 6}[1 if picture.ndim == 2 else picture.shape[2]]
    rows = b"".join(b"\0" + picture[y].tobytes() for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b"")]
    framed = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)
