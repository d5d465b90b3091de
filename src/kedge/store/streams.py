"""How the buffers of a state are arranged in streams of chunks."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kedge import codec
from kedge.chunks import (
    CHUNK_BYTES,
    INLINE_BYTES,
    WORKERS,
    Deferred,
    DeviceMemory,
    Entry,
    Reader,
    Staged,
    Target,
    Writer,
    cut,
    cut_by_content,
)
from kedge.errors import Corrupted, NotFound
from kedge.ports import Buffer

from .manifest import Manifest, Span

SMALL_BUFFER_BYTES = 256 * 1024  # smaller buffers share a stream
_SOURCE_WORKERS = 4  # for files, which each worker reads into its own memory
TREE_CHUNK_BYTES = 16 * 1024  # large trees are cut by content, so that a small change stores little

_local = threading.local()


def size_of(buffer: codec.Source) -> int:
    return len(buffer) if isinstance(buffer, memoryview) else buffer.size_bytes


def add_streams(writer: Writer, encoded: codec.Encoded) -> Manifest:
    """Add large buffers first, so that their streams keep their positions in later saves; then small ones, the tree."""
    spans: list[Span | None] = [None] * len(encoded.buffers)
    streams: list[list[Entry]] = []
    small: list[tuple[int, memoryview]] = []
    for n, buffer in enumerate(encoded.buffers):
        size = size_of(buffer)
        if isinstance(buffer, memoryview):
            if size < SMALL_BUFFER_BYTES:
                small.append((n, buffer))
                continue
            pieces: Iterable[Buffer | Deferred] = cut(buffer)
        else:
            pieces = buffer.pieces()
        is_memory = isinstance(buffer, memoryview | DeviceMemory)
        spans[n] = Span(len(streams), 0, size, is_lazy=not is_memory)
        at_once = WORKERS if is_memory else _SOURCE_WORKERS
        streams.append(writer.add(pieces, size_bytes=size, at_once=at_once, is_shared=_is_shared(buffer, encoded)))
    if small:
        offset = 0
        for n, view in small:
            spans[n] = Span(len(streams), offset, len(view))
            offset += len(view)
        streams.append(writer.add(_bundles([view for _, view in small]), size_bytes=offset))
    tree: bytes | None = encoded.tree
    tree_stream = -1
    if len(encoded.tree) > INLINE_BYTES:
        tree, tree_stream = None, len(streams)
        streams.append(writer.add(cut_by_content(encoded.tree, TREE_CHUNK_BYTES), size_bytes=len(encoded.tree)))
    return Manifest(tree, tree_stream, [span for span in spans if span is not None], streams)


def _is_shared(buffer: codec.Source, encoded: codec.Encoded) -> bool:
    """Return whether others may change these bytes while they are saved: not if immutable, nor in a private copy.

    Sources that are not memory read their pieces into their own memory.
    """
    return isinstance(buffer, memoryview) and not encoded.is_private and not isinstance(buffer.obj, bytes)


def _bundles(views: list[memoryview]) -> Iterable[bytes]:
    """Yield small buffers joined to pieces of at most a chunk."""
    waiting: list[memoryview] = []
    size = 0
    for view in views:
        if waiting and size + len(view) > CHUNK_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
        waiting.append(view)
        size += len(view)
    yield b"".join(waiting)


def place(entries: Sequence[Entry], data: memoryview) -> list[tuple[Entry, memoryview]]:
    """Return each entry with its part of `data`, which holds them consecutively."""
    placed, offset = [], 0
    for entry in entries:
        placed.append((entry, data[offset : offset + entry.size_bytes]))
        offset += entry.size_bytes
    return placed


def part_of(target: Target, start: int, stop: int) -> Target:
    return target[start:stop] if isinstance(target, memoryview) else target.part(start, stop)


@dataclass(frozen=True, slots=True)
class LateReader:
    """Reads what stayed in the store when a checkpoint was loaded.

    If the checkpoint was deleted since then, missing chunks are not damage.
    """

    reader: Reader
    knows: Callable[[str], bool]

    def read(self, wanted: Sequence[tuple[Entry, memoryview | Staged]], *, of: str) -> None:
        with self._existing(of):
            self.reader.read(wanted, of=of)

    def read_row(self, entries: Sequence[Entry], memory: memoryview, *, of: str) -> None:
        with self._existing(of):
            self.reader.read_row(entries, memory, of=of)

    @contextmanager
    def _existing(self, checkpoint_id: str) -> Iterator[None]:
        try:
            yield
        except Corrupted:
            if not self.knows(checkpoint_id):
                raise deleted_while_read(checkpoint_id) from None
            raise


def deleted_while_read(checkpoint_id: str) -> NotFound:
    return NotFound(
        f"checkpoint {checkpoint_id} was deleted while it was read", hint="kedge list JOB shows what exists"
    )


class SharedChunk:
    """A chunk that several buffers share: read into the reading thread's memory, then copied to each buffer.

    They get nothing before it is verified (I2), and it is not held longer: loading a state of ten thousand arrays takes
    hardly more memory than the arrays.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._parts: list[tuple[int, Target]] = []

    def add(self, offset: int, part: Target) -> None:
        """Fill `part` from `offset` of the chunk."""
        self._parts.append((offset, part))

    def staging(self) -> memoryview:
        memory: bytearray | None = getattr(_local, "memory", None)
        if memory is None or len(memory) < self._size_bytes:
            memory = bytearray(self._size_bytes)
            if self._size_bytes <= CHUNK_BYTES:
                _local.memory = memory
        return memoryview(memory)[: self._size_bytes]

    def take(self, data: memoryview) -> None:
        for offset, part in self._parts:
            if isinstance(part, memoryview):
                part[:] = data[offset : offset + len(part)]
            else:
                part.take(data[offset : offset + part.size_bytes])


def entries_at(entries: list[Entry], starts: list[int], span: Span) -> Iterable[tuple[Entry, int]]:
    """Yield the entries of a stream that a span touches, with their offsets."""
    stop = span.offset + span.size_bytes
    for i in range(bisect_right(starts, span.offset) - 1, len(entries)):
        if starts[i] >= stop:
            return
        yield entries[i], starts[i]
