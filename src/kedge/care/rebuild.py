"""The disaster drill: an index that was lost, or brought back from an old backup, gets what the packs still know.

Every save leaves a record of itself in a pack, a small one a moment later (`store.backlog`). Those the index lacks, and
has not deleted, are added to it. What is whole in the index stays as it is, so this may be run again, and on a store
that is well it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from kedge.errors import Conflict
from kedge.model import CheckpointStatus, to_us
from kedge.ports import Blobs, Chunk, ChunksGone, IdTaken, Index, NewCheckpoint
from kedge.store.chunk_reader import ChunkReader
from kedge.store.local import LocalStore
from kedge.store.record import NoKeys, read_packs

from .repair import add_saves, chunks_of, in_order, open_rows, wrong_key

if TYPE_CHECKING:
    from kedge.crypto import FoundKeys

Progress = Callable[[int, int], None]

_PAGE = 1000


@dataclass(frozen=True, slots=True)
class RebuildReport:
    packs: int  # read
    found: int  # checkpoints they tell of
    added: int  # to the index, which did not have them
    corrupted: tuple[str, ...]  # of those, IDs that cannot be loaded: packs with chunks of theirs are gone
    locked: Mapping[str, int]  # saves under other keys, by the ID of the master key


@dataclass(slots=True)
class _Found:
    """What the packs contain one namespace."""

    records: dict[str, NewCheckpoint]
    places: dict[bytes, Chunk]


def rebuild(
    blobs: Blobs,
    open_store: Callable[[str], AbstractContextManager[LocalStore]],
    *,
    actor: str,
    keys: FoundKeys | None = None,
    known: Mapping[str, Sequence[NewCheckpoint]] = MappingProxyType({}),
    progress: Progress | None = None,
) -> RebuildReport:
    """Add to the index of each namespace what the packs know. `progress(done, total)` counts packs.

    Of an encrypted store, `keys` are those of the index, and gather what the packs say of older ones.
    `known` are rows by namespace, as an index has them, that were found elsewhere and are better than those of packs.
    Nobody should save meanwhile: a save between its packs and its commit would be taken for a lost one.
    """
    packs = dict(blobs.packs())
    by_namespace: dict[str, _Found] = {}
    opening = keys or NoKeys()
    for record in read_packs(blobs, packs, opening, progress):
        found = by_namespace.setdefault(record.namespace, _Found({}, {}))
        for chunk in record.chunks:
            if chunk.pack in packs:
                found.places.setdefault(chunk.digest, chunk)
        add_saves(found.records, record.saves)
    if opening.locked and not by_namespace and not known:
        raise wrong_key(opening.locked, keys)
    added = 0
    corrupted: list[str] = []
    for namespace in {*by_namespace, *known}:
        found = by_namespace.setdefault(namespace, _Found({}, {}))
        with open_store(namespace) as store:
            rows, lost = open_rows(store, known.get(namespace, ()))
            found.records.update(rows)
            new, damaged = _add(store, found, actor)
        added += new
        corrupted += [*lost, *damaged]
    count = sum(len(found.records) for found in by_namespace.values())
    return RebuildReport(len(packs), count, added, tuple(corrupted), dict(opening.locked))


def _add(store: LocalStore, found: _Found, actor: str) -> tuple[int, list[str]]:
    deleted = _deleted(store.index)
    missing = {i: r for i, r in found.records.items() if i not in deleted and not store.knows(i)}

    def locate(digests: list[bytes]) -> dict[bytes, Chunk]:
        """Where the index says, else where the packs say."""
        known = store.index.locate(digests)
        return {d: known.get(d) or found.places[d] for d in digests if d in known or d in found.places}

    store.reader = ChunkReader(store.blobs, lambda digests: locate(list(digests)), store.pool, store.vault)
    added = 0
    corrupted: list[str] = []
    for record in in_order(missing.values()):
        chunks, status = chunks_of(store, record, locate)
        parent = record.parent if record.parent and store.knows(record.parent) else None
        whole = replace(_keyed(store.index, record), new_chunks=chunks, parent=parent, status=status)
        try:
            if not _commit(store.index, whole, actor):
                continue
        except ChunksGone:  # gc of that index had given the pack up
            status = CheckpointStatus.CORRUPTED
            if not _commit(store.index, replace(whole, new_chunks=(), status=status), actor):
                continue
        added += 1
        if status is CheckpointStatus.CORRUPTED:
            corrupted.append(record.id)
    return added, corrupted


def _keyed(index: Index, record: NewCheckpoint) -> NewCheckpoint:
    """The record with its idempotency key, unless a newer one of the index has that: it was used again since.

    An older one in the index, which was deleted before that and came back with a backup, loses the key. Where no number
    is known, as in most packs, the time decides which is newer; both stay either way.
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
    """Whether the index has the record now, under the number it asks for or under the next one."""
    try:
        return index.commit([record], actor=actor)[0].id == record.id
    except IdTaken:
        return False  # another namespace has it
    except Conflict:
        if record.seq is None:
            raise
        return _commit(index, replace(record, seq=None), actor)


def _deleted(index: Index) -> set[str]:
    """What this index remembers to have deleted: its packs may still be there, and it must stay deleted."""
    deleted: set[str] = set()
    position = 0
    while events := index.events(position, _PAGE):
        deleted.update(e.checkpoint for e in events if e.action == "delete" and e.checkpoint)
        position = events[-1].id
    return deleted
