"""The port for what exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from kedge.model import Checkpoint, CheckpointStatus

from .catalogue import Catalogue
from .record import NewCheckpoint, SavedRow, Unrecorded
from .values import (
    CheckpointIds,
    Checkpoints,
    Chunk,
    Digests,
    Outcomes,
    PackUse,
    Problems,
    RecordPlace,
    References,
    Seen,
)


class Index(Catalogue, Protocol):
    """What exists. One namespace per object; several objects, threads and processes may share the store behind it.

    Each method is one transaction. With `KEYS` for its job a lease is the right to change the keys of the namespace.
    """

    store_id: str
    namespace: str
    written_by: str  # the newest Kedge that has opened it for writing, when it was opened

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        """Insert all of `records` or none, durably, in one transaction, and append their events.

        In that transaction: allocate each `seq` (I4); check leases (I5): a record whose job is leased needs the
        current token, else LeaseHeld / LeaseLost, unless this very record landed before: it is answered, or IdTaken;
        check that reused chunks exist, else ChunksGone; a known idempotency key with the same request digest answers
        the first checkpoint instead of inserting, with another digest it is IdempotencyConflict, unless it is the key
        of the checkpoint in `takes_key_from`: that one loses it to this record; an unknown parent is NotFound, unless
        `seq` is given: what is copied or rebuilt may come without its ancestors; a used ID is IdTaken; a `key_id` that
        is not the current one is KeysChanged; the first save of a job without a `key_id` in an encrypted store is a
        Conflict (I10).
        What `then` says is done in the same transaction, and refused by nothing. What a record is `provided` with is
        looked at, and done, there too: Unmet where it is not so, unless this very record landed before.
        New chunks that exist already keep their first location, unless that is damaged. Concurrent callers may
        share one sync.
        """
        ...

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        """`commit` of each record, by its actor, on its own: one that is refused disturbs no other.

        Answers for each its checkpoint, or what `commit` would have raised. All may share one sync.
        """
        ...

    def keys_of(self, checkpoint_ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        """Idempotency key and request digest by checkpoint ID, for copies; those without a key are left out."""
        ...

    def locate(self, digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        """Where these chunks are; unknown ones are left out. Any number, in bounded statements."""
        ...

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, *, actor: str) -> CheckpointIds:
        """Set the status of checkpoints that still are as they were seen; answers those, changed or not.

        Compared in the same transaction: the row has the same digest and status; and, where chunks or missing names
        are given, at least one of these chunks lies where it was seen, byte for byte in a row, or one of these names
        still has no row. So a check never condemns what was deleted, healed, moved or encrypted anew meanwhile.
        One event, if any status changed.
        """
        ...

    def reserve_numbers(self, job: str, last_seq: int) -> None:
        """Give no number up to `last_seq` to a save of this job (I4). Creates the job row if there is none."""
        ...

    def append_event(
        self, action: str, *, actor: str, job: str | None = None, checkpoints: Sequence[str] = (), detail: str = "{}"
    ) -> None:
        """Append an event, or one for each of `checkpoints`, in one transaction."""

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

    def accept(self, closed: Mapping[str, str]) -> None:
        """From now on this index counts, though the store had a newer one: a rebuild has read the packs.

        But for saves of the `closed` namespaces, of whatever store, which are under the key with this ID.
        """
        ...

    def closed_namespaces(self) -> Mapping[str, str]:
        """Those of the last `accept`: packs may hold saves of theirs that no index knows, and gc keeps them (I3)."""
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
