"""The commit protocol: how a state becomes a durable checkpoint, and how it is loaded and verified.

    save   encode → chunk → digest → compress → (seal) → packs durable → index commit → acknowledge  (I1, I10)
    load   index row → manifest digest → chunks, each verified → decode, data only                   (I2, I7)

A crash between any two steps leaves at most packs that no index row names; gc removes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack

from kedge import codec
from kedge.blobs.shelter import Turns, give_up_if_abandoned, guarded
from kedge.blobs.workers import Workers
from kedge.chunks import CHUNK_BYTES, INLINE_BYTES, WORKERS, Entry, Target, cut_by_content
from kedge.codec.decoder import load as decode
from kedge.errors import CheckpointError, Conflict, Corrupted, NoSpace, NotFound, ReadOnly, StorageError
from kedge.model import Checkpoint, CheckpointId, new_checkpoint_id, now_us, to_datetime
from kedge.ports import (
    NEWEST_INTACT,
    Blobs,
    Chunk,
    ChunksGone,
    Digests,
    IdTaken,
    Index,
    KeysChanged,
    NewCheckpoint,
    Outcomes,
    digest_of,
)

from . import How, Save, Store, Stored, not_over_http
from .adoption import adopt, branch, export, id_exists
from .backlog import Backlog
from .chunk_cache import KnownChunks, RecentStreams
from .chunk_reader import ChunkReader
from .chunk_writer import ChunkWriter, settled
from .load import ChunkedStore
from .manifest import SPILL_OVER_BYTES, WHOLE_TREE, Manifest, pack_manifest, pack_root, pack_tree
from .record import Draft, PackRecord, pack_record
from .request import Request
from .rope import PartedTree, write_parts
from .streams import TREE_CHUNK_BYTES, size_of
from .transfer import IncomingState

if TYPE_CHECKING:
    from kedge.crypto import DataKey, Vault

_NO_BUFFERS: Mapping[int, Target] = {}
_MAX_ATTEMPTS = 8
_UNASKED_BYTES = 32 * 1024  # of a tree in parts: sending that again takes no longer than querying the index
_REPEATED = (StorageError, ChunksGone, IdTaken, KeysChanged)  # failures of a first commit that are retried


class LocalStore(ChunkedStore):
    """An index, blobs, and the order in which they are written. Thread-safe; survives fork.

    With a vault, the index seals what it is given (`index.encrypted`), and chunks are sealed here (I10).
    """

    def __init__(
        self,
        index: Index,
        blobs: Blobs,
        vault: Vault | None = None,
        *,
        inline_bytes: int = INLINE_BYTES,
        has_backlog: bool = False,
    ) -> None:
        """Use an open index and blobs.

        `inline_bytes`: a save's new chunks up to this size go to the index, if none of them is large alone.
        `has_backlog`: packs outlive the index, so what only the index has is copied there (`backlog`).
        """
        self.index = guarded(index)
        self.blobs = guarded(blobs)
        self.vault = vault
        self.written_by = index.written_by
        self.inline_bytes = inline_bytes
        self._recent = RecentStreams()
        self._known = KnownChunks(index, blobs)
        self.turns = Turns()
        self._workers = _new_workers()
        self.reader = ChunkReader(blobs, index.locate, self.pool, vault)
        self.backlog = Backlog(self.index, self.blobs, self.describe, lambda: self.key) if has_backlog else None

    @property
    def catalogue(self) -> Index:
        return self.index

    def pool(self) -> Workers:
        """Return the threads for large states, which start when first needed."""
        return self._workers

    def at_rest(self) -> LocalStore:
        """Return the store that outlives the process and whose keys count: another one for a `memory:` store."""
        return self

    # Saving

    def save(self, request: Request, encoded: codec.Encoded | PartedTree | IncomingState, *, actor: str) -> Checkpoint:
        """Make the encoded state durable and acknowledge it by returning its checkpoint (I1)."""
        if isinstance(encoded, codec.Encoded) and _is_small(encoded):
            return self.turns.run(self._save_small, request, encoded, actor)
        return self.turns.run(self.save_alone, request, encoded, actor)

    def _save_small(self, request: Request, encoded: codec.Encoded, actor: str) -> Checkpoint:
        """Commit a small state straight to the index, where concurrent savers share a commit."""
        record = _small_record(request, encoded, *self.identity(request))
        try:
            (saved,) = self.index.commit((record,), actor=actor)
        except _REPEATED as failure:
            return self._repeat((request, encoded, actor), record, failure)
        self.note()
        return saved

    def _repeat(self, save: Save, record: NewCheckpoint, failure: BaseException) -> Checkpoint:
        """Save a small state again after its first commit failed."""
        request, encoded, actor = save
        if isinstance(failure, NoSpace | ReadOnly):
            raise failure
        return self.save_alone(request, encoded, actor, record if isinstance(failure, StorageError) else None)

    def note(self) -> None:
        """Note that the index has a save which no pack has."""
        if self.backlog is not None:
            self.backlog.note()

    def identity(self, request: Request) -> tuple[CheckpointId, int]:
        """Return the ID and time of a new checkpoint, or those given for a copied one."""
        created_us = now_us() if request.created_us is None else request.created_us
        return request.checkpoint_id or self.new_id(request.step, created_us), created_us

    def save_many(self, saves: Sequence[Save]) -> Outcomes:
        """`save` each independently, by its actor: return checkpoints or exceptions. Small ones share a commit (I1)."""
        return self.turns.run(self._save_many, saves)

    def _save_many(self, saves: Sequence[Save]) -> Outcomes:
        records: dict[int, NewCheckpoint] = {}
        for n, (request, encoded, _) in enumerate(saves):
            if _is_small(encoded):
                records[n] = _small_record(request, encoded, *self.identity(request))
        shared = self.index.commit_each([(record, saves[n][2]) for n, record in records.items()])
        committed = dict(zip(records, shared, strict=True))
        if committed:
            self.note()
        return [self._settle(save, records.get(n), committed.get(n)) for n, save in enumerate(saves)]

    def _settle(
        self, save: Save, record: NewCheckpoint | None, outcome: Checkpoint | BaseException | None
    ) -> Checkpoint | BaseException:
        """Save on its own what the shared commit could not settle."""
        try:
            if record is None or outcome is None:
                return self.save_alone(*save)
            if isinstance(outcome, _REPEATED):
                return self._repeat(save, record, outcome)
        except CheckpointError as error:
            return error
        return outcome

    def save_alone(
        self,
        request: Request,
        encoded: codec.Encoded | PartedTree | IncomingState,
        actor: str,
        failed: NewCheckpoint | None = None,
    ) -> Checkpoint:
        """Save by a commit of its own, again and again as far as that helps. `failed` may have been committed."""
        checkpoint_id, created_us = (failed.id, failed.created_us) if failed else self.identity(request)
        has_failed = failed is not None
        distrusted: frozenset[bytes] = frozenset()
        for _ in range(_MAX_ATTEMPTS):
            try:
                checkpoint = self._save_once(request, encoded, checkpoint_id, created_us, distrusted, actor)
                self.note()
                return checkpoint
            except ChunksGone as gone:
                distrusted = distrusted | frozenset(gone.digests)
            except KeysChanged:
                self.refresh_keys()
                distrusted = frozenset()
            except IdTaken:
                if request.checkpoint_id:
                    raise id_exists(checkpoint_id) from None
                if has_failed and (saved := self._same(checkpoint_id, request.job, created_us)) is not None:
                    return saved
                checkpoint_id = self.new_id(request.step, created_us)
            except (NoSpace, ReadOnly):
                raise
            except StorageError:
                if has_failed:
                    raise
                has_failed = True  # I9: retry once, from memory, into new packs
        raise Conflict(
            f"job {request.job}: gc removed chunks that this save reuses, again and again",
            hint="run it again when kedge gc has ended",
        )

    def new_id(self, step: str, created_us: int) -> CheckpointId:
        """Return a new ID, which begins with the step's name unless names are hidden."""
        return new_checkpoint_id("checkpoint" if self.vault and self.vault.hides_names else step, created_us)

    def refresh_keys(self) -> None:
        """Read the current keys again after KeysChanged."""
        assert self.vault is not None
        self.vault.refresh()

    @property
    def key(self) -> DataKey | None:
        """The data key for one save, from its first chunk to its commit."""
        return None if self.vault is None else self.vault.current

    def _same(self, checkpoint_id: CheckpointId, job: str, created_us: int) -> Checkpoint | None:
        """Return the checkpoint of an attempt that failed after its commit; None if another save has the ID."""
        try:
            saved = self.index.get(checkpoint_id)
        except NotFound:
            return None
        return saved if saved.job == job and saved.created_at == to_datetime(created_us) else None

    def _save_once(
        self,
        request: Request,
        encoded: codec.Encoded | PartedTree | IncomingState,
        checkpoint_id: CheckpointId,
        created_us: int,
        distrusted: frozenset[bytes],
        actor: str,
    ) -> Checkpoint:
        if isinstance(encoded, codec.Encoded) and _is_small(encoded):
            record = _small_record(request, encoded, checkpoint_id, created_us)
            return self.index.commit((record,), actor=actor)[0]
        if isinstance(encoded, IncomingState):
            return encoded.commit(request, checkpoint_id, created_us, distrusted, actor)
        if isinstance(encoded, PartedTree):
            return self._save_parts(request, encoded, checkpoint_id, created_us, distrusted, actor)

        size_bytes = len(encoded.tree) + sum(size_of(b) for b in encoded.buffers)
        previous = self._previous_streams(request.job) if size_bytes > CHUNK_BYTES else ()
        writer = self.writer(distrusted=distrusted, size_hint=size_bytes, previous=previous)
        with settled(writer):
            manifest, packed = self._write_streams(writer, request.job, encoded)
            record = request.record(checkpoint_id, created_us, size_bytes, packed, content=packed)
            checkpoint = self.commit(writer, self.finish(writer, record), actor)
        self._recent.remember(request.job, manifest.streams)
        return checkpoint

    def _save_parts(
        self,
        request: Request,
        tree: PartedTree,
        checkpoint_id: CheckpointId,
        created_us: int,
        distrusted: frozenset[bytes],
        actor: str,
    ) -> Checkpoint:
        writer = self.writer(distrusted=distrusted, unasked_bytes=_UNASKED_BYTES)
        with settled(writer):
            packed, named = write_parts(tree, writer, lambda digest: writer.name(digest) in self._known)
            record = request.record(checkpoint_id, created_us, tree.size_bytes, packed, content=packed)
            record = self.finish(writer, record)
            checkpoint = self.commit(writer, record, actor)
        self._known.remember(map(writer.name, named), record.new_chunks)
        return checkpoint

    def writer(
        self,
        *,
        distrusted: frozenset[bytes] = frozenset(),
        size_hint: int = 0,
        previous: Sequence[Sequence[Entry]] = (),
        key: DataKey | None = None,
        unasked_bytes: int = 0,
    ) -> ChunkWriter:
        """Return a writer for the chunks of one save, under the current data key unless another one is given."""
        return ChunkWriter(
            self.blobs, self.index.locate, self.pool, previous=previous, distrusted=distrusted, size_hint=size_hint,
            key=key or self.key, inline_bytes=self.inline_bytes, unasked_bytes=unasked_bytes,
        )  # fmt: skip

    def commit(self, writer: ChunkWriter, record: NewCheckpoint, actor: str) -> Checkpoint:
        """Commit a record whose chunks are durable (I1)."""
        (checkpoint,) = self.index.commit((record,), actor=actor)
        if checkpoint.id != record.id:  # an earlier save has its idempotency key
            writer.withdraw()
        return checkpoint

    def finish(self, writer: ChunkWriter, record: NewCheckpoint) -> NewCheckpoint:
        """Make the chunks of a record durable; return the record to commit."""

        def describe(placed: Sequence[Chunk]) -> Draft:
            stored_bytes = record.stored_bytes + sum(chunk.stored_bytes for chunk in placed)
            return self.describe([replace(record, stored_bytes=stored_bytes, has_chunks=True)], placed, writer.key)

        written = writer.finish(describe)
        self._known.check_packs(written.reused)
        give_up_if_abandoned()  # the state's owner was interrupted and may be changing it
        return replace(
            record,
            stored_bytes=record.stored_bytes + written.stored_bytes,
            has_chunks=True,
            new_chunks=written.new,
            reused_chunks=written.reused,
            key_id="" if writer.key is None else writer.key.id.hex(),
        )

    def describe(self, saves: Sequence[NewCheckpoint], placed: Sequence[Chunk], key: DataKey | None) -> Draft:
        """Return the pack record of saves and of places of chunks, sealed if the namespace is."""
        wrap = None if self.vault is None or key is None else partial(self.vault.wrap_record, key)
        return pack_record(PackRecord(self.index.namespace, saves, placed), wrap)

    def _write_streams(self, writer: ChunkWriter, job: str, encoded: codec.Encoded) -> tuple[Manifest, bytes]:
        manifest = self.add_streams(writer, job, encoded)
        writer.drain()
        packed = pack_manifest(manifest)
        if len(packed) > SPILL_OVER_BYTES:
            table = writer.add(cut_by_content(packed, 4 * TREE_CHUNK_BYTES), size_bytes=len(packed))
            writer.drain()
            packed = pack_root(len(packed), table)
        return manifest, packed

    # Loading

    def open(self, checkpoint: Checkpoint, packed: bytes) -> Manifest:
        """Return the verified manifest of a checkpoint row."""
        self._verify(checkpoint, packed)
        return self.parse(packed, of=checkpoint.id)

    def load(self, stored: Stored, **how: Unpack[How]) -> object:
        checkpoint, packed = stored
        is_whole = how.get("only") is None and how.get("into") is None and how.get("device") is None
        if packed[:1] != WHOLE_TREE or not is_whole:
            return super().load(stored, **how)
        self._verify(checkpoint, packed)  # the usual small state: all of it is in its row
        return decode(packed[1:], _NO_BUFFERS.__getitem__)

    def _verify(self, checkpoint: Checkpoint, packed: bytes) -> None:
        if not self.is_intact(checkpoint, packed):
            raise Corrupted(
                f"the manifest of checkpoint {checkpoint.id} does not match its digest",
                hint="run kedge check; restore an earlier checkpoint",
            )

    def is_intact(self, checkpoint: Checkpoint, packed: bytes) -> bool:
        """Return whether a manifest is the one that was saved. A sealed one proved that when it was decrypted."""
        return self.vault is not None or digest_of(packed).hex() == checkpoint.digest

    # What is stored already

    branch, export, adopt = branch, export, adopt

    def chunks(self, packed: bytes) -> Digests:
        """Return the index's current names of the chunks in a manifest, for copies and verify."""
        if self.vault is None:
            return list(self.contents(packed))
        digests = list(dict.fromkeys(self.contents(packed)))
        places = self.reader.find(digests)
        return [places[d].digest if d in places else self.vault.current.chunk_id(d) for d in digests]

    def references(self, packed: bytes) -> Iterable[bytes]:
        """Return the index's names of all chunks in a manifest, including those of a spilled one, for gc.

        During a change of keys, all names a chunk may have.
        """
        if self.vault is None:
            return self.contents(packed)
        return (name for digest in self.contents(packed) for name in self.vault.chunk_ids(digest))

    # What the job's earlier states were

    def _previous_streams(self, job: str) -> Sequence[Sequence[Entry]]:
        """Return streams of any earlier checkpoint of this job, to compare with: the commit checks what is reused."""
        if (known := self._recent.of(job)) is not None:
            return known
        try:
            for newest, packed in self.index.list_stored(job, NEWEST_INTACT):
                return self.parse(packed, of=newest.id).streams
        except Corrupted:
            pass  # a damaged predecessor must not stop a save; it only costs the comparison
        return ()

    # Life

    def after_fork(self) -> None:
        """Replace the parent's threads, and its lock, which may never be released, in a forked child."""
        self._recent.after_fork()
        self._known.after_fork()
        if self.backlog is not None:
            self.backlog.after_fork()
        self.turns = Turns()
        self._workers = _new_workers()

    def close(self) -> None:
        if self.backlog is not None:
            self.backlog.close()
        self.turns.close()
        workers, self._workers = self._workers, _new_workers()
        workers.shutdown(wait=True)
        self.blobs.close()
        self.index.close()


def _new_workers() -> Workers:
    return Workers(WORKERS, "kedge", keep=WORKERS)


def local_store(store: Store, what: str) -> LocalStore:
    """Return `store` if it is a local one. `what` names the operation in the error."""
    if not isinstance(store, LocalStore):
        raise not_over_http(what)
    return store


def _is_small(encoded: codec.Encoded) -> bool:
    """Return whether a state fits into its index row: one commit, one sync (I1)."""
    return not encoded.buffers and len(encoded.tree) <= INLINE_BYTES


def _small_record(
    request: Request, encoded: codec.Encoded, checkpoint_id: CheckpointId, created_us: int
) -> NewCheckpoint:
    packed = pack_tree(encoded.tree)
    return request.record(checkpoint_id, created_us, len(encoded.tree), packed, content=encoded.tree)
