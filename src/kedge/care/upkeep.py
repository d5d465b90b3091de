"""Policies of jobs, applied after their saves at a cost that does not grow with the history (I6).

A save reads and judges at most one page of the history, and continues where the last one stopped. After a complete walk
the next one begins once about a tenth of what is kept has been added. The sequence number decides when: the process
that saves a number divisible by the stride begins. So processes that save once and end do not each begin at the newest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kedge.blobs.shelter import sheltered
from kedge.model import Checkpoint
from kedge.ports import Index

from .policies import RetentionPolicy
from .review import Verdict, carry_out

PAGE_ROWS = 100
_READ_POLICY_EVERY = 64  # saves: another process may have changed it. Reading takes as long as a save, or longer
MOST_JOBS = 10_000  # kept in memory; a dropped one is read again at its next save
FINISH_WITHIN_S = 2.0


@dataclass(slots=True)
class _Job:
    saves: int = 0
    policy: RetentionPolicy | None = None
    is_new_policy: bool = False
    checkpoints: int = 0
    walk: Iterator[list[Verdict]] | None = None


class Upkeep:
    """The work that one process's saves cause by the policies of their jobs."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self.after_fork()

    def after_fork(self) -> None:
        """Drop the parent's walks in a forked child, and its lock, which may never be released here."""
        self._jobs: dict[str, _Job] = {}
        self._working = threading.Lock()

    @sheltered
    def set_retention(self, job: str, policy: RetentionPolicy | None, *, actor: str) -> None:
        """Set or remove a job's policy, which applies from the next save on."""
        self._index.set_retention(job, None if policy is None else policy.to_json(), actor=actor)
        with self._working:
            self._jobs[job] = _Job(policy=policy, is_new_policy=True)

    def after_save(self, saved: Checkpoint, *, actor: str, is_first: bool = False) -> None:
        """Do a bounded part of the work for the job's policy; `is_first`: the save created the job."""
        job = self._jobs.get(saved.job)
        if job is not None and job.policy is None and job.saves % _READ_POLICY_EVERY:
            job.saves += 1  # two threads may count one save: harmless
        else:
            self._work(saved, actor=actor, is_first=is_first)

    @sheltered
    def _work(self, saved: Checkpoint, *, actor: str, is_first: bool) -> None:
        if not self._working.acquire(blocking=False):
            return  # another thread works on it; a save never waits for this
        try:
            if (job := self._jobs.get(saved.job)) is None:
                if len(self._jobs) >= MOST_JOBS:
                    del self._jobs[next(iter(self._jobs))]
                job = self._jobs[saved.job] = _Job()
            if job.saves % _READ_POLICY_EVERY == 0 and not is_first:  # a new job has no policy
                _read_policy(self._index, saved.job, job)
            job.saves += 1
            if job.policy is not None and job.walk is None and (job.is_new_policy or _is_due(saved.seq, job)):
                job.walk = carry_out(self._index, job.policy, saved.job, actor=actor, page_rows=PAGE_ROWS)
                job.is_new_policy = False
            if job.walk is not None:
                _step(job)
        finally:
            self._working.release()

    @sheltered
    def finish(self) -> None:
        """Continue walks for a moment: for processes that save little and end."""
        until_s = time.monotonic() + FINISH_WITHIN_S
        with self._working:
            for job in self._jobs.values():
                while job.walk is not None and time.monotonic() < until_s:
                    _step(job)


def _read_policy(index: Index, name: str, job: _Job) -> None:
    record = index.job(name)
    policy = RetentionPolicy.from_json(record.retention) if record and record.retention else None
    if policy != job.policy:
        job.policy, job.walk = policy, None
        job.is_new_policy = job.saves > 0  # otherwise this process has just started, which is no reason
    job.checkpoints = record.checkpoints if record else 0


def _is_due(seq: int, job: _Job) -> bool:
    """Return whether a walk begins: once per tenth of what is kept, by a power of two, so that it seldom changes."""
    stride = 1 << max(0, (job.checkpoints // 10).bit_length() - 1)
    return seq % stride == 0


def _step(job: _Job) -> None:
    walk, job.walk = job.walk, None  # a failing one begins again when it is due
    if walk is not None and next(walk, None) is not None:
        job.walk = walk
