"""Disaster recovery: an index that was lost, or restored from an old backup, gets what the packs still know.

Every save leaves its record in a pack, a small one a moment later (`store.backlog`). Records that the index lacks, and
has not deleted, are added to it. Sound index rows are not changed, so a rebuild may be repeated, and does nothing on a
sound store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from kedge.errors import Conflict, Corrupted, Validation
from kedge.model import CheckpointStatus, parse_name, to_us
from kedge.ports import Blobs, Chunk, ChunksGone, IdTaken, Index, NewCheckpoint, digest_of
from kedge.store import knows
from kedge.store.chunk_reader import ChunkReader
from kedge.store.local import LocalStore
from kedge.store.record import NoKeys, read_packs

from . import Progress
from .review import parents_first

if TYPE_CHECKING:
    from kedge.crypto import Keyrings


_PAGE = 1000


@dataclass(frozen=True, slots=True)
class RebuildReport:
    packs: int  # that were read
    found: int  # checkpoints recorded in them
    added: int  # to the index, which lacked them
    from_packs: int  # of those, known only from packs
    corrupted: tuple[str, ...]  # of those, IDs that cannot be loaded because packs with their chunks are gone
    locked: Mapping[str, int]  # saves under other keys, by the ID of the master key
    closed: Mapping[str, str]  # namespaces under other keys, which were not changed, with those IDs


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a namespace from other places, which is better than what packs have."""

    rows: Sequence[NewCheckpoint] = ()  # as in an index
    chunks: Sequence[Chunk] = ()
    deleted: Collection[str] = ()  # IDs that packs may still have


@dataclass(slots=True)
class _Content:
    """What the packs contain of one namespace."""

    records: dict[str, NewCheckpoint] = field(default_factory=dict)
    places: dict[bytes, Chunk] = field(default_factory=dict)


def rebuild(
    blobs: Blobs,
    open_store: Callable[[str], AbstractContextManager[LocalStore]],
    *,
    actor: str,
    keys: Keyrings | None = None,
    known: Mapping[str, Known] = MappingProxyType({}),
    progress: Progress | None = None,
) -> RebuildReport:
    """Add what the packs know to the index of each namespace. `progress(done, total)` counts packs.

    For an encrypted store, `keys` are those of the index; older ones are added from the packs. Nobody may save
    meanwhile: a save between its packs and its commit would be taken for a lost one.
    """
    packs = dict(blobs.packs())
    by_namespace: dict[str, _Content] = {}
    opening = keys or NoKeys()
    for record in read_packs(blobs, packs, opening, progress):
        content = by_namespace.setdefault(record.namespace, _Content())
        for chunk in record.chunks:
            if chunk.pack in packs:
                content.places.setdefault(chunk.digest, chunk)
        _add_saves(content.records, record.saves)
    if opening.locked and not by_namespace and not any(of_namespace.rows for of_namespace in known.values()):
        raise _wrong_key(opening.locked, keys)
    added = from_packs = 0
    corrupted: list[str] = []
    closed = {name: master for name, master in opening.closed.items() if name not in by_namespace}
    for namespace in {*by_namespace, *known} - closed.keys():
        content, elsewhere = by_namespace.setdefault(namespace, _Content()), known.get(namespace, Known())
        content.places.update(_present(elsewhere.chunks, packs))
        with open_store(namespace) as store:
            rows, lost = _open_rows(store, elsewhere.rows)
            recorded = {i: record for i, record in content.records.items() if i not in elsewhere.deleted}
            gone = [record for i, record in content.records.items() if i in elsewhere.deleted and i not in rows]
            content.records = {**recorded, **rows}
            new, damaged = _add(store, content, actor)
            _remember_deleted(store.index, gone, actor)
        added += len(new)
        from_packs += len(new - rows.keys())
        corrupted += [*(i for i in lost if i not in content.records), *damaged]
    count = sum(len(content.records) for content in by_namespace.values())
    return RebuildReport(len(packs), count, added, from_packs, tuple(corrupted), dict(opening.locked), closed)


def still_closed(index: Index, closed: Mapping[str, str]) -> dict[str, str]:
    """Return the namespaces a rebuild left closed that no rebuild has read since the index was lost."""
    before = index.closed_namespaces()
    try:
        index.refuse_older()
    except Corrupted:
        before = {}
    return {name: master for name, master in closed.items() if not before or name in before}


def _present(chunks: Iterable[Chunk], packs: Mapping[str, int]) -> Iterator[tuple[bytes, Chunk]]:
    """Yield chunks whose packs exist; another pack may have the others."""
    for chunk in chunks:
        if not chunk.pack or chunk.pack in packs:
            yield chunk.digest, chunk
        elif chunk.data is not None:
            yield chunk.digest, replace(chunk, pack="", offset=0)


def _add(store: LocalStore, content: _Content, actor: str) -> tuple[set[str], list[str]]:
    """Add missing checkpoints to the index; return their IDs, and the IDs of those that cannot be loaded."""
    deleted = _deleted(store.index)
    missing = {i: r for i, r in content.records.items() if i not in deleted and not knows(store.index, i)}

    def locate(digests: list[bytes]) -> dict[bytes, Chunk]:
        """Return places from the index, or otherwise from the packs."""
        known = store.index.locate(digests)
        return {d: known.get(d) or content.places[d] for d in digests if d in known or d in content.places}

    store.reader = ChunkReader(store.blobs, lambda digests: locate(list(digests)), store.pool, store.vault)
    added: set[str] = set()
    corrupted: list[str] = []
    for record in _in_order(missing.values()):
        chunks, status = _chunks_of(store, record, locate)
        parent = record.parent if record.parent and knows(store.index, record.parent) else None
        has_chunks = record.has_chunks or bool(chunks)  # files do not say; gc reads only these (I3)
        keyed = _keyed(store.index, record)
        whole = replace(keyed, new_chunks=chunks, has_chunks=has_chunks, parent=parent, status=status)
        try:
            if not _commit(store.index, whole, actor):
                continue
        except ChunksGone:  # that index's gc had condemned the pack
            status = CheckpointStatus.CORRUPTED
            if not _commit(store.index, replace(whole, new_chunks=(), status=status), actor):
                continue
        added.add(record.id)
        if status is CheckpointStatus.CORRUPTED:
            corrupted.append(record.id)
    return added, corrupted


def _keyed(index: Index, record: NewCheckpoint) -> NewCheckpoint:
    """Return the record with its idempotency key, unless a newer one in the index has reused it.

    An older holder in the index, which was deleted before that and restored with a backup, loses the key. If the number
    is unknown, as in most packs, the time decides which is newer; both checkpoints stay.
    """
    if record.idempotency_key is None:
        return record
    holders = index.find(record.job, [record.idempotency_key])
    if not holders:
        return record
    holder, _ = holders[record.idempotency_key]
    is_newer = record.seq > holder.seq if record.seq else record.created_us > to_us(holder.created_at)
    return replace(record, takes_key_from=holder.id) if is_newer else replace(record, idempotency_key=None)


def _commit(index: Index, record: NewCheckpoint, actor: str) -> bool:
    """Commit the record under its number or the next one. Return whether the index has it now."""
    try:
        return index.commit([record], actor=actor)[0].id == record.id
    except IdTaken:
        return False  # another namespace has it
    except Conflict:
        if record.seq is None:
            raise
        return _commit(index, replace(record, seq=None), actor)


def _deleted(index: Index) -> set[str]:
    """Return what this index has deleted: it must stay deleted, though packs may still have it."""
    deleted: set[str] = set()
    position = 0
    while events := index.events(position, _PAGE):
        for event in events:
            if event.checkpoint and event.action == "delete":
                deleted.add(event.checkpoint)
            elif event.checkpoint and event.action == "save":
                deleted.discard(event.checkpoint)  # it returned from another store
        position = events[-1].id
    return deleted


def _remember_deleted(index: Index, gone: Iterable[NewCheckpoint], actor: str) -> None:
    """Add deletions of records that packs still have, or the next rebuild would bring them back."""
    remembered = _deleted(index)
    by_job: dict[str, list[str]] = {}
    for record in gone:
        if record.id not in remembered:
            by_job.setdefault(record.job, []).append(record.id)
    for job, checkpoints in by_job.items():
        index.append_event("delete", actor=actor, job=job, checkpoints=checkpoints)


def _open_rows(store: LocalStore, rows: Sequence[NewCheckpoint]) -> tuple[dict[str, NewCheckpoint], list[str]]:
    """Return records of the old index by ID, and the IDs of those that do not decrypt, which are lost."""
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


def _wrong_key(locked: Mapping[str, int], keys: Keyrings | None) -> Validation:
    """The error for a wrong key, raised before anything is added: gc must not take the store for empty."""
    given = "no key was given" if keys is None else f"the one given is {keys.master.id}"
    return Validation(
        f"the packs contain {sum(locked.values()):,} saves under key {', '.join(sorted(locked))}, and {given}",
        hint="give the right one: --key, $KEDGE_KEY or $KEDGE_KEY_FILE; a new database must be emptied first: "
        "DROP SCHEMA kedge CASCADE",
    )


def _add_saves(known: dict[str, NewCheckpoint], saves: Iterable[NewCheckpoint]) -> None:
    """Add saves. Of several records of one save, those with its number know more."""
    for save in saves:
        if save.id not in known or (save.seq is not None and known[save.id].seq is None):
            known[save.id] = save


def _in_order(records: Iterable[NewCheckpoint]) -> list[NewCheckpoint]:
    """Order records for an index: by number if known, otherwise by time; no child before its parent.

    Each idempotency key appears once.
    """
    for record in records:
        parse_name("job", record.job)
    in_line = sorted(records, key=lambda r: (r.job, r.seq or 1 << 31, r.created_us, r.id))
    return parents_first(_with_own_keys(in_line))  # the index accepts no child without its parent


def _with_own_keys(records: Sequence[NewCheckpoint]) -> list[NewCheckpoint]:
    """Leave each idempotency key to its last checkpoint, because it was reused only after a deletion."""
    owners = {(r.job, r.idempotency_key): r.id for r in records if r.idempotency_key is not None}
    return [
        r if r.idempotency_key is None or owners[r.job, r.idempotency_key] == r.id else replace(r, idempotency_key=None)
        for r in records
    ]


def _chunks_of(
    store: LocalStore, record: NewCheckpoint, locate: Callable[[list[bytes]], dict[bytes, Chunk]]
) -> tuple[list[Chunk], CheckpointStatus]:
    """Return the existing chunks of a record, and its resulting status."""
    if digest_of(record.manifest) != record.digest:
        return [], CheckpointStatus.CORRUPTED
    try:
        digests = sorted(set(store.chunks(record.manifest)))
    except Corrupted:  # an unreadable chunk ends the repair instead: it may be sound
        return [], CheckpointStatus.CORRUPTED
    chunks = list(locate(digests).values())
    return chunks, record.status if len(chunks) == len(digests) else CheckpointStatus.CORRUPTED
