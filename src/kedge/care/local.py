"""Maintenance of a local store. Each operation is a module of this package, imported when it is called."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from kedge.errors import CheckpointError, Conflict, Validation
from kedge.model import Checkpoint, CheckpointId
from kedge.ports import Selection, pages
from kedge.store import lease
from kedge.store.local import LocalStore
from kedge.store.request import Request, branch_listed, request_again
from kedge.urls import Lock, find_keys, keep_keyring, open_found

from . import Progress
from .review import Verdict, carry_out, review
from .upkeep import Upkeep

if TYPE_CHECKING:
    from kedge.diff import Diff

    from .gc import GcReport
    from .policies import RetentionPolicy
    from .rebuild import RebuildReport
    from .rekey import RekeyReport
    from .retention import Plan
    from .verify import VerifyReport


_JOB_LEASE_S = 5.0  # of a copy or a deletion: after a kill, the next one waits this long
_PAGE = 500  # checkpoints looked up, or deleted, per transaction


class LocalCare(Upkeep):
    """`Care` of a local store: the store, its URL, and the key it was opened with."""

    def __init__(self, store: LocalStore, url: str, lock: Lock | None) -> None:
        super().__init__(store.index)
        self._store = store
        self._url = url
        self._lock = lock

    # Retention

    def apply(
        self, policy: RetentionPolicy, job: str | None, *, dry_run: bool, actor: str, progress: Progress | None
    ) -> Plan:
        from .retention import execute, plan

        planned = plan(self._store.index, policy, job=job)
        return planned if dry_run else execute(self._store.index, planned, actor=actor, progress=progress)

    def review(self, policy: RetentionPolicy, job: str | None, *, dry_run: bool, actor: str) -> Iterator[Verdict]:
        if dry_run:
            return review(self._store.index, policy, job)
        return chain.from_iterable(carry_out(self._store.index, policy, job, actor=actor))

    # Health

    def diff(self, old_id: str, new_id: str) -> Diff:
        from kedge.diff import diff

        return diff(self._store, self._store.index.read(old_id), self._store.index.read(new_id))

    def verify(self, job: str | None, *, deep: bool, actor: str, progress: Progress | None) -> VerifyReport:
        from .verify import verify

        return verify(self._store, job=job, deep=deep, actor=actor, progress=progress)

    def condemn(self, checkpoint_id: str, *, actor: str) -> Checkpoint:
        from .verify import condemn

        return condemn(self._store, checkpoint_id, actor=actor)

    def gc(self, *, dry_run: bool, actor: str, progress: Progress | None) -> GcReport:
        from .gc import collect, foresee

        at_rest = self._store.at_rest()
        if dry_run:
            return foresee(at_rest, progress=progress)
        if at_rest is not self._store:
            collect(self._store, actor=actor)
        return collect(at_rest, actor=actor, progress=progress)

    def stats(self, job: str | None) -> Mapping[str, int]:
        from .verify import stats

        return stats(self._store, job)

    def rebuild(self, *, actor: str, progress: Progress | None) -> RebuildReport:
        from .rebuild import rebuild, still_closed

        keys = None if self._lock is None else find_keys(self._store, self._lock)

        def opened(namespace: str) -> AbstractContextManager[LocalStore]:
            return closing(open_found(self._url, namespace, self._lock, keys, actor=actor))

        if self._store.at_rest() is not self._store:
            raise Validation("a store in memory has no packs to rebuild from", hint="open the directory it is kept in")
        if self._url == "memory:":
            raise Validation("a store in memory has no packs to rebuild from", hint="its index cannot get lost alone")
        report = rebuild(self._store.blobs, opened, actor=actor, keys=keys, progress=progress)
        self._store.index.accept(still_closed(self._store.index, report.closed))
        if self._store.vault is not None:
            self._store.vault.refresh()
        return report

    # Copies

    def copy_job(self, job: str, new_job: str, *, actor: str) -> list[Checkpoint]:
        """Copy a job. Safe to repeat after an interruption: the key of each copy names its source."""
        index = self._store.index
        with lease.hold(index, new_job, ttl_s=_JOB_LEASE_S) as held:
            history = index.list(job)
            self._refuse_other_history(history, job, new_job)
            renamed: dict[str, CheckpointId] = {}
            copies: list[Checkpoint] = []

            def describe(source: Checkpoint, parent: CheckpointId | None) -> Request:
                return request_again(source, job=new_job, parent=parent, idempotency_key=_copy_key(source), lease=held)

            for checkpoint in history:
                parent = renamed.get(checkpoint.parent or "", checkpoint.parent)
                copy = branch_listed(self._store, checkpoint.id, parent, describe, actor=actor)
                if copy is not None:
                    copies.append(copy)
                    renamed[checkpoint.id] = copy.id
            return copies

    def _refuse_other_history(self, history: Sequence[Checkpoint], job: str, new_job: str) -> None:
        """Refuse to mix histories: `new_job` may have only what an interrupted copy of `job` left there."""
        index = self._store.index
        target = index.job(new_job)
        if target is None or not target.checkpoints:
            return
        keys = [_copy_key(checkpoint) for checkpoint in history]
        copies = sum(len(index.find(new_job, keys[n : n + _PAGE])) for n in range(0, len(keys), _PAGE))
        if copies != target.checkpoints:
            raise Conflict(
                f"job {new_job} exists and is not a copy of job {job}",
                hint=f"choose another name, or delete job {new_job} first",
            )

    def delete_job(self, job: str, *, even_pinned: bool, actor: str) -> int:
        """Delete a job under its lease, so that nobody saves meanwhile. Deletes nothing if a checkpoint is pinned."""
        index = self._store.index
        with lease.hold(index, job, ttl_s=_JOB_LEASE_S):
            history = (checkpoint for page in pages(index.list, job, _PAGE) for checkpoint in page)
            if not even_pinned and (pinned := next((c.id for c in history if c.is_pinned), None)):
                raise Conflict(
                    f"checkpoint {pinned} of job {job} is pinned",
                    hint=f"unpin it (kedge pin {pinned} --off), or delete pinned checkpoints too (even_pinned=True)",
                )
            deleted = 0
            while page := index.list(job, Selection(limit=_PAGE)):  # the newest: children before parents
                deleted += len(
                    index.delete([checkpoint.id for checkpoint in page], even_pinned=even_pinned, actor=actor)
                )
            if (remaining := index.job(job)) is not None and remaining.retention is not None:
                index.set_retention(job, None, actor=actor)
            return deleted

    # Keys

    def rekey(
        self, new_key: bytes | str | None, *, rewrite: bool, actor: str, progress: Progress | None
    ) -> RekeyReport:
        from kedge.crypto import parse_master

        from .rekey import change_master, changing
        from .rekey import rewrite as rewrite_all

        if self._lock is None:
            raise Validation("this store is not encrypted", hint="make a new one with a key, and save there")
        master = None if new_key is None else parse_master(new_key)
        store = self._store.at_rest()
        with changing(store) as lease:
            if master is not None:
                report = change_master(store, self._lock.master, master, lease, actor=actor)
                self._lock = replace(self._lock, master=master)
                keep_keyring(self._url, self._store)
                if not rewrite:
                    return report
            report = rewrite_all(store, self._lock.master, lease, actor=actor, progress=progress)
            keep_keyring(self._url, self._store)
        return report

    @property
    def encryption(self) -> Mapping[str, object] | None:
        vault = self._store.at_rest().vault
        return None if vault is None else vault.description

    # Life

    def close(self) -> None:
        try:
            self.finish()
        except CheckpointError as error:  # every save is done; a later one tries again
            warnings.warn(f"retention failed: {error}", stacklevel=3)


def _copy_key(checkpoint: Checkpoint) -> str:
    """Return the idempotency key of a copy of `checkpoint` in another job."""
    return f"copy:{checkpoint.id}"
