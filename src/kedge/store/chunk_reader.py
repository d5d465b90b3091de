"""From stored chunks back to bytes: locate, read, decrypt, verify, join.

Every chunk is verified by its digest before its bytes are returned (I2).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from kedge.blobs.shelter import give_up_if_abandoned, sheltered
from kedge.chunks import WORKERS, Entry, Staged
from kedge.errors import Corrupted, NotFound
from kedge.ports import Blobs, Buffer, Chunk, Encoding, digest_of

from .chunk_cache import RecentChunks
from .manifest import decompress

if TYPE_CHECKING:
    from kedge.crypto import Vault

RUN_BYTES = 8 << 20  # of neighbours in a remote pack per read; each worker keeps as much memory
_GAP_BYTES = 64 * 1024  # a smaller gap between two of them is read, too: that costs less than another read

_T = TypeVar("_T")
_local = threading.local()


class ChunkReader:
    """Reads verified chunks of one store into memory that the caller provides."""

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
        self._recent = RecentChunks()

    @sheltered
    def find(self, digests: Iterable[bytes]) -> dict[bytes, Chunk]:
        """Return where the chunks with this content are; unknown ones are left out."""
        if self._vault is None:
            return self._locate(list(digests))
        names = {digest: self._vault.chunk_ids(digest) for digest in digests}
        places = self._locate([name for ids in names.values() for name in ids])
        # During a change of keys a chunk may exist under two names; the first is that of the current key.
        known = {digest: [name for name in ids if name in places] for digest, ids in names.items()}
        return {digest: places[ids[0]] for digest, ids in known.items() if ids}

    def _find_again(self, digest: bytes, place: Chunk | None) -> Chunk | None:
        """Return where a chunk is now; None if nowhere else. gc may have moved it, or a change of keys renamed it."""
        if self._vault is not None:
            self._vault.refresh()
        moved = self.find([digest]).get(digest)
        return None if moved == place else moved

    @sheltered
    def read(self, wanted: Sequence[tuple[Entry, memoryview | Staged]], *, of: str) -> None:
        """Fill each target with the chunk of its entry, in parallel, each verified (I2)."""
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
                give_up_if_abandoned()
                future.result()
        finally:
            for future in futures:
                future.cancel()
            for future in futures:  # nobody may write to the targets after this returns
                if not future.cancelled():
                    future.exception()

    @sheltered
    def read_row(self, entries: Sequence[Entry], memory: memoryview, *, of: str) -> None:
        """Fill `memory` with consecutive chunks, each verified (I2). Zeros are skipped.

        Runs in this thread, for callers with threads of their own. Chunks that are consecutive in a pack share one
        read.
        """
        places = self.find({entry.digest for entry in entries if not entry.is_zero})
        run: list[tuple[Entry, memoryview]] = []  # of chunks that are consecutive in a pack
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
        """Return whether the bytes in the pack are those of the chunk."""
        is_raw = place is not None and place.encoding is Encoding.RAW and place.stored_bytes == place.size_bytes
        return is_raw and place is not None and place.data is None and self._vault is None

    def _read_side_by_side(
        self, run: Sequence[tuple[Entry, memoryview]], memory: memoryview, places: dict[bytes, Chunk], of: str
    ) -> None:
        """Read a run at once. A chunk that fails is read again alone, which finds the reason."""
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
            if not is_sound or digest_of(part) != entry.digest:
                self._read_one(entry, part, place, of)

    def _runs(
        self, wanted: Sequence[tuple[Entry, memoryview | Staged]], places: Mapping[bytes, Chunk]
    ) -> tuple[list[list[tuple[Entry, memoryview | Staged]]], list[tuple[Entry, memoryview | Staged]]]:
        """Split into runs of neighbours in remote packs, and all others."""
        elsewhere: list[tuple[Entry, memoryview | Staged]] = []
        alone: list[tuple[Entry, memoryview | Staged]] = []
        for item in wanted:
            place = places.get(item[0].digest)
            (elsewhere if place is not None and self._is_elsewhere(place) else alone).append(item)
        runs = neighbours(elsewhere, lambda item: places[item[0].digest])
        return [run for run in runs if len(run) > 1], [*alone, *(run[0] for run in runs if len(run) == 1)]

    def _is_elsewhere(self, place: Chunk) -> bool:
        return place.data is None and self._blobs.file_of(place.pack) is None

    def _read_run(self, run: Sequence[tuple[Entry, memoryview | Staged]], places: dict[bytes, Chunk], of: str) -> None:
        """Read a run of neighbours at once. A chunk that fails is read again alone, which finds the reason."""
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
        """Return chunks that are known only by digest, verified by it when they were read (I2)."""
        chunks = self._recent.among(digests)
        if missing := [digest for digest in digests if digest not in chunks]:
            read = self._read_all_named(missing, of)
            self._recent.add(read)
            chunks |= read
        return chunks

    @sheltered
    def _read_all_named(self, digests: Sequence[bytes], of: str) -> dict[bytes, bytes]:
        places = self.find(digests)
        contents: dict[bytes, bytes] = {}
        for run in neighbours([d for d in places if self._is_elsewhere(places[d])], places.__getitem__):
            try:
                stored = read_neighbours(self._blobs, [places[digest] for digest in run])
                for digest, data in zip(run, stored, strict=True):
                    contents[digest] = bytes(unpack(places[digest], data, self._vault))
            except (NotFound, Corrupted):
                continue  # each is read alone below
        for digest in digests:
            place, plain = places.get(digest), contents.get(digest)
            if plain is None and place is not None and place.data is not None:
                with suppress(Corrupted):
                    plain = bytes(unpack(place, place.data, self._vault))
            if plain is None or digest_of(plain) != digest:
                plain = self._read_named(digest, place, of)
            contents[digest] = plain
        return contents

    def _read_named(self, digest: bytes, place: Chunk | None, of: str) -> bytes:
        entry = Entry(place.size_bytes if place else 0, digest)

        def read(place: Chunk | None) -> bytes:
            if place is None:
                raise NotFound("it is not in the index")
            try:
                plain = bytes(unpack(place, read_stored(self._blobs, place), self._vault))
            except Corrupted as error:
                raise _damaged(entry, of, error.message) from error
            if digest_of(plain) != digest:
                raise _damaged(entry, of, "its bytes do not match its digest")
            return plain

        try:
            return self._confirmed(digest, place, read)
        except NotFound as error:
            raise _damaged(entry, of, error.message) from error

    def _confirmed(self, digest: bytes, place: Chunk | None, read: Callable[[Chunk | None], _T]) -> _T:
        """Return `read(place)` of a chunk. Raises NotFound or Corrupted only if a second look agrees (I2).

        Since the look-up gc may have moved the chunk, or a change of keys renamed it. Bytes may also have changed in
        transit.
        """
        is_second = False
        while True:
            try:
                return read(place)
            except (NotFound, Corrupted) as error:
                moved = self._find_again(digest, place)
                if moved is None and (is_second or isinstance(error, NotFound)):
                    raise
                is_second = moved is None
                place = place if moved is None else moved

    @sheltered
    def map(self, entries: Sequence[Entry], *, of: str) -> memoryview:
        """Return a stream as read-only memory mapped from the packs; only compressed chunks are copied.

        Verified like a read (I2), which reads the bytes through the page cache once but keeps no copy.
        """
        from kedge.blobs.memory_map import Piece, Region, is_mappable

        places = self.find({e.digest for e in entries if not e.is_zero})
        size = sum(e.size_bytes for e in entries)
        pieces: list[Piece] = []
        mapped: list[tuple[Entry, int]] = []
        copied: list[tuple[Entry, int]] = []
        offset = 0
        for entry in entries:
            place = places.get(entry.digest)
            path = (
                self._blobs.file_of(place.pack)
                if place and place.pack and place.data is None and not place.encoding
                else None
            )
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

    def _read_some(
        self, task: Sequence[tuple[Entry, memoryview | Staged]], places: dict[bytes, Chunk], of: str
    ) -> None:
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
            self._confirmed(entry.digest, place, lambda place: self._read_verified(entry, target, place, of))
        except NotFound as error:
            raise _damaged(entry, of, str(error)) from error

    def _read_verified(self, entry: Entry, target: memoryview, place: Chunk | None, of: str) -> None:
        self._fill(entry, target, place, of)
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
    """Return whether a chunk begins where `before` ends."""
    return place is not None and place.pack == before.pack and place.offset == before.offset + before.stored_bytes


def neighbours(wanted: Iterable[_T], place_of: Callable[[_T], Chunk]) -> list[list[_T]]:
    """Group items whose chunks are neighbours in a pack, in runs of bounded length."""
    runs: list[list[_T]] = []
    pack, start, end = "", 0, 0
    for item in sorted(wanted, key=lambda item: ((place := place_of(item)).pack, place.offset)):
        place = place_of(item)
        stop = place.offset + place.stored_bytes
        if not runs or place.pack != pack or place.offset > end + _GAP_BYTES or stop - start > RUN_BYTES:
            runs.append([])
            pack, start, end = place.pack, place.offset, stop
        runs[-1].append(item)
        end = max(end, stop)
    return runs


def read_neighbours(blobs: Blobs, places: Sequence[Chunk]) -> list[memoryview]:
    """Read a run at once and return its stored bytes, in this thread's memory, valid until the next call."""
    start = places[0].offset
    size = max(place.offset + place.stored_bytes for place in places) - start
    buffer: bytearray | None = getattr(_local, "run", None)
    if buffer is None or len(buffer) < size:
        buffer = _local.run = bytearray(size)
    view = memoryview(buffer)
    blobs.read_into(places[0].pack, start, view[:size])
    return [view[place.offset - start :][: place.stored_bytes] for place in places]


def read_stored(blobs: Blobs, place: Chunk) -> Buffer:
    """Return the stored bytes of a chunk."""
    if place.data is not None:
        return place.data
    stored = memoryview(bytearray(place.stored_bytes))
    blobs.read_into(place.pack, place.offset, stored)
    return stored


def unpack(place: Chunk, stored: Buffer, vault: Vault | None, target: memoryview | None = None) -> Buffer:
    """Return the plain bytes of a chunk, in `target` if that saves a copy.

    Raises Corrupted for plain data in an encrypted namespace, sealed data in a plain one, or what does not decrypt
    (I10).
    """
    if place.encoding.is_sealed != (vault is not None):
        is_sealed = "encrypted" if place.encoding.is_sealed else "not encrypted"
        raise Corrupted(f"it is {is_sealed}, which this namespace does not allow", hint="run kedge check")
    if vault is not None:
        key = vault.key_of(stored)
        if place.encoding is Encoding.SEALED and target is not None and len(stored) == len(target) + key.overhead_bytes:
            key.open_into("chunk", place.digest, stored, target)
            return target
        stored = key.open("chunk", place.digest, stored)
    return decompress(stored, place.size_bytes) if place.encoding.is_zstd else stored


def read_verified(blobs: Blobs, place: Chunk, vault: Vault | None) -> tuple[Buffer, Buffer]:
    """Return the stored and the plain bytes of a chunk, verified against its name in the index (I2)."""
    stored = read_stored(blobs, place)
    plain = unpack(place, stored, vault)
    if len(plain) != place.size_bytes or not _is_named(place.digest, plain, vault):
        where = f"at {place.offset} of pack {place.pack}" if place.pack else "in the index"
        raise Corrupted(f"chunk {place.digest.hex()[:16]}… {where} does not match its digest", hint="run kedge check")
    return stored, plain


def _is_named(name: bytes, plain: Buffer, vault: Vault | None) -> bool:
    """Return whether the index would give these bytes this name."""
    digest = digest_of(plain)
    return digest == name if vault is None else name in vault.chunk_ids(digest)


def _check_digest(entry: Entry, data: memoryview, of: str) -> None:
    if digest_of(data) != entry.digest:
        raise _damaged(entry, of, "its bytes do not match its digest")


def _check(entry: Entry, data: memoryview, of: str) -> None:
    _check_digest(entry, data, of)
    data.release()


def _damaged(entry: Entry, of: str, why: str) -> Corrupted:
    return Corrupted(
        f"chunk {entry.digest.hex()[:16]}… of {of} is damaged: {why}",
        hint="run kedge check; restore an earlier checkpoint or another copy of the store",
        chunk=entry.digest,
    )
