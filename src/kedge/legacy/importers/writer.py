"""Drafts into a store: many in one transaction, each at most once, with their IDs, times and parents.

A draft's key is its idempotency key, so that importing again adds nothing and an interrupted import goes on. A job that
was continued in the store since it was imported is left alone: its newest checkpoint must stay the newest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kedge import codec
from kedge.chunks import INLINE_BYTES
from kedge.errors import CheckpointError, Conflict, LeaseHeld, NotFound, StorageError
from kedge.manager import CheckpointManager
from kedge.model import CheckpointId, CheckpointStatus
from kedge.ports import IdTaken, KeysChanged, NewCheckpoint
from kedge.store.local import local_store
from kedge.store.manifest import Manifest, pack_manifest
from kedge.store.record import new_record
from kedge.store.request import Request, parse_request

from .common import Draft, Finding, Verdict, clean, digest

BATCH = 500
BATCH_BYTES = 8 << 20
MOST_FINDINGS = 10_000  # listed one by one; beyond that they are counted


@dataclass(slots=True)
class Report:
    """What was imported and what not; of a plan, what would be."""

    imported: int = 0
    present: int = 0  # imported before
    by_format: Counter[str] = field(default_factory=Counter)
    jobs: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[Verdict] = field(default_factory=Counter)

    def find(self, finding: Finding) -> None:
        self.counts[finding.verdict] += 1
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(finding)

    def of(self, verdict: Verdict) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict is verdict]


@dataclass(frozen=True, slots=True)
class _Ready:
    draft: Draft
    request: Request
    encoded: codec.Encoded


class Writer:
    """Collects drafts and commits them in batches."""

    def __init__(self, manager: CheckpointManager, report: Report, *, is_owner: bool = False) -> None:
        """`is_owner`: the drafts are the newest word on their jobs, whoever wrote these before."""
        self._manager = manager
        self._is_owner = is_owner
        self._store = local_store(manager.store, "importing")
        self._report = report
        self._batch: list[_Ready] = []
        self._size_bytes = 0
        self._renamed: dict[str, CheckpointId] = {}
        self._foreign: dict[str, bool] = {}

    def add(self, draft: Draft) -> None:
        try:
            request = replace(
                parse_request(
                    draft.job,
                    draft.step,
                    level=draft.level,
                    parent=draft.parent,
                    tags=draft.tags,
                    metadata=draft.metadata,
                    idempotency_key=draft.found_by or f"import:{digest(draft.key)}",
                    schema_version=draft.schema_version,
                ),
                checkpoint_id=None if draft.id is None else CheckpointId(draft.id),
                created_us=draft.created_us,
            )
            encoded = codec.encode(draft.state)
        except CheckpointError as error:
            self._report.find(Finding(Verdict.SKIPPED, draft.source, clean(error.message)))
            return
        draft.state = None
        if encoded.buffers or len(encoded.tree) > INLINE_BYTES:
            self.flush()
            self._write_large(_Ready(draft, request, encoded))
            return
        self._batch.append(_Ready(draft, request, encoded))
        self._size_bytes += len(encoded.tree)
        if len(self._batch) >= BATCH or self._size_bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        batch, self._batch, self._size_bytes = self._batch, [], 0
        records = [(ready, self._record(ready)) for ready in self._new_ones(batch)]
        if not records:
            return
        try:
            self._commit([record for _, record in records])
        except (IdTaken, NotFound, Conflict):
            for ready, record in records:  # one of them is special; find out which
                self._commit_alone(ready, record)
        else:
            for ready, _ in records:
                self._count(ready.draft)

    def _commit(self, records: Sequence[NewCheckpoint]) -> None:
        try:
            self._store.index.commit(records, actor=self._manager.actor)
        except KeysChanged:
            self._store.refresh_keys()
            self._store.index.commit(records, actor=self._manager.actor)

    def _hides_names(self) -> bool:
        """Old IDs begin with the names of steps: a store that hides these keeps the IDs in its sealed metadata only."""
        return self._store.vault is not None and self._store.vault.hides_names

    def _new_ones(self, batch: Sequence[_Ready]) -> list[_Ready]:
        """Those that the store does not have, and whose jobs are nobody else's."""
        by_job: dict[str, list[_Ready]] = {}
        for ready in batch:
            by_job.setdefault(ready.request.job, []).append(ready)
        known: set[tuple[str, str]] = set()
        for job, some in by_job.items():
            keys = [str(ready.request.idempotency_key) for ready in some]
            known |= {(job, key) for key in self._store.find(job, keys)}
        new = []
        for ready in batch:
            key = (ready.request.job, str(ready.request.idempotency_key))
            if key in known:
                self._report.present += 1
                self._report.jobs.add(key[0])
            elif not self._is_owner and ready.draft.found_by is None and self._is_foreign(ready.request.job):
                why = f"job {ready.request.job} has checkpoints of its own by now, and is not added to"
                self._report.find(Finding(Verdict.SKIPPED, ready.draft.source, why))
            else:
                known.add(key)
                new.append(ready)
        return new

    def _is_foreign(self, job: str) -> bool:
        if job not in self._foreign:
            newest = self._store.list(job, limit=1)
            self._foreign[job] = bool(newest) and "legacy" not in newest[0].metadata
        return self._foreign[job]

    def _record(self, ready: _Ready) -> NewCheckpoint:
        request = self._with_parent(ready)
        created_us = request.created_us or _now_us()
        packed = pack_manifest(Manifest(ready.encoded.tree))
        checkpoint_id = request.checkpoint_id
        if checkpoint_id is None or self._hides_names():
            checkpoint_id = self._store.new_id(request.step, created_us)
            if request.checkpoint_id is not None:
                self._renamed[request.checkpoint_id] = checkpoint_id
        record = new_record(
            request, checkpoint_id, created_us, len(ready.encoded.tree), packed, content=ready.encoded.tree
        )
        return record if ready.draft.status is record.status else replace(record, status=ready.draft.status)

    def _with_parent(self, ready: _Ready) -> Request:
        parent = ready.request.parent
        return ready.request if parent is None else replace(ready.request, parent=self._renamed.get(parent, parent))

    def _commit_alone(self, ready: _Ready, record: NewCheckpoint) -> None:
        for _ in range(3):
            try:
                self._commit([record])
            except IdTaken:
                record = replace(record, id=self._other_id(ready, record.id))
            except NotFound:
                why = f"its parent {record.parent} is not there; it has none now"
                self._report.find(Finding(Verdict.LOSSY, ready.draft.source, why))
                record = replace(record, parent=None)
            except (LeaseHeld, Conflict) as error:
                self._report.find(Finding(Verdict.SKIPPED, ready.draft.source, clean(error.message)))
                return
            else:
                self._count(ready.draft)
                return
        self._report.find(Finding(Verdict.SKIPPED, ready.draft.source, "no free ID for it"))

    def _other_id(self, ready: _Ready, taken: str) -> CheckpointId:
        """Another checkpoint has the ID: an older version of the same one, or that of another job."""
        request = ready.request
        if request.checkpoint_id is None:
            return self._store.new_id(request.step, request.created_us or _now_us())
        other = CheckpointId(f"{taken[:110]}@{digest(f'{request.job}/{ready.draft.key}')[:12]}")
        self._renamed[request.checkpoint_id] = other
        if not self._is_same_job(taken, request.job):
            why = f"ID {taken} belongs to another checkpoint; it is {other} now"
            self._report.find(Finding(Verdict.LOSSY, ready.draft.source, why))
        return other

    def _is_same_job(self, checkpoint_id: str, job: str) -> bool:
        try:
            return self._store.get(checkpoint_id).job == job
        except NotFound:
            return False

    def _write_large(self, ready: _Ready) -> None:
        if not self._new_ones([ready]):
            return
        request = self._with_parent(ready)
        if self._hides_names():
            request = replace(request, checkpoint_id=None)
        if request.parent is not None and not self._store.knows(request.parent):
            why = f"its parent {request.parent} is not there; it has none now"
            self._report.find(Finding(Verdict.LOSSY, ready.draft.source, why))
            request = replace(request, parent=None)
        if request.checkpoint_id is not None and self._store.knows(request.checkpoint_id):
            request = replace(request, checkpoint_id=self._other_id(ready, request.checkpoint_id))
        try:
            saved = self._store.save(request, ready.encoded, actor=self._manager.actor)
        except StorageError:
            raise
        except CheckpointError as error:
            self._report.find(Finding(Verdict.SKIPPED, ready.draft.source, clean(error.message)))
            return
        if ready.draft.status is not CheckpointStatus.CREATED:
            self._store.index.update(saved.id, status=ready.draft.status, actor=self._manager.actor)
        self._count(ready.draft)

    def _count(self, draft: Draft) -> None:
        self._report.imported += 1
        self._report.by_format[draft.form] += 1
        self._report.jobs.add(draft.job)


def _now_us() -> int:
    return time.time_ns() // 1000
