"""The commit protocol: how a state becomes a durable checkpoint, and comes back verified.

    save   encode → chunk → digest → compress → (seal) → packs durable → index commit → acknowledge  (I1, I10)
    load   index row → manifest digest → chunks, each verified → decode, data only                   (I2, I7)

Between any two of these steps a crash leaves at most packs that no index row names; gc removes them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kedge import codec
from kedge.blobs.shelter import Turns, give_up_if_abandoned, sheltered
from kedge.blobs.sheltered import guarded
from kedge.blobs.workers import Workers
from kedge.chunks import (
    CHUNK_BYTES,
    INLINE_BYTES,
    WORKERS,
    Entry,
    RecallingSource,
    cut_by_content,
)
from kedge.errors import CheckpointError, Conflict, Corrupted, NoSpace, NotFound, ReadOnly, StorageError
from kedge.model import (
    Checkpoint,
    CheckpointId,
    CheckpointLevel,
    CheckpointStatus,
    EventChain,
    Job,
    Lease,
    new_checkpoint_id,
    to_datetime,
)
from kedge.ports import (
    Blobs,
    CheckpointIds,
    Checkpoints,
    Chunk,
    ChunksGone,
    Digests,
    Events,
    IdTaken,
    Index,
    Jobs,
    KeysChanged,
    NewCheckpoint,
    Outcomes,
    digest_of,
)

from . import Save, Store, Stored, not_over_http
from .adoption import Exported, Moved, ReadChunks, adopt, export
from .chunk_cache import KnownChunks
from .chunk_reader import ChunkReader
from .chunk_writer import ChunkWriter
from .loading import Loading
from .manifest import SPILL_OVER_BYTES, Manifest, pack_manifest, pack_root
from .received import Received
from .record import branch_record, new_record, pack_record
from .request import Request
from .rope import PartedTree, write_parts
from .streams import (
    TREE_CHUNK_BYTES,
    add_streams,
    size_of,
)

if TYPE_CHECKING:
    from kedge.crypto import DataKey, Vault

_Streams = list[list[Entry]]

_MAX_ATTEMPTS = 8
_RECENT_JOBS = 8
_RECENT_ENTRIES = 65536
_RECENT_DIGESTS = 65536
_RECENT_CHUNKS = 4
_CARRIED_CHUNKS = 64
_RECALLED_STATES = 8  # how far back a source may look for what it has stored before


class LocalStore(Loading):
    """An index, blobs, and the order in which they are written. Thread-safe; survives fork.

    With a vault, the index is one that seals what it is given (`index.encrypted`), and chunks are sealed here (I10).
    """

    def __init__(
        self, index: Index, blobs: Blobs, vault: Vault | None = None, *, inline_bytes: int = INLINE_BYTES
    ) -> None:
        """`inline_bytes`: new chunks of a save up to this go to the index, if none of them is large by itself."""
        self.index = guarded(index)
        self.blobs = guarded(blobs)
        self.vault = vault
        self.inline_bytes = inline_bytes
        self._recent: OrderedDict[str, _Streams] = OrderedDict()
        self._known = KnownChunks(index, blobs)
        self._groups: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self.turns = Turns()
        self._workers = _new_workers()
        self.reader = ChunkReader(blobs, index.locate, self.pool, vault)

    def pool(self) -> Workers:
        """Threads for large states, which begin when first needed."""
        return self._workers

    def at_rest(self) -> LocalStore:
        """The store that outlives the process, whose keys count: another one where this is memory that is kept."""
        return self

    def after_fork(self) -> None:
        """In a forked child: the parent's threads do not exist here, and its lock may never be released."""
        self._lock = threading.Lock()
        self._known.after_fork()
        self.turns = Turns()
        self._workers = _new_workers()

    def close(self) -> None:
        workers, self._workers = self._workers, _new_workers()
        workers.shutdown(wait=True)
        self.blobs.close()
        self.index.close()

    # What the index decides alone. One line each, so that `Store` is the only door.

    @property
    def row_bytes(self) -> int:
        return self.index.row_bytes

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self.index.get(checkpoint_id)

    def read(self, checkpoint_id: str) -> Stored:
        return self.index.read(checkpoint_id)

    def latest(self, job: str, level: CheckpointLevel | None = None) -> Stored | None:
        return self.index.latest(job, level)

    def find(self, job: str, keys: Sequence[str]) -> dict[str, Stored]:
        return self.index.find(job, keys)

    def find_next(self, job: str, after: int, limit: int) -> dict[str, Stored]:
        return self.index.find_next(job, after, limit)

    def list(
        self,
        job: str,
        *,
        level: CheckpointLevel | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> Checkpoints:
        return self.index.list(job, level=level, tags=tags, metadata=metadata, limit=limit, before=before, after=after)

    def job(self, name: str) -> Job | None:
        return self.index.job(name)

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        return self.index.jobs(prefix, limit, after)

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        return self.index.delete(checkpoint_ids, even_pinned=even_pinned, actor=actor)

    def update(
        self,
        checkpoint_id: str,
        *,
        actor: str,
        is_pinned: bool | None = None,
        tags: Mapping[str, str | None] | None = None,
        status: CheckpointStatus | None = None,
    ) -> Checkpoint:
        return self.index.update(checkpoint_id, actor=actor, is_pinned=is_pinned, tags=tags, status=status)

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        self.index.set_retention(job, policy_json, actor=actor)

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        return self.index.acquire_lease(job, holder, ttl_s)

    def renew_lease(self, lease: Lease) -> None:
        self.index.renew_lease(lease)

    def release_lease(self, lease: Lease) -> None:
        self.index.release_lease(lease)

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        return self.index.events(after, limit, newest=newest, before=before)

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        return self.index.wait_for_event(after, timeout_s)

    def audit(self, until: int | None = None) -> EventChain:
        return self.index.audit(until)

    # Saving

    def save(self, request: Request, encoded: codec.Encoded | PartedTree | Received, *, actor: str) -> Checkpoint:
        """Make the encoded state durable and acknowledge it by returning its checkpoint (I1)."""
        return self.turns.run(self._save, request, encoded, *self._identity(request), actor)

    def _identity(self, request: Request) -> tuple[CheckpointId, int]:
        """The ID and the time of a new checkpoint: given ones where it is an old one."""
        created_us = time.time_ns() // 1000 if request.created_us is None else request.created_us
        return request.checkpoint_id or self.new_id(request.step, created_us), created_us

    def save_many(self, saves: Sequence[Save]) -> Outcomes:
        """`save` of each, by its actor: its checkpoint, or what it raises. Small ones share one commit (I1)."""
        return self.turns.run(self._save_many, saves)

    def _save_many(self, saves: Sequence[Save]) -> Outcomes:
        records: dict[int, NewCheckpoint] = {}
        for n, (request, encoded, _) in enumerate(saves):
            if _is_small(encoded):
                records[n] = _small_record(request, encoded, *self._identity(request))
        shared = self.index.commit_each([(record, saves[n][2]) for n, record in records.items()])
        committed = dict(zip(records, shared, strict=True))
        return [self._settle(save, records.get(n), committed.get(n)) for n, save in enumerate(saves)]

    def _settle(
        self,
        save: Save,
        record: NewCheckpoint | None,
        outcome: Checkpoint | BaseException | None,
    ) -> Checkpoint | BaseException:
        """What is not settled by a shared commit is saved by itself."""
        request, encoded, actor = save
        try:
            if isinstance(outcome, StorageError) and not isinstance(outcome, NoSpace | ReadOnly):
                assert record is not None
                return self._save(request, encoded, record.id, record.created_us, actor, has_failed=True)
            if outcome is None or isinstance(outcome, ChunksGone | IdTaken | KeysChanged):
                return self.save(request, encoded, actor=actor)
        except CheckpointError as error:
            return error
        return outcome

    def _save(
        self,
        request: Request,
        encoded: codec.Encoded | PartedTree | Received,
        checkpoint_id: CheckpointId,
        created_us: int,
        actor: str,
        *,
        has_failed: bool = False,
    ) -> Checkpoint:
        distrusted: frozenset[bytes] = frozenset()
        for _ in range(_MAX_ATTEMPTS):
            try:
                return self._save_once(request, encoded, checkpoint_id, created_us, distrusted, actor)
            except ChunksGone as gone:
                distrusted = distrusted | frozenset(gone.digests)
            except KeysChanged:
                self.refresh_keys()
                distrusted = frozenset()
            except IdTaken:
                if request.checkpoint_id:
                    raise _id_exists(checkpoint_id) from None
                if has_failed and (saved := self._same(checkpoint_id, request.job, created_us)) is not None:
                    return saved
                checkpoint_id = self.new_id(request.step, created_us)
            except (NoSpace, ReadOnly):
                raise
            except StorageError:
                if has_failed:
                    raise
                has_failed = True  # I9: once more, from memory, into new packs
        raise Conflict(
            f"job {request.job}: gc kept removing chunks this save wanted to reuse",
            hint="run it again when kedge gc has ended",
        )

    def new_id(self, step: str, created_us: int) -> CheckpointId:
        """A new ID, which begins with the step's name unless names are hidden."""
        return new_checkpoint_id("checkpoint" if self.vault and self.vault.hides_names else step, created_us)

    def refresh_keys(self) -> None:
        """After KeysChanged: find out what the keys are now."""
        assert self.vault is not None
        self.vault.refresh()

    @property
    def key(self) -> DataKey | None:
        """The data key for one save, from its first chunk to its commit."""
        return None if self.vault is None else self.vault.current

    def _same(self, checkpoint_id: CheckpointId, job: str, created_us: int) -> Checkpoint | None:
        """The checkpoint of an attempt that was reported as failed after its commit; None if the ID is another's."""
        try:
            found = self.index.get(checkpoint_id)
        except NotFound:
            return None
        return found if found.job == job and found.created_at == to_datetime(created_us) else None

    def _save_once(
        self,
        request: Request,
        encoded: codec.Encoded | PartedTree | Received,
        checkpoint_id: CheckpointId,
        created_us: int,
        distrusted: frozenset[bytes],
        actor: str,
    ) -> Checkpoint:
        if isinstance(encoded, Received):
            return encoded.commit(request, checkpoint_id, created_us, distrusted, actor)
        if isinstance(encoded, PartedTree):
            return self._save_parts(request, encoded, checkpoint_id, created_us, distrusted, actor)
        tree = encoded.tree
        if _is_small(encoded):
            record = _small_record(request, encoded, checkpoint_id, created_us)
            return self.index.commit((record,), actor=actor)[0]

        size_bytes = len(tree) + sum(size_of(b) for b in encoded.buffers)
        writer = ChunkWriter(
            self.blobs,
            self.index.locate,
            self.pool,
            previous=self._previous_streams(request.job) if size_bytes > CHUNK_BYTES else (),
            distrusted=distrusted,
            size_hint=size_bytes,
            key=self.key,
            inline_bytes=self.inline_bytes,
        )
        try:
            manifest, packed = self._write_streams(writer, request.job, encoded)
            record = new_record(request, checkpoint_id, created_us, size_bytes, packed, content=packed)
            checkpoint = self.commit(writer, record, actor)
        except BaseException:
            writer.abort()
            raise
        writer.release()
        self._remember(request.job, manifest.streams)
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
        writer = ChunkWriter(
            self.blobs,
            self.index.locate,
            self.pool,
            distrusted=distrusted,
            key=self.key,
            inline_bytes=self.inline_bytes,
        )
        try:
            packed, named = write_parts(tree, writer, lambda digest: writer.name(digest) in self._known)
            record = new_record(request, checkpoint_id, created_us, tree.size_bytes, packed, content=packed)
            record = self.finish(writer, record)
            checkpoint = self.index.commit((record,), actor=actor)[0]
        except BaseException:
            writer.abort()
            raise
        writer.release()
        self._known.remember(map(writer.name, named), record.new_chunks)
        return checkpoint

    def commit(self, writer: ChunkWriter, record: NewCheckpoint, actor: str) -> Checkpoint:
        """Make the chunks durable, then the record that names them (I1)."""
        return self.index.commit((self.finish(writer, record),), actor=actor)[0]

    def finish(self, writer: ChunkWriter, record: NewCheckpoint) -> NewCheckpoint:
        """Make the chunks of a record durable; the record as it is to be committed."""
        written = writer.finish(lambda placed: self.describe(record, placed, writer.key))
        self._known.check_packs(written.reused)
        give_up_if_abandoned()  # the state's owner was interrupted, and may be changing it
        return replace(
            record,
            stored_bytes=record.stored_bytes + written.stored_bytes,
            has_chunks=True,
            new_chunks=written.new,
            reused_chunks=written.reused,
            key_id="" if writer.key is None else writer.key.id.hex(),
        )

    def describe(self, record: NewCheckpoint, placed: Sequence[Chunk], key: DataKey | None) -> bytes:
        """What a pack says of a save, sealed where the namespace is."""
        wrap = None if self.vault is None or key is None else partial(self.vault.wrap_record, key)
        return pack_record(self.index.namespace, record, placed, wrap)

    def _write_streams(self, writer: ChunkWriter, job: str, encoded: codec.Encoded) -> tuple[Manifest, bytes]:
        for buffer in encoded.buffers:
            if isinstance(buffer, RecallingSource):
                buffer.recall(self.earlier_states(job))
        manifest = add_streams(writer, encoded)
        writer.drain()
        packed = pack_manifest(manifest)
        if len(packed) > SPILL_OVER_BYTES:
            table = writer.add(cut_by_content(packed, 4 * TREE_CHUNK_BYTES), size_bytes=len(packed))
            writer.drain()
            packed = pack_root(len(packed), table)
        return manifest, packed

    def branch(self, source: Stored, request: Request, *, actor: str) -> Checkpoint:
        """Save the state of `source` again as `request` says; nothing is copied, both share their chunks."""
        return self.turns.run(self._branch, source, request, actor)

    def _branch(self, source: Stored, request: Request, actor: str) -> Checkpoint:
        record = branch_record(*source, request, self.chunks(source[1]), *self._identity(request))
        for _ in range(_MAX_ATTEMPTS):
            try:
                with self.under_current_key(record) as current:
                    (checkpoint,) = self.index.commit((current,), actor=actor)
            except KeysChanged:
                self.refresh_keys()
            except IdTaken:
                if request.checkpoint_id:
                    raise _id_exists(record.id) from None
                record = replace(record, id=self.new_id(record.step, record.created_us))
            except ChunksGone as gone:
                raise NotFound(
                    f"the checkpoint to copy to job {record.job} was deleted meanwhile",
                    hint="choose another one",
                ) from gone
            else:
                return checkpoint
        raise Conflict(f"no free ID for a checkpoint of job {record.job}", hint="run it again")

    @contextmanager
    def under_current_key(self, record: NewCheckpoint) -> Iterator[NewCheckpoint]:
        """The record with its chunks under the names that the current data key gives; what is not there is written.

        That is nothing, unless keys are being changed. Inside the block the record is to be committed.
        """
        if self.vault is None:
            yield record
            return
        key = self.vault.current
        writer = ChunkWriter(self.blobs, self.index.locate, self.pool, key=key)
        try:
            digests = list(dict.fromkeys(self.contents(record.manifest)))
            for start in range(0, len(digests), _CARRIED_CHUNKS):
                found = self.reader.find(some := digests[start : start + _CARRIED_CHUNKS])
                for digest in some:
                    place = found.get(digest)
                    if place is None or place.digest == key.chunk_id(digest):
                        writer.reuse(digest)  # if it is gone, the commit says so
                    else:
                        writer.add_named(self.reader.read_named([digest], of=record.id))
            plain = replace(record, stored_bytes=len(record.manifest))
            current = self.finish(writer, plain)
            yield replace(current, has_chunks=bool(digests))
        except BaseException:
            writer.abort()
            raise
        writer.release()

    def _previous_streams(self, job: str) -> Sequence[Sequence[Entry]]:
        """Streams of an earlier checkpoint of this job, to compare with. Any will do: commit checks what is reused."""
        with self._lock:
            known = self._recent.get(job)
        if known is not None:
            return known
        found = self.index.latest(job)
        if found is None:
            return ()
        try:
            return self.parse(found[1], of=found[0].id).streams
        except Corrupted:
            return ()  # a damaged predecessor must not stop a save; it only costs the comparison

    def _remember(self, job: str, streams: _Streams) -> None:
        if sum(map(len, streams)) > _RECENT_ENTRIES:
            return
        with self._lock:
            self._recent[job] = streams
            self._recent.move_to_end(job)
            while len(self._recent) > _RECENT_JOBS:
                self._recent.popitem(last=False)

    # Loading

    def open(self, checkpoint: Checkpoint, packed: bytes) -> Manifest:
        """The verified manifest of a checkpoint row."""
        if not self.is_intact(checkpoint, packed):
            raise Corrupted(
                f"the manifest of checkpoint {checkpoint.id} does not match its digest",
                hint="run kedge check; restore an earlier checkpoint",
            )
        return self.parse(packed, of=checkpoint.id)

    def is_intact(self, checkpoint: Checkpoint, packed: bytes) -> bool:
        """Whether a manifest is the one that was saved. What was sealed has proved that by opening."""
        return self.vault is not None or digest_of(packed).hex() == checkpoint.digest

    # From and to other stores

    @property
    def is_encrypted(self) -> bool:
        return self.vault is not None

    def stored_bytes(self) -> int:
        return self.index.totals()["stored_bytes"]

    def export(self, checkpoint_id: str) -> Exported:
        return export(self, checkpoint_id)

    def adopt(self, exported: Sequence[Exported], read: ReadChunks, *, actor: str, moved: Moved) -> Checkpoints:
        return adopt(self, exported, read, actor=actor, moved=moved)

    @sheltered
    def read_nodes(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Chunks of digests, remembered: neighbours in a history share most of them."""
        missing = [digest for digest in digests if digest not in self._groups]
        found = self.reader.read_named(missing, of="a checkpoint") if missing else {}
        found.update((digest, self._groups[digest]) for digest in digests if digest not in found)
        with self._lock:
            if len(self._groups) + len(missing) > _RECENT_DIGESTS:
                self._groups = {}
            self._groups.update((digest, found[digest]) for digest in missing)
        return found

    def references(self, packed: bytes) -> Iterable[bytes]:
        """Every chunk a manifest names, as the index calls it, those of a spilled manifest included (for gc).

        While keys are changed, by all names it may have.
        """
        if self.vault is None:
            return self.contents(packed)
        return (name for digest in self.contents(packed) for name in self.vault.chunk_ids(digest))

    def chunks(self, packed: bytes) -> Digests:
        """The chunks a manifest names, as the index calls them now (for copies and verify)."""
        if self.vault is None:
            return list(self.contents(packed))
        digests = list(dict.fromkeys(self.contents(packed)))
        found = self.reader.find(digests)
        return [found[d].digest if d in found else self.vault.current.chunk_id(d) for d in digests]


def _new_workers() -> Workers:
    return Workers(WORKERS, "kedge", keep=WORKERS)


def local_store(store: Store, what: str) -> LocalStore:
    """`store` for what needs the index and the packs themselves; `what` names it in the refusal."""
    if not isinstance(store, LocalStore):
        raise not_over_http(what)
    return store


def _id_exists(checkpoint_id: str) -> Conflict:
    return Conflict(f"checkpoint {checkpoint_id} exists already", hint="choose another ID, or none")


def _is_small(encoded: codec.Encoded) -> bool:
    """Whether a state lives in its index row: one commit, one sync (I1)."""
    return not encoded.buffers and len(encoded.tree) <= INLINE_BYTES


def _small_record(
    request: Request, encoded: codec.Encoded, checkpoint_id: CheckpointId, created_us: int
) -> NewCheckpoint:
    packed = pack_manifest(Manifest(encoded.tree))
    return new_record(request, checkpoint_id, created_us, len(encoded.tree), packed, content=encoded.tree)
