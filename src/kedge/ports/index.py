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

    Each method is one transaction. A lease on the job `KEYS` is the right to change the namespace's keys.
    """

    store_id: str
    namespace: str
    written_by: str  # the newest Kedge that opened it for writing, as of this opening

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        """Insert all of `records` or none, durably, in one transaction, and append their events.

        The transaction allocates each `seq` (I4) and checks:
        - The record has the current token if its job is leased (I5). Raises LeaseHeld or LeaseLost, unless this same
          record was committed before: then it returns that checkpoint, or raises IdTaken.
        - Reused chunks exist. Raises ChunksGone.
        - The idempotency key is new. A known one with the same request digest returns the first checkpoint and inserts
          nothing. Another digest raises IdempotencyConflict, unless `takes_key_from` has the key: this record takes it.
        - The parent exists. Raises NotFound, unless `seq` is given: copies and rebuilt records may lack ancestors.
        - The ID is unused. Raises IdTaken.
        - `key_id` is the current one. Raises KeysChanged. A job's first save without a `key_id` in an encrypted store
          raises Conflict (I10).

        Checks `record.provided` and applies its changes, too. Raises Unmet if a condition fails, unless this same
        record was committed before. Carries out `record.then`, which refuses nothing. A new chunk that already exists
        keeps its first location, unless that one is damaged. Concurrent callers may share one sync.
        """
        ...

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        """`commit` each record independently, by its own actor: a refused one does not affect the others.

        Returns for each its checkpoint, or the exception `commit` would have raised. All may share one sync.
        """
        ...

    def keys_of(self, checkpoint_ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        """Return idempotency key and request digest by checkpoint ID, for copies. Those without a key are left out."""
        ...

    def locate(self, digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        """Return where these chunks are; unknown ones are left out. Any number, in bounded statements."""
        ...

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, *, actor: str) -> CheckpointIds:
        """Set the status of checkpoints that are still as `seen`; return their IDs, changed or not.

        The transaction compares digest and status of the row. If chunks or missing names are given, one of them must
        still hold: a chunk is where it was seen (for an inline one, with the same bytes), or a name still has no row.
        So a check never condemns what was deleted, healed, moved or re-encrypted meanwhile. Appends one event if any
        status changed.
        """
        ...

    def reserve_numbers(self, job: str, last_seq: int) -> None:
        """Reserve numbers up to `last_seq`: no save of this job gets one (I4). Creates the job row if needed."""
        ...

    def append_event(
        self, action: str, *, actor: str, job: str | None = None, checkpoints: Sequence[str] = (), detail: str = "{}"
    ) -> None:
        """Append an event, or one for each of `checkpoints`, in one transaction."""

    def manifests(self, after: int = 0, *, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        """Yield (row, checkpoint, manifest) above row `after`, for gc and verify, in bounded memory."""
        ...

    def sweep(self, references: References, *, lease_token: int | None = None) -> tuple[int, int]:
        """Delete every chunk row that no manifest names; return (chunks, stored bytes) removed.

        `references(checkpoint ID, manifest)` yields digests. Marking runs beside writers. So each transaction that
        deletes first marks the manifests of all checkpoints with events since then: a save finds its reused chunks or
        gets ChunksGone (I3). The base of an existing chunk stays, too. `lease_token` belongs to a change of keys, whose
        references leave out names of old keys. Each of these transactions raises LeaseLost if it is no longer current.
        """
        ...

    def unrecorded(self, limit: int) -> Unrecorded:
        """Return what only the index has: at most `limit` checkpoints and as many chunks.

        The checkpoints were saved or re-encrypted since the last `set_recorded`, and no pack is named for them. The
        chunks are stored only in rows. Reads nothing older (I6).
        """
        ...

    def set_recorded(self, places: Sequence[RecordPlace], chunks: Sequence[Chunk], *, up_to: int) -> None:
        """Name the packs that have records of checkpoints, which keeps them from gc, and those with copies of chunks.

        Skips a row that was deleted or changed since, or already has a place. `up_to` only ever grows. Raises
        ChunksGone for a condemned pack.
        """
        ...

    def recorded_in(self, pack: str) -> Sequence[SavedRow]:
        """Return the checkpoints of this namespace that `set_recorded` named this pack for."""
        ...

    def packs(self) -> Sequence[PackUse]:
        """Return the packs that chunk rows and record places name, in any namespace."""
        ...

    def chunks_of(self, pack: str) -> Sequence[Chunk]:
        """Return the chunks in one pack, by offset."""
        ...

    def condemn(self, pack: str) -> bool:
        """Return whether no chunk row of any namespace names this pack. gc calls it before it removes the pack.

        If writers may be on machines that blobs cannot lock out, a pack that got True is never named again: `commit`
        and `relocate` raise ChunksGone for chunks in it (I3).
        """
        ...

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> Digests:
        """Set whether saves may reuse these chunks; return the digests whose rows are still as given.

        Skips rows that name another place, size or encoding, or hold other bytes.
        """
        ...

    def relocate(self, chunks: Sequence[Chunk], *, from_pack: str, records: Sequence[RecordPlace] = ()) -> int:
        """Point chunk rows that are still in `from_pack` to their new places (compaction); return how many.

        Does the same for places of records whose rows are unchanged.
        """
        ...

    def keyring(self) -> str | None:
        """Return the sealed keys of this namespace; None while it is plain. Opaque to the index."""
        ...

    def set_keyring(
        self, keyring: str, key_id: str, *, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        """Replace the keyring `replacing` by one whose data key is `key_id`. Return False if another one is there.

        A change of keys passes the token of its lease on `KEYS`. Raises LeaseLost if it is no longer current. The first
        keyring makes the store an encrypted one, which plain readers refuse (I8). Raises Conflict if anything was saved
        before, because its bytes would stay readable.
        """
        ...

    def reseal(self, record: NewCheckpoint, *, replacing: bytes, actor: str, envelope: str | None = None) -> bool:
        """Replace the checkpoint whose digest is `replacing` by the same one, re-encrypted.

        Changes manifest, digest, metadata and stored bytes, and inserts new chunks. Raises KeysChanged and ChunksGone
        like `commit`, LeaseLost if `lease_token` is not that of the lease on `KEYS`, RowChanged if `envelope` is given
        and is not the row's metadata. Returns False if the checkpoint is gone or has another digest.
        """
        ...

    def scrub(self) -> None:
        """Erase all traces of what was deleted or replaced, as far as the index controls them.

        Called when nothing uses an old data key any more, before that key is deleted (I10).
        """
        ...

    def refuse_older(self) -> None:
        """Raise Corrupted if the store once had a newer index: gc would remove what only packs know (I3)."""
        ...

    def accept(self, closed: Mapping[str, str]) -> None:
        """Make this index the valid one, though the store had a newer one: a rebuild has read the packs.

        Saves of `closed` namespaces, of any store, are excepted; each is encrypted under the key with this ID.
        """
        ...

    def closed_namespaces(self) -> Mapping[str, str]:
        """Return those of the last `accept`. Packs may hold saves of theirs that no index knows; gc keeps them (I3)."""
        ...

    def make_room(self) -> bool:
        """Free the space the index reserves for a full disk, so that gc can continue. Return whether there was any."""
        ...

    def totals(self) -> Mapping[str, int]:
        """Return this namespace's counts of jobs, checkpoints and chunks, and its size_bytes and stored_bytes.

        plain_bytes are those of chunks before compression, chunk_bytes as stored, inline_bytes the part in the index.
        """
        ...

    def integrity_problems(self) -> Problems:
        """Return the index's own problems (SQLite's integrity check, counters, event chain); [] if sound."""
        ...

    def close(self) -> None: ...
