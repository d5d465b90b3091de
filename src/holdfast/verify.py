"""Checking a store: that everything named exists and, deep, that every byte is what was saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from .chunk_reader import read_verified
from .errors import CheckpointError, Corrupted, NotFound
from .model import Checkpoint, CheckpointStatus
from .ports import UNREADABLE, Chunk
from .store import Store

Progress = Callable[[int, int], None]

_MARK_AT_ONCE = 500
_PUT_BACK = "put the file back from a copy of the store, or save the same state again"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: with what, how, and what to do about it."""

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


def verify(store: Store, *, job: str | None, deep: bool, actor: str, progress: Progress | None = None) -> VerifyReport:
    """Check one job, or everything. Checkpoints found damaged are marked so, and verified ones as valid.

    Quick: manifests match their digests, every chunk they name is in the index, and its pack is long enough.
    Deep: every chunk is read and proved against its SHA-256 too. `progress(done, total)` counts stored bytes.
    """
    problems = [Problem("index", text, "run holdfast check --repair") for text in store.index.integrity_problems()]
    wanted = _digests_of(store, job) if job is not None else None
    bad, chunks, bytes_read, damage = _check_chunks(store, wanted, deep=deep, progress=progress)
    problems += damage

    count = 0
    corrupted: list[str] = []
    sound: list[str] = []
    for checkpoint, packed in _manifests(store, job):
        count += 1
        why = _damage(store, checkpoint, packed, bad)
        if why is not None:
            try:
                why = _confirm(store, checkpoint, why, bad)
            except NotFound:
                continue  # deleted meanwhile
        if why is None:
            if deep and checkpoint.status in (CheckpointStatus.CREATED, CheckpointStatus.CORRUPTED):
                sound.append(checkpoint.id)
        else:
            problems.append(
                Problem(
                    f"checkpoint {checkpoint.id} of job {checkpoint.job}",
                    why,
                    "restore an earlier one or another copy",
                )
            )
            corrupted.append(checkpoint.id)
        if len(sound) >= _MARK_AT_ONCE:
            store.index.mark(sound, CheckpointStatus.VALID, actor=actor)
            sound = []
    store.index.mark(sound, CheckpointStatus.VALID, actor=actor)
    store.index.mark(corrupted, CheckpointStatus.CORRUPTED, actor=actor)
    used = {use.pack for use in store.index.packs()}
    unused = sum(1 for pack, _ in store.blobs.packs() if pack not in used)
    return VerifyReport(count, chunks, bytes_read, tuple(problems), tuple(corrupted), unused)


def condemn(store: Store, checkpoint_id: str, *, actor: str) -> Checkpoint:
    """Mark a checkpoint that turned out to be damaged, and its damaged chunks: no later save rests on them."""
    marked = store.index.update(checkpoint_id, status=CheckpointStatus.CORRUPTED, actor=actor)
    try:
        names = store.chunks(store.index.read(checkpoint_id)[1])
    except Corrupted:
        return marked  # its manifest is, and names nothing
    rows = [chunk for chunk in store.index.locate(sorted(set(names))).values() if chunk.pack and not chunk.is_damaged]
    damaged = store.pool().map(lambda chunk: _is_damaged(store, chunk), rows)
    store.index.mark_damaged([chunk for chunk, is_bad in zip(rows, damaged, strict=True) if is_bad], True)
    return marked


def _is_damaged(store: Store, chunk: Chunk) -> bool:
    """Only what was read and is wrong: a store that cannot be reached proves nothing."""
    try:
        read_verified(store.blobs, chunk, store.vault)
    except Corrupted:
        return True
    except CheckpointError:
        return False
    return False


def _manifests(store: Store, job: str | None) -> Iterable[tuple[Checkpoint, bytes]]:
    if job is None or store.vault is not None:  # rows that do not open are told by `manifests` alone
        for _, checkpoint, packed in store.index.manifests(with_chunks=False):
            if job is None or checkpoint.job == job:
                yield checkpoint, packed
        return
    for checkpoint in store.index.list(job):
        try:
            yield store.index.read(checkpoint.id)
        except NotFound:
            continue  # deleted meanwhile


def _digests_of(store: Store, job: str) -> set[bytes]:
    found: set[bytes] = set()
    for _, packed in _manifests(store, job):
        try:
            found.update(store.references(packed))
        except Corrupted:
            continue  # named with its checkpoint below
    return found


def _check_chunks(
    store: Store, wanted: set[bytes] | None, *, deep: bool, progress: Progress | None
) -> tuple[set[bytes], int, int, list[Problem]]:
    """Chunks that are damaged or lie in missing packs; how many were looked at; how many bytes were read."""
    bad: set[bytes] = set()
    problems: list[Problem] = []
    uses = list(store.index.packs())
    sizes = dict(store.blobs.packs())  # after the rows: a row names bytes that are there already (I1)
    total = sum(use.live_bytes for use in uses)
    chunks = done = bytes_read = 0
    for use in uses:
        rows = [c for c in store.index.chunks_of(use.pack) if wanted is None or c.digest in wanted]
        chunks += len(rows)
        size = sizes.get(use.pack)
        if size is not None and any(c.offset + c.stored_bytes > size for c in rows):
            sizes = dict(store.blobs.packs())  # it grew since it was listed
            size = sizes.get(use.pack)
        if size is None and rows:
            # gc may have moved its chunks since it was listed; then nothing names it any more
            rows = [c for c in store.index.chunks_of(use.pack) if wanted is None or c.digest in wanted]
            damaged = rows
            if rows:
                problems.append(Problem(f"pack {use.pack}", "is missing", _PUT_BACK))
        elif deep:
            damaged = []
            for chunk, damage in _read_all(store, rows):
                bytes_read += chunk.stored_bytes
                if damage:
                    damaged.append(chunk)
                    problems.append(Problem(f"pack {use.pack}", damage, _PUT_BACK))
        else:
            damaged = [c for c in rows if size is not None and c.offset + c.stored_bytes > size]
            if damaged:
                problems.append(Problem(f"pack {use.pack}", "is cut short", _PUT_BACK))
        bad.update(c.digest for c in damaged)
        store.index.mark_damaged([c for c in damaged if not c.is_damaged], True)
        if deep:  # a pack that was put back
            store.index.mark_damaged([c for c in rows if c.is_damaged and c.digest not in bad], False)
        done += use.live_bytes
        if progress:
            progress(done, total)
    return bad, chunks, bytes_read, problems


def _read_all(store: Store, rows: list[Chunk]) -> Iterable[tuple[Chunk, str]]:
    """Read chunks in parallel; answers each with "" or what is wrong with it."""
    waiting: list[tuple[Chunk, Future[str]]] = []
    for chunk in rows:
        waiting.append((chunk, store.pool().submit(_prove, store, chunk)))
        if len(waiting) > 16:
            first, future = waiting.pop(0)
            yield first, future.result()
    for chunk, future in waiting:
        yield chunk, future.result()


def _prove(store: Store, chunk: Chunk, *, is_second: bool = False) -> str:
    """ "" or what is wrong with a chunk, if a second look agrees (I2).

    Since it was looked up gc may have moved or removed it, and a change of keys replaced it.
    """
    try:
        read_verified(store.blobs, chunk, store.vault)
    except (NotFound, Corrupted) as error:
        now = store.index.locate([chunk.digest]).get(chunk.digest)
        if now is None:
            return ""  # nothing names it any more
        if replace(now, is_damaged=chunk.is_damaged) != chunk:
            return _prove(store, now)
        if not is_second:
            return _prove(store, chunk, is_second=True)
        return error.message if isinstance(error, Corrupted) else f"chunk {chunk.digest.hex()[:16]}… cannot be read"
    except CheckpointError as error:
        return error.message
    return ""


def _confirm(store: Store, checkpoint: Checkpoint, why: str, bad: set[bytes]) -> str | None:
    """Look again at a checkpoint that seems damaged: its keys may have been changed since it was read. NotFound if it
    was deleted."""
    if store.vault is not None:
        store.vault.refresh()
    try:
        return _damage(store, *store.index.read(checkpoint.id), bad)
    except Corrupted:
        return why


def _damage(store: Store, checkpoint: Checkpoint, packed: bytes, bad: set[bytes]) -> str | None:
    """Why a checkpoint cannot be loaded, or None."""
    if packed == UNREADABLE:
        return "it does not decrypt: it was changed, put here from elsewhere, or not encrypted at all"
    if not store.is_intact(checkpoint, packed):
        return "its manifest does not match its digest"
    try:
        digests = set(store.chunks(packed))
    except CheckpointError as error:
        return error.message
    if broken := digests & bad:
        return f"{len(broken)} of its {len(digests)} chunks are damaged or missing"
    located = store.index.locate(sorted(digests))
    missing = len(digests) - len(located)
    if missing:
        return f"{missing} of its {len(digests)} chunks are not in the index"
    for chunk in located.values():
        if chunk.data is not None and _prove(store, chunk):
            return f"chunk {chunk.digest.hex()[:16]}… in the index is damaged"
    return None


def stats(store: Store, job: str | None = None) -> Mapping[str, int]:
    """Numbers of a job, or of the store: what was saved, what it takes, what gc could give back at most."""
    if job is not None:
        found = store.index.job(job)
        if found is None:
            raise NotFound(f"job {job} not found", hint="holdfast jobs shows which jobs exist")
        return {
            "checkpoints": found.checkpoints,
            "last_seq": found.last_seq,
            "size_bytes": found.size_bytes,
            "stored_bytes": found.stored_bytes,
        }
    packs = list(store.blobs.packs())
    return {**store.index.totals(), "packs": len(packs), "pack_bytes": sum(size for _, size in packs)}
