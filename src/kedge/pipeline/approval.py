"""Approvals, of runs and of executions of workflows: asked in the newest status record, decided in the inbox, once.

asked      an entry under "waiting" in the newest status record of the job
decided    a message in the job's inbox, under an idempotency key made of the approval's ID: the index sees to it that
           there is one decision, whoever is how fast
expired    denied by `expiry`, the same way
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from kedge.errors import Conflict, Denied, NotFound
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, Checkpoint, parse_decision

from .account import Waiting
from .inbox import StoreLike, opened, parse_run_key, post
from .keys import step_key
from .owner import job_pages, newest_status, newest_statuses

APPROVAL = "approval"
EXPIRY = "expiry"  # who denies what nobody decided in time


@dataclass(frozen=True, slots=True)
class Approval:
    """A decision: final, and by whom."""

    approved: bool
    actor: str
    comment: str = ""
    decided_at: str = ""

    @property
    def word(self) -> str:
        return "approved" if self.approved else "denied"

    def denied(self, key: str, name: str) -> Denied:
        why = f": {self.comment}" if self.comment else ""
        return Denied(
            f"approval {name} of run {key} was denied by {self.actor}{why}", hint="a denial is final; use another key"
        )

    def conflict(self, key: str, name: str) -> Conflict:
        """What a second decision gets."""
        at = f" on {self.decided_at[:16].replace('T', ' ')} UTC" if self.decided_at else ""
        follows = "the run follows it when it goes on" if self.approved else "use another key to start anew"
        return Conflict(
            f"approval {name} of {key} was {self.word} by {self.actor}{at}", hint=f"a decision is final; {follows}"
        )


@dataclass(frozen=True, slots=True)
class PendingApproval:
    """What somebody is asked to decide."""

    job: str  # the key of a run, or the ID of an execution
    kind: str  # run or execution
    name: str  # a path, or the name of an execution's checkpoint
    id: str  # which `decide` takes, too: names of checkpoints may repeat
    prompt: str
    asked_at: datetime | None  # None where an importer did not know
    expires_at: datetime | None = None

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and time.time() >= self.expires_at.timestamp()

    def waiting(self) -> Waiting:
        """The entry of a status record."""
        entry: Waiting = {"for": APPROVAL, "name": self.name, "prompt": self.prompt}
        if self.asked_at is not None:
            entry["asked_at"] = self.asked_at.isoformat()
        if self.id != self.name:
            entry["id"] = self.id
        if self.expires_at is not None:
            entry["expires_at"] = self.expires_at.isoformat()
        return entry


def pending_approvals(store: CheckpointManager, job: str) -> list[PendingApproval]:
    """What a run or an execution waits for and nobody has decided; [] for a job that is neither."""
    record = status_record(store, job)
    return [] if record is None else _pending(store, record)


def _pending(store: CheckpointManager, record: Checkpoint) -> list[PendingApproval]:
    still_open = (asked for asked in _asked_in(record) if not asked.is_expired)
    return [asked for asked in still_open if decision_of(store, record.job, asked.id) is None]


def find_approvals(store: CheckpointManager, *, most_jobs: int | None = None) -> list[PendingApproval]:
    """Those of all jobs, by job; at most `most_jobs` are looked at."""
    return [
        asked
        for page in job_pages(store, most=most_jobs)
        for record in _status_records(store, [job.name for job in page])
        for asked in _pending(store, record)
    ]


def _status_records(store: CheckpointManager, jobs: Sequence[str]) -> list[Checkpoint]:
    """`status_record` of many jobs, in a few statements."""
    newest = store.catalogue.newest(jobs)
    known = {job: record for job, record in newest.items() if _is_status(record)}
    others = [job for job, record in newest.items() if job not in known and record.metadata.get("kind") is not None]
    known |= newest_statuses(store, others)
    return [known[job] for job in jobs if job in known]


def decide(
    store: StoreLike, key: str, name: str, approved: bool, *, actor: str | None = None, comment: str = ""
) -> Approval:
    """Approve or deny what a run, or an execution of a workflow, waits for: for good. `store` may be a path or URL.

    `name` is the path of the approval, with the stages it is in, or the name or ID of an execution's checkpoint.
    Raises Conflict when it was decided or has expired, NotFound when nobody asked.
    """
    approved = parse_decision(approved)
    with opened(store) as manager:
        return _decide(manager, parse_run_key(key), name, approved, actor or manager.actor, comment)


def _decide(store: CheckpointManager, key: str, name: str, approved: bool, actor: str, comment: str) -> Approval:
    pending = _asked(store, key)
    matching = [asked for asked in pending if name in (asked.id, asked.name)]
    if not matching:
        if (earlier := decision_of(store, key, name) or _decision_by_name(store, key, name)) is not None:
            raise earlier.conflict(key, name)
        names = ", ".join(asked.name for asked in pending)
        hint = f"it waits for: {names}" if names else f"kedge runs show {key} says for what"
        raise NotFound(f"run {key} does not wait for approval {name}", hint=hint)
    asked = matching[-1]
    if asked.is_expired:
        raise expire(store, asked).conflict(key, name)
    return decide_once(store, asked, approved, actor, comment)


def decide_once(store: CheckpointManager, asked: PendingApproval, approved: bool, actor: str, comment: str) -> Approval:
    """Make a decision durable; Conflict when there is one."""
    decision = Approval(approved, str(actor)[:200], str(comment)[:2000], datetime.now(UTC).isoformat())
    try:
        post(store, asked.job, APPROVAL, asked.name, asdict(decision), idempotency_key=_decision_key(asked.id))
    except Conflict:
        if (earlier := decision_of(store, asked.job, asked.id)) is None:
            raise
        raise earlier.conflict(asked.job, asked.name) from None
    return decision


def expire(store: CheckpointManager, asked: PendingApproval) -> Approval:
    """The decision about an approval whose time is over: a denial, unless somebody decided at the last moment."""
    try:
        return decide_once(store, asked, False, EXPIRY, "nobody decided in time")
    except Conflict:
        if (earlier := decision_of(store, asked.job, asked.id)) is None:
            raise
        return earlier


def decision_of(store: CheckpointManager, job: str, approval_id: str) -> Approval | None:
    message = store.load_by_key(parse_run_key(job) + INBOX_SUFFIX, _decision_key(approval_id))
    return None if message is None else _decision_in(message[1])


def _decision_by_name(store: CheckpointManager, job: str, name: str) -> Approval | None:
    """The newest decision about a checkpoint of this name, which the execution no longer waits for."""
    messages = store.list(job + INBOX_SUFFIX, metadata={"kind": APPROVAL, "name": name}, limit=1)
    return _decision_in(store.load(messages[0].id)) if messages else None


def _decision_in(message: Any) -> Approval:
    return Approval(**message["value"])


def _decision_key(approval_id: str) -> str:
    return "decision:" + step_key((approval_id,), "", {})


def _asked(store: CheckpointManager, job: str) -> list[PendingApproval]:
    record = status_record(store, job)
    return [] if record is None else _asked_in(record)


def _asked_in(record: Checkpoint) -> list[PendingApproval]:
    waiting = record.metadata.get("waiting")
    if not isinstance(waiting, list):
        return []
    return [_parse(record, entry) for entry in waiting if isinstance(entry, dict) and entry.get("for") == APPROVAL]


def status_record(store: CheckpointManager, job: str) -> Checkpoint | None:
    """The newest record that says how a run or an execution is; None for a job that is neither."""
    newest = store.list(job, limit=1)
    if not newest or newest[0].metadata.get("kind") is None:
        return None
    return newest[0] if _is_status(newest[0]) else newest_status(store, job)


def _is_status(record: Checkpoint) -> bool:
    return record.metadata.get("kind") in ("run", "execution")


def _parse(record: Checkpoint, entry: Mapping[str, object]) -> PendingApproval:
    name = str(entry.get("name", ""))
    return PendingApproval(
        record.job,
        str(record.metadata["kind"]),
        name,
        str(entry.get("id", name)),
        str(entry.get("prompt", "")),
        parse_moment(entry.get("asked_at")) or record.created_at,
        parse_moment(entry.get("expires_at")),
    )


def parse_moment(text: object) -> datetime | None:
    """A moment from its ISO text, in UTC where that does not say; None for what is none."""
    try:
        moment = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC) if moment is not None and moment.tzinfo is None else moment
