"""Which checkpoints stay. A plan is made first, shown on request, then executed.

A checkpoint stays if any rule of the policy keeps it. Whatever the rules say, these stay, too:

    pinned     until they are unpinned
    newest     the newest checkpoint of each job, and the newest that is not corrupted, so never the only usable one
    ancestors  the parents of what stays, and their parents; in other jobs, too, if all jobs are planned

"Last" and "newest" refer to sequence numbers (I4). A mark of damage deletes nothing: what would stay without marks
stays. The rules are also counted without the corrupted ones, so that they take no sound checkpoint's place. If all
checkpoints of a job are corrupted, all stay.

Clocks cannot be trusted with deletions, so the time of day is never read. Age is counted back from the job's newest
usable checkpoint, along the sequence. Times that contradict the sequence are skipped, and a pause counts for at most
half of `keep_within`. So an idle job, or a clock that jumps ahead or is set back, loses no history at once. Hourly to
monthly rules keep the newest checkpoint, by sequence, of each of the last n such periods (UTC) that have any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from kedge.model import Checkpoint, Document
from kedge.ports import Index

from . import Progress
from .policies import RetentionPolicy, format_duration, parse_duration
from .review import UNPLANNED, Verdict, carry_out, review

__all__ = ["Plan", "RetentionPolicy", "execute", "format_duration", "parse_duration", "plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy keeps and deletes, by job and sequence; after `execute`, what was kept and deleted.

    `frees_bytes` is what the deleted saves once added to the store. gc frees the part of it that nothing else shares.
    """

    policy: RetentionPolicy
    keep: tuple[Verdict, ...]
    delete: tuple[Checkpoint, ...]
    frees_bytes: int
    job: str | None = None  # None: all jobs

    def to_json(self, *, is_applied: bool) -> Document:
        return {
            "job": self.job,
            "policy": json.loads(self.policy.to_json()),
            "applied": is_applied,
            "delete": [checkpoint.to_json() for checkpoint in self.delete],
            "keep": [{**verdict.checkpoint.to_json(), "reasons": list(verdict.reasons)} for verdict in self.keep],
            "frees_bytes": self.frees_bytes,
        }


def plan(index: Index, policy: RetentionPolicy, job: str | None = None) -> Plan:
    """Return what `policy` would delete in one job or, with None, in all, changing nothing.

    All of it is held in memory: `review` yields the same one by one.
    """
    return _plan(policy, review(index, policy, job), job)


def _plan(policy: RetentionPolicy, verdicts: Iterable[Verdict], job: str | None) -> Plan:
    ordered = sorted(verdicts, key=lambda verdict: (verdict.checkpoint.job, verdict.checkpoint.seq))
    keep = tuple(verdict for verdict in ordered if verdict.reasons)
    delete = tuple(verdict.checkpoint for verdict in ordered if not verdict.reasons)
    return Plan(policy, keep, delete, sum(c.stored_bytes for c in delete), job)


def execute(index: Index, planned: Plan, *, actor: str, progress: Progress | None = None) -> Plan:
    """Delete what was planned and return what was really deleted.

    The policy is applied again, and only what both it and the plan delete is deleted. So what was pinned, tagged or
    made a parent meanwhile stays, and a checkpoint saved since is never touched. Children are deleted before their
    parents, in small transactions: an interruption leaves no checkpoint without its ancestors.
    """
    if not planned.delete:
        return planned
    among = {c.id for c in planned.delete}
    before = {keeping.checkpoint.id: keeping.reasons for keeping in planned.keep}
    done: list[Verdict] = []
    count = 0
    for page in carry_out(index, planned.policy, planned.job, actor=actor, among=among):
        for verdict in page:
            is_spared = verdict.reasons == (UNPLANNED,)
            known = before.get(verdict.checkpoint.id, verdict.reasons) if is_spared else verdict.reasons
            done.append(Verdict(verdict.checkpoint, known))
            count += not known
        if progress and page:
            progress(count, len(among))
    return _plan(planned.policy, done, planned.job)
