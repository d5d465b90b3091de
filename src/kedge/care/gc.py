"""Freeing the space of what nothing references, beside writers and readers in other processes (I3).

    1. index:  delete chunk rows that no manifest names, in one transaction; a save that wanted to reuse one of them
               gets ChunksGone and writes it again
    2. packs:  copy there what only the index has (`store.backlog`), before a pack with its record is removed
    3. packs:  delete those that no row names, after checking each once more while its writer is locked out
    4. packs:  rewrite sparse ones: live chunks go to a new pack, durable before the index points there; then delete
               the old ones as in 3. On a full disk, 3 makes the space that 4 needs

A crash between any two of these leaves garbage for the next gc, never a missing chunk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from kedge.errors import Conflict, Corrupted, NoSpace, NotFound
from kedge.ports import UNREADABLE, Chunk, ChunksGone, NewCheckpoint
from kedge.store import knows
from kedge.store.backlog import write_saves
from kedge.store.chunk_reader import read_verified
from kedge.store.local import LocalStore
from kedge.store.record import Keys, NoKeys, append_record, read_packs, read_records

from . import Progress

COMPACT_BELOW = 0.5  # a pack with a smaller live part is rewritten
SMALL_BYTES = 64 << 10  # packs up to this size, left by processes that save little, are joined
JOIN_FROM = 16  # if there are at least so many of them
_LOCATED = 10_000  # chunks per look-up


@dataclass(frozen=True, slots=True)
class GcReport:
    """The numbers of one gc."""

    chunks_removed: int
    packs_removed: int
    packs_rewritten: int
    bytes_freed: int
    packs_kept: int
    bytes_kept: int
    damaged: tuple[str, ...] = ()  # packs left alone because one of their chunks does not verify


def collect(store: LocalStore, *, actor: str, progress: Progress | None = None) -> GcReport:
    """Remove unreferenced chunks and packs, and compact the rest. `progress(done, total)` counts packs."""
    store.index.refuse_older()
    _refuse_locked(store)
    bytes_before = sum(size for _, size in store.blobs.packs())
    chunks_removed, _ = store.index.sweep(lambda _, manifest: store.references(manifest))
    if store.backlog is not None:
        with suppress(NoSpace):  # what stays then is removed below
            store.backlog.copy()
    store.blobs.seal()
    unused, _, _ = _remove_unused(store, None)
    rewritten, damaged = _compact(store)
    removed, packs_left, bytes_kept = _remove_unused(store, progress)
    removed += unused
    bytes_freed = max(0, bytes_before - bytes_kept)  # what compaction wrote is subtracted
    report = GcReport(chunks_removed, removed, rewritten, bytes_freed, packs_left, bytes_kept, tuple(damaged))
    if removed or chunks_removed:
        detail = f'{{"chunks":{chunks_removed},"packs":{removed},"bytes":{bytes_freed}}}'
        store.index.append_event("gc", actor=actor, detail=detail)
    return report


def _refuse_locked(store: LocalStore) -> None:
    """Refuse an index that was created with the wrong key: it knows no saves, and all packs would be garbage."""
    if store.index.jobs(limit=1) or store.index.packs():
        return
    keys: Keys = NoKeys()
    if store.vault is not None:
        from kedge.crypto import Keyrings

        keys = Keyrings(store.vault.master)
    for _ in read_packs(store.blobs, [pack for pack, _ in store.blobs.packs()], keys):
        pass
    if keys.locked:
        raise Conflict(
            f"the packs hold {keys.locked.total():,} saves under key {', '.join(sorted(keys.locked))}, and this index "
            "knows none of them",
            hint="run kedge rebuild with that key first",
        )


def foresee(store: LocalStore, *, progress: Progress | None = None) -> GcReport:
    """Return what `collect` would do now, changing nothing.

    This is an estimate: `collect` keeps a pack that is being written, and what compaction writes is subtracted from
    what it frees. The names of all used chunks are held in memory.
    """
    store.index.refuse_older()
    _refuse_locked(store)
    used: set[bytes] = set()
    for _, checkpoint, manifest in store.index.manifests():
        if manifest == UNREADABLE:
            raise Corrupted(f"checkpoint {checkpoint.id} does not decrypt", hint="kedge check names what is damaged")
        used.update(store.references(manifest))
    uses = {use.pack: use for use in store.index.packs()}
    present = list(store.blobs.packs())
    joins = _has_many_small(size for _, size in present)
    closed = store.index.closed_namespaces().keys()
    removed = rewritten = bytes_freed = 0
    for done, (pack, size) in enumerate(present, 1):
        rows = store.index.chunks_of(pack)
        unnamed = [chunk.stored_bytes for chunk in rows if chunk.digest not in used]
        live_bytes = uses[pack].live_bytes - sum(unnamed) if pack in uses else 0
        is_garbage = live_bytes <= 0
        is_rewritten = not is_garbage and _is_sparse(live_bytes, size, joins) and len(unnamed) < len(rows)
        if (is_garbage or is_rewritten) and _may_go(store, pack, closed):
            removed, rewritten = removed + is_garbage, rewritten + is_rewritten
            bytes_freed += size - max(0, live_bytes)
        if progress:
            progress(done, len(present))
    in_use = list(used)
    kept_rows = sum(len(store.index.locate(in_use[n : n + _LOCATED])) for n in range(0, len(in_use), _LOCATED))
    chunks_removed = max(0, store.index.totals()["chunks"] - kept_rows)
    bytes_kept = sum(size for _, size in present) - bytes_freed
    return GcReport(
        chunks_removed, removed + rewritten, rewritten, bytes_freed, len(present) - removed - rewritten, bytes_kept
    )


def _remove_unused(store: LocalStore, progress: Progress | None) -> tuple[int, int, int]:
    """Delete unreferenced packs; return how many were deleted, how many stayed, and their bytes."""
    used = {use.pack for use in store.index.packs()}
    closed = store.index.closed_namespaces().keys()
    removed = left = bytes_kept = 0
    present = list(store.blobs.packs())
    for done, (pack, size) in enumerate(present, 1):
        if pack not in used and _may_go(store, pack, closed) and _remove(store, pack):
            removed += 1
        else:
            left += 1
            bytes_kept += size
        if progress:
            progress(done, len(present))
    return removed, left, bytes_kept


def _remove(store: LocalStore, pack: str) -> bool:
    return store.blobs.remove(pack, partial(store.index.condemn, pack))


def _may_go(store: LocalStore, pack: str, closed: Collection[str]) -> bool:
    """Return whether no namespace that waits for a rebuild with its key can need a pack (I3).

    Only the last pack of a save has its record: a pack without records may belong to a closed namespace.
    """
    if not closed:
        return True
    namespaces = _namespaces_in(store, pack)
    return bool(namespaces) and namespaces.isdisjoint(closed)


def _namespaces_in(store: LocalStore, pack: str) -> set[str]:
    """Return the namespaces that have records in a pack, with or without their keys."""
    keys, namespaces = NoKeys(), set[str]()
    with suppress(NotFound):  # another gc has removed it
        namespaces.update(record.namespace for record in read_packs(store.blobs, [pack], keys))
    return namespaces | keys.closed.keys()


def _has_many_small(sizes: Iterable[int]) -> bool:
    return sum(size <= SMALL_BYTES for size in sizes) >= JOIN_FROM


def _is_sparse(live_bytes: int, size: int, joins_small: bool) -> bool:
    return live_bytes < COMPACT_BELOW * size or (joins_small and size <= SMALL_BYTES)


def _compact(store: LocalStore) -> tuple[int, list[str]]:
    sizes = dict(store.blobs.packs())
    rewritten, damaged = 0, []
    joins = _has_many_small(sizes.values())
    closed = store.index.closed_namespaces().keys()
    for use in sorted(store.index.packs(), key=lambda use: use.live_bytes):  # those that need least space free some
        size = sizes.get(use.pack)
        if size is None or not _is_sparse(use.live_bytes, size, joins) or not _may_go(store, use.pack, closed):
            continue
        try:
            rewritten += _rewrite_confirmed(store, use.pack)
        except NoSpace:
            break  # all that needs no writing is freed already; the rest waits for space
        except ChunksGone:
            continue  # another gc condemned the new pack as abandoned: the old one stays until the next gc
        except (Corrupted, NotFound):
            damaged.append(use.pack)  # verify names the checkpoints; moving damaged bytes would hide them
    return rewritten, damaged


def _rewrite_confirmed(store: LocalStore, pack: str) -> bool:
    """Rewrite a pack; return whether it was. Raises Corrupted or NotFound only if a second look agrees (I2).

    After its chunks were listed, another gc may have moved them, or a change of keys may have replaced them.
    """
    live, is_second = store.index.chunks_of(pack), False
    while live or store.index.recorded_in(pack):  # otherwise it belongs to another namespace's gc
        try:
            _rewrite_in_room(store, pack, live)
        except (Corrupted, NotFound):
            now = store.index.chunks_of(pack)
            if is_second and now == live:
                raise
            live, is_second = now, now == live
        else:
            return True
    return False


def _rewrite_in_room(store: LocalStore, pack: str, live: Sequence[Chunk]) -> None:
    """Rewrite a pack. On a full disk, use the reserved space and delete the old pack at once, for the next one."""
    try:
        _rewrite(store, pack, live)
    except NoSpace:
        if not store.index.make_room():
            raise
        _rewrite(store, pack, live)
        _remove(store, pack)


def _rewrite(store: LocalStore, pack: str, live: Sequence[Chunk]) -> None:
    """Move the live chunks of a pack to a new one. The old file is deleted once no row names it."""
    writer = store.blobs.writer(sum(c.stored_bytes for c in live))
    moved: list[Chunk] = []
    try:
        for chunk in live:
            stored, _ = read_verified(store.blobs, chunk, store.vault)
            new_pack, offset = writer.append(stored)
            moved.append(replace(chunk, pack=new_pack, offset=offset))
        rows = store.index.recorded_in(pack)
        if others := _other_saves(store, pack, {save.id for save, _ in rows}):
            append_record(writer, store.describe(others, (), store.key))
        places = list(write_saves(writer, rows, moved, store.describe, store.key))
        writer.commit()
        store.index.relocate(moved, from_pack=pack, records=places)
    except BaseException:
        writer.abort()
        raise
    writer.release()


def _other_saves(store: LocalStore, pack: str, recorded: set[str]) -> list[NewCheckpoint]:
    """Return saves in a pack's records that still exist, except those for which the index names the pack."""
    vault = store.vault
    return [
        save
        for record in read_records(store.blobs, pack, vault.unwrap_record if vault else None, is_plain=vault is None)
        for save in record.saves
        if record.namespace == store.index.namespace and save.id not in recorded and knows(store.index, save.id)
    ]
