"""The commit protocol: how a state becomes a durable checkpoint, and comes back verified.

    save   encode → chunk → digest → compress → (seal) → packs durable → index commit → acknowledge  (I1, I10)
    load   index row → manifest digest → chunks, each verified → decode, data only                   (I2, I7)

Between any two of these steps a crash leaves at most packs that no index row names; gc removes them.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
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
    Staged,
    StoredStream,
    Target,
    allocate,
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
from .backlog import Backlog
from .chunk_cache import KnownChunks
from .chunk_reader import ChunkReader
from .chunk_writer import ChunkWriter, settled
from .manifest import SPILL_OVER_BYTES, Manifest, pack_manifest, pack_root, parse_manifest, root_of
from .record import PackRecord, branch_record, new_record, pack_record
from .request import Request
from .rope import PartedTree, parts_of, read_parts, references, write_parts
from .streams import (
    SMALL_BUFFER_BYTES,
    TREE_CHUNK_BYTES,
    LateReader,
    SharedChunk,
    add_streams,
    entries_at,
    part_of,
    place,
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


class LocalStore:
    """An index, blobs, and the order in which they are written. Thread-safe; survives fork.

    With a vault, the index is one that seals what it is given (`index.encrypted`), and chunks are sealed here (I10).
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
        """`inline_bytes`: new chunks of a save up to this go to the index, if none of them is large by itself.

        `has_backlog`: packs outlive the index, and what is in it alone is copied there (`backlog`).
        """
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
        self.backlog = Backlog(self.index, self.blobs, self.describe, lambda: self.key) if has_backlog else None

    def _note(self, saves: int = 1) -> None:
        """So many saves are in the index alone."""
        if self.backlog is not None:
            self.backlog.note(saves)

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
        if self.backlog is not None:
            self.backlog.after_fork()
        self.turns = Turns()
        self._workers = _new_workers()

    def close(self) -> None:
        if self.backlog is not None:
            self.backlog.close()
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

    def save(self, request: Request, encoded: codec.Encoded | PartedTree, *, actor: str) -> Checkpoint:
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
        if committed:
            self._note(len(committed))
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
        encoded: codec.Encoded | PartedTree,
        checkpoint_id: CheckpointId,
        created_us: int,
        actor: str,
        *,
        has_failed: bool = False,
    ) -> Checkpoint:
        distrusted: frozenset[bytes] = frozenset()
        for _ in range(_MAX_ATTEMPTS):
            try:
                checkpoint = self._save_once(request, encoded, checkpoint_id, created_us, distrusted, actor)
                self._note()
                return checkpoint
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
        encoded: codec.Encoded | PartedTree,
        checkpoint_id: CheckpointId,
        created_us: int,
        distrusted: frozenset[bytes],
        actor: str,
    ) -> Checkpoint:
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
        with settled(writer):
            manifest, packed = self._write_streams(writer, request.job, encoded)
            record = new_record(request, checkpoint_id, created_us, size_bytes, packed, content=packed)
            checkpoint = self.commit(writer, self.finish(writer, record), actor)
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
        with settled(writer):
            packed, named = write_parts(tree, writer, lambda digest: writer.name(digest) in self._known)
            record = new_record(request, checkpoint_id, created_us, tree.size_bytes, packed, content=packed)
            record = self.finish(writer, record)
            checkpoint = self.commit(writer, record, actor)
        self._known.remember(map(writer.name, named), record.new_chunks)
        return checkpoint

    def commit(self, writer: ChunkWriter, record: NewCheckpoint, actor: str) -> Checkpoint:
        """Commit a record whose chunks are durable (I1)."""
        (checkpoint,) = self.index.commit((record,), actor=actor)
        if checkpoint.id != record.id:  # the first one under its idempotency key: there will be no other
            writer.withdraw()
        return checkpoint

    def finish(self, writer: ChunkWriter, record: NewCheckpoint) -> NewCheckpoint:
        """Make the chunks of a record durable; the record as it is to be committed."""

        def describe(placed: Sequence[Chunk]) -> bytes:
            stored_bytes = record.stored_bytes + sum(chunk.stored_bytes for chunk in placed)
            return self.describe([replace(record, stored_bytes=stored_bytes, has_chunks=True)], placed, writer.key)

        written = writer.finish(describe)
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

    def describe(self, saves: Sequence[NewCheckpoint], placed: Sequence[Chunk], key: DataKey | None) -> bytes:
        """What a pack says of saves and of places of chunks, sealed where the namespace is."""
        wrap = None if self.vault is None or key is None else partial(self.vault.wrap_record, key)
        return pack_record(PackRecord(self.index.namespace, saves, placed), wrap)

    def _write_streams(self, writer: ChunkWriter, job: str, encoded: codec.Encoded) -> tuple[Manifest, bytes]:
        for buffer in encoded.buffers:
            if isinstance(buffer, RecallingSource):
                buffer.recall(self._earlier_states(job))
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
                self._note()
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
        with settled(writer):
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

    def _earlier_states(self, job: str) -> Iterator[tuple[object, Callable[[int], StoredStream]]]:
        """Outlines of the job's newest checkpoints, each with a way to open its lazy buffers."""
        for checkpoint in reversed(self.index.list(job, limit=_RECALLED_STATES)):
            try:
                checkpoint, packed = self.index.read(checkpoint.id)
                manifest = self.open(checkpoint, packed)
                outline = codec.outline(self.tree_of(checkpoint, manifest))
            except (Corrupted, NotFound):
                continue  # damaged or deleted: costs the comparison, not the save
            yield outline, partial(self._stream, checkpoint, manifest)

    def _remember(self, job: str, streams: _Streams) -> None:
        if sum(map(len, streams)) > _RECENT_ENTRIES:
            return
        with self._lock:
            self._recent[job] = streams
            self._recent.move_to_end(job)
            while len(self._recent) > _RECENT_JOBS:
                self._recent.popitem(last=False)

    # Loading

    def parse(self, packed: bytes, *, of: str) -> Manifest:
        """The manifest of index bytes, spilled ones read from their chunks."""

        def read_spilled(size_bytes: int, entries: list[Entry]) -> bytes:
            data = allocate(size_bytes)
            self.reader.read(place(entries, data), of=of)
            return bytes(data)

        if (parts := parts_of(packed)) is not None:
            return Manifest(read_parts(parts, partial(self.reader.read_named, of=of)))
        return parse_manifest(packed, read_spilled, self.index.written_by)

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

    def tree_of(self, checkpoint: Checkpoint, manifest: Manifest) -> bytes:
        """The encoded tree of an open manifest."""
        if manifest.tree is not None:
            return manifest.tree
        entries = manifest.streams[manifest.tree_stream]
        data = allocate(sum(e.size_bytes for e in entries))
        self.reader.read(place(entries, data), of=checkpoint.id)
        return bytes(data)

    def tree(self, stored: Stored) -> bytes:
        return self.tree_of(stored[0], self.open(*stored))

    def buffer_sizes(self, stored: Stored) -> Sequence[int | None]:
        return [None if span.is_lazy else span.size_bytes for span in self.open(*stored).buffers]

    def buffers(self, stored: Stored, ordinals: Sequence[int] | None = None) -> dict[int, Target | StoredStream]:
        manifest = self.open(*stored)
        return self.read_buffers(stored[0], manifest, range(len(manifest.buffers)) if ordinals is None else ordinals)

    def load(
        self,
        stored: Stored,
        *,
        only: Sequence[str] | None = None,
        into: object = None,
        mapped: bool = False,
        device: str | None = None,
    ) -> object:
        """The state, each byte verified on the way (I2); with `only`, just the branches that match."""
        checkpoint, packed = stored
        manifest = self.open(checkpoint, packed)
        tree = self.tree_of(checkpoint, manifest)
        recent: dict[tuple[int, int], memoryview] = {}
        if mapped:
            return codec.decode(tree, partial(self._map_buffer, checkpoint, manifest, recent), only=only)
        if only is not None or device is not None:
            fetch = partial(self._read_buffer, checkpoint, manifest, recent)
            sizes = [-1 if span.is_lazy else span.size_bytes for span in manifest.buffers]
            wanted = None if device is None else codec.DeviceTargets(device, sizes)
            state = codec.decode(tree, fetch, only=only, device=wanted)
            if wanted is not None:
                self.read_buffers(checkpoint, manifest, wanted.targets, wanted.targets)
            return state
        targets = codec.buffer_targets(tree, into) if into is not None else {}
        ready = self.read_buffers(checkpoint, manifest, range(len(manifest.buffers)), targets)
        return codec.decode(tree, ready.__getitem__, into=into)

    def read_buffers(
        self,
        checkpoint: Checkpoint,
        manifest: Manifest,
        ordinals: Iterable[int],
        targets: Mapping[int, Target] | None = None,
        recent: dict[tuple[int, int], memoryview] | None = None,
    ) -> dict[int, Target | StoredStream]:
        """Buffers by ordinal, in the targets given or in fresh memory; lazy ones stay in the store.

        Small buffers share chunks: who asks for one buffer after the other gives a dictionary for `recent` ones.
        """
        ready: dict[int, Target | StoredStream] = {}
        wanted: list[tuple[Entry, memoryview | Staged]] = []
        shared: dict[tuple[int, int], SharedChunk] = {}  # (stream, offset)
        copies: list[tuple[Target, memoryview]] = []
        starts: dict[int, list[int]] = {}
        for n in ordinals:
            if not 0 <= n < len(manifest.buffers):
                raise Corrupted(f"checkpoint {checkpoint.id} has no buffer {n}", hint="run kedge check")
            span = manifest.buffers[n]
            if span.is_lazy:
                ready[n] = self._stream(checkpoint, manifest, n)
                continue
            target = (targets or {}).get(n)
            if target is None:
                target = allocate(span.size_bytes)
            ready[n] = target
            if span.stream not in starts:
                starts[span.stream] = list(accumulate((e.size_bytes for e in manifest.streams[span.stream]), initial=0))
            for entry, at in entries_at(manifest.streams[span.stream], starts[span.stream], span):
                inside = at - span.offset  # where the chunk begins, seen from the buffer
                start, stop = max(inside, 0), min(inside + entry.size_bytes, span.size_bytes)
                part = part_of(target, start, stop)
                if stop - start == entry.size_bytes:
                    wanted.append((entry, part))
                elif recent is None:
                    if (chunk := shared.get((span.stream, at))) is None:
                        chunk = shared[span.stream, at] = SharedChunk(entry.size_bytes)
                        wanted.append((entry, chunk))
                    chunk.add(start - inside, part)
                else:
                    if (scratch := recent.get((span.stream, at))) is None:
                        scratch = recent[span.stream, at] = allocate(entry.size_bytes)
                        wanted.append((entry, scratch))
                    copies.append((part, scratch[start - inside : stop - inside]))
        if wanted:
            self.reader.read(wanted, of=checkpoint.id)
        for into, source in copies:
            if isinstance(into, memoryview):
                into[:] = source
            else:
                into.take(source)
        while recent is not None and len(recent) > _RECENT_CHUNKS:
            del recent[next(iter(recent))]
        return ready

    def _read_buffer(
        self, checkpoint: Checkpoint, manifest: Manifest, recent: dict[tuple[int, int], memoryview], ordinal: int
    ) -> Target | StoredStream:
        return self.read_buffers(checkpoint, manifest, [ordinal], recent=recent)[ordinal]

    def _map_buffer(
        self, checkpoint: Checkpoint, manifest: Manifest, recent: dict[tuple[int, int], memoryview], ordinal: int
    ) -> Target | StoredStream:
        """A large buffer over the packs; small ones, which share their chunks, are read as usual."""
        span = manifest.buffers[ordinal] if 0 <= ordinal < len(manifest.buffers) else None
        if span is None or span.is_lazy or span.size_bytes < SMALL_BUFFER_BYTES:
            return self._read_buffer(checkpoint, manifest, recent, ordinal)
        try:
            return self.reader.map(manifest.streams[span.stream], of=checkpoint.id)
        except (NotFound, Corrupted):  # gc may have moved a chunk: look again
            return self.reader.map(manifest.streams[span.stream], of=checkpoint.id)

    def _stream(self, checkpoint: Checkpoint, manifest: Manifest, ordinal: int) -> StoredStream:
        span = manifest.buffers[ordinal]
        reader = LateReader(self.reader, self.knows)
        return StoredStream(manifest.streams[span.stream], span.size_bytes, reader, checkpoint.id)

    def knows(self, checkpoint_id: str) -> bool:
        """Whether the checkpoint exists."""
        try:
            self.index.get(checkpoint_id)
        except NotFound:
            return False
        except Corrupted:
            return True  # what is wrong with it, reading it tells
        return True

    @sheltered
    def _read_groups(self, digests: Sequence[bytes]) -> dict[bytes, bytes]:
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

    def contents(self, packed: bytes) -> Iterator[bytes]:
        """The digests of what a manifest names."""
        if (parts := parts_of(packed)) is not None:
            yield from references(parts, self._read_groups)
            return
        root = root_of(packed)
        if root is not None:
            yield from (e.digest for e in root[1] if not e.is_zero)
        yield from self.parse(packed, of="a checkpoint").digests()


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
