"""Arrays: how many elements differ, and by how much."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

from kedge.codec import BufferSummary

from .changes import ArrayDelta
from .states import READ_BYTES, Content, Piece

_STEP_BYTES = 1 << 20  # compared at a time

_ELEMENTWISE = frozenset({"ndarray", "tensor", "numpy scalar"})  # tables and byte strings are only bytes


class Tally:
    """Counts the differences in arrays of one form."""

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

    def compare(self, old: Content, new: Content) -> None:
        item = self._itemsize
        read_bytes = max(READ_BYTES // item, 1) * item
        step = max(_STEP_BYTES // item, 1) * item
        for start, stop in _whole_items(unproved(old.pieces(), new.pieces()), item):
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


def unproved(old: Sequence[Piece], new: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Yield ranges in which the marks of two contents of one size do not prove them equal."""
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
    """Yield the ranges widened to whole items and joined where they touch, so that no item occurs twice."""
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
    """Return an array of bytes as numbers whose differences are meaningful; None for other dtypes."""
    np: Any = _numpy()
    if dtype == "bfloat16":  # the upper half of a float32
        return (data.view("<u2").astype("<u4") << 16).view("<f4")
    try:
        numpy_dtype = np.dtype(dtype)
    except (TypeError, ValueError):
        return None
    return data.view(numpy_dtype) if numpy_dtype.kind in "iufc" and numpy_dtype.itemsize == itemsize else None


def _largest_difference(old: Any, new: Any) -> float | None:
    """Return the largest absolute difference between arrays of one number type, ignoring NaN."""
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
