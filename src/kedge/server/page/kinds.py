"""What a job is: by its name where that tells, else by its records. One place says its status, for every page."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote

from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, QUEUE_PREFIX, Job
from kedge.pipeline.entries import queue_of
from kedge.pipeline.owner import newest_status, status_of
from kedge.process.execution import UNREADABLE, ExecutionState
from kedge.process.workflow import Workflows


class Kind(StrEnum):
    JOB = "job"
    RUN = "run"
    WORKFLOW = "workflow"
    THREAD = "thread"
    CONTAINER = "container"
    QUEUE = "queue"
    INTERNAL = "internal"


# What begins so is of that kind, whatever it holds.
_BY_PREFIX = {
    QUEUE_PREFIX: Kind.QUEUE,
    "schedule:": Kind.INTERNAL,
    "llm:": Kind.INTERNAL,
    "thread:": Kind.THREAD,
    "memory:": Kind.THREAD,
    "session:": Kind.THREAD,
    "adk:": Kind.THREAD,
    "adk-user:": Kind.THREAD,
    "adk-app:": Kind.THREAD,
    "flow:": Kind.THREAD,
    "container:": Kind.CONTAINER,
    "pod:": Kind.CONTAINER,
    "process:": Kind.CONTAINER,
}

STATUSES = ("running", "paused", "completed", "failed", "cancelled", "abandoned", "unreadable")


@dataclass(frozen=True, slots=True)
class About:
    kind: Kind
    status: str = ""  # of a run or an execution of a workflow

    def address_of(self, job: str) -> str:
        """Of the page that shows it as what it is."""
        if self.kind is Kind.QUEUE:
            return f"/queues#queue-{quote(queue_of(job), safe='')}"
        folder = {Kind.RUN: "runs", Kind.WORKFLOW: "executions"}.get(self.kind, "jobs")
        return f"/{folder}/{quote(job, safe='')}"


def named_kind(job: str) -> Kind | None:
    """What the name alone tells; None: its records have to be asked."""
    is_beside_a_queue = job.startswith(QUEUE_PREFIX) and job != QUEUE_PREFIX + queue_of(job)
    if is_beside_a_queue or job.endswith(INBOX_SUFFIX):
        return Kind.INTERNAL
    return next((kind for prefix, kind in _BY_PREFIX.items() if job.startswith(prefix)), None)


def about(store: CheckpointManager, job: str) -> About:
    """What a job is, and how it stands now: two look-ups at most, however long its history (I6)."""
    kind = named_kind(job)
    if kind is not None:
        return About(kind)
    newest = store.list(job, limit=1)
    kind_of_newest = newest[0].metadata.get("kind") if newest else None
    if kind_of_newest == "execution":
        state = newest[0].metadata.get("state")
        if state == ExecutionState.PAUSED:  # it may have been decided since
            state = Workflows(store).get_execution_status(job)["state"]
        return About(Kind.WORKFLOW, str(state) if state in tuple(ExecutionState) else UNREADABLE)
    status = newest_status(store, job) if kind_of_newest is not None else None
    return About(Kind.JOB) if status is None else About(Kind.RUN, str(status_of(status)))


_LOOKED_AT = 2000  # jobs, for one page of them
_PAGE = 200


def jobs_of(
    store: CheckpointManager, kind: str, prefix: str, after: str | None, most: int
) -> tuple[list[tuple[Job, About]], str | None]:
    """Jobs of a kind, or with "" all but internal ones, in the order of their names; and after which to go on.

    Looks at a bounded number of jobs (I6): there may be more, although few were found.
    """
    chosen: list[tuple[Job, About]] = []
    for _ in range(0, _LOOKED_AT, _PAGE):
        page = store.jobs(prefix, _PAGE, after)
        for job in page:
            if len(chosen) == most:
                return chosen, after
            after = job.name
            named = named_kind(job.name)
            if named is not None and named != kind and (kind or named is Kind.INTERNAL):
                continue
            is_ = about(store, job.name)
            if not kind or is_.kind == kind:
                chosen.append((job, is_))
        if len(page) < _PAGE:
            return chosen, None
    return chosen, after
