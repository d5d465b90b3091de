"""From streams of bytes to stored chunks: cut, compare, digest, compress, seal, place.

The order for each chunk was chosen by measurement:
- BLAKE3.
- Reuse the chunk at the same position of an earlier checkpoint if it is equal.
- Reuse the chunk that the index knows.
- zstd, if a sample shrinks.
- Append to a pack, or store in an index row if all new data is small.

The bytes written are those that were digested (I2): a piece that others may change is first copied, to memory the disk
can read directly. Only the comparison with an earlier checkpoint may read the original, because equal pieces are not
written.

In an encrypted namespace (I10) a chunk is compressed, then sealed in an envelope. The index knows it by a name that
only the key gives. Manifests, which are encrypted themselves, still name chunks by their content, so that they are the
same in every store and under every key.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, TypeAlias

import zstandard

from kedge.blobs.shelter import give_up_if_abandoned
from kedge.chunks import CHUNK_BYTES, INLINE_BYTES, TASK_BYTES, WORKERS, ZERO, Deferred, Entry, digest_of_zeros, is_zero
from kedge.errors import Conflict, NotFound, StorageError, Validation
from kedge.ports import (
    Blobs,
    BlobWriter,
    Buffer,
    Chunk,
    ChunksGone,
    Encoding,
    IdTaken,
    KeysChanged,
    Unmet,
    digest_of,
)

from .record import Draft, append_record

if TYPE_CHECKING:
    from kedge.crypto import DataKey

BLOCK_BYTES = 4096  # of packs: a chunk that begins on one can be mapped, and read around the page cache
BUNDLE_BYTES = 1 << 20  # small chunks are written in bundles of this size
_TRY_BYTES = 256  # less does not shrink alone
_DOUBT_BYTES = 16 * 1024  # from this size on, a sample costs much less than trying
_PENDING = Entry(0, ZERO)
# By a commit, which has then not happened.
_REFUSALS = (Conflict, NotFound, Validation, ChunksGone, IdTaken, KeysChanged, Unmet)
_Task: TypeAlias = list[tuple[int, memoryview | Deferred]]  # slot of the entry, piece
_Stored: TypeAlias = tuple[bytes, int, Encoding, Buffer]  # digest, size, encoding, bytes as they are stored

_local = threading.local()


@dataclass(frozen=True, slots=True)
class _Earlier:
    """What a stream is compared with, and whether others may change the memory of its pieces."""

    entries: Sequence[Entry]
    is_shared: bool


@dataclass(frozen=True, slots=True)
class Written:
    """The result of writing the streams of one save."""

    new: list[Chunk]
    reused: list[bytes]
    stored_bytes: int


class ChunkWriter:
    """The chunks of one save. Call add for each stream, then finish; on any failure abort."""

    def __init__(
        self,
        blobs: Blobs,
        locate: Callable[[Sequence[bytes]], dict[bytes, Chunk]],
        pool: Callable[[], Executor],
        *,
        previous: Sequence[Sequence[Entry]] = (),
        distrusted: frozenset[bytes] = frozenset(),
        size_hint: int = 0,
        key: DataKey | None = None,
        inline_bytes: int = INLINE_BYTES,
        unasked_bytes: int = 0,
    ) -> None:
        """Prepare the save.

        `unasked_bytes`: named chunks of a save that reuses others go with the commit without a look-up, up to this
        size. They are new unless another process saved them; then the commit keeps that process's copy.
        """
        self._blobs = blobs
        self._inline_bytes = inline_bytes
        self._unasked_bytes = min(unasked_bytes, inline_bytes)
        self.key = key
        self._locate = locate
        self._pool = pool
        self._previous = previous
        self._distrusted = distrusted  # the index reported these as gone: write them even if it seems to know them
        self._size_hint = size_hint
        self._lock = threading.Lock()
        self._claimed: set[bytes] = set()
        self._reused: set[bytes] = set()
        self._placed: list[Chunk] = []
        self._waiting: list[tuple[bytes, int, Encoding, bytes]] = []  # small chunks: digest, size, encoding, stored
        self._waiting_bytes = 0
        self._writer: BlobWriter | None = None
        self._record: tuple[str, int] | None = None  # where the record of the save is, once written
        self._in_flight: list[Future[None]] = []
        self._streams = 0
        self._is_changing = False  # a guess: like the previous piece

    def add(
        self, pieces: Iterable[Buffer | Deferred], *, size_bytes: int, at_once: int = WORKERS, is_shared: bool = False
    ) -> list[Entry]:
        """Write one stream with at most `at_once` workers; its entries are complete after `finish`.

        Others may change the memory of `is_shared` pieces meanwhile.
        """
        earlier = _Earlier(self._previous[self._streams] if self._streams < len(self._previous) else (), is_shared)
        self._streams += 1
        entries: list[Entry] = []
        task: _Task = []
        task_bytes = 0
        for piece in pieces:
            if isinstance(piece, Deferred):
                if piece.known is not None and self._reuse(piece.known):
                    entries.append(piece.known)
                    continue
                task_bytes += 4 * piece.size_bytes  # its memory is additional, so a worker takes fewer at once
            else:
                piece = memoryview(piece)
                task_bytes += len(piece)
            task.append((len(entries), piece))
            entries.append(_PENDING)
            if size_bytes <= CHUNK_BYTES:
                self._work(entries, task, earlier)
            elif task_bytes >= TASK_BYTES:
                self._submit(entries, task, earlier, at_once)
            else:
                continue
            task, task_bytes = [], 0
        if task:
            self._submit(entries, task, earlier, at_once)
        return entries

    def _reuse(self, old: Entry) -> bool:
        """Return whether a chunk of an earlier checkpoint may be reused; the commit checks that it exists."""
        return old.is_zero or self.reuse(old.digest)

    def name(self, digest: bytes) -> bytes:
        """Return the index's name for the chunk with this content."""
        return digest if self.key is None else self.key.chunk_id(digest)

    def _submit(self, entries: list[Entry], task: _Task, earlier: _Earlier, at_once: int) -> None:
        give_up_if_abandoned()
        while len(self._in_flight) > at_once:  # limits the memory of sources that read their own pieces
            self._in_flight.pop(0).result()
        self._in_flight.append(self._pool().submit(self._work, entries, task, earlier))

    def _work(self, entries: list[Entry], task: _Task, earlier: _Earlier) -> None:
        fresh: dict[bytes, memoryview] = {}
        copied_bytes = 0
        for slot, piece in task:
            if isinstance(piece, Deferred):
                piece = memoryview(piece.read())
            size = len(piece)
            old = earlier.entries[slot] if slot < len(earlier.entries) else _PENDING
            if earlier.is_shared:
                if not self._is_changing and self._is_same(old, size, digest_of(piece)):
                    entries[slot] = old
                    continue
                piece = _copy(piece, copied_bytes)
                copied_bytes += -(-size // BLOCK_BYTES) * BLOCK_BYTES
            digest = digest_of(piece)
            is_same = self._is_same(old, size, digest)
            self._is_changing = not is_same
            if is_same:
                entries[slot] = old
                continue
            if is_zero(piece, digest):
                entries[slot] = Entry(size, ZERO)
                continue
            entries[slot] = Entry(size, digest)
            fresh[self.name(digest)] = piece
        self._store_fresh(fresh)

    def _is_same(self, old: Entry, size: int, digest: bytes) -> bool:
        if old.is_zero:
            return old.size_bytes == size > 0 and digest == digest_of_zeros(size)
        return old.digest == digest and old.size_bytes == size and self._reuse(old)

    def add_named(self, pieces: Mapping[bytes, bytes]) -> None:
        """Write chunks that belong to no stream and have known digests, with at most one look-up."""
        fresh = {self.name(digest): memoryview(piece) for digest, piece in pieces.items()}
        is_new = bool(self._reused) and sum(map(len, fresh.values())) <= self._unasked_bytes
        self._store_fresh(fresh, is_asked=not is_new)

    def reuse(self, digest: bytes) -> bool:
        """Return whether a chunk from an earlier save may be reused; the commit checks that it still exists."""
        name = self.name(digest)
        if name in self._distrusted:
            return False
        self._reused.add(name)
        return True

    def _store_fresh(self, fresh: dict[bytes, memoryview], *, is_asked: bool = True) -> None:
        """Place chunks that neither the index (if `is_asked`) nor this save has yet."""
        if not fresh:
            return
        known = self._locate(list(fresh)) if is_asked else {}
        with self._lock:
            for digest, chunk in known.items():
                if digest not in self._distrusted and not chunk.is_damaged:
                    self._reused.add(digest)
                    del fresh[digest]
            for digest in self._claimed & fresh.keys():
                del fresh[digest]
            self._claimed |= fresh.keys()
        if not fresh:
            return
        shrinks = _shrinks(max(fresh.values(), key=len))
        is_shrinking = True
        together: list[_Stored] = []
        for digest, piece in fresh.items():
            try_zstd = shrinks and len(piece) >= _TRY_BYTES
            if not is_shrinking and len(piece) >= _DOUBT_BYTES:  # a sample costs less than trying again
                try_zstd = try_zstd and _samples_shrink(piece, len(piece) // 16)
            is_shrinking = self._place(digest, piece, together, try_zstd=try_zstd)
        if together:
            self._write_together(together)

    def _place(self, digest: bytes, piece: memoryview, together: list[_Stored], *, try_zstd: bool) -> bool:
        """Write a chunk or queue it: `together` collects this worker's uncompressed ones. Return whether it shrank."""
        encoding = Encoding.RAW
        stored: Buffer = piece
        is_smaller = False
        if try_zstd:
            squeezed = _compressor().compress(piece)
            if len(squeezed) < 0.9 * len(piece):
                encoding, stored, is_smaller = Encoding.ZSTD, squeezed, True
        if self.key is not None:
            encoding |= Encoding.SEALED
            stored = _seal(self.key, digest, stored)
        if len(stored) < INLINE_BYTES:
            self._put_by(digest, len(piece), encoding, stored)
        elif len(stored) >= BUNDLE_BYTES // 4 or encoding is not Encoding.RAW:  # all others have memory of their own
            self._write_together([(digest, len(piece), encoding, stored)])
        else:
            together.append((digest, len(piece), encoding, stored))
            if sum(len(data) for *_, data in together) >= BUNDLE_BYTES // 2:
                self._write_together(together)
                together.clear()
        return is_smaller

    def _put_by(self, digest: bytes, size: int, encoding: Encoding, stored: Buffer) -> None:
        """Queue a small chunk, to be written in a bundle with those of all workers."""
        with self._lock:
            self._waiting.append((digest, size, encoding, bytes(stored)))
            self._waiting_bytes += len(stored)
            if self._waiting_bytes < BUNDLE_BYTES:
                return
            bundle, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._write_bundle(bundle)

    def _write_together(self, chunks: Sequence[_Stored]) -> None:
        """Write chunks consecutively, each beginning on a block, in one write, so that one read can return them."""
        ends = list(accumulate(-(-len(stored) // BLOCK_BYTES) * BLOCK_BYTES for *_, stored in chunks))
        if len(chunks) == 1:
            pack, offset = self._open_writer().append(chunks[0][3])
        else:
            joined = _joining_memory()[: ends[-1]]
            for (*_, stored), start, end in zip(chunks, [0, *ends], ends, strict=False):
                joined[start : start + len(stored)] = stored
                joined[start + len(stored) : end] = bytes(end - start - len(stored))
            pack, offset = self._open_writer().append(joined)
        for (digest, size, encoding, stored), start in zip(chunks, [0, *ends], strict=False):
            self._placed.append(Chunk(digest, size, len(stored), encoding, pack, offset + start))

    def _write_bundle(self, bundle: list[tuple[bytes, int, Encoding, bytes]]) -> None:
        pack, offset = self._open_writer().append(b"".join(stored for *_, stored in bundle))
        for digest, size, encoding, stored in bundle:
            self._placed.append(Chunk(digest, size, len(stored), encoding, pack, offset))
            offset += len(stored)

    def _open_writer(self) -> BlobWriter:
        with self._lock:
            if self._writer is None:
                self._writer = self._blobs.writer(self._size_hint)
            return self._writer

    def drain(self) -> None:
        """Wait for every stream added so far; their entries are then complete."""
        pending, self._in_flight = self._in_flight, []
        for future in pending:
            future.result()

    def finish(self, describe: Callable[[list[Chunk]], Draft]) -> Written:
        """Make everything durable (I1). `describe(chunks)` is appended after them, so that packs explain themselves.

        If all of it is small, no pack is needed: the bytes go to the index with the commit.
        """
        self.drain()
        if self._writer is None and self._waiting_bytes <= self._inline_bytes:
            self._placed += [Chunk(d, n, len(s), e, data=s) for d, n, e, s in self._waiting]
        else:
            if self._waiting:
                self._write_bundle(self._waiting)
            writer = self._open_writer()
            self._record = append_record(writer, describe(self._placed), self._placed[-1].pack if self._placed else "")
            writer.commit()
        self._placed.sort(key=lambda chunk: chunk.digest)
        new = self._placed
        return Written(new, sorted(self._reused - self._claimed), sum(c.stored_bytes for c in new))

    def abort(self) -> None:
        for future in self._in_flight:
            future.cancel()
        for future in self._in_flight:
            if not future.cancelled():
                future.exception()
        if self._writer is not None:
            self._writer.abort()

    def withdraw(self) -> None:
        """Abort a save that the index has refused, so that no rebuild finds it in the packs."""
        if self._writer is None or self._record is None:
            self.abort()
            return
        with suppress(StorageError):  # the caller hears of the refusal, not of a failing disk
            self._writer.withdraw(*self._record)

    def release(self) -> None:
        """Let gc judge the packs again: the index has committed the chunks, or never will (I3)."""
        if self._writer is not None:
            self._writer.release()


@contextmanager
def settled(writer: ChunkWriter) -> Iterator[None]:
    """Commit what the writer wrote inside this block. Afterwards gc may judge its packs (I3).

    What the index refuses is withdrawn from the packs before the refusal is raised. A commit that failed otherwise may
    have happened, so nothing is touched.
    """
    try:
        yield
    except _REFUSALS:
        writer.withdraw()
        raise
    except BaseException:
        writer.abort()
        raise
    writer.release()


def _seal(key: DataKey, name: bytes, plain: Buffer) -> memoryview:
    """Seal into this thread's buffer, valid until the next call: new memory costs as much as encrypting."""
    size = len(plain) + key.overhead_bytes
    buffer: bytearray | None = getattr(_local, "envelope", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.envelope = bytearray(max(size, CHUNK_BYTES + key.overhead_bytes))
    sealed = memoryview(buffer)[:size]
    key.seal_into("chunk", name, plain, sealed)
    return sealed


def _compressor() -> zstandard.ZstdCompressor:
    compressor: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if compressor is None:
        compressor = _local.compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
    return compressor


def _joining_memory() -> memoryview:
    """Return this thread's page-aligned memory for joined writes, which the disk can read directly."""
    memory: memoryview | None = getattr(_local, "joining", None)
    if memory is None:
        region = mmap.mmap(-1, BUNDLE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = _local.joining = memoryview(region)
    return memory


def _copy(piece: memoryview, offset: int) -> memoryview:
    """Copy to this thread's page-aligned memory at `offset`, valid until its next task; nobody else changes it."""
    memory: memoryview | None = getattr(_local, "copies", None)
    if memory is None or len(memory) < offset + len(piece):
        size = len(piece) if offset == 0 and len(piece) <= CHUNK_BYTES // 2 else TASK_BYTES + CHUNK_BYTES
        region = mmap.mmap(-1, max(size, offset + len(piece)), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory = _local.copies = memoryview(region)  # a smaller one lives on in the pieces that were copied to it
    copy = memory[offset : offset + len(piece)]
    copy[:] = piece
    return copy


def _shrinks(piece: memoryview) -> bool:
    """Return whether three samples of 16 KiB shrink by more than a tenth; small pieces are simply tried."""
    size = len(piece)
    if size <= INLINE_BYTES:
        return size >= _TRY_BYTES
    return _samples_shrink(piece, 16384)


def _samples_shrink(piece: memoryview, each_bytes: int) -> bool:
    size = len(piece)
    sample = b"".join(piece[at : at + each_bytes] for at in (size // 6, size // 2, size - size // 6))
    return len(_compressor().compress(sample)) < 0.85 * len(sample)  # random float32 gives 0.9 and costs as much
