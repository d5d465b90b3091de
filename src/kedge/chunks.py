"""What streams of bytes are cut into, and where those bytes are: in memory, on a device, still in the store.

`chunk_writer` puts chunks into a store, `chunk_reader` gets them back, verified.
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

CHUNK_BYTES = 1 << 20  # of buffers; measured best for arrays
TASK_BYTES = 4 << 20  # what a worker takes at once: one look-up and one compression test for all of it
INLINE_BYTES = 64 * 1024  # new data of one save up to this lives in index rows: one commit, one sync (I1)
WORKERS = max(6, min(12, os.cpu_count() or 1))  # 12 are faster than 6, or than 16, on a machine with 16 cores


ZERO = bytes(32)
_BEGIN_OF_ZEROS = bytes(64)


@dataclass(frozen=True, slots=True)
class Entry:
    """One chunk of a stream. `digest`, BLAKE3 of its bytes, names and proves it; zeros stand for zero bytes."""

    size_bytes: int
    digest: bytes

    @property
    def is_zero(self) -> bool:
        return self.digest == ZERO


@dataclass(frozen=True, slots=True)
class Deferred:
    """A piece that the worker storing it reads; while the store has the chunk `known`, nobody does."""

    size_bytes: int
    read: Callable[[], Buffer]
    known: Entry | None = None


class Staged(Protocol):
    """Where a chunk goes that is read and verified elsewhere first."""

    def staging(self) -> memoryview:
        """Memory of this thread, as large as this, to read into before `take`; used again by the next call."""
        ...

    def take(self, data: memoryview) -> None:
        """Copy `data` there."""
        ...


@runtime_checkable
class DeviceMemory(Staged, Protocol):
    """Bytes of an accelerator, which the processor reaches only by copying."""

    @property
    def size_bytes(self) -> int: ...

    def part(self, start: int, stop: int) -> DeviceMemory: ...

    def pieces(self) -> Iterator[Deferred]:
        """Chunk by chunk; what one of them reads is good until the same thread reads again."""
        ...

    def copy_to(self, target: memoryview) -> None:
        """Begin to copy to main memory; done after `wait`."""
        ...

    def wait(self) -> None: ...

    def lock(self, memory: memoryview) -> bool:
        """Keep pages in their place, for faster copying; whether that worked. `unlock` before they are freed."""
        ...

    def unlock(self, memory: memoryview) -> None: ...


Target: TypeAlias = memoryview | DeviceMemory


@runtime_checkable
class RecallingSource(Protocol):
    """A source that can tell from an earlier state of the job that some of its pieces are stored already."""

    @property
    def size_bytes(self) -> int: ...

    def recall(self, earlier: Iterable[tuple[object, Callable[[int], StoredStream]]]) -> None:
        """Called before `pieces`. Earlier states, newest first: the outline, and a way to open a buffer of it."""
        ...

    def pieces(self) -> Iterator[Buffer | Deferred]: ...


class Reader(Protocol):
    """What reads chunks of a store, each verified before its bytes are handed out (I2)."""

    def read(self, wanted: Sequence[tuple[Entry, memoryview | Staged]], *, of: str) -> None:
        """Fill each target with the chunk of its entry."""
        ...

    def read_row(self, entries: Sequence[Entry], memory: memoryview, *, of: str) -> None:
        """Fill `memory` with the chunks, one behind the other; zeros are left out."""
        ...


class Writer(Protocol):
    """What takes the chunks of one save."""

    def add(
        self, pieces: Iterable[Buffer | Deferred], *, size_bytes: int, at_once: int = WORKERS, is_shared: bool = False
    ) -> list[Entry]:
        """Take one stream; its entries are complete later. `is_shared` pieces lie in memory that others may change."""
        ...

    def add_named(self, pieces: Mapping[bytes, bytes]) -> None:
        """Take chunks that belong to no stream and whose digests are known."""
        ...

    def reuse(self, digest: bytes) -> bool:
        """Whether a chunk an earlier save wrote may stand for one of this save; the commit checks that it exists."""
        ...


@dataclass(frozen=True, slots=True)
class StoredStream:
    """What a source comes back as: chunks still in the store, in order; `reader` verifies each (I2)."""

    entries: Sequence[Entry]
    size_bytes: int
    reader: Reader
    of: str


@lru_cache(maxsize=16)
def digest_of_zeros(size: int) -> bytes:
    return digest_of(bytes(size))


def is_zero(piece: memoryview, digest: bytes) -> bool:
    """Whether a piece of at least a page, with this digest, is all zeros."""
    size = len(piece)
    # The beginning is asked first: pieces cut by content have all sizes, and hashing zeros for each costs.
    return size >= 4096 and piece[:64] == _BEGIN_OF_ZEROS and digest == digest_of_zeros(size)


def cut(data: memoryview, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """`data` in pieces of `size`, without copying."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def portions(items: Iterable[T], size_of: Callable[[T], int], most_bytes: int) -> Iterator[list[T]]:
    """Some of them at a time: until they take `most_bytes`."""
    some: list[T] = []
    size = 0
    for item in items:
        some.append(item)
        size += size_of(item)
        if size >= most_bytes:
            yield some
            some, size = [], 0
    if some:
        yield some


def cut_by_content(data: Buffer, average: int) -> Iterator[memoryview]:
    """Pieces whose borders follow the content, so that an insertion changes only the pieces around it."""
    from pyfastcdc import FastCDC

    view = memoryview(data)
    if len(view) <= average // 4:
        yield view
        return
    for piece in FastCDC(avg_size=average, min_size=average // 4, max_size=average * 4).cut_buf(view):
        yield view[piece.offset : piece.offset + piece.length]


def allocate(size_bytes: int) -> memoryview:
    """Memory for a loaded buffer; large ones begin on a page, so that the disk can write into them directly.

    Asking for huge pages was measured: never faster here, and up to three times slower where memory is fragmented.
    """
    if size_bytes < 2 << 20:
        return memoryview(bytearray(size_bytes))
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
