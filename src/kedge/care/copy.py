"""Copies from one store to another: the same checkpoints, with IDs, numbers, parents, tags, pins, times and keys.

A copy compares what both indexes list, and transfers missing checkpoints with only their missing chunks. Every chunk is
read verified (I2) and durable in the target before the checkpoint that names it (I1), oldest first in each job. So the
target always has a beginning of the source's history; run an interrupted copy again.

Nothing is merged: an ID or a number that means something else in the target raises Conflict. An idempotency key belongs
to the same checkpoint as in the source: if the source reused it after a deletion, it also moves in the target.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kedge.errors import Conflict, Corrupted, NotFound
from kedge.model import Checkpoint, CheckpointId, CheckpointStatus, Event, Job, to_us
from kedge.ports import NewCheckpoint, Selection, Update, pages
from kedge.store import Store, knows
from kedge.store.adoption import Exported
from kedge.store.local import LocalStore

from . import Progress

FOLLOWED = ("save", "tag", "pin", "unpin", "status", "retention", "delete")  # events that also change the target
_PAGE = 500  # checkpoints compared at a time
_EXPORTED_AT_ONCE = 200  # checkpoints whose manifests are in memory; those without chunks share a commit


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The numbers of one copy."""

    copied: int = 0
    present: int = 0  # already in the target
    changed: int = 0  # of those, tags, pin or archived updated
    deleted: int = 0  # deleted from the source: only with mirror=True
    chunks_moved: int = 0
    bytes_moved: int = 0  # of chunks, uncompressed
    size_bytes: int = 0  # of the copied checkpoints
    damaged: tuple[str, ...] = ()  # IDs that the source cannot read; they were left out

    def plus(self, other: CopyReport) -> CopyReport:
        pairs = ((name, getattr(self, name) + getattr(other, name)) for name in self.__slots__)
        return CopyReport(**dict(pairs))


class Copying:
    """A copy from a source to a target."""

    def __init__(
        self,
        source: Store,
        target: Store,
        *,
        job: str | None = None,
        since_us: int | None = None,
        mirror: bool = False,
        actor: str,
    ) -> None:
        self.source = source
        self.target = target
        self.job = job
        self.since_us = since_us
        self.mirror = mirror
        self.actor = actor
        self._lock = threading.Lock()
        self._report = CopyReport()
        self._done_bytes = self._total_bytes = 0
        self._progress: Progress | None = None

    def copy(self, progress: Progress | None = None) -> CopyReport:
        """Update the target from the source. `progress(done, total)` counts stored bytes of the source."""
        self._report, self._progress, self._done_bytes = CopyReport(), progress, 0
        self._total_bytes = sum(job.stored_bytes for job in self._jobs())
        for job in self._jobs():
            self._copy_job(job.name)
        return self._report

    # Jobs

    def _jobs(self) -> Iterator[Job]:
        if self.job is not None:
            if (job := self.source.catalogue.job(self.job)) is None:
                raise NotFound(f"job {self.job} not found", hint="kedge jobs shows which jobs exist")
            yield job
            return
        after = ""
        while page := self.source.catalogue.jobs(limit=_PAGE, after=after):
            yield from page
            after = page[-1].name

    def _copy_job(self, job: str) -> None:
        """Copy a job, and reserve in the target the numbers that the source has used and freed (I4)."""
        self._copy_retention(job)
        after = 0
        for page in pages(self.source.catalogue.list, job, _PAGE):
            last = page[-1].seq
            there = self.target.catalogue.list(job, Selection(after=after, before=last + 1))
            self._copy_page(page, there)
            self._delete_others(page, there)
            after = last
        self._delete_others([], self.target.catalogue.list(job, Selection(after=after)) if self.mirror else [])
        self._reserve_numbers(job)

    def _reserve_numbers(self, job: str) -> None:
        """Reserve numbers in a local target; a service continues after the newest checkpoint it received."""
        here, there = self.source.catalogue.job(job), self.target.catalogue.job(job)
        if not isinstance(self.target, LocalStore) or (there is None and self.since_us is not None):
            return  # nothing of the job was requested
        if here is not None and here.last_seq > (there.last_seq if there else 0):
            self.target.index.reserve_numbers(job, here.last_seq)

    def _copy_retention(self, job: str) -> None:
        here, there = self.source.catalogue.job(job), self.target.catalogue.job(job)
        if here is not None and here.retention != (there.retention if there else None):
            self.target.catalogue.set_retention(job, here.retention, actor=self.actor)

    def _copy_page(self, page: Sequence[Checkpoint], there: Sequence[Checkpoint]) -> None:
        known = {c.id: c for c in there}
        numbers = {c.seq: c for c in there}
        wanted: list[Checkpoint] = []
        for checkpoint in page:
            if (twin := known.get(checkpoint.id)) is not None:
                self._check_same(checkpoint, twin)
                self._update(checkpoint, twin)
                self._count(present=1)
                self._advance(checkpoint.stored_bytes)
            elif self.since_us is not None and to_us(checkpoint.created_at) < self.since_us:
                self._advance(checkpoint.stored_bytes)
            elif checkpoint.seq in numbers:
                raise Conflict(
                    f"job {checkpoint.job} of the target has {numbers[checkpoint.seq].id} as number {checkpoint.seq}, "
                    f"where the source has {checkpoint.id}",
                    hint="both stores were written to: copy to another store or namespace",
                )
            else:
                wanted.append(checkpoint)
        self._copy_all(wanted)

    def _copy_all(self, wanted: Sequence[Checkpoint]) -> None:
        """Copy these, oldest first. Those without chunks, such as small states, share commits."""
        for start in range(0, len(wanted), _EXPORTED_AT_ONCE):
            exports = [exported for c in wanted[start : start + _EXPORTED_AT_ONCE] if (exported := self._export(c))]
            holders = self._holders([exported.record for exported in exports])
            small: list[Exported] = []
            for exported in exports:
                record = replace(exported.record, takes_key_from=holders.get(exported.record.id))
                exported = replace(exported, record=record)
                if not exported.references:
                    small.append(exported)
                    continue
                self._adopt(small)
                small = []
                try:
                    self._adopt([exported])
                except Corrupted:
                    self._left_out(record.id)
            self._adopt(small)

    def _export(self, checkpoint: Checkpoint) -> Exported | None:
        try:
            return self.source.export(checkpoint.id)
        except (NotFound, Corrupted):
            self._left_out(checkpoint.id)
            return None

    def _adopt(self, exported: Sequence[Exported]) -> None:
        if not exported:
            return
        saved = self.target.adopt(exported, actor=self.actor, moved=self._moved)
        for export, checkpoint in zip(exported, saved, strict=True):
            self._arrived(export.record, checkpoint)
            if not export.references:
                self._advance(export.record.stored_bytes)

    def _moved(self, chunks: int, size_bytes: int) -> None:
        self._count(chunks_moved=chunks, bytes_moved=size_bytes)
        self._advance(size_bytes)

    def _holders(self, records: Sequence[NewCheckpoint]) -> dict[str, CheckpointId]:
        """Return, by ID, the target's checkpoint that has this one's idempotency key and must release it.

        A key becomes free when its checkpoint is deleted. So the source has deleted that one, which has a lower number.
        If the source still has it, or it has a higher number, there is a Conflict, as usual.
        """
        by_job: dict[str, dict[str, NewCheckpoint]] = {}
        for record in records:
            if record.idempotency_key is not None:
                by_job.setdefault(record.job, {})[record.idempotency_key] = record
        holders: dict[str, CheckpointId] = {}
        for job, heirs in by_job.items():
            for key, (holder, _) in self.target.catalogue.find(job, list(heirs)).items():
                heir = heirs[key]
                is_lower = heir.seq is not None and holder.seq < heir.seq
                if holder.id != heir.id and is_lower and not knows(self.source.catalogue, holder.id):
                    holders[heir.id] = holder.id
        return holders

    def _left_out(self, checkpoint_id: str) -> None:
        if knows(self.source.catalogue, checkpoint_id):  # otherwise deleted meanwhile
            self._count(damaged=(checkpoint_id,))

    def _arrived(self, record: NewCheckpoint, checkpoint: Checkpoint) -> None:
        """Count a copy after checking that the target has this same checkpoint."""
        same = (record.id, record.job, record.seq, record.size_bytes)
        is_other = not self.target.catalogue.is_encrypted and checkpoint.digest != record.digest.hex()
        if is_other or (checkpoint.id, checkpoint.job, checkpoint.seq, checkpoint.size_bytes) != same:
            raise _differs(record.id, record.job)
        self._count(copied=1, size_bytes=record.size_bytes)

    def _check_same(self, checkpoint: Checkpoint, twin: Checkpoint) -> None:
        """Compare by digest if both stores are plain; encrypted ones have different digests in every store."""
        is_plain = not self.source.catalogue.is_encrypted and not self.target.catalogue.is_encrypted
        here, there = (
            (c.job, c.seq, c.step, c.created_at, c.size_bytes, c.digest if is_plain else "") for c in (checkpoint, twin)
        )
        if here != there:
            raise _differs(checkpoint.id, checkpoint.job)

    # Mutable fields

    def _update(self, checkpoint: Checkpoint, twin: Checkpoint) -> None:
        tags: dict[str, str | None] = {n: v for n, v in checkpoint.tags.items() if twin.tags.get(n) != v}
        tags.update(dict.fromkeys(twin.tags.keys() - checkpoint.tags.keys()))
        pinned = checkpoint.is_pinned if checkpoint.is_pinned != twin.is_pinned else None
        was, now = (c.status is CheckpointStatus.ARCHIVED for c in (twin, checkpoint))
        status = None if was == now else CheckpointStatus.ARCHIVED if now else CheckpointStatus.CREATED
        if tags or pinned is not None or status is not None:
            self.target.catalogue.update(twin.id, Update(pinned, tags or None, status), actor=self.actor)
            self._count(changed=1)

    def _delete_others(self, page: Sequence[Checkpoint], there: Sequence[Checkpoint]) -> None:
        """Delete what the source has deleted. Checks again, because it may have been saved since the page was read."""
        if self.mirror:
            known = {c.id for c in page}
            self._delete([c for c in there if c.id not in known and not knows(self.source.catalogue, c.id)])

    def _delete(self, doomed: Sequence[Checkpoint]) -> None:
        for start in range(0, len(doomed), _PAGE):
            ids = [c.id for c in doomed[start : start + _PAGE]]
            self._count(deleted=len(self.target.catalogue.delete(ids, even_pinned=True, actor=self.actor)))

    # Following

    def replay(self, events: Sequence[Event]) -> CopyReport:
        """Repeat in the target the changes that events record. The newest state of the source wins."""
        self._report, self._progress = CopyReport(), None
        saved: dict[str, None] = {}
        jobs: dict[str, None] = {}
        for event in events:
            if event.action not in FOLLOWED or (self.job is not None and event.job != self.job):
                continue
            if event.action == "retention" and event.job is not None:
                self._copy_retention(event.job)
            if event.job is not None and event.action in ("save", "delete"):
                jobs[event.job] = None
            if event.action == "delete" and event.checkpoint is not None:
                saved.pop(event.checkpoint, None)
                self._forget(event.checkpoint)
            elif event.checkpoint is not None:
                saved[event.checkpoint] = None
        report = self._bring(saved)
        for job in jobs:
            self._reserve_numbers(job)
        return report

    def catch_up(self, checkpoint_ids: Iterable[str]) -> CopyReport:
        """Copy these checkpoints if they still exist and are readable by now."""
        self._report, self._progress = CopyReport(), None
        return self._bring(checkpoint_ids)

    def _bring(self, checkpoint_ids: Iterable[str]) -> CopyReport:
        new: list[Checkpoint] = []
        for checkpoint_id in checkpoint_ids:
            try:
                checkpoint = self.source.catalogue.get(checkpoint_id)
            except NotFound:
                continue  # deleted meanwhile: its own event comes later
            except Corrupted:
                self._left_out(checkpoint_id)
                continue
            try:
                twin = self.target.catalogue.get(checkpoint_id)
            except NotFound:
                if self.since_us is None or to_us(checkpoint.created_at) >= self.since_us:
                    new.append(checkpoint)
            else:
                self._check_same(checkpoint, twin)
                self._update(checkpoint, twin)
        self._copy_all(new)
        return self._report

    def _forget(self, checkpoint_id: str) -> None:
        if self.mirror and not knows(self.source.catalogue, checkpoint_id):
            try:
                self._delete([self.target.catalogue.get(checkpoint_id)])
            except NotFound:
                pass

    # Numbers

    def _count(self, *, damaged: tuple[str, ...] = (), **numbers: int) -> None:
        with self._lock:
            self._report = self._report.plus(CopyReport(**numbers, damaged=damaged))

    def _advance(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            done = min(self._done_bytes, self._total_bytes)
        if self._progress is not None:
            self._progress(done, self._total_bytes)


def _differs(checkpoint_id: str, job: str) -> Conflict:
    return Conflict(
        f"checkpoint {checkpoint_id} of job {job} has different content in the target",
        hint="the stores are unrelated: copy to another store or namespace",
    )
