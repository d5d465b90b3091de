"""The two ports. Everything that is kept goes through them; nothing else is pluggable.

    Index   what exists: jobs, checkpoints, manifests, where each chunk is, leases, events.
            Every method is one transaction. It alone decides what is acknowledged.
    Blobs   the bytes: immutable packs of chunks. A pack no index row names is garbage.

A save is: append chunks to packs → `BlobWriter.commit` (durable) → `Index.commit` (durable) → acknowledge (I1).
Deleting goes the other way round: index rows first, bytes later, by gc (I3).

All methods are safe to call from several threads. Adapters raise only `errors.*`.
The suites in `kedge.testing` state these contracts as tests; an adapter is right when it passes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from blake3 import blake3

from .model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus, Event, EventChain, Job, Lease

Buffer = bytes | bytearray | memoryview

# Names for what Index answers, because inside it `list` is a method.
Checkpoints = list[Checkpoint]
CheckpointIds = list[CheckpointId]
Jobs = list[Job]
Events = list[Event]
Problems = list[str]
Outcomes = list[Checkpoint | BaseException]
Digests = list[bytes]
References = Callable[[str, bytes], Iterable[bytes]]  # checkpoint ID and manifest as the index has it → chunk digests

FORMAT_VERSION = 1  # of a plain store (I8)
ENCRYPTED_FORMAT_VERSION = 2  # the same with a keyring and sealed rows: what knows only format 1 must not touch it


def digest_of(data: Buffer) -> bytes:
    """What names and proves chunks, manifests and records: BLAKE3, 32 bytes."""
    return blake3(data).digest()


class Encoding(IntEnum):
    """How a chunk's stored bytes relate to its plain bytes."""

    RAW = 0
    ZSTD = 1
    SEALED = 2  # an envelope of the plain bytes (I10)
    SEALED_ZSTD = 3  # an envelope of a zstd frame

    @property
    def is_sealed(self) -> bool:
        return self >= Encoding.SEALED

    @property
    def is_zstd(self) -> bool:
        return self in (Encoding.ZSTD, Encoding.SEALED_ZSTD)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Where the bytes of one chunk are: at `offset` in `pack`, or in the index row itself (`data`)."""

    digest: bytes  # BLAKE3 of the plain bytes: 32 bytes; where they are encrypted, a name only the key gives (I10)
    size_bytes: int  # plain
    stored_bytes: int
    encoding: Encoding
    pack: str = ""  # "" when inline
    offset: int = 0
    data: bytes | None = None  # the stored bytes when inline
    is_damaged: bool = False  # found so by verify: not to be reused; a new copy takes its place


@dataclass(frozen=True, slots=True)
class NewCheckpoint:
    """All one save writes to the index."""

    id: CheckpointId
    job: str
    step: str
    level: CheckpointLevel
    created_us: int
    size_bytes: int
    stored_bytes: int
    digest: bytes  # BLAKE3 of `manifest`
    codec: str
    schema_version: str
    manifest: bytes
    parent: CheckpointId | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    is_pinned: bool = False
    metadata_json: str = "{}"
    has_chunks: bool = False  # the manifest names chunks; gc reads only such manifests
    new_chunks: Sequence[Chunk] = ()  # durable in their packs already, or inline
    reused_chunks: Sequence[bytes] = ()  # digests that must still exist when this commits
    lease_token: int | None = None
    idempotency_key: str | None = None
    request_digest: bytes = b""  # what an idempotency key must match
    takes_key_from: CheckpointId | None = None  # a checkpoint deleted at the source, whose key this one has now
    seq: int | None = None  # given when an index is rebuilt or a history copied; else the next of the job
    status: CheckpointStatus = CheckpointStatus.CREATED
    key_id: str = ""  # the data key this is sealed under, which must still be the current one when this commits


@dataclass(frozen=True, slots=True)
class Seen:
    """A checkpoint as a check has read it, with what it found wrong there: `Index.mark` compares both.

    `chunks`: rows whose bytes do not verify or are gone. `missing`: names for which there was no row.
    """

    checkpoint: Checkpoint
    chunks: Sequence[Chunk] = ()
    missing: Sequence[bytes] = ()


KEYS = ""  # where a lease is for a job: the right to change the keys of the namespace. No job is called so

ENVELOPE = 0xE1  # the first byte of whatever is sealed (I10): no manifest begins so
UNREADABLE = b"\0"  # what `Index.manifests` gives for a manifest that does not decrypt (I10): no manifest begins so


class ChunksGone(Exception):
    """Raised by `Index.commit`: gc removed chunks the save wanted to reuse. The store writes them and commits again."""

    def __init__(self, digests: Sequence[bytes]) -> None:
        super().__init__(f"{len(digests)} chunks are gone")
        self.digests = digests


class KeysChanged(Exception):
    """Raised by `Index.commit`: the namespace has a new data key. The store seals the save again and commits again."""


class IdTaken(Exception):
    """Raised by `Index.commit`: the ID exists. The store draws another one."""


@dataclass(frozen=True, slots=True)
class PackUse:
    """How much of a pack the index still names."""

    pack: str
    live_chunks: int
    live_bytes: int


class Index(Protocol):
    """What exists. One namespace per object; several objects, threads and processes may share the store behind it."""

    store_id: str
    namespace: str
    is_encrypted: bool  # the store, when it was opened: some namespace of it has a keyring
    row_bytes: int  # up to this much a row holds well: what is cut small in order to be shared is cut so

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        """Insert all of `records` or none, durably, in one transaction, and append their events.

        In that transaction: allocate each `seq` (I4); check leases (I5): a record whose job is leased needs the
        current token, else LeaseHeld / LeaseLost; check that reused chunks exist, else ChunksGone; a known
        idempotency key with the same request digest answers the first checkpoint instead of inserting, with
        another digest it is IdempotencyConflict, unless it is the key of the checkpoint in `takes_key_from`: that one
        loses it to this record; an unknown parent is NotFound, unless `seq` is given: what is copied or rebuilt may
        come without its ancestors; a used ID is IdTaken; a `key_id` that is not the current one is KeysChanged; the
        first save of a job without a `key_id` in an encrypted store is a Conflict (I10).
        New chunks that exist already keep their first location, unless that is damaged. Concurrent callers may
        share one sync.
        """
        ...

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        """`commit` of each record, by its actor, on its own: one that is refused disturbs no other.

        Answers for each its checkpoint, or what `commit` would have raised. All may share one sync.
        """
        ...

    def get(self, checkpoint_id: str) -> Checkpoint:
        """The checkpoint, or NotFound."""
        ...

    def read(self, checkpoint_id: str) -> tuple[Checkpoint, bytes]:
        """The checkpoint and its manifest, or NotFound."""
        ...

    def latest(self, job: str, level: CheckpointLevel | None = None) -> tuple[Checkpoint, bytes] | None:
        """The checkpoint with the highest sequence number that is not corrupted, and its manifest."""
        ...

    def find(self, job: str, keys: Sequence[str]) -> dict[str, tuple[Checkpoint, bytes]]:
        """What was saved under these idempotency keys, with manifests; unknown ones are left out. Any number."""
        ...

    def find_next(self, job: str, after: int, limit: int) -> dict[str, tuple[Checkpoint, bytes]]:
        """As `find`, of those among the `limit` sequence numbers above `after` that were saved under a key."""
        ...

    def keys_of(self, checkpoint_ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        """Idempotency key and request digest by checkpoint ID, for copies; those without a key are left out."""
        ...

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
        """Checkpoints of a job, oldest first; [] for an unknown job. Manifests are not read.

        With `limit`, the newest `limit` below sequence number `before`; with `after`, the oldest above it.
        `metadata` maps JSON paths ("loss", "model.name") to values; paths and values are bound, never spliced.
        """
        ...

    def job(self, name: str) -> Job | None: ...

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        """Jobs by name, from `after` (exclusive) on."""
        ...

    def locate(self, digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        """Where these chunks are; unknown ones are left out. Any number, in bounded statements."""
        ...

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        """Remove these checkpoints in one transaction; answers those that existed. A pinned one is a Conflict."""
        ...

    def update(
        self,
        checkpoint_id: str,
        *,
        actor: str,
        is_pinned: bool | None = None,
        tags: Mapping[str, str | None] | None = None,
        status: CheckpointStatus | None = None,
    ) -> Checkpoint:
        """Change what may change. Tags are merged; a value of None removes the tag."""
        ...

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, *, actor: str) -> CheckpointIds:
        """Set the status of checkpoints that still are as they were seen; answers those, changed or not.

        Compared in the same transaction: the row has the same digest and status; and, where chunks or missing names
        are given, at least one of these chunks lies where it was seen, byte for byte in a row, or one of these names
        still has no row. So a check never condemns what was deleted, healed, moved or encrypted anew meanwhile.
        One event, if any status changed.
        """
        ...

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        """The policy to apply after saves of this job. Creates the job row if there is none."""
        ...

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        """A new lease with a higher token than any before, or LeaseHeld while another one runs.

        With `KEYS` for `job` it is the right to change the keys of the namespace; no job is made for it.
        Time is the index's own (boot clock, database clock), never the caller's wall clock (I4).
        """
        ...

    def renew_lease(self, lease: Lease) -> None:
        """Extend by its ttl, or LeaseLost when it was released or taken over."""
        ...

    def release_lease(self, lease: Lease) -> None:
        """Give it back; a lost one is ignored, because its job belongs to somebody else now."""
        ...

    def append_event(self, action: str, *, actor: str, job: str | None = None, detail: str = "{}") -> None: ...

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        """Events with an ID above `after`, and below `before`: the first `limit` or, with `newest`, the last; in order.

        IDs grow; an event is visible when its change is.
        """
        ...

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        """Whether there is an event above `after`, by any process; waits for one until `timeout_s` is over."""
        ...

    def audit(self, until: int | None = None) -> EventChain:
        """Read the log from its beginning to event `until`, or its end, and prove that each entry follows."""
        ...

    def manifests(self, after: int = 0, *, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        """(row, checkpoint, manifest) of every checkpoint above row `after`, for gc and verify. Bounded memory."""
        ...

    def sweep(self, references: References, *, lease_token: int | None = None) -> tuple[int, int]:
        """Delete every chunk row that no manifest names; answers (chunks, stored bytes) removed.

        `references(checkpoint ID, manifest)` yields digests. Marking runs beside writers; each write transaction that
        deletes first marks the manifests of all checkpoints that events since then speak of, so that a save either has
        its reused chunks found or gets ChunksGone (I3). `lease_token` is that of a change of keys, whose references
        leave out names of old keys: LeaseLost, in each of these transactions, when it is no longer the current one.
        """
        ...

    def packs(self) -> Sequence[PackUse]:
        """Packs that chunk rows name, in any namespace."""
        ...

    def chunks_of(self, pack: str) -> Sequence[Chunk]:
        """The chunks in one pack, by offset."""
        ...

    def condemn(self, pack: str) -> bool:
        """Whether no chunk row, of any namespace, names this pack now; asked by gc before it removes the pack.

        Where writers may be on machines that blobs cannot lock out, a pack for which this answered True is never
        named again: `commit` raises ChunksGone for new chunks in it, and so does `relocate` (I3).
        """
        ...

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> Digests:
        """Say whether saves may reuse these chunks; answers the digests of those whose rows still are as given.

        Rows that name another place, another size or encoding, or hold other bytes are left alone.
        """
        ...

    def relocate(self, chunks: Sequence[Chunk], *, from_pack: str) -> int:
        """Point chunk rows that still are in `from_pack` to their new places (compaction); answers how many."""
        ...

    def keyring(self) -> str | None:
        """The sealed keys of this namespace; None while it is plain. Opaque to the index."""
        ...

    def set_keyring(
        self, keyring: str, key_id: str, *, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        """Put a keyring, whose current data key is `key_id`, in the place of `replacing`; False if another is there.

        A change of keys gives the token of its lease of `KEYS`: LeaseLost when that is no longer the current one.
        The first of all makes the store an encrypted one, which plain readers refuse (I8); Conflict if anything was
        saved before: its bytes would stay readable.
        """
        ...

    def reseal(self, record: NewCheckpoint, *, replacing: bytes, actor: str) -> bool:
        """Put the same checkpoint, encrypted anew, in the place of the one whose digest is `replacing`.

        Changes manifest, digest, metadata and stored bytes, and inserts new chunks, as a commit does: KeysChanged and
        ChunksGone as there; LeaseLost if `lease_token` is not that of the lease of `KEYS`. False if the checkpoint is
        gone or has another digest by now.
        """
        ...

    def scrub(self) -> None:
        """Leave nothing behind of what was deleted or replaced, as far as the index has it in its hands.

        Called when nothing is under an old data key any more, before that is thrown away (I10).
        """
        ...

    def refuse_older(self) -> None:
        """Corrupted if the store once had a newer index than this one: gc would remove what only packs know (I3)."""
        ...

    def accept(self) -> None:
        """From now on this index counts, though the store had a newer one: a rebuild has read the packs."""
        ...

    def make_room(self) -> bool:
        """Give back what the index keeps for a full disk, so that gc can go on; whether there was anything."""
        ...

    def totals(self) -> Mapping[str, int]:
        """Numbers of this namespace: jobs, checkpoints, their size_bytes and stored_bytes, and chunks.

        plain_bytes are those of chunks before compression, chunk_bytes as stored, inline_bytes the part in the index.
        """
        ...

    def integrity_problems(self) -> Problems:
        """What the index finds wrong with itself (SQLite's integrity check, counters, event chain); [] when well."""
        ...

    def close(self) -> None: ...


class BlobWriter(Protocol):
    """What one save writes. Used by several threads; then one of them calls commit or abort, and release at last."""

    def append(self, data: Buffer) -> tuple[str, int]:
        """Store `data` and answer (pack, offset). The caller may reuse `data` as soon as this returns."""
        ...

    def commit(self) -> None:
        """Return only when everything appended, and the names of its packs, survive power loss (I1).

        A failed sync is not tried again on the same file (I9): the packs are given up and StorageError is raised.
        """
        ...

    def abort(self) -> None:
        """Give up; what was appended becomes garbage. Includes release."""
        ...

    def release(self) -> None:
        """Let gc judge the packs again: the index has committed what names the chunks, or never will.

        Until then they are kept from `Blobs.remove`, in every process (I3). May be called again.
        """
        ...


class Blobs(Protocol):
    """The bytes. Packs are immutable once committed; offsets below a commit never change."""

    def writer(self, size_hint: int) -> BlobWriter: ...

    def seal(self) -> None:
        """Add nothing more to the packs written so far; later writers begin new ones. gc calls it to compact them."""
        ...

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target`; a missing pack is NotFound, a short one Corrupted.

        Both are answers of the place itself. While it cannot be asked (a folder or a bucket that is away, no
        permission, no descriptors, no network) nothing is known about the pack: StorageError.
        """
        ...

    def packs(self) -> Iterator[tuple[str, int]]:
        """(name, size in bytes) of every pack that takes space, finished or not."""
        ...

    def remove(self, pack: str, is_garbage: Callable[[], bool]) -> bool:
        """Delete a pack if no writer may still add to it and `is_garbage()`, asked while writers are kept out.

        Answers whether it was deleted. A missing pack is not an error: removal is repeated after crashes (I3).
        """
        ...

    def scan(self, pack: str, magic: bytes) -> Iterator[int]:
        """Offsets in a pack at which an append beginning with `magic` may lie, for rebuilding an index."""
        ...

    def file_of(self, pack: str) -> str | None:
        """A local file that can be mapped, for adapters that have one."""
        ...

    def close(self) -> None: ...
