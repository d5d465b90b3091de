"""Checking a store: that everything referenced exists and, with deep, that every byte is what was saved.

A check runs long, beside savers, deletions, gc and changes of keys, and loading skips what it condemns. So it follows
two rules.

    Damage is bytes that were read and do not match, or that the storage itself reports as missing. Any other error
    ends the check, names what could not be read, and marks nothing.
    A mark is compared with what was read, in its transaction (`Index.mark`, `Index.mark_damaged`). What differs by
    then is read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from kedge.blobs.shelter import give_up_if_abandoned, sheltered
from kedge.errors import Conflict, Corrupted, NotFound, ReadOnly, StorageError, could_not_look
from kedge.model import Checkpoint, CheckpointStatus
from kedge.ports import UNREADABLE, Chunk, Seen, pages
from kedge.store.chunk_reader import read_verified
from kedge.store.local import LocalStore

from . import Progress

Row = tuple[int | None, Checkpoint, bytes]  # its number if the index was walked; the manifest

_MARK_AT_ONCE = 500
_AT_ONCE = 16  # concurrent chunk reads
_PAGE = 1000  # checkpoints per list
_MAX_LOOKS = 8  # for a checkpoint that differs each time
_PUT_BACK = "put the file back from a copy of the store, or save the same state again"


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its subject, what is wrong, and what to do about it."""

    subject: str
    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    checkpoints: int
    chunks: int
    bytes_read: int
    problems: tuple[Problem, ...]
    corrupted: tuple[str, ...]  # IDs of checkpoints that cannot be loaded
    unused_packs: int

    @property
    def is_ok(self) -> bool:
        return not self.problems


def verify(
    store: LocalStore, *, job: str | None, deep: bool, actor: str, progress: Progress | None = None
) -> VerifyReport:
    """Check one job, or everything. Marks damaged checkpoints as corrupted, verified ones as valid.

    Quick: manifests match their digests, every chunk they name is in the index, and its pack is long enough. Deep:
    every chunk is also read and compared with its digest. `progress(done, total)` counts stored bytes. Raises
    StorageError for what cannot be read, and marks nothing because of it.
    """
    check = _Check(store, deep=deep, actor=actor)
    problems = [Problem("index", text, "run kedge check --repair") for text in store.index.integrity_problems()]
    check.look_at_packs(_digests_of(store, job) if job is not None else None, progress)
    count = 0
    for row in _rows(store, job):
        count += 1
        check.judge(row)
    check.mark()
    used = {use.pack for use in store.index.packs()}
    with _looking_at("the packs"):
        unused = sum(1 for pack, _ in store.blobs.packs() if pack not in used)
    problems += check.problems
    return VerifyReport(count, check.chunks, check.bytes_read, tuple(problems), tuple(check.corrupted), unused)


def condemn(store: LocalStore, checkpoint_id: str, *, actor: str) -> Checkpoint:
    """Read a whole checkpoint; if it is damaged, mark it and its damaged chunks, so that no save reuses them."""
    check = _Check(store, deep=True, actor=actor, is_vouching=False)
    try:
        check.judge((None, *store.index.read(checkpoint_id)))
    except Corrupted:  # a row that does not decrypt: only a walk returns it
        for row in store.index.manifests(with_chunks=False):
            if row[1].id == checkpoint_id:
                check.judge(row)
                break
    check.mark()
    return store.index.get(checkpoint_id)


class _Check:
    """One check: what it has found, and the marks it has yet to write."""

    def __init__(self, store: LocalStore, *, deep: bool, actor: str, is_vouching: bool = True) -> None:
        self.problems: list[Problem] = []
        self.corrupted: list[str] = []
        self.chunks = self.bytes_read = 0
        self._store = store
        self._deep = deep
        self._actor = actor
        self._is_vouching = deep and is_vouching
        self._bad: dict[bytes, Chunk] = {}  # chunks whose bytes are wrong or gone
        self._ends: dict[str, int] = {}  # how far each pack was checked
        self._sound: list[Seen] = []
        self._doubtful: list[tuple[int | None, str, Seen]] = []

    # Packs

    def look_at_packs(self, wanted: set[bytes] | None, progress: Progress | None) -> None:
        """Check the chunks in packs, all of them or those in `wanted`, pack by pack."""
        uses = list(self._store.index.packs())
        with _looking_at("the packs"):
            sizes = dict(self._store.blobs.packs())  # after the rows: the bytes of a row exist already (I1)
        total = sum(use.live_bytes for use in uses)
        done = 0
        for use in uses:
            rows = [
                chunk
                for chunk in self._store.index.chunks_of(use.pack)
                if chunk.data is None and (wanted is None or chunk.digest in wanted)
            ]
            if rows:
                self.chunks += len(rows)
                self._look_at_pack(use.pack, rows, sizes.get(use.pack))
            done += use.live_bytes
            if progress:
                progress(done, total)

    @sheltered
    def _look_at_pack(self, pack: str, rows: Sequence[Chunk], size: int | None) -> None:
        """Check the chunks of one pack. `size` is as listed, or None: it may have grown or been removed since."""
        damaged: dict[bytes, tuple[Chunk, str]] = {}
        if size is None and self._probe(rows[-1], rows[-1].offset) == "is missing":
            damaged = {chunk.digest: (chunk, "is missing") for chunk in rows}
        elif self._deep:
            damaged = {chunk.digest: (chunk, what) for chunk, what in self._read_all(rows) if what}
        else:
            for chunk in rows:
                last = chunk.offset + chunk.stored_bytes - 1
                if (size is None or last >= size) and (what := self._probe(chunk, last)):
                    damaged[chunk.digest] = chunk, what
        standing = self._condemn([chunk for chunk, _ in damaged.values()])
        for what in dict.fromkeys(damaged[digest][1] for digest in standing):
            self.problems.append(Problem(f"pack {pack}", what, _PUT_BACK))
        if self._deep:  # a pack that was restored
            healed = [c for c in rows if c.is_damaged and c.digest not in damaged]
            self._mark_damaged(healed, False)
        self._ends[pack] = rows[-1].offset + 1

    def _mark(self, seen: Sequence[Seen], status: CheckpointStatus) -> Sequence[str]:
        """Write marks; return what is still as seen. If nothing can be written, only the report tells."""
        try:
            return self._store.index.mark(seen, status, actor=self._actor)
        except ReadOnly:
            return [look.checkpoint.id for look in seen]

    def _mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> list[bytes]:
        try:
            return list(self._store.index.mark_damaged(chunks, is_damaged))
        except ReadOnly:
            return [chunk.digest for chunk in chunks]

    def _condemn(self, damaged: Sequence[Chunk]) -> list[bytes]:
        """Mark chunks that were seen damaged; return those still as seen."""
        standing = self._mark_damaged(damaged, True)
        still = set(standing)
        self._bad.update((chunk.digest, chunk) for chunk in damaged if chunk.digest in still)
        return standing

    def _probe(self, chunk: Chunk, offset: int) -> str:
        """Return what is wrong with a pack at one byte; "" if nothing."""
        with _looking_at(f"pack {chunk.pack}"):
            try:
                self._store.blobs.read_into(chunk.pack, offset, memoryview(bytearray(1)))
            except NotFound:
                return "is missing"
            except Corrupted:
                return "is cut short"
        return ""

    def _read_all(self, rows: Sequence[Chunk]) -> Iterator[tuple[Chunk, str]]:
        """Read chunks in parallel; yield each with "" or its problem."""
        waiting: list[tuple[Chunk, Future[str]]] = []
        try:
            for chunk in rows:
                give_up_if_abandoned()
                waiting.append((chunk, self._store.pool().submit(_prove, self._store, chunk)))
                self.bytes_read += chunk.stored_bytes
                if len(waiting) > _AT_ONCE:
                    first, future = waiting.pop(0)
                    yield first, future.result()
            while waiting:
                first, future = waiting.pop(0)
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()

    # Checkpoints

    @sheltered
    def judge(self, row: Row) -> None:
        """Check a checkpoint. `mark` writes the verdict later, together with others."""
        number, checkpoint, packed = row
        damage = self._damage(checkpoint, packed)
        if damage is not None:
            self._doubtful.append((number, *damage))
        elif self._is_vouching and checkpoint.status in (CheckpointStatus.CREATED, CheckpointStatus.CORRUPTED):
            self._sound.append(Seen(checkpoint))
        if len(self._sound) + len(self._doubtful) >= _MARK_AT_ONCE:
            self.mark()

    def mark(self) -> None:
        """Write the verdicts on checkpoints, and check again those that have changed since."""
        for _ in range(_MAX_LOOKS):
            sound, doubtful, self._sound, self._doubtful = self._sound, self._doubtful, [], []
            self._mark(sound, CheckpointStatus.VALID)
            seen = [seen for _, _, seen in doubtful]
            standing = set(self._mark(seen, CheckpointStatus.CORRUPTED))
            for number, why, look in doubtful:
                if look.checkpoint.id in standing:
                    self._report(look.checkpoint, why)
                elif (row := self._again(number, look.checkpoint.id)) is not None:
                    self.judge(row)
            if not self._doubtful and not self._sound:
                return
        if self._doubtful:
            raise _restless(self._doubtful[0][2].checkpoint)

    def _report(self, checkpoint: Checkpoint, why: str) -> None:
        subject = f"checkpoint {checkpoint.id} of job {checkpoint.job}"
        self.problems.append(Problem(subject, why, "restore an earlier one or another copy"))
        self.corrupted.append(checkpoint.id)

    def _again(self, number: int | None, checkpoint_id: str) -> Row | None:
        """Return the same checkpoint as it is now; None if it was deleted."""
        if number is None:
            try:
                return None, *self._store.index.read(checkpoint_id)
            except NotFound:
                return None
        row = next(iter(self._store.index.manifests(number - 1, with_chunks=False)), None)
        return row if row is not None and row[1].id == checkpoint_id else None

    def _damage(self, checkpoint: Checkpoint, packed: bytes) -> tuple[str, Seen] | None:
        """Return why a checkpoint cannot be loaded, and what was seen of that; None if it can be."""
        if packed == UNREADABLE:
            why = "it does not decrypt: it was changed, put here from elsewhere, or not encrypted at all"
            return why, Seen(checkpoint)
        if not self._store.is_intact(checkpoint, packed):
            return "its manifest does not match its digest", Seen(checkpoint)
        for _ in range(_MAX_LOOKS):
            try:
                with _looking_at(f"checkpoint {checkpoint.id} of job {checkpoint.job}"):
                    names = list(dict.fromkeys(self._store.chunks(packed)))
            except Corrupted as error:
                if (seen := self._damaged_table(checkpoint, error)) is not None:
                    return error.message, seen
            else:
                return self._damaged_chunks(checkpoint, names) if names else None
        raise _restless(checkpoint)

    def _damaged_table(self, checkpoint: Checkpoint, error: Corrupted) -> Seen | None:
        """Return what was seen of a damaged chunk that contains names of chunks; None if it is sound by now."""
        if not error.chunk:
            return Seen(checkpoint)  # its bytes are what was saved, but they are not names
        place = self._store.reader.find([error.chunk]).get(error.chunk)
        if place is None:
            key = self._store.key
            return Seen(checkpoint, missing=[error.chunk if key is None else key.chunk_id(error.chunk)])
        if not _prove(self._store, place):
            return None  # healed meanwhile
        self._condemn([place])
        return Seen(checkpoint, chunks=[place])

    def _damaged_chunks(self, checkpoint: Checkpoint, names: Sequence[bytes]) -> tuple[str, Seen] | None:
        places = self._store.index.locate(names)
        missing = [name for name in names if name not in places]
        damaged = [c for c in places.values() if c.digest in self._bad and _place(c) == _place(self._bad[c.digest])]
        known = {chunk.digest for chunk in damaged}
        inside = [c for c in places.values() if c.data is not None and c.digest not in known]
        unread = [c for c in places.values() if self._deep and c.data is None and c.offset >= self._ends.get(c.pack, 0)]
        new = [chunk for chunk in inside if _prove(self._store, chunk)]
        new += [chunk for chunk, what in self._read_all(unread) if what]
        if new:
            self._condemn(new)
            damaged += new
        if not missing and not damaged:
            return None
        if damaged:
            why = f"{len(damaged) + len(missing)} of its {len(names)} chunks are damaged or missing"
        else:
            why = f"{len(missing)} of its {len(names)} chunks are not in the index"
        return why, Seen(checkpoint, damaged, missing)


def _restless(checkpoint: Checkpoint) -> StorageError:
    return could_not_look(f"checkpoint {checkpoint.id}", Conflict("each read returns something different"))


def _place(chunk: Chunk) -> tuple[object, ...]:
    return chunk.pack, chunk.offset, chunk.stored_bytes, chunk.encoding, chunk.data


def _prove(store: LocalStore, chunk: Chunk) -> str:
    """Return what is wrong with a chunk; "" if nothing. Read twice, because it may be corrupted in transit."""
    where = f"pack {chunk.pack}" if chunk.pack else f"chunk {chunk.digest.hex()[:16]}… in the index"
    with _looking_at(where):
        for is_last in (False, True):
            try:
                read_verified(store.blobs, chunk, store.vault)
            except (Corrupted, NotFound) as error:
                if is_last:
                    return error.message
            else:
                break
    return ""


@contextmanager
def _looking_at(subject: str) -> Iterator[None]:
    """Raise StorageError for any other error inside: it says nothing about `subject`, and ends the check."""
    try:
        yield
    except (Corrupted, NotFound):
        raise
    except Exception as error:
        raise could_not_look(subject, error) from error


def _rows(store: LocalStore, job: str | None) -> Iterable[Row]:
    if job is None or store.vault is not None:  # only `manifests` returns rows that do not decrypt
        for row in store.index.manifests(with_chunks=False):
            if job is None or row[1].job == job:
                yield row
        return
    for page in pages(store.index.list, job, _PAGE):
        for checkpoint in page:
            try:
                yield None, *store.index.read(checkpoint.id)
            except NotFound:
                continue  # deleted meanwhile


def _digests_of(store: LocalStore, job: str) -> set[bytes]:
    digests: set[bytes] = set()
    for _, checkpoint, packed in _rows(store, job):
        if packed == UNREADABLE:
            continue  # reported with its checkpoint below
        try:
            with _looking_at(f"checkpoint {checkpoint.id} of job {job}"):
                digests.update(store.references(packed))
        except Corrupted:
            continue  # reported with its checkpoint below
    return digests


def stats(store: LocalStore, job: str | None = None) -> Mapping[str, int]:
    """Return numbers of a job, or of the store: what was saved, what it takes, the most gc could free."""
    if job is not None:
        record = store.index.job(job)
        if record is None:
            raise NotFound(f"job {job} not found", hint="kedge jobs shows which jobs exist")
        return {
            "checkpoints": record.checkpoints,
            "last_seq": record.last_seq,
            "size_bytes": record.size_bytes,
            "stored_bytes": record.stored_bytes,
        }
    packs = list(store.blobs.packs())
    return {**store.index.totals(), "packs": len(packs), "pack_bytes": sum(size for _, size in packs)}
