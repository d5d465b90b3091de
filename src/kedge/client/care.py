"""Care for a store behind a service: the service does it, in a task if it takes long."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from kedge.care import Progress
from kedge.care.gc import GcReport
from kedge.care.policies import RetentionPolicy
from kedge.care.rebuild import RebuildReport
from kedge.care.rekey import RekeyReport
from kedge.care.retention import Plan
from kedge.care.review import Verdict
from kedge.care.verify import Problem, VerifyReport
from kedge.diff.changes import Change, ChangeKind, Diff
from kedge.errors import CheckpointError
from kedge.model import Checkpoint
from kedge.store import not_over_http

from .store import HttpStore

_POLL_S = 0.1


class HttpCare:
    """`kedge.care.Care` of a store behind a service. The service knows the actor by the token."""

    encryption = None  # configured at the service

    def __init__(self, store: HttpStore) -> None:
        self._store = store

    def apply(
        self, policy: RetentionPolicy, job: str | None, *, dry_run: bool, actor: str, progress: Progress | None
    ) -> Plan:
        planned = self._store.client.retention(policy, job, dry_run=dry_run)
        reasons = [tuple(document.pop("reasons")) for document in planned["keep"]]
        keep = tuple(map(Verdict, map(Checkpoint.from_json, planned["keep"]), reasons))
        delete = tuple(Checkpoint.from_json(document) for document in planned["delete"])
        if progress:
            progress(len(delete), len(delete))
        return Plan(policy, keep, delete, planned["frees_bytes"], job)

    def review(self, policy: RetentionPolicy, job: str | None, *, dry_run: bool, actor: str) -> Iterator[Verdict]:
        """From one response, which contains all verdicts."""
        planned = self.apply(policy, job, dry_run=dry_run, actor=actor, progress=None)
        verdicts = [*planned.keep, *(Verdict(checkpoint, ()) for checkpoint in planned.delete)]
        return iter(sorted(verdicts, key=lambda verdict: (verdict.checkpoint.job, -verdict.checkpoint.seq)))

    def set_retention(self, job: str, policy: RetentionPolicy | None, *, actor: str) -> None:
        self._store.client.set_retention(job, policy)

    def after_save(self, saved: Checkpoint, *, actor: str, is_first: bool = False) -> None:
        """Do nothing: the service applies the policy."""

    def diff(self, old_id: str, new_id: str) -> Diff:
        document = self._store.client.diff(old_id, new_id)
        changes = tuple(
            Change(c["path"], ChangeKind(c["kind"]), c.get("old"), c.get("new"), c.get("detail", ""))
            for c in document["changes"]
        )
        names = ("left_out", "added", "removed", "changed", "bytes_changed", "shared_bytes")
        counts = {name: document[name] for name in names}
        return Diff(changes, old_id=document["old"], new_id=document["new"], **counts)

    def verify(self, job: str | None, *, deep: bool, actor: str, progress: Progress | None) -> VerifyReport:
        result = self._finish(self._store.client.start_verify(job, deep), progress)
        problems = tuple(Problem(**problem) for problem in result.pop("problems"))
        return VerifyReport(problems=problems, corrupted=tuple(result.pop("corrupted")), **result)

    def condemn(self, checkpoint_id: str, *, actor: str) -> Checkpoint:
        return self._store.client.condemn(checkpoint_id)  # the service reads it itself

    def gc(self, *, dry_run: bool, actor: str, progress: Progress | None) -> GcReport:
        result = self._finish(self._store.client.start_gc(dry_run=dry_run), progress)
        return GcReport(damaged=tuple(result.pop("damaged")), **result)

    def _finish(self, task: dict[str, Any], progress: Progress | None) -> dict[str, Any]:
        """Wait for a task of the service; return its result."""
        while task["status"] == "running":
            time.sleep(_POLL_S)
            task = self._store.client.task(task["id"])
            if progress and task["total"]:
                progress(task["done"], task["total"])
        if task["status"] == "failed":
            raise CheckpointError(f"{task['kind']} failed: {task['error']}", hint="the service's log tells more")
        result: dict[str, Any] = task["result"]
        return result

    def stats(self, job: str | None) -> Mapping[str, int]:
        return self._store.client.stats(job)

    def copy_job(self, job: str, new_job: str, *, actor: str) -> list[Checkpoint]:
        self._store.client.copy(job, new_job)
        return self._store.catalogue.list(new_job)

    def delete_job(self, job: str, *, even_pinned: bool, actor: str) -> int:
        return self._store.client.delete_job(job, even_pinned=even_pinned)

    def rebuild(self, *, actor: str, progress: Progress | None) -> RebuildReport:
        raise not_over_http("rebuilding an index")

    def rekey(
        self, new_key: bytes | str | None, *, rewrite: bool, actor: str, progress: Progress | None
    ) -> RekeyReport:
        raise not_over_http("changing keys")

    def after_fork(self) -> None:
        """Do nothing: no state here belongs to a process."""

    def close(self) -> None:
        """The service continues."""
