"""Checkpoints on their way from one store to another: what one gives away, and how another makes it its own.

Every chunk is read verified (I2) and durable before the checkpoint that names it (I1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from kedge.chunks import portions
from kedge.errors import Conflict, Corrupted, NotFound
from kedge.model import Checkpoint, CheckpointStatus
from kedge.ports import Checkpoints, ChunksGone, IdTaken, KeysChanged, NewCheckpoint

from .chunk_writer import ChunkWriter, settled

if TYPE_CHECKING:
    from .local import LocalStore

MOVE_BYTES = 4 << 20  # read and written by one worker at once
_USUAL_BYTES = 1 << 19  # of a chunk whose length is not known
_AT_ONCE = 4
_MAX_ATTEMPTS = 8

ReadChunks: TypeAlias = Callable[[Sequence[bytes]], Mapping[bytes, bytes]]  # verified plain bytes by digest
Moved: TypeAlias = Callable[[int, int], None]  # so many chunks, so many plain bytes


@dataclass(frozen=True, slots=True)
class Exported:
    """A checkpoint as another store can take it: its record, and the digests of all chunks that it needs."""

    record: NewCheckpoint
    references: Sequence[bytes]
    sizes: Mapping[bytes, int] = field(default_factory=dict)  # of chunks, as far as they are known
    spilled: bytes = b""  # what lies in chunks of a manifest that is only the root of one

    def size_of(self, digest: bytes) -> int:
        return self.sizes.get(digest, _USUAL_BYTES)


def record_to_export(checkpoint: Checkpoint, packed: bytes, key: tuple[str, bytes] | None) -> NewCheckpoint:
    """`key`: the idempotency key of the checkpoint, and what it must match."""
    is_archived = checkpoint.status is CheckpointStatus.ARCHIVED
    return replace(
        NewCheckpoint.of(checkpoint, packed),
        idempotency_key=key[0] if key else None,
        request_digest=key[1] if key else b"",
        seq=checkpoint.seq,
        status=CheckpointStatus.ARCHIVED if is_archived else CheckpointStatus.CREATED,
    )


def export(store: LocalStore, checkpoint_id: str) -> Exported:
    checkpoint, packed = store.index.read(checkpoint_id)
    if not store.is_intact(checkpoint, packed):
        raise Corrupted(f"the manifest of checkpoint {checkpoint.id} does not match its digest", hint="run kedge check")
    key = store.index.keys_of([checkpoint_id]).get(checkpoint_id)
    references = sorted(set(store.contents(packed)))
    sizes = {digest: chunk.size_bytes for digest, chunk in store.reader.find(references).items()} if references else {}
    return Exported(record_to_export(checkpoint, packed, key), references, sizes)


def adopt(
    store: LocalStore, exported: Sequence[Exported], read: ReadChunks, *, actor: str, moved: Moved
) -> Checkpoints:
    """Save them as they are; of their chunks, only those move that are not here. Several share a commit if none has
    chunks. Answers what has their IDs here now: if it was here before, that is for the caller to compare."""
    if len(exported) > 1 or not exported[0].references:
        return _adopt_small(store, [export.record for export in exported], actor)
    return [_adopt_one(store, exported[0], read, actor, moved)]


def _adopt_small(store: LocalStore, records: Sequence[NewCheckpoint], actor: str) -> Checkpoints:
    try:
        checkpoints = store.index.commit(records, actor=actor)
    except IdTaken:
        if len(records) == 1:
            return [taken(store, records[0])]
    else:
        store.note()
        return checkpoints
    return [checkpoint for record in records for checkpoint in _adopt_small(store, [record], actor)]


def _adopt_one(store: LocalStore, exported: Exported, read: ReadChunks, actor: str, moved: Moved) -> Checkpoint:
    distrusted: frozenset[bytes] = frozenset()
    for _ in range(_MAX_ATTEMPTS):
        writer = ChunkWriter(
            store.blobs,
            store.index.locate,
            store.pool,
            distrusted=distrusted,
            size_hint=exported.record.size_bytes,
            key=store.key,
        )
        try:
            with settled(writer):
                _move(store, exported, read, writer, distrusted, moved)
                return store.commit(writer, store.finish(writer, exported.record), actor)
        except ChunksGone as gone:
            distrusted |= frozenset(gone.digests)
        except KeysChanged:
            store.refresh_keys()
        except IdTaken:
            return taken(store, exported.record)
    raise Conflict(
        f"gc of the target kept removing chunks that {exported.record.id} needs", hint="run it again when gc has ended"
    )


def _move(
    store: LocalStore,
    exported: Exported,
    read: ReadChunks,
    writer: ChunkWriter,
    distrusted: frozenset[bytes],
    moved: Moved,
) -> None:
    """Hand over what the store lacks: a few MiB for each worker, a few workers at once."""
    there = store.index.locate([writer.name(digest) for digest in exported.references])
    missing: list[bytes] = []
    for digest in exported.references:
        chunk = there.get(name := writer.name(digest))
        if chunk is None or chunk.is_damaged or name in distrusted:
            missing.append(digest)
        else:
            writer.reuse(digest)

    def move(digests: Sequence[bytes]) -> None:
        pieces = read(digests)
        writer.add_named(pieces)
        moved(len(pieces), sum(map(len, pieces.values())))

    under_way: list[Future[None]] = []
    try:
        for some in portions(missing, exported.size_of, MOVE_BYTES):
            while len(under_way) >= _AT_ONCE:
                under_way.pop(0).result()
            under_way.append(store.pool().submit(move, some))
        while under_way:
            under_way.pop(0).result()
    finally:
        for future in under_way:
            future.cancel()
        for future in under_way:  # the writer must not be used once this has returned
            if not future.cancelled():
                future.exception()


def taken(store: LocalStore, record: NewCheckpoint) -> Checkpoint:
    """The checkpoint that has the ID here."""
    try:
        return store.index.get(record.id)
    except NotFound:
        raise Conflict(
            f"another namespace of the target has a checkpoint {record.id}",
            hint="copy into another store, or into that namespace",
        ) from None
