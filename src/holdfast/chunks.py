"""From streams of bytes to chunks and back: cut, compare, digest, compress, place; read, verify, put together.

Writing, per chunk (the order is measured, docs/benchmarks.md): BLAKE3 → equal to the chunk at the same place of an
earlier checkpoint? then that one is reused → SHA-256 → known to the index? then that one is reused → zstd where a
sample shrinks → a pack, or the index row itself when all that is new is small.
Reading verifies every chunk by BLAKE3 before its bytes reach anyone (I2).

In an encrypted namespace (I10) a chunk is an envelope, sealed after it was compressed, and the index knows it by a name
that only the key gives. Manifests, which are encrypted themselves, go on naming chunks by their content, so that they
are the same in every store and under every key.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar, runtime_checkable

import zstandard
from blake3 import blake3

from .errors import Corrupted, NotFound
from .manifest import ZERO, Entry, decompress
from .ports import Blobs, BlobWriter, Buffer, Chunk, Encoding

if TYPE_CHECKING:
    from .crypto import DataKey, Vault

CHUNK_BYTES = 1 << 20  # of buffers; measured best for arrays
BLOCK_BYTES = 4096  # of packs: a chunk that begins on one can be mapped, and read around the page cache
TASK_BYTES = 4 << 20  # what a worker takes at once: one look-up and one compression test for all of it
INLINE_BYTES = 64 * 1024  # new data of one save up to this lives in index rows: one commit, one sync (I1)
BUNDLE_BYTES = 1 << 20  # small chunks are written together
WORKERS = max(6, min(12, os.cpu_count() or 1))  # 12 are faster than 6, or than 16, on a machine with 16 cores
RUN_BYTES = 8 << 20  # of neighbours in a pack elsewhere, asked for at once; each worker keeps as much memory
_GAP_BYTES = 64 * 1024  # between two of them that is read too, because it costs less than asking twice
_TRY_BYTES = 256  # less does not shrink by itself

_T = TypeVar("_T")
_local = threading.local()


@dataclass(frozen=True, slots=True)
class Deferred:
    """A piece that the worker storing it reads; while the store has the chunk `known`, nobody does."""

    size_bytes: int
    read: Callable[[], Buffer]
    known: Entry | None = None


@runtime_checkable
class DeviceMemory(Protocol):
    """Bytes of an accelerator, which the processor reaches only by copying."""

    @property
    def size_bytes(self) -> int: ...

    def part(self, start: int, stop: int) -> DeviceMemory: ...

    def pieces(self) -> Iterator[Deferred]:
        """Chunk by chunk; what one of them reads is good until the same thread reads again."""
        ...

    def staging(self) -> memoryview:
        """Memory of this thread, as large as this, to read into before `take`; used again by the next call."""
        ...

    def take(self, data: memoryview) -> None:
        """Copy `data` there."""
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


def cut(data: memoryview, size: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """`data` in pieces of `size`, without copying."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


def cut_by_content(data: Buffer, average: int) -> Iterator[memoryview]:
    """Pieces whose borders follow the content, so that an insertion changes only the pieces around it."""
    from pyfastcdc import FastCDC

    view = memoryview(data)
    if len(view) <= average // 4:
        yield view
        return
    for piece in FastCDC(avg_size=average, min_size=average // 4, max_size=average * 4).cut_buf(view):
        yield view[piece.offset : piece.offset + piece.length]


_BEGIN_OF_ZEROS = bytes(64)  # asked first: pieces cut by content have all sizes, and hashing zeros for each costs


@lru_cache(maxsize=16)
def _zeros_fast(size: int) -> bytes:
    return blake3(bytes(size)).digest()


@dataclass(frozen=True, slots=True)
class Written:
    """What writing the streams of one save came to."""

    new: list[Chunk]
    reused: list[bytes]
    stored_bytes: int


class ChunkWriter:
    """The chunks of one save. Add streams, then finish; abort on any failure."""

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
    ) -> None:
        self._blobs = blobs
        self._inline_bytes = inline_bytes
        self.key = key
        self._locate = locate
        self._pool = pool
        self._previous = previous
        self._distrusted = distrusted  # chunks the index said are gone: write them even if it seems to know them
        self._size_hint = size_hint
        self._lock = threading.Lock()
        self._claimed: set[bytes] = set()
        self._reused: set[bytes] = set()
        self._placed: list[Chunk] = []
        self._waiting: list[tuple[bytes, int, Encoding, bytes]] = []  # small chunks: digest, size, encoding, stored
        self._waiting_bytes = 0
        self._writer: BlobWriter | None = None
        self._in_flight: list[Future[None]] = []
        self._streams = 0

    def add(self, pieces: Iterable[Buffer | Deferred], *, size_bytes: int) -> list[Entry]:
        """Write one stream; its entries are complete after `finish`."""
        earlier = self._previous[self._streams] if self._streams < len(self._previous) else ()
        self._streams += 1
        entries: list[Entry] = []
        task: _Task = []
        task_bytes = 0
        for piece in pieces:
            if isinstance(piece, Deferred):
                if piece.known is not None and self._reuse(piece.known):
                    entries.append(piece.known)
                    continue
                task_bytes += 4 * piece.size_bytes  # its memory comes on top, so a worker takes fewer at once
            else:
                piece = memoryview(piece)
                task_bytes += len(piece)
            task.append((len(entries), piece))
            entries.append(_PENDING)
            if size_bytes <= CHUNK_BYTES:
                self._work(entries, task, earlier)
            elif task_bytes >= TASK_BYTES:
                self._submit(entries, task, earlier)
            else:
                continue
            task, task_bytes = [], 0
        if task:
            self._submit(entries, task, earlier)
        return entries

    def _reuse(self, old: Entry) -> bool:
        """Whether a chunk of an earlier checkpoint may stand for a piece; the commit checks that it exists."""
        if old.is_zero:
            return True
        name = self.name(old.digest)
        if name in self._distrusted:
            return False
        self._reused.add(name)
        return True

    def name(self, digest: bytes) -> bytes:
        """What the index calls the chunk with this content."""
        return digest if self.key is None else self.key.chunk_id(digest)

    def _submit(self, entries: list[Entry], task: _Task, earlier: Sequence[Entry]) -> None:
        while len(self._in_flight) > WORKERS:  # bounds what sources with pieces of their own keep in memory
            self._in_flight.pop(0).result()
        self._in_flight.append(self._pool().submit(self._work, entries, task, earlier))

    def _work(self, entries: list[Entry], task: _Task, earlier: Sequence[Entry]) -> None:
        fresh: dict[bytes, memoryview] = {}
        for slot, piece in task:
            if isinstance(piece, Deferred):
                piece = memoryview(piece.read())
            size = len(piece)
            fast = blake3(piece).digest()
            old = earlier[slot] if slot < len(earlier) else _PENDING
            if old.fast == fast and old.size_bytes == size and self._reuse(old):
                entries[slot] = old
                continue
            if size >= 4096 and piece[:64] == _BEGIN_OF_ZEROS and fast == _zeros_fast(size):
                entries[slot] = Entry(size, ZERO, fast)
                continue
            digest = hashlib.sha256(piece).digest()
            entries[slot] = Entry(size, digest, fast)
            fresh[self.name(digest)] = piece
        self._store_fresh(fresh)

    def add_named(self, pieces: Mapping[bytes, bytes]) -> None:
        """Write chunks that belong to no stream and whose digests are known: one look-up for all."""
        self._store_fresh({self.name(digest): memoryview(piece) for digest, piece in pieces.items()})

    def reuse(self, digest: bytes) -> bool:
        """Whether a chunk an earlier save wrote may stand for one of this save; the commit checks that it exists."""
        return self._reuse(Entry(0, digest, ZERO))

    def _store_fresh(self, fresh: dict[bytes, memoryview]) -> None:
        """Place those that the index does not have and nobody else in this save has placed."""
        if not fresh:
            return
        known = self._locate(list(fresh))
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
        together: list[_Stored] = []
        for digest, piece in fresh.items():
            self._place(digest, piece, together, try_zstd=shrinks and len(piece) >= _TRY_BYTES)
        if together:
            self._write_together(together)

    def _place(self, digest: bytes, piece: memoryview, together: list[_Stored], *, try_zstd: bool) -> None:
        """Write a chunk, or let it wait: `together` holds those of this worker that are stored as they are."""
        encoding, stored = Encoding.RAW, piece
        if try_zstd:
            squeezed = _compressor().compress(piece)
            if len(squeezed) < 0.9 * len(piece):
                encoding, stored = Encoding.ZSTD, memoryview(squeezed)
        if self.key is not None:
            encoding = Encoding.SEALED_ZSTD if encoding is Encoding.ZSTD else Encoding.SEALED
            stored = _seal(self.key, digest, stored)
        if len(stored) < INLINE_BYTES:
            self._put_by(digest, len(piece), encoding, stored)
        elif len(stored) >= BUNDLE_BYTES // 4 or encoding is not Encoding.RAW:  # the others take memory of their own
            self._write_together([(digest, len(piece), encoding, stored)])
        else:
            together.append((digest, len(piece), encoding, stored))
            if sum(len(one) for *_, one in together) >= BUNDLE_BYTES // 2:
                self._write_together(together)
                together.clear()

    def _put_by(self, digest: bytes, size: int, encoding: Encoding, stored: memoryview) -> None:
        """A small chunk waits for others, of any worker, to be written with."""
        with self._lock:
            self._waiting.append((digest, size, encoding, bytes(stored)))
            self._waiting_bytes += len(stored)
            if self._waiting_bytes < BUNDLE_BYTES:
                return
            bundle, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self._write_bundle(bundle)

    def _write_together(self, chunks: Sequence[_Stored]) -> None:
        """Chunks that follow each other, each beginning on a block: written at once, and one day read at once."""
        ends = list(accumulate(-(-len(stored) // BLOCK_BYTES) * BLOCK_BYTES for *_, stored in chunks))
        if len(chunks) == 1:
            pack, offset = self._open_writer().append(chunks[0][3])
        else:
            gaps = (end - start - len(one[3]) for start, end, one in zip([0, *ends], ends, chunks, strict=False))
            padded = [part for one, gap in zip(chunks, gaps, strict=True) for part in (one[3], bytes(gap))]
            pack, offset = self._open_writer().append(b"".join(padded))
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
        """Wait for every stream added so far; their entries are complete afterwards."""
        pending, self._in_flight = self._in_flight, []
        for future in pending:
            future.result()

    def finish(self, describe: Callable[[list[Chunk]], bytes]) -> Written:
        """Make all of it durable (I1). `describe(chunks)` is written behind them, so that packs explain themselves.

        What is small enough needs no pack: its bytes go to the index with the commit.
        """
        self.drain()
        if self._writer is None and self._waiting_bytes <= self._inline_bytes:
            self._placed += [Chunk(d, n, len(s), e, data=s) for d, n, e, s in self._waiting]
        else:
            if self._waiting:
                self._write_bundle(self._waiting)
            writer = self._open_writer()
            writer.append(describe(self._placed))
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

    def release(self) -> None:
        """The index has named the chunks, or never will: gc may judge their packs (I3)."""
        if self._writer is not None:
            self._writer.release()


_PENDING = Entry(0, ZERO, ZERO)
_Task: TypeAlias = list[tuple[int, memoryview | Deferred]]  # slot of the entry, piece
_Stored: TypeAlias = tuple[bytes, int, Encoding, Buffer]  # digest, size, encoding, bytes as they are stored


def _seal(key: DataKey, name: bytes, plain: memoryview) -> memoryview:
    """An envelope in a buffer of this thread, good until the next one: fresh memory costs as much as encrypting."""
    size = len(plain) + key.overhead_bytes
    buffer: bytearray | None = getattr(_local, "envelope", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.envelope = bytearray(max(size, CHUNK_BYTES + key.overhead_bytes))
    sealed = memoryview(buffer)[:size]
    key.seal_into("chunk", name, plain, sealed)
    return sealed


def _compressor() -> zstandard.ZstdCompressor:
    found: zstandard.ZstdCompressor | None = getattr(_local, "compressor", None)
    if found is None:
        found = _local.compressor = zstandard.ZstdCompressor(level=1, write_content_size=True)
    return found


def _shrinks(piece: memoryview) -> bool:
    """Whether three samples of 16 KiB shrink by more than a tenth; small pieces are simply tried."""
    size = len(piece)
    if size <= INLINE_BYTES:
        return size >= _TRY_BYTES
    sample = b"".join(piece[at : at + 16384] for at in (size // 6, size // 2, size - size // 6))
    return len(_compressor().compress(sample)) < 0.85 * len(sample)  # random float32 gives 0.9 and costs as much


class ChunkReader:
    """Reads chunks of one store, verified, into memory the caller provides."""

    def __init__(
        self,
        blobs: Blobs,
        locate: Callable[[Sequence[bytes]], dict[bytes, Chunk]],
        pool: Callable[[], Executor],
        vault: Vault | None = None,
    ) -> None:
        self._blobs = blobs
        self._locate = locate
        self._pool = pool
        self._vault = vault

    def find(self, digests: Iterable[bytes]) -> dict[bytes, Chunk]:
        """Where the chunks with this content are; unknown ones are left out."""
        if self._vault is None:
            return self._locate(list(digests))
        names = {digest: self._vault.chunk_ids(digest) for digest in digests}
        found = self._locate([name for some in names.values() for name in some])
        # While keys are changed a chunk may be there under two names: the first one is that of the current key.
        return {d: found[some[0]] for d, ids in names.items() if (some := [name for name in ids if name in found])}

    def _find_again(self, digest: bytes, place: Chunk | None) -> Chunk | None:
        """Where a chunk is now: gc may have moved it, or a change of keys renamed it. None if nowhere else."""
        if self._vault is not None:
            self._vault.refresh()
        moved = self.find([digest]).get(digest)
        return None if moved == place else moved

    def read(self, wanted: Sequence[tuple[Entry, Target]], *, of: str) -> None:
        """Fill each target with the chunk of its entry, in parallel, every one verified (I2)."""
        places = self.find({e.digest for e, _ in wanted if not e.is_zero})
        if len(wanted) <= 2:
            self._read_some(wanted, places, of)
            return
        runs, alone = self._runs(wanted, places)
        size = max(1, min(8, len(alone) // WORKERS))
        tasks = [alone[i : i + size] for i in range(0, len(alone), size)]
        futures = [self._pool().submit(self._read_run, run, places, of) for run in runs]
        futures += [self._pool().submit(self._read_some, task, places, of) for task in tasks]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
            for future in futures:  # nobody may write into the targets once this has returned
                if not future.cancelled():
                    future.exception()

    def read_row(self, entries: Sequence[Entry], memory: memoryview, *, of: str) -> None:
        """Fill `memory` with chunks one behind the other, every one verified (I2): in this thread, for callers with
        threads of their own. What lies in a pack as it is wanted is read at once. Zeros are left out."""
        places = self.find({entry.digest for entry in entries if not entry.is_zero})
        run: list[tuple[Entry, memoryview]] = []  # of chunks that lie side by side
        begin = end = 0
        before: Chunk | None = None
        for entry in entries:
            start, end = end, end + entry.size_bytes
            if entry.is_zero:
                before = None
                continue
            place = places.get(entry.digest)
            if run and not (self._is_plain(place) and before is not None and _follows(place, before)):
                self._read_side_by_side(run, memory[begin:start], places, of)
                run = []
            if not run:
                begin = start
            run.append((entry, memory[start:end]))
            before = place if self._is_plain(place) else None
        if run:
            self._read_side_by_side(run, memory[begin : begin + sum(len(part) for _, part in run)], places, of)

    def _is_plain(self, place: Chunk | None) -> bool:
        """Whether the bytes in the pack are those of the chunk."""
        is_raw = place is not None and place.encoding is Encoding.RAW and place.stored_bytes == place.size_bytes
        return is_raw and place is not None and place.data is None and self._vault is None

    def _read_side_by_side(
        self, run: Sequence[tuple[Entry, memoryview]], memory: memoryview, places: dict[bytes, Chunk], of: str
    ) -> None:
        """What fails is read again by itself, which tells what is the matter with it."""
        first = places.get(run[0][0].digest)
        is_read = False
        if len(run) > 1 and first is not None:
            try:
                self._blobs.read_into(first.pack, first.offset, memory)
                is_read = True
            except (NotFound, Corrupted):
                pass
        for entry, part in run:
            place = places.get(entry.digest)
            is_sound = is_read and place is not None and place.size_bytes == len(part)
            if not is_sound or blake3(part).digest() != entry.fast:
                self._read_one(entry, part, place, of)

    def _runs(
        self, wanted: Sequence[tuple[Entry, Target]], places: Mapping[bytes, Chunk]
    ) -> tuple[list[list[tuple[Entry, Target]]], list[tuple[Entry, Target]]]:
        """Neighbours in packs that are not files here, and all others."""
        elsewhere: list[tuple[Entry, Target]] = []
        alone: list[tuple[Entry, Target]] = []
        for one in wanted:
            place = places.get(one[0].digest)
            (elsewhere if place is not None and self._is_elsewhere(place) else alone).append(one)
        runs = neighbours(elsewhere, lambda one: places[one[0].digest])
        return [run for run in runs if len(run) > 1], [*alone, *(run[0] for run in runs if len(run) == 1)]

    def _is_elsewhere(self, place: Chunk) -> bool:
        return place.data is None and self._blobs.file_of(place.pack) is None

    def _read_run(self, run: Sequence[tuple[Entry, Target]], places: dict[bytes, Chunk], of: str) -> None:
        """Neighbours, read at once. What fails is read again by itself, which tells what is the matter with it."""
        try:
            stored = read_neighbours(self._blobs, [places[entry.digest] for entry, _ in run])
        except (NotFound, Corrupted):
            self._read_some(run, places, of)
            return
        for (entry, target), data in zip(run, stored, strict=True):
            memory = target if isinstance(target, memoryview) else target.staging()
            try:
                self._fill(entry, memory, places[entry.digest], of, data)
                _check_digest(entry, memory, of)
            except Corrupted:
                self._read_one(entry, memory, places[entry.digest], of)
            if not isinstance(target, memoryview):
                target.take(memory)

    def read_named(self, digests: Sequence[bytes], *, of: str) -> dict[bytes, bytes]:
        """The bytes of chunks that are known by their digests alone, verified by them (I2)."""
        places = self.find(digests)
        found: dict[bytes, bytes] = {}
        for run in neighbours([d for d in places if self._is_elsewhere(places[d])], places.__getitem__):
            try:
                stored = read_neighbours(self._blobs, [places[digest] for digest in run])
                for digest, data in zip(run, stored, strict=True):
                    found[digest] = bytes(unpack(places[digest], data, self._vault))
            except (NotFound, Corrupted):
                continue  # read by themselves below
        return {
            digest: plain
            if (plain := found.get(digest)) is not None and hashlib.sha256(plain).digest() == digest
            else self._read_named(digest, places.get(digest), of)
            for digest in digests
        }

    def _read_named(self, digest: bytes, place: Chunk | None, of: str) -> bytes:
        entry = Entry(place.size_bytes if place else 0, digest, ZERO)
        try:
            if place is None:
                raise NotFound("it is not in the index")
            plain = bytes(unpack(place, read_stored(self._blobs, place), self._vault))
        except NotFound as error:
            moved = self._find_again(digest, place)
            if moved is None:
                raise _damaged(entry, of, error.message) from error
            return self._read_named(digest, moved, of)
        if hashlib.sha256(plain).digest() != digest:
            raise _damaged(entry, of, "its bytes do not match its digest")
        return plain

    def map(self, entries: Sequence[Entry], *, of: str) -> memoryview:
        """A stream as read-only memory over the packs themselves: only compressed chunks are copied.

        Verified like a read (I2), which passes the bytes through the page cache once but keeps none of them.
        """
        from .blobs.mapping import Piece, Region, is_mappable

        places = self.find({e.digest for e in entries if not e.is_zero})
        size = sum(e.size_bytes for e in entries)
        pieces: list[Piece] = []
        mapped: list[tuple[Entry, int]] = []
        copied: list[tuple[Entry, int]] = []
        offset = 0
        for entry in entries:
            place = places.get(entry.digest)
            path = self._blobs.file_of(place.pack) if place and place.pack and place.encoding is Encoding.RAW else None
            piece = Piece(offset, entry.size_bytes, path or "", place.offset if place else 0)
            if path and is_mappable(piece, size):
                pieces.append(piece)
                mapped.append((entry, offset))
            elif not entry.is_zero:
                copied.append((entry, offset))
            offset += entry.size_bytes
        region = Region(size, pieces)
        self.read([(e, region.writable[at : at + e.size_bytes]) for e, at in copied], of=of)
        tasks = [self._pool().submit(_check, e, region.writable[at : at + e.size_bytes], of) for e, at in mapped]
        for task in tasks:
            task.result()
        return region.seal()

    def _read_some(self, task: Sequence[tuple[Entry, Target]], places: dict[bytes, Chunk], of: str) -> None:
        for entry, target in task:
            place = places.get(entry.digest)
            if isinstance(target, memoryview):
                self._read_one(entry, target, place, of)
            else:
                staging = target.staging()
                self._read_one(entry, staging, place, of)
                target.take(staging)

    def _read_one(self, entry: Entry, target: memoryview, place: Chunk | None, of: str) -> None:
        if entry.is_zero:
            target[:] = bytes(len(target))
            return
        try:
            self._read_verified(entry, target, place, of)
        except Corrupted:
            if place is None or not self._is_elsewhere(place):
                raise
            self._read_verified(entry, target, place, of)  # it may have been changed on its way here

    def _read_verified(self, entry: Entry, target: memoryview, place: Chunk | None, of: str) -> None:
        while True:
            try:
                self._fill(entry, target, place, of)
            except NotFound as error:
                # gc may have moved the chunk to another pack since it was looked up; ask again.
                moved = self._find_again(entry.digest, place)
                if moved is None:
                    raise _damaged(entry, of, str(error)) from error
                place = moved
            else:
                break
        _check_digest(entry, target, of)

    def _fill(
        self, entry: Entry, target: memoryview, place: Chunk | None, of: str, stored: Buffer | None = None
    ) -> None:
        if place is None:
            raise NotFound("the index does not know it")
        if place.size_bytes != len(target):
            raise _damaged(entry, of, "its length in the index is wrong")
        if place.encoding is Encoding.RAW and place.data is None and self._vault is None:
            if place.stored_bytes != len(target):
                raise _damaged(entry, of, "its length in the index is wrong")
            if stored is None:
                self._blobs.read_into(place.pack, place.offset, target)
            else:
                target[:] = stored
            return
        try:
            stored = read_stored(self._blobs, place) if stored is None else stored
            plain = unpack(place, stored, self._vault, target)
        except Corrupted as error:
            raise _damaged(entry, of, error.message) from error
        if len(plain) != len(target):
            raise _damaged(entry, of, "its length is wrong")
        if plain is not target:
            target[:] = plain


def _follows(place: Chunk | None, before: Chunk) -> bool:
    """Whether one begins where the other ends."""
    return place is not None and place.pack == before.pack and place.offset == before.offset + before.stored_bytes


def neighbours(wanted: Iterable[_T], place_of: Callable[[_T], Chunk]) -> list[list[_T]]:
    """What lies side by side in a pack, in runs of bounded length."""
    runs: list[list[_T]] = []
    pack, start, end = "", 0, 0
    for one in sorted(wanted, key=lambda one: ((place := place_of(one)).pack, place.offset)):
        place = place_of(one)
        stop = place.offset + place.stored_bytes
        if not runs or place.pack != pack or place.offset > end + _GAP_BYTES or stop - start > RUN_BYTES:
            runs.append([])
            pack, start, end = place.pack, place.offset, stop
        runs[-1].append(one)
        end = max(end, stop)
    return runs


def read_neighbours(blobs: Blobs, places: Sequence[Chunk]) -> list[memoryview]:
    """The stored bytes of a run, read at once into memory of this thread, good until the next one."""
    start = places[0].offset
    size = max(place.offset + place.stored_bytes for place in places) - start
    buffer: bytearray | None = getattr(_local, "run", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.run = bytearray(size)
    view = memoryview(buffer)
    blobs.read_into(places[0].pack, start, view[:size])
    return [view[place.offset - start :][: place.stored_bytes] for place in places]


def read_stored(blobs: Blobs, place: Chunk) -> Buffer:
    """The bytes of a chunk as they are stored."""
    if place.data is not None:
        return place.data
    stored = memoryview(bytearray(place.stored_bytes))
    blobs.read_into(place.pack, place.offset, stored)
    return stored


def unpack(place: Chunk, stored: Buffer, vault: Vault | None, target: memoryview | None = None) -> Buffer:
    """The plain bytes of a chunk, in `target` where that saves a copy.

    What is plain in an encrypted namespace, or sealed in a plain one, is Corrupted (I10), and so is what does not open.
    """
    if place.encoding.is_sealed != (vault is not None):
        is_sealed = "encrypted" if place.encoding.is_sealed else "not encrypted"
        raise Corrupted(f"it is {is_sealed}, which this namespace does not allow", hint="run holdfast check")
    if vault is not None:
        key = vault.key_of(stored)
        if place.encoding is Encoding.SEALED and target is not None and len(stored) == len(target) + key.overhead_bytes:
            key.open_into("chunk", place.digest, stored, target)
            return target
        stored = key.open("chunk", place.digest, stored)
    return decompress(stored, place.size_bytes) if place.encoding.is_zstd else stored


def read_verified(blobs: Blobs, place: Chunk, vault: Vault | None) -> tuple[Buffer, Buffer]:
    """The stored and the plain bytes of a chunk, proved against the name it has in the index (I2)."""
    stored = read_stored(blobs, place)
    plain = unpack(place, stored, vault)
    if len(plain) != place.size_bytes or not _is_named(place.digest, plain, vault):
        where = f"at {place.offset} of pack {place.pack}" if place.pack else "in the index"
        raise Corrupted(
            f"chunk {place.digest.hex()[:16]}… {where} does not match its digest", hint="run holdfast check"
        )
    return stored, plain


def _is_named(name: bytes, plain: Buffer, vault: Vault | None) -> bool:
    """Whether the index would call these bytes so."""
    digest = hashlib.sha256(plain).digest()
    return digest == name if vault is None else name in vault.chunk_ids(digest)


@dataclass(frozen=True, slots=True)
class StoredStream:
    """What a source comes back as: chunks still in the store, in order; `reader` verifies each (I2)."""

    entries: Sequence[Entry]
    size_bytes: int
    reader: ChunkReader
    of: str


def _check_digest(entry: Entry, data: memoryview, of: str) -> None:
    if blake3(data).digest() != entry.fast:
        raise _damaged(entry, of, "its bytes do not match its digest")


def _check(entry: Entry, data: memoryview, of: str) -> None:
    _check_digest(entry, data, of)
    data.release()


def _damaged(entry: Entry, of: str, why: str) -> Corrupted:
    return Corrupted(
        f"chunk {entry.digest.hex()[:16]}… of {of} is damaged: {why}",
        hint="run holdfast check; restore an earlier checkpoint or another copy of the store",
    )


def allocate(size_bytes: int) -> memoryview:
    """Memory for a loaded buffer; large ones begin on a page, so that the disk can write into them directly.

    Asking for huge pages was measured: never faster here, and up to three times slower where memory is fragmented.
    """
    if size_bytes < 2 << 20:
        return memoryview(bytearray(size_bytes))
    return memoryview(mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
