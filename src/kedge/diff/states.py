"""One side of a comparison: a checkpoint, whose chunks are read on demand."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from kedge import codec
from kedge.chunks import Entry, allocate
from kedge.codec import BufferSummary
from kedge.errors import Corrupted
from kedge.model import Checkpoint
from kedge.store.local import LocalStore

READ_BYTES = 4 << 20  # of each side at a time: several chunks, read in parallel


class Mark(NamedTuple):
    """A chunk, and where it begins relative to the buffer."""

    digest: bytes
    size_bytes: int
    begin: int


class Piece(NamedTuple):
    """Part of a content. Two pieces with the same mark have the same bytes at the same place."""

    start: int
    stop: int
    mark: Mark | None = None  # None: unknown without reading


class Content(Protocol):
    """The bytes of a summary."""

    size_bytes: int

    def pieces(self) -> Sequence[Piece]: ...

    def read(self, start: int, stop: int) -> memoryview: ...


class _Held:
    """Bytes in the tree itself."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)
        self.size_bytes = len(self._data)

    def pieces(self) -> Sequence[Piece]:
        return [Piece(0, self.size_bytes)] if self.size_bytes else []

    def read(self, start: int, stop: int) -> memoryview:
        return self._data[start:stop]


def _inline(summary: BufferSummary) -> list[Content]:
    """Return the content that is in the tree itself."""
    return [_Held(summary.data)] if summary.data or not summary.ordinals else []


class StoredState:
    """A checkpoint. Keeps the last few chunks it read, because small arrays share them."""

    def __init__(self, store: LocalStore, checkpoint: Checkpoint, packed: bytes) -> None:
        self._store = store
        self._id = checkpoint.id
        self._manifest = store.open(checkpoint, packed)
        self._starts: dict[int, list[int]] = {}
        self._recent: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self.outline = codec.outline(store.tree_of(checkpoint, self._manifest))

    def contents(self, summary: BufferSummary) -> list[Content]:
        if max(summary.ordinals, default=0) >= max(len(self._manifest.buffers), 1):
            raise Corrupted(f"checkpoint {self._id} lacks a buffer of its tree", hint="run kedge check")
        return [*_inline(summary), *(_Stored(self, n) for n in summary.ordinals)]

    def span(self, ordinal: int) -> tuple[int, int, int]:
        span = self._manifest.buffers[ordinal]
        return span.stream, span.offset, span.size_bytes

    def entries(self, stream: int, start: int, stop: int) -> Iterator[tuple[int, int, Entry]]:
        """Yield (number, offset, entry) of a stream's chunks with bytes of [start, stop)."""
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
        while held > READ_BYTES and len(self._recent) > 1:
            held -= len(self._recent.popitem(last=False)[1])
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


class _Stored:
    """One buffer of a checkpoint."""

    def __init__(self, state: StoredState, ordinal: int) -> None:
        self._state = state
        self._stream, self._offset, self.size_bytes = state.span(ordinal)

    def pieces(self) -> Sequence[Piece]:
        begin, end = self._offset, self._offset + self.size_bytes
        return [
            Piece(
                max(at, begin) - begin,
                min(at + entry.size_bytes, end) - begin,
                Mark(entry.digest, entry.size_bytes, at - begin),
            )
            for _, at, entry in self._state.entries(self._stream, begin, end)
            if entry.size_bytes
        ]

    def read(self, start: int, stop: int) -> memoryview:
        return self._state.read(self._stream, self._offset + start, self._offset + stop)
