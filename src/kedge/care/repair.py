"""Rebuilding the index of an embedded store from what is still readable: the damaged index itself, and the packs.

Every save that wrote to a pack left a record of itself there. Small states live in the index alone: of those, what the
damaged index still gives is kept, the rest is gone and reported. Nothing is thrown away: the old index stays beside
the new one as `index….damaged-…`.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.blobs.direct import sync_directory
from kedge.blobs.packs import PackBlobs
from kedge.errors import Conflict, Corrupted, NotFound, Validation
from kedge.index.sqlite.closed_mark import SUFFIX as STATE
from kedge.index.sqlite.closed_mark import lacks_log
from kedge.index.sqlite.index import SqliteIndex
from kedge.index.sqlite.salvage import Salvaged, put_jobs, salvage
from kedge.model import CheckpointStatus, parse_name
from kedge.ports import Chunk, NewCheckpoint, digest_of
from kedge.store.chunk_reader import ChunkReader
from kedge.store.directory import INDEX, PACKS, Marker, absolute, locked, read_keyrings, read_marker, write_marker
from kedge.store.local import LocalStore
from kedge.store.record import NoKeys, read_packs

if TYPE_CHECKING:
    from kedge.crypto import FoundKeys, MasterKey

_INDEX = re.compile(r"index(?:-(\d{1,9}))?\.sqlite")


@dataclass(frozen=True, slots=True)
class RepairReport:
    checkpoints: int  # in the new index
    from_packs: int  # of those, known only from packs
    corrupted: tuple[str, ...]  # IDs that are listed but cannot be loaded
    is_index_complete: bool  # whether the old index could be read to its end
    old_index: str  # where it lies now; "" if there was none


def repair(path: Path, *, actor: str, master: MasterKey | None = None) -> RepairReport:
    """Make a new index for the store at `path`, whose master key is needed where it is encrypted.

    Other processes wait while it is made. Those that have the old index open are refused at their next commit,
    because it is no longer the index. Killed at any moment, the store has the old index or the new one, whole: the
    marker, replaced atomically, says which (I1).
    """
    path = absolute(path)
    if not (path / PACKS).is_dir():
        raise NotFound(f"there is no store at {path}", hint="check --store or $KEDGE_STORE")
    with locked(path):
        try:
            marker = read_marker(path)
        except (Corrupted, FileNotFoundError):
            marker = None
        old = path / (marker.index if marker else _first_index(path))
        is_cut = lacks_log(str(old))
        with _writers_kept_out(old):
            found = salvage(old)
            store_id = marker.store_id if marker else found.meta.get("store_id") or os.urandom(16).hex()
            keys = _find_keys(path, store_id, found, master, marker)
            new = path / _next_index(path, old.name)
            count, from_packs, corrupted = _rebuild(path, new, store_id, found, keys, actor)
            sync_directory(path)
            write_marker(path, Marker(store_id, new.name, is_encrypted=keys is not None))
            has_old = old.exists()
            kept = _put_aside(path, old)
    return RepairReport(count, from_packs, corrupted, found.is_complete and not is_cut, str(kept) if has_old else "")


def _find_keys(
    path: Path, store_id: str, found: Salvaged, master: MasterKey | None, marker: Marker | None
) -> FoundKeys | None:
    """The keys of an encrypted store, as far as its index or the copy beside it has them; None if it is plain."""
    copies = read_keyrings(path)
    kept = {name.removeprefix("keyring:"): text for name, text in found.meta.items() if name.startswith("keyring:")}
    if not copies and not kept and not (marker and marker.is_encrypted):
        return None
    if master is None:
        raise Validation(
            "this store is encrypted, and no key was given",
            hint="give it: --key, $KEDGE_KEY or $KEDGE_KEY_FILE",
        )
    from kedge.crypto import FoundKeys

    keys = FoundKeys(master)
    keys.refuse_wrong_master([*kept.values(), *copies.values()])
    for namespace, text in [*kept.items(), *copies.items()]:
        keys.add(store_id, namespace, text)
    return keys


def _rebuild(
    path: Path, new: Path, store_id: str, found: Salvaged, keys: FoundKeys | None, actor: str
) -> tuple[int, int, tuple[str, ...]]:
    """Fill a new index; answers how many checkpoints it has, how many only packs knew, which are damaged."""
    places: dict[str, dict[bytes, Chunk]] = {ns: {c.digest: c for c in rows} for ns, rows in found.chunks.items()}
    blobs = PackBlobs(str(path / PACKS))
    corrupted: list[str] = []
    count = from_packs = 0
    try:
        opening = keys or NoKeys()
        told = _read_packs(blobs, places, opening)
        if opening.locked and not told and not found.checkpoints:
            raise wrong_key(opening.locked, keys)
        for namespace in {"default", *found.checkpoints, *told, *found.jobs, *(keys.namespaces if keys else ())}:
            index = SqliteIndex(str(new), namespace=namespace, store_id=store_id)
            store = LocalStore(index, blobs) if keys is None else behind_keys(index, blobs, keys, actor)
            records, lost = open_rows(store, found.checkpoints.get(namespace, []))
            for checkpoint_id, record in told.get(namespace, {}).items():
                if checkpoint_id not in found.deleted and checkpoint_id not in records:  # the index knows better
                    records[checkpoint_id] = record
                    from_packs += 1
            corrupted += [checkpoint_id for checkpoint_id in lost if checkpoint_id not in records]
            corrupted += _fill(store, records, places.get(namespace, {}), actor)
            count += len(records)
            store.index.close()
            put_jobs(new, namespace, found.jobs.get(namespace, []))
    finally:
        blobs.close()
    return count, from_packs, tuple(corrupted)


def behind_keys(index: SqliteIndex, blobs: PackBlobs, keys: FoundKeys, actor: str) -> LocalStore:
    """The index behind the keys of its namespace, which are put in first."""
    from kedge.crypto import Vault, key_id_of
    from kedge.index.encrypted import EncryptedIndex

    text = keys.keyring_for(index.store_id, index.namespace)
    if text is None:
        return LocalStore(index, blobs)  # nothing was ever saved there
    who = keys.shown_as(index.namespace, actor)
    index.set_keyring(text, key_id_of(text), replacing=index.keyring(), actor=who)
    vault = Vault(keys.master, index.store_id, index.namespace, index.keyring)
    return LocalStore(EncryptedIndex(index, vault), blobs, vault)


def open_rows(store: LocalStore, rows: Sequence[NewCheckpoint]) -> tuple[dict[str, NewCheckpoint], list[str]]:
    """Records of the old index by ID, and the IDs of those that do not decrypt, which are gone."""
    if store.vault is None:
        return {row.id: row for row in rows}, []
    from kedge.index.encrypted import EncryptedIndex

    assert isinstance(store.index, EncryptedIndex)
    records: dict[str, NewCheckpoint] = {}
    lost: list[str] = []
    for row in rows:
        try:
            records[row.id] = store.index.open_record(row)
        except Corrupted:
            lost.append(row.id)
    return records, lost


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


def _next_index(path: Path, old: str) -> str:
    """A name that no index here has, nor the one that is lost: what a killed repair left is not built upon."""
    lost = _INDEX.fullmatch(old)
    return f"index-{max([*_indexes(path), int(lost[1] or 1) if lost else 1]) + 1}.sqlite"


def _put_aside(path: Path, old: Path) -> Path:
    """Keep the old index under another name. It is out of use already, so the order does not matter."""
    kept = path / f"{old.stem}.damaged-{time.time_ns()}"
    for suffix in ("", "-wal", "-shm", STATE):
        part = path / (old.name + suffix)
        if part.exists():
            os.rename(part, str(kept) + suffix)
    sync_directory(path)
    return kept


def _read_packs(
    blobs: PackBlobs, places: dict[str, dict[bytes, Chunk]], keys: FoundKeys | NoKeys
) -> dict[str, dict[str, NewCheckpoint]]:
    """What the packs say of themselves: places of chunks the index lacks, and records by namespace and ID."""
    sizes = dict(blobs.packs())
    for of_namespace in places.values():
        for digest, chunk in [(d, c) for d, c in of_namespace.items() if c.pack and c.pack not in sizes]:
            if chunk.data is None:
                del of_namespace[digest]  # the pack is gone; perhaps another one has the chunk
            else:
                of_namespace[digest] = replace(chunk, pack="", offset=0)
    told: dict[str, dict[str, NewCheckpoint]] = {}
    for record in read_packs(blobs, sizes, keys):
        known = places.setdefault(record.namespace, {})
        for chunk in record.chunks:
            if chunk.pack in sizes:
                known.setdefault(chunk.digest, chunk)
        add_saves(told.setdefault(record.namespace, {}), record.saves)
    return told


def wrong_key(locked: Mapping[str, int], keys: FoundKeys | None) -> Validation:
    """Before anything was added: who gave the wrong key must not take the store for empty, and let gc empty it."""
    given = "no key was given" if keys is None else f"the one given is {keys.master.id}"
    return Validation(
        f"the packs contain {sum(locked.values()):,} saves under key {', '.join(sorted(locked))}, and {given}",
        hint="give the right one: --key, $KEDGE_KEY or $KEDGE_KEY_FILE; a new database must be emptied first: "
        "DROP SCHEMA kedge CASCADE",
    )


def add_saves(known: dict[str, NewCheckpoint], saves: Iterable[NewCheckpoint]) -> None:
    """Of several records of one save, those that tell its number know more."""
    for save in saves:
        if save.id not in known or (save.seq is not None and known[save.id].seq is None):
            known[save.id] = save


def _fill(store: LocalStore, records: dict[str, NewCheckpoint], places: dict[bytes, Chunk], actor: str) -> list[str]:
    """Commit the records with the chunks they name; those that miss some are kept, marked as corrupted."""

    def locate(digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        return {digest: places[digest] for digest in digests if digest in places}

    # The new index does not know the chunks yet.
    store.reader = ChunkReader(store.blobs, locate, store.pool, store.vault)
    lost: list[str] = []
    for record in in_order(records.values()):
        chunks, status = chunks_of(store, record, locate)
        if status is CheckpointStatus.CORRUPTED:
            lost.append(record.id)
        parent = record.parent if record.parent in records else None
        whole = replace(record, new_chunks=chunks, reused_chunks=(), parent=parent, status=status)
        store.index.commit([whole], actor=actor)
    return lost


def in_order(records: Iterable[NewCheckpoint]) -> list[NewCheckpoint]:
    """Records as an index takes them: by number where it is known, else by time, no child before its parent, and each
    idempotency key once."""
    for record in records:
        parse_name("job", record.job)
    in_line = sorted(records, key=lambda r: (r.job, r.seq or 1 << 31, r.created_us, r.id))
    return _parents_first(_with_own_keys(in_line))


def _with_own_keys(records: Sequence[NewCheckpoint]) -> list[NewCheckpoint]:
    """An idempotency key was used again only after its checkpoint was deleted: the last that had it has it."""
    owners = {(r.job, r.idempotency_key): r.id for r in records if r.idempotency_key is not None}
    return [
        r if r.idempotency_key is None or owners[r.job, r.idempotency_key] == r.id else replace(r, idempotency_key=None)
        for r in records
    ]


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
    store: LocalStore, record: NewCheckpoint, locate: Callable[[list[bytes]], dict[bytes, Chunk]]
) -> tuple[list[Chunk], CheckpointStatus]:
    """The chunks a record names, as far as they are there, and what that makes of it."""
    if digest_of(record.manifest) != record.digest:
        return [], CheckpointStatus.CORRUPTED
    try:
        digests = sorted(set(store.chunks(record.manifest)))
    except Corrupted:  # what could not be read at all ends the repair: it may be sound
        return [], CheckpointStatus.CORRUPTED
    chunks = list(locate(digests).values())
    return chunks, record.status if len(chunks) == len(digests) else CheckpointStatus.CORRUPTED
