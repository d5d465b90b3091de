"""The chunks that streams of bytes are cut into, and where the bytes are: in memory, on a device, in the store.

`chunk_writer` stores chunks, `chunk_reader` reads and verifies them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias, TypeVar, runtime_checkable

from .ports import Buffer, digest_of

T = TypeVar("T")

CHUNK_BYTES = 1 << 20  # of buffers; measured to be best for arrays
TASK_BYTES = 4 << 20  # a worker's task: one look-up and one compression test for all of it
INLINE_BYTES = 64 * 1024  # up to this, a save's new data lives in index rows: one commit, one sync (I1)
WORKERS = max(6, min(12, os.cpu_count() or 1))  # with 16 cores, 12 are faster than 6 or 16


ZERO = bytes(32)
_BEGIN_OF_ZEROS = bytes(64)


@dataclass(frozen=True, slots=True)
class Entry:
    """One chunk of a stream. `digest`, BLAKE3 of its bytes, names and verifies it; ZERO stands for zero bytes."""

    size_bytes: int
    digest: bytes

    @property
    def is_zero(self) -> bool:
        return self.digest == ZERO


@dataclass(frozen=True, slots=True)
class Deferred:
    """A piece that its storing worker reads. If the store has the chunk `known`, nobody reads it."""

    size_bytes: int
    read: Callable[[], Buffer]
    known: Entry | None = None


class Staged(Protocol):
    """A target for a chunk that is read and verified elsewhere first."""

    def staging(self) -> memoryview:
        """Return this thread's memory of this size, to read into before `take`. The next call reuses it."""
        ...

    def take(self, data: memoryview) -> None:
        """Copy `data` to the target."""
        ...


@runtime_checkable
class DeviceMemory(Staged, Protocol):
    """Memory of an accelerator, which the processor reaches only by copying."""

    @property
    def size_bytes(self) -> int: ...

    def part(self, start: int, stop: int) -> DeviceMemory: ...

    def pieces(self) -> Iterator[Deferred]:
        """Yield the chunks. What one of them reads is valid until the same thread reads again."""
        ...

    def copy_to(self, target: memoryview) -> None:
        """Start copying to main memory; complete after `wait`."""
        ...

    def wait(self) -> None: ...

    def lock(self, memory: memoryview) -> bool:
        """Pin pages for faster copying; return whether that worked. Call `unlock` before they are freed."""
        ...

    def unlock(self, memory: memoryview) -> None: ...


Target: TypeAlias = memoryview | DeviceMemory


@runtime_checkable
class RecallingSource(Protocol):
    """A source that can tell from an earlier state of the job which of its pieces are already stored."""

    @property
    def size_bytes(self) -> int: ...

    def recall(self, earlier: Iterable[tuple[object, Callable[[int], StoredStream]]]) -> None:
        """Receive earlier states, newest first: the outline, and a function that opens one of its buffers.

        Called before `pieces`.
        """
        ...

    def pieces(self) -> Iterator[Buffer | Deferred]: ...


class Reader(Protocol):
    """Reads chunks from a store, and verifies each before it returns the bytes (I2)."""

    def read(self, wanted: Sequence[tuple[Entry, memoryview | Staged]], *, of: str) -> None:
        """Fill each target with the chunk of its entry."""
        ...

    def read_row(self, entries: Sequence[Entry], memory: memoryview, *, of: str) -> None:
        """Fill `memory` with consecutive chunks; zeros are skipped."""
        ...


class Writer(Protocol):
    """Stores the chunks of one save."""

    def add(
        self, pieces: Iterable[Buffer | Deferred], *, size_bytes: int, at_once: int = WORKERS, is_shared: bool = False
    ) -> list[Entry]:
        """Store one stream; its entries are completed later. Others may change the memory of `is_shared` pieces."""
        ...

    def add_named(self, pieces: Mapping[bytes, bytes]) -> None:
        """Store chunks that belong to no stream and have known digests."""
        ...

    def reuse(self, digest: bytes) -> bool:
        """Return whether a chunk from an earlier save may be reused; the commit checks that it still exists."""
        ...


@dataclass(frozen=True, slots=True)
class StoredStream:
    """A loaded source: chunks still in the store, in order; `reader` verifies each (I2)."""

    entries: Sequence[Entry]
    size_bytes: int
    reader: Reader
    of: str


@lru_cache(maxsize=16)
def digest_of_zeros(size: int) -> bytes:
    return digest_of(bytes(size))


def is_zero(piece: memoryview, digest: bytes) -> bool:
    """Return whether a piece with this digest, of at least a page, is all zeros."""
    size = len(piece)
    # Compare the beginning first: pieces cut by content have all sizes, and hashing zeros for each is expensive.
    return size >= 4096 and piece[:64] == _BEGIN_OF_ZEROS and digest == digest_of_zeros(size)


def cut(data: memoryview, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """Yield `data` in pieces of `size`, without copying."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def portions(items: Iterable[T], size_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Yield items in groups of at least `most_bytes`, and the rest."""
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= most_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def cut_by_content(data: Buffer, average: int) -> Iterator[memoryview]:
    """Yield pieces whose borders follow the content, so that an insertion changes only the pieces around it."""
    from pyfastcdc import FastCDC

    view = memoryview(data)
    if len(view) <= average // 4:
        yield view
        return
    for piece in FastCDC(avg_size=average, min_size=average // 4, max_size=average * 4).cut_buf(view):
        yield view[piece.offset : piece.offset + piece.length]


def allocate(size_bytes: int) -> memoryview:
    """Return memory for a loaded buffer. Large ones begin on a page, so that the disk can write into them directly.

    Huge pages were measured: never faster here, and up to three times slower where memory is fragmented.
    """
    if size_bytes < 2 << 20:
        return memoryview(bytearray(size_bytes))
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
