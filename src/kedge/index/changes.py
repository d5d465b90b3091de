"""The writing methods of `ports.Index` that are the same in every database: each calls one of `SqlWrites`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from kedge.model import Checkpoint, CheckpointStatus, Lease
from kedge.ports import CheckpointIds, Chunk, Digests, NewCheckpoint, RecordPlace, Seen, Update

from .writes import SqlWrites

T = TypeVar("T")


class SqlChanges:
    """Requests write transactions; each database runs them in its own way."""

    def _change(self, change: Callable[[SqlWrites], T], *, is_urgent: bool = False, is_repeatable: bool = True) -> T:
        """Run `change` in a transaction.

        Urgent changes free space or note damage, and may use the reserve for a full disk. Repeatable ones may be done
        twice, and are repeated when the answer to a commit was lost.
        """
        raise NotImplementedError

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        return self._change(
            lambda writes: writes.delete(checkpoint_ids, even_pinned, actor), is_urgent=True, is_repeatable=False
        )

    def update(self, checkpoint_id: str, update: Update, *, actor: str) -> Checkpoint:
        return self._change(lambda writes: writes.update(checkpoint_id, update, actor))

    def mark(self, seen: Sequence[Seen], status: CheckpointStatus, *, actor: str) -> CheckpointIds:
        return self._change(lambda writes: writes.mark(seen, status, actor), is_urgent=True) if seen else []

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        self._change(lambda writes: writes.set_retention(job, policy_json, actor))

    def reserve_numbers(self, job: str, last_seq: int) -> None:
        self._change(lambda writes: writes.reserve_numbers(job, last_seq))

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        return self._change(lambda writes: writes.acquire_lease(job, holder, ttl_s), is_repeatable=False)

    def renew_lease(self, lease: Lease) -> None:
        self._change(lambda writes: writes.renew_lease(lease))

    def release_lease(self, lease: Lease) -> None:
        self._change(lambda writes: writes.end_lease(lease.job, lease.token))

    def append_event(
        self, action: str, *, actor: str, job: str | None = None, checkpoints: Sequence[str] = (), detail: str = "{}"
    ) -> None:
        def append(writes: SqlWrites) -> None:
            for checkpoint in checkpoints or (None,):
                writes.event(action, actor, job, checkpoint, detail)

        self._change(append, is_urgent=True, is_repeatable=False)

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> Digests:
        return self._change(lambda writes: writes.mark_damaged(chunks, is_damaged), is_urgent=True) if chunks else []

    def relocate(self, chunks: Sequence[Chunk], *, from_pack: str, records: Sequence[RecordPlace] = ()) -> int:
        return self._change(lambda writes: writes.relocate(chunks, from_pack, records), is_urgent=True)

    def set_recorded(self, places: Sequence[RecordPlace], chunks: Sequence[Chunk], *, up_to: int) -> None:
        self._change(lambda writes: writes.set_recorded(places, chunks, up_to))

    def reseal(self, record: NewCheckpoint, *, replacing: bytes, actor: str, envelope: str | None = None) -> bool:
        return self._change(lambda writes: writes.reseal(record, replacing, actor, envelope))
