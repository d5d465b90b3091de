"""Saves drafts in a store: many in one transaction, each at most once, with their IDs, times and parents.

A draft's key is its idempotency key: importing again adds nothing, and an interrupted import continues. A job that was
continued in the store since it was imported is left alone: its newest checkpoint must stay the newest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from kedge import codec
from kedge.chunks import INLINE_BYTES
from kedge.errors import CheckpointError, Conflict, NotFound, StorageError
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointId, CheckpointStatus, mapping_of, new_checkpoint_id, now_us
from kedge.store.request import Request, parse_request

from .common import SAVED_HERE, Draft, Finding, Verdict, clean, digest

BATCH = 500
BATCH_BYTES = 8 << 20
MOST_FINDINGS = 10_000  # listed one by one; beyond that they are counted


class Outcome(StrEnum):
    """What became of one source: a file, a checkpoint's folder, or a row's card or thread."""

    WHOLE = "whole"
    PART = "part"  # the findings about it say what is missing
    SKIPPED = "skipped"  # nothing of it; the findings say why


@dataclass(slots=True)
class Report:
    """What was imported and what not; of a plan, what would be."""

    imported: int = 0
    present: int = 0  # imported before
    by_format: Counter[str] = field(default_factory=Counter)
    jobs: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[Verdict] = field(default_factory=Counter)
    sources: dict[str, Outcome] = field(default_factory=dict)

    def find(self, finding: Finding) -> None:
        self.counts[finding.verdict] += 1
        known = self.sources.setdefault(finding.source, Outcome.SKIPPED)
        if known is Outcome.WHOLE:
            self.sources[finding.source] = Outcome.PART
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(finding)

    def count(self, form: str, job: str, source: str, *, is_new: bool = True) -> None:
        """One more that is imported, or was before."""
        self.imported += is_new
        self.present += not is_new
        if is_new:
            self.by_format[form] += 1
        self.jobs.add(job)
        known = self.sources.setdefault(source, Outcome.WHOLE)
        if known is Outcome.SKIPPED:
            self.sources[source] = Outcome.PART

    def of(self, verdict: Verdict) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict is verdict]


@dataclass(frozen=True, slots=True)
class _Ready:
    draft: Draft
    request: Request
    encoded: codec.Encoded

    @property
    def key(self) -> tuple[str, str]:
        return self.request.job, str(self.request.idempotency_key)


class Writer:
    """Collects drafts and saves them in batches."""

    def __init__(self, manager: CheckpointManager, report: Report, *, is_owner: bool = False) -> None:
        """`is_owner`: the drafts are the newest word on their jobs, whoever wrote these before."""
        self._manager = manager
        self._is_owner = is_owner
        self._store = manager.store
        self._report = report
        self._batch: list[_Ready] = []
        self._size_bytes = 0
        self._renamed: dict[str, CheckpointId] = {}
        self._foreign: dict[str, bool] = {}
        # Old IDs begin with the names of steps: a store that hides these keeps the IDs in its sealed metadata only.
        self._hides_names = bool((manager.encryption or {}).get("encrypts_names"))

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
            self._skip(draft, error.message)
            return
        draft.state = None
        size_bytes = len(encoded.tree)
        is_large = bool(encoded.buffers) or size_bytes > INLINE_BYTES
        if is_large:
            self.flush()  # a batch saves its large states last, and order is that of saving
        self._batch.append(_Ready(draft, request, encoded))
        self._size_bytes += size_bytes
        if is_large or len(self._batch) >= BATCH or self._size_bytes >= BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        batch, self._batch, self._size_bytes = self._batch, [], 0
        saves = [(ready, self._request(ready)) for ready in self._new_ones(batch)]
        for (ready, request), outcome in zip(saves, self._save(saves), strict=True):
            self._settle(ready, request, outcome)

    def _save(self, saves: Sequence[tuple[_Ready, Request]]) -> Sequence[Checkpoint | BaseException]:
        actor = self._manager.actor
        return self._store.save_many([(request, ready.encoded, actor) for ready, request in saves]) if saves else ()

    def _new_ones(self, batch: Sequence[_Ready]) -> list[_Ready]:
        """Those that the store does not have, and whose jobs are nobody else's."""
        keys: dict[str, list[str]] = {}
        for ready in batch:
            keys.setdefault(ready.request.job, []).append(ready.key[1])
        known = {
            (job, key): checkpoint
            for job, of_job in keys.items()
            for key, (checkpoint, _) in self._store.catalogue.find(job, of_job).items()
        }
        new: dict[tuple[str, str], _Ready] = {}
        for ready in batch:
            job = ready.request.job
            if ready.key in known or ready.key in new:
                self._report.count(ready.draft.form, job, ready.draft.source, is_new=False)
                if ready.key in known:
                    self._mark(ready.draft, known[ready.key])  # an import may have been killed before it came to that
            elif not self._is_owner and ready.draft.found_by is None and self._is_foreign(job):
                self._skip(ready.draft, f"job {job} has checkpoints of its own by now, and is not added to")
            else:
                new[ready.key] = ready
        return list(new.values())

    def _is_foreign(self, job: str) -> bool:
        if job not in self._foreign:
            newest = self._manager.list(job, limit=1)
            old = mapping_of(newest[0].metadata.get("legacy")) if newest else {}
            self._foreign[job] = bool(newest) and (not old or SAVED_HERE in old)
        return self._foreign[job]

    def _request(self, ready: _Ready) -> Request:
        """The request with the IDs that this store has for the draft and its parent."""
        request = ready.request
        if request.parent is not None:
            request = replace(request, parent=self._renamed.get(request.parent, request.parent))
        if self._hides_names and request.checkpoint_id is not None:
            drawn = new_checkpoint_id("checkpoint", request.created_us or now_us())
            self._renamed[request.checkpoint_id] = drawn
            request = replace(request, checkpoint_id=drawn)
        return request

    def _settle(self, ready: _Ready, request: Request, outcome: Checkpoint | BaseException) -> None:
        """Count what was saved. What has no parent any more is saved without, what has another's ID under another."""
        for _ in range(2):
            if isinstance(outcome, NotFound) and request.parent is not None:
                parent = self._renamed.get(request.parent)
                if parent is None:
                    self._lose(ready.draft, f"its parent {request.parent} is not there; it has none now")
                request = replace(request, parent=parent)
            elif (
                isinstance(outcome, Conflict) and request.checkpoint_id and self._manager.exists(request.checkpoint_id)
            ):
                request = replace(request, checkpoint_id=self._other_id(ready, request.checkpoint_id))
            else:
                break
            (outcome,) = self._save([(ready, request)])
        if isinstance(outcome, Checkpoint):
            self._mark(ready.draft, outcome)
            self._report.count(ready.draft.form, ready.draft.job, ready.draft.source)
        elif isinstance(outcome, CheckpointError) and not isinstance(outcome, StorageError):
            self._skip(ready.draft, outcome.message)
        else:
            raise outcome

    def _other_id(self, ready: _Ready, taken: str) -> CheckpointId:
        """Another checkpoint has the ID: an older version of the same one, or that of another job."""
        other = CheckpointId(f"{taken[:110]}@{digest(f'{ready.request.job}/{ready.draft.key}')[:12]}")
        self._renamed[str(ready.request.checkpoint_id)] = other
        if self._manager.get(taken).job != ready.request.job:
            self._lose(ready.draft, f"ID {taken} belongs to another checkpoint; it is {other} now")
        return other

    def _mark(self, draft: Draft, saved: Checkpoint) -> None:
        """Give what was archived in the old system that status."""
        if draft.status is not CheckpointStatus.CREATED and saved.status is CheckpointStatus.CREATED:
            self._manager.set_status(saved.id, draft.status)

    def _lose(self, draft: Draft, why: str) -> None:
        self._report.find(Finding(Verdict.LOSSY, draft.source, why))

    def _skip(self, draft: Draft, why: str) -> None:
        self._report.find(Finding(Verdict.SKIPPED, draft.source, clean(why)))
