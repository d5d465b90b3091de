"""Stored states saved as other checkpoints: in the same store, or on their way to another one.

Every chunk is read verified (I2) and durable before the checkpoint that names it (I1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

from kedge.blobs.shelter import sheltered
from kedge.chunks import portions
from kedge.errors import Conflict, Corrupted, NotFound
from kedge.model import Checkpoint, CheckpointStatus
from kedge.ports import Checkpoints, ChunksGone, IdTaken, KeysChanged, NewCheckpoint

from . import Stored, knows
from .chunk_writer import ChunkWriter, settled
from .request import Request

if TYPE_CHECKING:
    from .local import LocalStore

MOVE_BYTES = 4 << 20  # one worker's task
_USUAL_BYTES = 1 << 19  # assumed for a chunk of unknown length
_AT_ONCE = 4
_CARRIED_CHUNKS = 64
_MAX_ATTEMPTS = 8

ReadChunks: TypeAlias = Callable[[Sequence[bytes]], Mapping[bytes, bytes]]  # verified plain bytes by digest
Moved: TypeAlias = Callable[[int, int], None]  # called with the numbers of chunks and of plain bytes moved


@dataclass(frozen=True, slots=True)
class Exported:
    """A checkpoint in a form another store can adopt: its record, the digests of all its chunks, and access to them."""

    record: NewCheckpoint
    references: Sequence[bytes]
    read: ReadChunks
    sizes: Mapping[bytes, int] = field(default_factory=dict)  # of chunks, if known
    spilled: bytes = b""  # the manifest's content in chunks, if the manifest is only its root

    def size_of(self, digest: bytes) -> int:
        return self.sizes.get(digest, _USUAL_BYTES)


def record_to_export(checkpoint: Checkpoint, packed: bytes, key: tuple[str, bytes] | None) -> NewCheckpoint:
    """Return the record. `key` is the checkpoint's idempotency key and what it must match."""
    is_archived = checkpoint.status is CheckpointStatus.ARCHIVED
    return replace(
        NewCheckpoint.of(checkpoint, packed),
        idempotency_key=key[0] if key else None,
        request_digest=key[1] if key else b"",
        seq=checkpoint.seq,
        status=CheckpointStatus.ARCHIVED if is_archived else CheckpointStatus.CREATED,
    )


def branch(store: LocalStore, source: Stored, request: Request, *, actor: str) -> Checkpoint:
    """Save the state of `source` again as `request` says. Nothing is copied: both share their chunks."""
    try:
        return store.turns.run(_branch, store, source, request, actor)
    except Corrupted:
        if knows(store.index, source[0].id):
            raise
        raise NotFound(
            f"the checkpoint to copy to job {request.job} was deleted meanwhile", hint="choose another one"
        ) from None


def _branch(store: LocalStore, source: Stored, request: Request, actor: str) -> Checkpoint:
    origin, packed = source
    shared = sorted(set(store.chunks(packed)))
    record = request.record(*store.identity(request), origin.size_bytes, packed, content=b"")
    record = replace(
        record, codec=origin.codec, has_chunks=bool(shared), reused_chunks=shared, request_digest=record.digest
    )
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        try:
            with under_current_key(store, record) as current:
                (checkpoint,) = store.index.commit((current,), actor=actor)
        except KeysChanged:
            store.refresh_keys()
        except IdTaken:
            if request.checkpoint_id:
                raise id_exists(record.id) from None
            record = replace(record, id=store.new_id(record.step, record.created_us))
        except ChunksGone as gone:
            if store.vault is None or attempt == _MAX_ATTEMPTS or not knows(store.catalogue, source[0].id):
                raise Corrupted(
                    f"checkpoint {source[0].id} is damaged: {len(gone.digests)} of its chunks cannot be reused",
                    hint="kedge check names what is damaged; choose another one",
                ) from gone
            store.refresh_keys()  # a change of keys has renamed its chunks
        else:
            store.note()
            return checkpoint
    raise Conflict(f"no free ID for a checkpoint of job {record.job}", hint="run it again")


@contextmanager
def under_current_key(store: LocalStore, record: NewCheckpoint) -> Iterator[NewCheckpoint]:
    """Yield the record with its chunks named by the current data key, after writing those that are missing.

    None are missing unless keys are being changed. Commit the record inside the block.
    """
    if store.vault is None:
        yield record
        return
    key = store.vault.current
    writer = store.writer(key=key)
    with settled(writer):
        digests = list(dict.fromkeys(store.contents(record.manifest)))
        for start in range(0, len(digests), _CARRIED_CHUNKS):
            places = store.reader.find(batch := digests[start : start + _CARRIED_CHUNKS])
            for digest in batch:
                place = places.get(digest)
                if place is None or place.digest == key.chunk_id(digest):
                    writer.reuse(digest)  # the commit checks that it still exists
                else:
                    writer.add_named(store.reader.read_named([digest], of=record.id))
        plain = replace(record, stored_bytes=len(record.manifest))
        current = store.finish(writer, plain)
        yield replace(current, has_chunks=bool(digests))


def export(store: LocalStore, checkpoint_id: str) -> Exported:
    checkpoint, packed = store.index.read(checkpoint_id)
    if not store.is_intact(checkpoint, packed):
        raise Corrupted(f"the manifest of checkpoint {checkpoint.id} does not match its digest", hint="run kedge check")
    key = store.index.keys_of([checkpoint_id]).get(checkpoint_id)
    references = sorted(set(store.contents(packed)))
    sizes = {digest: chunk.size_bytes for digest, chunk in store.reader.find(references).items()} if references else {}
    return Exported(record_to_export(checkpoint, packed, key), references, store.read_chunks, sizes)


@sheltered
def adopt(store: LocalStore, exported: Sequence[Exported], *, actor: str, moved: Moved) -> Checkpoints:
    """Save checkpoints unchanged, moving only the chunks that are missing here. Return those with their IDs here.

    Several share a commit if none has chunks. The caller must compare a checkpoint that was here before.
    """
    if len(exported) > 1 or not exported[0].references:
        return _adopt_small(store, [export.record for export in exported], actor)
    return [_adopt_one(store, exported[0], actor, moved)]


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


def _adopt_one(store: LocalStore, exported: Exported, actor: str, moved: Moved) -> Checkpoint:
    distrusted: frozenset[bytes] = frozenset()
    for _ in range(_MAX_ATTEMPTS):
        writer = store.writer(distrusted=distrusted, size_hint=exported.record.size_bytes)
        try:
            with settled(writer):
                _move(store, exported, writer, distrusted, moved)
                return store.commit(writer, store.finish(writer, exported.record), actor)
        except ChunksGone as gone:
            distrusted |= frozenset(gone.digests)
        except KeysChanged:
            store.refresh_keys()
        except IdTaken:
            return taken(store, exported.record)
    raise Conflict(
        f"gc of the target removed chunks that {exported.record.id} needs, again and again",
        hint="run it again when gc has ended",
    )


def _move(
    store: LocalStore,
    exported: Exported,
    writer: ChunkWriter,
    distrusted: frozenset[bytes],
    moved: Moved,
) -> None:
    """Move the chunks the store lacks, a few MiB per worker, with a few workers."""
    there = store.index.locate([writer.name(digest) for digest in exported.references])
    missing: list[bytes] = []
    for digest in exported.references:
        chunk = there.get(name := writer.name(digest))
        if chunk is None or chunk.is_damaged or name in distrusted:
            missing.append(digest)
        else:
            writer.reuse(digest)

    def move(digests: Sequence[bytes]) -> None:
        pieces = exported.read(digests)
        writer.add_named(pieces)
        moved(len(pieces), sum(map(len, pieces.values())))

    under_way: list[Future[None]] = []
    try:
        for batch in portions(missing, exported.size_of, MOVE_BYTES):
            while len(under_way) >= _AT_ONCE:
                under_way.pop(0).result()
            under_way.append(store.pool().submit(move, batch))
        while under_way:
            under_way.pop(0).result()
    finally:
        for future in under_way:
            future.cancel()
        for future in under_way:  # nothing may use the writer after this returns
            if not future.cancelled():
                future.exception()


def taken(store: LocalStore, record: NewCheckpoint) -> Checkpoint:
    """Return the checkpoint that has the ID here."""
    try:
        return store.index.get(record.id)
    except NotFound:
        raise Conflict(
            f"another namespace of the target has a checkpoint {record.id}",
            hint="copy into another store, or into that namespace",
        ) from None


def id_exists(checkpoint_id: str) -> Conflict:
    return Conflict(f"checkpoint {checkpoint_id} exists already", hint="choose another ID, or none")
