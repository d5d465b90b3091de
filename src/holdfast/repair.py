"""Rebuilding the index of an embedded store from what is still readable: the damaged index itself, and the packs.

Every save that wrote to a pack left a record of itself there. Small states live in the index alone: of those, what the
damaged index still gives is kept, the rest is gone and reported. Nothing is thrown away: the old index stays beside
the new one as `index….damaged-…`.
"""

from __future__ import annotations

import hashlib
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from .blobs.direct import sync_directory
from .blobs.packs import PackBlobs
from .chunks import ChunkReader
from .embedded import INDEX, PACKS, Marker, locked, read_marker, write_marker
from .errors import CheckpointError, Conflict, Corrupted, NotFound
from .index.salvage import Salvaged, put_jobs, salvage
from .index.sqlite import SqliteIndex
from .model import CheckpointStatus, parse_name
from .ports import Chunk, NewCheckpoint
from .records import read_records
from .store import Store

_INDEX = re.compile(r"index(?:-(\d{1,9}))?\.sqlite")


@dataclass(frozen=True, slots=True)
class RepairReport:
    checkpoints: int  # in the new index
    from_packs: int  # of those, known only from packs
    corrupted: tuple[str, ...]  # IDs that are listed but cannot be loaded
    is_index_complete: bool  # whether the old index could be read to its end
    old_index: str  # where it lies now


def repair(path: Path, *, actor: str) -> RepairReport:
    """Make a new index for the store at `path`.

    Other processes wait while it is made. Those that have the old index open are refused at their next commit,
    because it is no longer the index. Killed at any moment, the store has the old index or the new one, whole: the
    marker, replaced atomically, says which (I1).
    """
    path = path.expanduser().absolute()
    if not (path / PACKS).is_dir():
        raise NotFound(f"there is no store at {path}", hint="check --store or $HOLDFAST_STORE")
    with locked(path):
        try:
            marker = read_marker(path)
        except (Corrupted, FileNotFoundError):
            marker = Marker(os.urandom(16).hex(), _first_index(path))
        old = path / marker.index
        with _writers_kept_out(old):
            found = salvage(old)
            new = path / _next_index(path)
            count, from_packs, corrupted = _rebuild(path, new, marker.store_id, found, actor)
            sync_directory(path)
            write_marker(path, Marker(marker.store_id, new.name))
            kept = _put_aside(path, old)
    return RepairReport(count, from_packs, corrupted, found.is_complete, str(kept))


def _rebuild(path: Path, new: Path, store_id: str, found: Salvaged, actor: str) -> tuple[int, int, tuple[str, ...]]:
    """Fill a new index; answers how many checkpoints it has, how many only packs knew, which are damaged."""
    places: dict[str, dict[bytes, Chunk]] = {ns: {c.digest: c for c in rows} for ns, rows in found.chunks.items()}
    records: dict[str, dict[str, NewCheckpoint]] = {
        ns: {r.id: r for r in rows} for ns, rows in found.checkpoints.items()
    }
    blobs = PackBlobs(str(path / PACKS))
    corrupted: list[str] = []
    try:
        from_packs = _read_packs(blobs, places, records, found.deleted)
        for namespace in {"default", *records, *found.jobs}:
            index = SqliteIndex(str(new), namespace=namespace, store_id=store_id)
            corrupted += _fill(index, blobs, records.get(namespace, {}), places.get(namespace, {}), actor)
            index.close()
            put_jobs(new, namespace, found.jobs.get(namespace, []))
    finally:
        blobs.close()
    return sum(map(len, records.values())), from_packs, tuple(corrupted)


@contextmanager
def _writers_kept_out(index: Path) -> Iterator[None]:
    """Hold the write lock of the old index; if it cannot be locked, it cannot be committed to either."""
    db = None
    if index.is_file():
        db = sqlite3.connect(f"{index.as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=30)
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                db.close()
                raise Conflict(
                    f"{index} is in use", hint="stop the jobs that write to this store, then repair"
                ) from error
        except sqlite3.DatabaseError:
            pass
    try:
        yield
    finally:
        if db is not None:
            db.close()


def _indexes(path: Path) -> dict[int, str]:
    """Index files in the store, by their number."""
    found = {}
    for name in os.listdir(path):
        if match := _INDEX.fullmatch(name):
            found[int(match[1] or 1)] = name
    return found


def _first_index(path: Path) -> str:
    """Which index a store without a readable marker has: a killed repair leaves a younger one, unfinished."""
    found = _indexes(path)
    return found[min(found)] if found else INDEX


def _next_index(path: Path) -> str:
    """A name that no index here has: what a killed repair left is not built upon."""
    return f"index-{max(_indexes(path), default=1) + 1}.sqlite"


def _put_aside(path: Path, old: Path) -> Path:
    """Keep the old index under another name. It is out of use already, so the order does not matter."""
    kept = path / f"{old.stem}.damaged-{time.time_ns()}"
    for suffix in ("", "-wal", "-shm"):
        part = path / (old.name + suffix)
        if part.exists():
            os.rename(part, str(kept) + suffix)
    sync_directory(path)
    return kept


def _read_packs(
    blobs: PackBlobs,
    places: dict[str, dict[bytes, Chunk]],
    records: dict[str, dict[str, NewCheckpoint]],
    deleted: set[str],
) -> int:
    """Add what the packs say of themselves; the index, where it could be read, knows better."""
    sizes = dict(blobs.packs())
    for of_namespace in places.values():
        for digest in [d for d, c in of_namespace.items() if c.pack and c.pack not in sizes]:
            del of_namespace[digest]  # the pack is gone; perhaps another one has the chunk
    added = 0
    for pack in sizes:
        for namespace, record, chunks in read_records(blobs, pack):
            known = places.setdefault(namespace, {})
            for chunk in chunks:
                if chunk.pack in sizes:
                    known.setdefault(chunk.digest, chunk)
            if record.id and record.id not in deleted and record.id not in records.setdefault(namespace, {}):
                records[namespace][record.id] = record
                added += 1
    return added


def _fill(
    index: SqliteIndex,
    blobs: PackBlobs,
    records: dict[str, NewCheckpoint],
    places: dict[bytes, Chunk],
    actor: str,
) -> list[str]:
    """Commit the records with the chunks they name; those that miss some are kept, marked as corrupted."""

    def locate(digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        return {digest: places[digest] for digest in digests if digest in places}

    store = Store(index, blobs)
    store.reader = ChunkReader(blobs, locate, store.pool)  # the new index does not know the chunks yet
    lost: list[str] = []
    for record in in_order(records.values()):
        chunks, status = chunks_of(store, record, locate)
        if status is CheckpointStatus.CORRUPTED:
            lost.append(record.id)
        parent = record.parent if record.parent in records else None
        index.commit([replace(record, new_chunks=chunks, reused_chunks=(), parent=parent, status=status)], actor=actor)
    return lost


def in_order(records: Iterable[NewCheckpoint]) -> list[NewCheckpoint]:
    """Records as an index takes them: by number where it is known, else by time, and no child before its parent."""
    for record in records:
        parse_name("job", record.job)
    return _parents_first(sorted(records, key=lambda r: (r.job, r.seq or 1 << 31, r.created_us, r.id)))


def _parents_first(records: Sequence[NewCheckpoint]) -> list[NewCheckpoint]:
    """The same records, every parent before its children: the index takes no child without its parent."""
    by_id = {r.id: r for r in records}
    placed: dict[str, NewCheckpoint] = {}
    for record in records:
        line: dict[str, NewCheckpoint] = {}
        above: NewCheckpoint | None = record
        while above is not None and above.id not in placed and above.id not in line:
            line[above.id] = above
            above = by_id.get(above.parent) if above.parent else None
        placed.update(reversed(line.items()))
    return list(placed.values())


def chunks_of(
    store: Store, record: NewCheckpoint, locate: Callable[[list[bytes]], dict[bytes, Chunk]]
) -> tuple[list[Chunk], CheckpointStatus]:
    """The chunks a record names, as far as they are there, and what that makes of it."""
    if hashlib.sha256(record.manifest).digest() != record.digest:
        return [], CheckpointStatus.CORRUPTED
    try:
        digests = sorted(set(store.references(record.manifest)))
    except CheckpointError:
        return [], CheckpointStatus.CORRUPTED
    chunks = list(locate(digests).values())
    return chunks, record.status if len(chunks) == len(digests) else CheckpointStatus.CORRUPTED
