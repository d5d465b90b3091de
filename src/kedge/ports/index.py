"""The port for what exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from kedge.model import Checkpoint, CheckpointLevel, CheckpointStatus, EventChain, Job, Lease

from .values import (
    CheckpointIds,
    Checkpoints,
    Chunk,
    Digests,
    Events,
    Jobs,
    NewCheckpoint,
    NewEnvelope,
    Outcomes,
    PackUse,
    Problems,
    RecordPlace,
    References,
    SavedRow,
    Seen,
    Unrecorded,
)


class Index(Protocol):
    """What exists. One namespace per object; several objects, threads and processes may share the store behind it."""

    store_id: str
    namespace: str
    is_encrypted: bool  # the store, when it was opened: some namespace of it has a keyring
    written_by: str  # the newest Kedge that has opened it for writing, when it was opened
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

    def list_stored(
        self,
        job: str,
        *,
        level: CheckpointLevel | None = None,
        tags: Mapping[str, Sequence[str]] | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> Sequence[tuple[Checkpoint, bytes]]:
        """As `list`, with manifests. `tags`: for each name the values that are wanted, at most 500."""
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
        envelope: NewEnvelope | None = None,
    ) -> Checkpoint:
        """Change what may change. Tags are merged; a value of None removes the tag.

        `envelope` goes with tags of an encrypted row: RowChanged and KeysChanged when it no longer fits.
        """
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

    def reserve_numbers(self, job: str, last_seq: int) -> None:
        """Give no number up to `last_seq` to a save of this job (I4). Creates the job row if there is none."""
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
        its reused chunks found or gets ChunksGone (I3). The base of a chunk that is there stays too. `lease_token` is
        that of a change of keys, whose references leave out names of old keys: LeaseLost, in each of these
        transactions, when it is no longer the current one.
        """
        ...

    def unrecorded(self, limit: int) -> Unrecorded:
        """Checkpoints that were saved, or encrypted anew, since the last `set_recorded` and have no record that it
        names, and chunks that are in rows alone: at most `limit` of each. Looks at nothing older (I6)."""
        ...

    def set_recorded(self, places: Sequence[RecordPlace], chunks: Sequence[Chunk], *, up_to: int) -> None:
        """Name the packs that tell of checkpoints, which keeps them from gc, and that have copies of chunks.

        A row that was deleted or changed since, or has a place already, is left alone. `up_to` only ever grows.
        ChunksGone for a pack that is condemned.
        """
        ...

    def recorded_in(self, pack: str) -> Sequence[SavedRow]:
        """The checkpoints of this namespace that this pack was named for."""
        ...

    def packs(self) -> Sequence[PackUse]:
        """Packs that rows of chunks and places of records name, in any namespace."""
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

    def relocate(self, chunks: Sequence[Chunk], *, from_pack: str, records: Sequence[RecordPlace] = ()) -> int:
        """Point chunk rows that still are in `from_pack` to their new places (compaction); answers how many.

        So too the places of records, of rows that are as they were.
        """
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

    def reseal(self, record: NewCheckpoint, *, replacing: bytes, actor: str, envelope: str | None = None) -> bool:
        """Put the same checkpoint, encrypted anew, in the place of the one whose digest is `replacing`.

        Changes manifest, digest, metadata and stored bytes, and inserts new chunks, as a commit does: KeysChanged and
        ChunksGone as there; LeaseLost if `lease_token` is not that of the lease of `KEYS`. False if the checkpoint is
        gone or has another digest by now. `envelope`: the metadata it must have, else RowChanged.
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
