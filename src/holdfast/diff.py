"""What changed between two states, by path.

    trees    are compared as outlines: nothing of the application is constructed (I7)
    arrays   that are equal are recognised by the digests in the manifests, without reading them;
             the others are read where their chunks differ, verified on the way (I2), compared in pieces

So the memory needed does not grow with the arrays. Paths are '/'-joined, as in `load(only=…)`; items of lists
have their number in the newer state, removed ones that in the older. A dictionary's order is no difference.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import math
import struct
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple, Protocol

from . import codec
from .chunks import allocate
from .codec import BufferSummary, TypeSummary
from .errors import Corrupted, Validation
from .manifest import Entry
from .model import Checkpoint
from .store import SMALL_BUFFER_BYTES, Store

MAX_CHANGES = 1000

_READ_BYTES = 4 << 20  # of each side at once: several chunks, read in parallel
_STEP_BYTES = 1 << 20  # compared at once
_MATCHED_ITEMS = 1000  # longer lists are compared by position after their common beginning and end
_LONG_TEXT = 80  # characters from which a diff says more than both texts
_MATCHED_LINES = 2000
_SHOWN_LINES = 60
_CONTEXT_LINES = 3
_SHOWN_CHARACTERS = 200


class ChangeKind(StrEnum):
    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    TYPE_CHANGED = "type_changed"


@dataclass(frozen=True, slots=True)
class ArrayDelta:
    """How an array, table or byte string changed. None where it cannot be told, such as without numpy."""

    elements: int  # of the newer one
    elements_changed: int | None
    bytes_changed: int
    max_abs_difference: float | None = None  # NaN left out; only of numbers
    note: str = ""  # what changed besides its elements: shape, dtype

    def __str__(self) -> str:
        parts = [self.note] if self.note else []
        if self.elements_changed is not None:
            parts.append(f"{self.elements_changed:,} of {self.elements:,} elements differ")
        elif not self.note:
            parts.append(f"{self.bytes_changed:,} bytes differ")
        if self.max_abs_difference is not None:
            parts.append(f"by up to {self.max_abs_difference:.6g}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """How a long text changed: the lines of a unified diff."""

    lines: tuple[str, ...]
    lines_left_out: int = 0

    def __str__(self) -> str:
        more = [f"… {self.lines_left_out:,} more lines"] if self.lines_left_out else []
        return "\n".join([*self.lines, *more])


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. `old` and `new` are values of the outlines; None where there is none."""

    path: str  # "" is the state itself
    kind: ChangeKind
    old: object = None
    new: object = None
    detail: ArrayDelta | TextDelta | str = ""  # str() of it is for people

    def to_json(self) -> dict[str, object]:
        entry: dict[str, object] = {"path": self.path, "kind": str(self.kind)}
        if self.kind is not ChangeKind.ADDED:
            entry |= {"old": brief(self.old), "old_bytes": weigh(self.old)}
        if self.kind is not ChangeKind.REMOVED:
            entry |= {"new": brief(self.new), "new_bytes": weigh(self.new)}
        if isinstance(self.detail, ArrayDelta):
            entry["elements"] = self.detail.elements
            entry["elements_changed"] = self.detail.elements_changed
            entry["bytes_changed"] = self.detail.bytes_changed
            entry["max_abs_difference"] = brief(self.detail.max_abs_difference)
        if self.detail:
            entry["detail"] = str(self.detail)
        return entry


@dataclass(frozen=True, slots=True)
class Diff:
    """All differences, counted; the first `max_changes` of them in full."""

    changes: tuple[Change, ...]
    left_out: int  # changes counted but not listed
    added: int
    removed: int
    changed: int  # those of another type included
    bytes_changed: int  # of arrays and byte strings: added, removed, or different
    shared_bytes: int  # of arrays and byte strings: the same in both
    old_id: str = ""
    new_id: str = ""

    @property
    def is_empty(self) -> bool:
        return not self.changes

    def to_json(self) -> dict[str, object]:
        """For json.dumps."""
        return {
            "old": self.old_id,
            "new": self.new_id,
            "added": self.added,
            "removed": self.removed,
            "changed": self.changed,
            "bytes_changed": self.bytes_changed,
            "shared_bytes": self.shared_bytes,
            "changes": [change.to_json() for change in self.changes],
            "left_out": self.left_out,
        }


def diff(
    store: Store, a: tuple[Checkpoint, bytes], b: tuple[Checkpoint, bytes], *, max_changes: int = MAX_CHANGES
) -> Diff:
    """What changed from checkpoint `a` to checkpoint `b`, each given with its manifest."""
    return _compare(_StoredState(store, *a), _StoredState(store, *b), max_changes, (a[0].id, b[0].id))


def diff_values(old: object, new: object, *, max_changes: int = MAX_CHANGES) -> Diff:
    """What changed between two states that were not saved; UnsupportedType for what could not be saved."""
    return _compare(_HeldState(old), _HeldState(new), max_changes)


def _compare(old: _State, new: _State, max_changes: int, ids: tuple[str, str] = ("", "")) -> Diff:
    if isinstance(max_changes, bool) or not isinstance(max_changes, int) or max_changes < 1:
        raise Validation(f"max_changes={max_changes!r}", hint="use a whole number from 1 on")
    comparison = _Comparison(old, new, max_changes)
    try:
        comparison.compare("", old.outline, new.outline)
    except RecursionError as error:
        raise Validation(
            "the states are too deep for what is left of the Python stack",
            hint="compare them from a function that is called less deeply",
        ) from error
    return comparison.result(*ids)


# The two states


class _Mark(NamedTuple):
    """A chunk, and where it begins as seen from the buffer."""

    digest: bytes
    fast: bytes
    size_bytes: int
    begin: int


class _Piece(NamedTuple):
    """Part of a content. Two pieces with the same mark hold the same bytes at the same place."""

    start: int
    stop: int
    mark: _Mark | None = None  # None: not known without reading


class _Content(Protocol):
    """The bytes behind a summary."""

    size_bytes: int

    def pieces(self) -> Sequence[_Piece]: ...

    def read(self, start: int, stop: int) -> memoryview: ...


class _State(Protocol):
    outline: object

    def contents(self, summary: BufferSummary) -> list[_Content]: ...


class _Held:
    """Bytes in memory."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.size_bytes = len(self._data)

    def pieces(self) -> Sequence[_Piece]:
        return [_Piece(0, self.size_bytes)] if self.size_bytes else []

    def read(self, start: int, stop: int) -> memoryview:
        return self._data[start:stop]


def _inline(summary: BufferSummary) -> list[_Content]:
    """What of a content is in the tree itself."""
    return [_Held(summary.data)] if summary.data or not summary.ordinals else []


class _HeldState:
    def __init__(self, state: object) -> None:
        encoded = codec.encode(state)
        self.outline = codec.outline(encoded.tree)
        self._buffers = encoded.buffers

    def contents(self, summary: BufferSummary) -> list[_Content]:
        contents = _inline(summary)
        for buffer in (self._buffers[n] for n in summary.ordinals):
            if not isinstance(buffer, memoryview):
                raise Validation("a state with files in it cannot be compared unsaved", hint="save both, compare those")
            contents.append(_Held(buffer))
        return contents


class _StoredState:
    """A checkpoint. Keeps the few chunks read last, because small arrays share them."""

    def __init__(self, store: Store, checkpoint: Checkpoint, packed: bytes) -> None:
        self._store = store
        self._id = checkpoint.id
        self._manifest = store.open(checkpoint, packed)
        self._starts: dict[int, list[int]] = {}
        self._recent: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self.outline = codec.outline(store.tree(checkpoint, self._manifest))

    def contents(self, summary: BufferSummary) -> list[_Content]:
        if max(summary.ordinals, default=0) >= max(len(self._manifest.buffers), 1):
            raise Corrupted(f"checkpoint {self._id} lacks a buffer of its tree", hint="run holdfast check")
        return [*_inline(summary), *(_Stored(self, n) for n in summary.ordinals)]

    def span(self, ordinal: int) -> tuple[int, int, int]:
        span = self._manifest.buffers[ordinal]
        return span.stream, span.offset, span.size_bytes

    def entries(self, stream: int, start: int, stop: int) -> Iterator[tuple[int, int, Entry]]:
        """(number, offset, entry) of the chunks of a stream that hold bytes of [start, stop)."""
        table = self._manifest.streams[stream]
        if stream not in self._starts:
            self._starts[stream] = list(accumulate((e.size_bytes for e in table), initial=0))
        starts = self._starts[stream]
        for n in range(max(bisect_right(starts, start) - 1, 0), len(table)):
            if starts[n] >= stop:
                return
            yield n, starts[n], table[n]

    def read(self, stream: int, start: int, stop: int) -> memoryview:
        touched = list(self.entries(stream, start, stop))
        missing = [(n, entry, allocate(entry.size_bytes)) for n, _, entry in touched if (stream, n) not in self._recent]
        self._store.reader.read([(entry, target) for _, entry, target in missing], of=self._id)
        self._recent.update(((stream, n), target) for n, _, target in missing)
        parts = []
        for n, offset, entry in touched:
            self._recent.move_to_end((stream, n))
            chunk = self._recent[stream, n]
            parts.append(chunk[max(start - offset, 0) : min(stop - offset, entry.size_bytes)])
        held = sum(map(len, self._recent.values()))
        while held > _READ_BYTES and len(self._recent) > 1:
            held -= len(self._recent.popitem(last=False)[1])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


class _Stored:
    """One buffer of a checkpoint."""

    def __init__(self, state: _StoredState, ordinal: int) -> None:
        self._state = state
        self._stream, self._offset, self.size_bytes = state.span(ordinal)

    def pieces(self) -> Sequence[_Piece]:
        begin, end = self._offset, self._offset + self.size_bytes
        return [
            _Piece(
                max(at, begin) - begin,
                min(at + entry.size_bytes, end) - begin,
                _Mark(entry.digest, entry.fast, entry.size_bytes, at - begin),
            )
            for _, at, entry in self._state.entries(self._stream, begin, end)
            if entry.size_bytes
        ]

    def read(self, start: int, stop: int) -> memoryview:
        return self._state.read(self._stream, self._offset + start, self._offset + stop)


# The walk over both trees


class _Comparison:
    def __init__(self, old: _State, new: _State, max_changes: int) -> None:
        self._old = old
        self._new = new
        self._max_changes = max_changes
        self._changes: list[Change] = []
        self._counts = dict.fromkeys(ChangeKind, 0)
        self._bytes_changed = 0
        self._shared_bytes = 0

    def result(self, old_id: str, new_id: str) -> Diff:
        counts = self._counts
        return Diff(
            tuple(self._changes),
            sum(counts.values()) - len(self._changes),
            counts[ChangeKind.ADDED],
            counts[ChangeKind.REMOVED],
            counts[ChangeKind.CHANGED] + counts[ChangeKind.TYPE_CHANGED],
            self._bytes_changed,
            self._shared_bytes,
            old_id,
            new_id,
        )

    def _report(self, change: Change) -> None:
        self._counts[change.kind] += 1
        if len(self._changes) < self._max_changes:
            self._changes.append(change)

    def _added(self, path: str, new: object) -> None:
        self._bytes_changed += weigh(new)
        self._report(Change(path, ChangeKind.ADDED, new=new))

    def _removed(self, path: str, old: object) -> None:
        self._bytes_changed += weigh(old)
        self._report(Change(path, ChangeKind.REMOVED, old=old))

    def compare(self, path: str, old: Any, new: Any) -> None:
        is_registered = isinstance(new, TypeSummary)
        if type_name(old) != type_name(new) or isinstance(old, TypeSummary) != is_registered:
            self._bytes_changed += weigh(old) + weigh(new)
            detail = f"{type_name(old)} → {type_name(new)}"
            self._report(Change(path, ChangeKind.TYPE_CHANGED, old, new, detail))
        elif isinstance(new, BufferSummary | bytes):
            self._compare_buffers(path, old, new)
        elif isinstance(new, dict):
            self._compare_dicts(path, old, new)
        elif isinstance(new, list | tuple | deque):
            self._compare_items(path, list(old), list(new))
        elif isinstance(new, set | frozenset):
            self._compare_sets(path, old, new)
        elif is_registered:
            self._compare_types(path, old, new)
        elif not self._is_same(old, new):
            text = _text_delta(old, new) if isinstance(new, str) and _is_long(old, new) else ""
            self._report(Change(path, ChangeKind.CHANGED, old, new, text))

    def _compare_dicts(self, path: str, old: Mapping[Any, Any], new: Mapping[Any, Any]) -> None:
        olds = {self._key(self._old, key): (key, value) for key, value in old.items()}
        news = {self._key(self._new, key): (key, value) for key, value in new.items()}
        for identity, (key, value) in olds.items():
            if identity in news:
                self.compare(_join(path, key), value, news[identity][1])
            else:
                self._removed(_join(path, key), value)
        for identity, (key, value) in news.items():
            if identity not in olds:
                self._added(_join(path, key), value)

    def _compare_types(self, path: str, old: TypeSummary, new: TypeSummary) -> None:
        if old.version != new.version:
            detail = f"version {old.version} → {new.version}"
            self._report(Change(path, ChangeKind.CHANGED, old, new, detail))
        if set(old.fields) == set(new.fields) == {"value"}:
            self.compare(path, old.fields["value"], new.fields["value"])
        else:
            self._compare_dicts(path, old.fields, new.fields)

    def _compare_sets(self, path: str, old: AbstractSet[Any], new: AbstractSet[Any]) -> None:
        olds = {self._key(self._old, item): item for item in old}
        news = {self._key(self._new, item): item for item in new}
        for identity in sorted(olds.keys() - news.keys(), key=repr):
            self._removed(_join(path, brief(olds[identity])), olds[identity])
        for identity in sorted(news.keys() - olds.keys(), key=repr):
            self._added(_join(path, brief(news[identity])), news[identity])

    def _compare_items(self, path: str, old: list[Any], new: list[Any]) -> None:
        start, shorter = 0, min(len(old), len(new))
        while start < shorter and self._is_same(old[start], new[start]):
            self._shared_bytes += weigh(new[start])
            start += 1
        end = 0
        while end < shorter - start and self._is_same(old[-1 - end], new[-1 - end]):
            self._shared_bytes += weigh(new[-1 - end])
            end += 1
        for i1, i2, j1, j2 in self._edits(old[start : len(old) - end], new[start : len(new) - end]):
            paired = min(i2 - i1, j2 - j1)
            for n in range(paired):
                self.compare(_join(path, start + j1 + n), old[start + i1 + n], new[start + j1 + n])
            for i in range(start + i1 + paired, start + i2):
                self._removed(_join(path, i), old[i])
            for j in range(start + j1 + paired, start + j2):
                self._added(_join(path, j), new[j])

    def _edits(self, old: list[Any], new: list[Any]) -> Iterator[tuple[int, int, int, int]]:
        """Ranges of `old` and the ranges of `new` that took their place."""
        if not old or not new or max(len(old), len(new)) > _MATCHED_ITEMS:
            yield 0, len(old), 0, len(new)
            return
        olds = [self._key(self._old, item) for item in old]
        news = [self._key(self._new, item) for item in new]
        for tag, i1, i2, j1, j2 in difflib.SequenceMatcher(None, olds, news).get_opcodes():
            if tag == "equal":
                self._shared_bytes += sum(map(weigh, new[j1:j2]))
            else:
                yield i1, i2, j1, j2

    def _compare_buffers(self, path: str, old: BufferSummary | bytes, new: BufferSummary | bytes) -> None:
        was, now = summary_of(old), summary_of(new)
        before, after = self._old.contents(was), self._new.contents(now)
        is_same_form = (was.dtype, was.shape, was.size_bytes) == (now.dtype, now.shape, now.size_bytes)
        if is_same_form and [c.size_bytes for c in before] == [c.size_bytes for c in after]:
            tally = _Tally(now)
            for a, b in zip(before, after, strict=True):
                tally.compare(a, b)
            self._shared_bytes += max(now.size_bytes - tally.bytes_changed, 0)
            self._bytes_changed += tally.bytes_changed
            if tally.bytes_changed:
                self._report(Change(path, ChangeKind.CHANGED, old, new, tally.delta()))
            return
        notes = []
        if was.dtype != now.dtype:
            notes.append(f"dtype {was.dtype} → {now.dtype}")
        if was.shape != now.shape:
            notes.append(f"shape {_shape(was.shape)} → {_shape(now.shape)}")
        shared = self._shared_chunks(was, now)
        self._shared_bytes += shared
        self._bytes_changed += max(was.size_bytes - shared, now.size_bytes - shared, 0)
        delta = ArrayDelta(math.prod(now.shape), None, max(now.size_bytes - shared, 0), None, ", ".join(notes))
        self._report(Change(path, ChangeKind.CHANGED, old, new, delta))

    def _shared_chunks(self, old: BufferSummary, new: BufferSummary) -> int:
        """Bytes of `new` in chunks that `old` has too, wherever they lie."""
        known = {mark for mark, _ in _whole_chunks(self._old.contents(old))}
        return sum(size for mark, size in _whole_chunks(self._new.contents(new)) if mark in known)

    def _is_same(self, old: Any, new: Any) -> bool:
        kind = type(new)
        if kind in _PLAIN:
            if type(old) is not kind or old != new:
                return bool(old != old and new != new)
            return kind is not float or old != 0 or repr(old) == repr(new)
        return self._key(self._old, old) == self._key(self._new, new)

    def _key(self, state: _State, value: Any) -> Hashable:
        """What equals only the key of an equal value: 1, True and 1.0 differ, NaN equals NaN."""
        kind = type(value)
        if kind is str or kind is int:
            return kind, value
        if isinstance(value, BufferSummary | bytes):
            summary = summary_of(value)
            marks = tuple(_content_key(content) for content in state.contents(summary))
            return summary.kind, summary.dtype, summary.shape, marks
        if isinstance(value, TypeSummary):
            return value.name, value.version, self._key(state, dict(value.fields))
        if isinstance(value, dict):
            return kind, frozenset([(self._key(state, k), self._key(state, v)) for k, v in value.items()])
        if isinstance(value, list | tuple | deque):
            return kind, tuple([self._key(state, item) for item in value])
        if isinstance(value, set | frozenset):
            return kind, frozenset([self._key(state, item) for item in value])
        return kind, repr(value)


_PLAIN = frozenset({type(None), bool, int, float, str})


def _whole_chunks(contents: Iterable[_Content]) -> Iterator[tuple[Hashable, int]]:
    """(digests, size) of the chunks that hold nothing else."""
    for content in contents:
        for piece in content.pieces():
            if piece.mark is not None and piece.stop - piece.start == piece.mark.size_bytes:
                yield (piece.mark.digest, piece.mark.fast), piece.mark.size_bytes


def _content_key(content: _Content) -> Hashable:
    """Digests of the chunks of a large buffer, which has them for itself; else of the bytes."""
    marks = [piece.mark for piece in content.pieces()]
    if content.size_bytes >= SMALL_BUFFER_BYTES and None not in marks:
        return tuple(marks)
    digest = hashlib.sha256()
    for at in range(0, content.size_bytes, _READ_BYTES):
        digest.update(content.read(at, min(at + _READ_BYTES, content.size_bytes)))
    return digest.digest()


def _join(path: str, name: object) -> str:
    return f"{path}/{name}" if path else str(name)


# Arrays


_ELEMENTWISE = frozenset({"ndarray", "tensor", "numpy scalar"})  # tables and byte strings are just bytes


class _Tally:
    """Counts what differs in arrays of one form."""

    def __init__(self, summary: BufferSummary) -> None:
        elements = math.prod(summary.shape)
        has_elements = summary.kind in _ELEMENTWISE and elements > 0 and summary.size_bytes % elements == 0
        self._itemsize = summary.size_bytes // elements if has_elements else 1
        self._dtype = summary.dtype
        self._elements = elements
        self._elements_changed = 0 if has_elements else None
        self._max_difference: float | None = None
        self.bytes_changed = 0

    def delta(self) -> ArrayDelta:
        return ArrayDelta(self._elements, self._elements_changed, self.bytes_changed, self._max_difference)

    def compare(self, old: _Content, new: _Content) -> None:
        item = self._itemsize
        read_bytes = max(_READ_BYTES // item, 1) * item
        step = max(_STEP_BYTES // item, 1) * item
        for start, stop in _whole_items(_unproved(old.pieces(), new.pieces()), item):
            for at in range(start, stop, read_bytes):
                end = min(at + read_bytes, stop)
                before, after = old.read(at, end), new.read(at, end)
                for n in range(0, end - at, step):
                    self._count(before[n : n + step], after[n : n + step])

    def _count(self, old: memoryview, new: memoryview) -> None:
        np = _numpy()
        if np is None:
            unequal = int.from_bytes(old, "little") ^ int.from_bytes(new, "little")
            self.bytes_changed += len(new) - unequal.to_bytes(len(new), "little").count(0)
            self._elements_changed = None
            return
        word = math.gcd(self._itemsize, 8)
        words = [np.frombuffer(side, f"u{word}").reshape(-1, self._itemsize // word) for side in (old, new)]
        differs = words[0] != words[1]
        differs = differs.any(axis=1) if differs.shape[1] > 1 else differs[:, 0]
        before, after = (side[differs].reshape(-1).view(np.uint8) for side in words)
        if not len(after):
            return
        self.bytes_changed += int(np.count_nonzero(before != after))
        if self._elements_changed is None:
            return
        self._elements_changed += int(np.count_nonzero(differs))
        largest = _largest_difference(*(_numbers(side, self._dtype, self._itemsize) for side in (before, after)))
        if largest is not None and (self._max_difference is None or largest > self._max_difference):
            self._max_difference = largest


def _unproved(old: Sequence[_Piece], new: Sequence[_Piece]) -> Iterator[tuple[int, int]]:
    """Ranges in which the marks of two contents of one size do not prove that they are equal."""
    i = j = at = 0
    while i < len(old) and j < len(new):
        a, b = old[i], new[j]
        stop = min(a.stop, b.stop)
        if a.mark is None or a.mark != b.mark:
            yield at, stop
        at = stop
        i += a.stop == stop
        j += b.stop == stop


def _whole_items(ranges: Iterable[tuple[int, int]], itemsize: int) -> Iterator[tuple[int, int]]:
    """The ranges widened to whole items and joined where they touch, so that no item is met twice."""
    start = stop = 0
    for low, high in ranges:
        low -= low % itemsize
        high += -high % itemsize
        if low > stop:
            if start < stop:
                yield start, stop
            start = low
        stop = high
    if start < stop:
        yield start, stop


@cache
def _numpy() -> ModuleType | None:
    try:
        return importlib.import_module("numpy")
    except ImportError:
        return None


def _numbers(data: Any, dtype: str, itemsize: int) -> Any:
    """An array of bytes as one of numbers whose differences mean something; None for other dtypes."""
    np: Any = _numpy()
    if dtype == "bfloat16":  # the upper half of a float32
        return (data.view("<u2").astype("<u4") << 16).view("<f4")
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError):
        return None
    return data.view(found) if found.kind in "iufc" and found.itemsize == itemsize else None


def _largest_difference(old: Any, new: Any) -> float | None:
    """The largest absolute difference between arrays of one number type, NaN left out."""
    if old is None:
        return None
    np: Any = _numpy()
    kind = old.dtype.kind
    if kind in "iu":  # exact: the difference of any two fits the unsigned type of the same size
        native = old.dtype.newbyteorder("=")
        old, new = old.astype(native), new.astype(native)
        differences = (np.maximum(old, new) - np.minimum(old, new)).view(f"u{native.itemsize}")
        return int(differences.max())
    wide = np.result_type(old.dtype, np.complex128 if kind == "c" else np.float64)
    with np.errstate(all="ignore"):
        differences = np.abs(new.astype(wide) - old.astype(wide))
    differences = differences[~np.isnan(differences)]
    return float(differences.max()) if differences.size else None


# Text


def _is_long(old: str, new: str) -> bool:
    return max(len(old), len(new)) > _LONG_TEXT or "\n" in old or "\n" in new


def _text_delta(old: str, new: str) -> TextDelta:
    a, b = old.split("\n"), new.split("\n")
    if len(a) == len(b) == 1:
        return _line_delta(old, new)
    same = _common(a, b)
    end = _common(a[same:][::-1], b[same:][::-1])
    same, end = max(same - _CONTEXT_LINES, 0), max(end - _CONTEXT_LINES, 0)
    a, b = a[same : len(a) - end], b[same : len(b) - end]
    left_out = max(len(a) - _MATCHED_LINES, 0) + max(len(b) - _MATCHED_LINES, 0)
    a, b = a[:_MATCHED_LINES], b[:_MATCHED_LINES]
    lines: list[str] = []
    for group in difflib.SequenceMatcher(None, a, b).get_grouped_opcodes(_CONTEXT_LINES):
        (_, i1, _, j1, _), (_, _, i2, _, j2) = group[0], group[-1]
        lines.append(f"@@ -{same + i1 + 1},{i2 - i1} +{same + j1 + 1},{j2 - j1} @@")
        for tag, i1, i2, j1, j2 in group:
            if tag == "equal":
                lines += [" " + line for line in a[i1:i2]]
            else:
                lines += ["-" + line for line in a[i1:i2]]
                lines += ["+" + line for line in b[j1:j2]]
    left_out += max(len(lines) - _SHOWN_LINES, 0)
    return TextDelta(tuple(_clip(line) for line in lines[:_SHOWN_LINES]), left_out)


def _common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many items two sequences have in common at their beginning; by halves, because texts may be long."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _line_delta(old: str, new: str) -> TextDelta:
    """Two long lines: the part around their first difference."""
    at = _common(old, new)
    start = max(at - _SHOWN_CHARACTERS // 4, 0)
    lead = "…" if start else ""
    lines = [f"-{lead}{_clip(old[start:])}", f"+{lead}{_clip(new[start:])}"]
    return TextDelta((f"@@ character {at + 1:,} @@", *lines))


def _clip(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


# Values, for people


def brief(value: object) -> str | int | float | bool | None:
    """A value as JSON can hold it: plain ones as they are, long text cut, anything else in words."""
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, str):
        return _clip(value)
    if isinstance(value, BufferSummary):
        if (number := _scalar(value)) is not None:
            return brief(number)
        if value.kind in ("bytes", "bytearray"):
            return f"{value.kind}, {value.size_bytes:,} bytes"
        return f"{value.kind} of {value.dtype}, shape {_shape(value.shape)}, {value.size_bytes:,} bytes"
    if isinstance(value, TypeSummary):
        return f"{value.name} (version {value.version})"
    if isinstance(value, dict | list | tuple | deque | set | frozenset):
        return f"{type_name(value)} of {len(value):,}"
    return _clip(repr(value))


_SCALARS = {"b1": "?", "f2": "e", "f4": "f", "f8": "d", "bool": "?", "float16": "e", "float32": "f", "float64": "d"}
for _n, _code in enumerate("bhiq"):
    _SCALARS |= {f"i{1 << _n}": _code, f"int{8 << _n}": _code}
    _SCALARS |= {f"u{1 << _n}": _code.upper(), f"uint{8 << _n}": _code.upper()}


def _scalar(summary: BufferSummary) -> float | None:
    """The number in a numpy scalar or an array without dimensions, which are short enough to be in the tree."""
    code = _SCALARS.get(summary.dtype.lstrip("<>|"))
    if code is None or summary.shape or struct.calcsize(f"={code}") != len(summary.data):
        return None
    found: float = struct.unpack((">" if summary.dtype[0] == ">" else "<") + code, summary.data)[0]
    return found


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "()"


def type_name(value: object) -> str:
    """What a value of an outline was when it was saved."""
    if isinstance(value, BufferSummary):
        return value.kind
    return value.name if isinstance(value, TypeSummary) else type(value).__name__


def summary_of(value: BufferSummary | bytes) -> BufferSummary:
    """Short byte strings are in outlines as themselves, long ones summarised: here they are alike."""
    if isinstance(value, BufferSummary):
        return value
    return BufferSummary("bytes", "uint8", (len(value),), len(value), data=value)


def weigh(value: object) -> int:
    """Bytes of all arrays and byte strings in a value of an outline."""
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
