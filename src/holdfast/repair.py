"""Rebuilding the index of an embedded store from what is still readable: the damaged index itself, and the packs.

Every save that wrote to a pack left a record of itself there. Small states live in the index alone: of those, what the
damaged index still gives is kept, the rest is gone and reported. Nothing is thrown away: the old index stays beside
the new one as `index.damaged-…`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .blobs.direct import sync_directory
from .blobs.packs import PackBlobs
from .chunks import ChunkReader
from .embedded import INDEX, MARKER, PACKS, locked, read_marker, write_marker
from .errors import CheckpointError, Corrupted, NotFound
from .index.salvage import salvage
from .index.sqlite import SqliteIndex
from .model import CheckpointStatus, parse_name
from .ports import Chunk, NewCheckpoint
from .records import read_records
from .store import Store


@dataclass(frozen=True, slots=True)
class RepairReport:
    checkpoints: int  # in the new index
    from_packs: int  # of those, known only from packs
    corrupted: tuple[str, ...]  # IDs that are listed but cannot be loaded
    is_index_complete: bool  # whether the old index could be read to its end
    old_index: str  # where it lies now


def repair(path: Path, *, actor: str) -> RepairReport:
    """Make a new index for the store at `path`. No other process may have the store open.

    Processes that do are refused at their next commit, because the file they opened is no longer the index.
    """
    path = path.expanduser().absolute()
    if not (path / PACKS).is_dir():
        raise NotFound(f"there is no store at {path}", hint="check --store or $HOLDFAST_STORE")
    with locked(path):
        try:
            store_id = read_marker(path)
        except (Corrupted, FileNotFoundError):
            store_id = os.urandom(16).hex()
        found = salvage(path / INDEX)
        places: dict[str, dict[bytes, Chunk]] = {ns: {c.digest: c for c in rows} for ns, rows in found.chunks.items()}
        records: dict[str, dict[str, NewCheckpoint]] = {
            ns: {r.id: r for r in rows} for ns, rows in found.checkpoints.items()
        }
        blobs = PackBlobs(str(path / PACKS))
        from_packs = _read_packs(blobs, places, records, found.deleted)
        draft = path / (INDEX + ".new")
        _remove(draft)
        count, corrupted = 0, []
        for namespace, of_namespace in records.items():
            index = SqliteIndex(str(draft), namespace=namespace, store_id=store_id)
            lost = _fill(index, blobs, of_namespace, places.get(namespace, {}), actor)
            count += len(of_namespace)
            corrupted += lost
            index.close()
        if not records:
            SqliteIndex(str(draft), store_id=store_id).close()
        blobs.close()
        kept = _swap(path, draft)
        if not (path / MARKER).is_file() or store_id != _marker_or_none(path):
            write_marker(path, store_id)
    return RepairReport(count, from_packs, tuple(corrupted), found.is_complete, str(kept))


def _marker_or_none(path: Path) -> str | None:
    try:
        return read_marker(path)
    except Corrupted:
        return None


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
    ordered = sorted(records.values(), key=lambda r: (r.job, r.seq or 1 << 31, r.created_us, r.id))
    for record in _parents_first(ordered):
        parse_name("job", record.job)
        chunks, status = _chunks_of(store, record, places)
        if status is CheckpointStatus.CORRUPTED:
            lost.append(record.id)
        parent = record.parent if record.parent in records else None
        index.commit([replace(record, new_chunks=chunks, reused_chunks=(), parent=parent, status=status)], actor=actor)
    return lost


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


def _chunks_of(store: Store, record: NewCheckpoint, places: dict[bytes, Chunk]) -> tuple[list[Chunk], CheckpointStatus]:
    if hashlib.sha256(record.manifest).digest() != record.digest:
        return [], CheckpointStatus.CORRUPTED
    try:
        digests = sorted(set(store.references(record.manifest)))
    except CheckpointError:
        return [], CheckpointStatus.CORRUPTED
    chunks = [places[d] for d in digests if d in places]
    whole = len(chunks) == len(digests)
    return chunks, record.status if whole else CheckpointStatus.CORRUPTED


def _swap(path: Path, draft: Path) -> Path:
    """Put the new index in the place of the old one, which is kept under another name."""
    kept = path / f"index.damaged-{time.time_ns()}"
    for suffix in ("-wal", "-shm", ""):
        old = path / (INDEX + suffix)
        if old.exists():
            os.rename(old, str(kept) + suffix)
    os.rename(draft, path / INDEX)
    sync_directory(path)
    return kept


def _remove(draft: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        Path(str(draft) + suffix).unlink(missing_ok=True)
