"""The status of a run and who owns it; how the next process notices at once that an owner on its machine is gone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice

from kedge.errors import LeaseHeld
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointLevel, Job, Lease, RunStatus
from kedge.ports import Then
from kedge.store.lease import is_holder_gone, machine, started
from kedge.store.request import Request, parse_request

from .leases import Leases

LOOK_EVERY_S = 0.02  # for the end of another owner's lease
_PAGE = 500
_FIRST_PAGE = 32
_RECORDED = tuple(status for status in RunStatus if status not in (RunStatus.ABANDONED, RunStatus.UNREADABLE))


def this_process() -> dict[str, object]:
    """What another process can recognise this one by, though numbers of processes are used again."""
    return {**machine(), "pid": os.getpid(), "started": started(os.getpid())}


def this_command() -> dict[str, object]:
    """How this process was started, for `kedge runs resume`."""
    return {"command": {"argv": list(sys.orig_argv), "cwd": os.getcwd()}}


def is_gone(owner: object) -> bool:
    """Whether a process surely does not exist any more; False when that cannot be known from here."""
    if not isinstance(owner, Mapping) or not isinstance(owner.get("pid"), int):
        return False
    here = machine()
    if not here["boot"] or any(owner.get(part) != value for part, value in here.items()):
        return False
    return started(owner["pid"]) != owner.get("started")


@contextmanager
def take_lease(
    store: CheckpointManager, key: str, ttl_s: float, wait_s: float = 0.0, *, held_by: Leases | None = None
) -> Iterator[Lease]:
    """A context that holds the lease of a job; that of a dead owner on this machine is ended first.

    Without this, a run killed a second ago could only go on when its lease has run out. An owner that is alive is
    waited for, `wait_s` at most; then LeaseHeld is raised. `held_by` renews it, else a thread of its own.
    """
    until, has_broken = time.monotonic() + wait_s, False
    with ExitStack() as stack:
        lease: Lease | None = None
        while lease is None:
            try:
                lease = stack.enter_context(held_by.hold(key) if held_by else store.lease(key, ttl_s))
            except LeaseHeld as error:
                if not has_broken and is_holder_gone(error.holder):
                    has_broken = True
                    store.break_lease(Lease(key, error.token, error.holder, ttl_s))
                elif time.monotonic() >= until:
                    raise
                else:
                    time.sleep(LOOK_EVERY_S)
        yield lease


def refuse_owned(store: CheckpointManager, key: str, *, ttl_s: float = 5.0) -> None:
    """LeaseHeld while somebody works on the run."""
    try:
        with take_lease(store, key, ttl_s):
            pass
    except LeaseHeld as error:
        raise held_by_another(key, error) from error


def walk_jobs(store: CheckpointManager, prefix: str = "", after: str | None = None) -> Iterator[Job]:
    """Jobs by name, a page at a time."""
    while page := store.jobs(prefix, _PAGE, after):
        after = page[-1].name
        yield from page


def newest_statuses(store: CheckpointManager, jobs: Sequence[str]) -> dict[str, Checkpoint]:
    """`newest_status` of many jobs, in a few statements; jobs that are no runs are left out."""
    newest = store.catalogue.newest(jobs, ("kind", "run"))
    return {job: record for job, record in newest.items() if record.metadata.get("kind") == "run"}


def job_pages(
    store: CheckpointManager, prefix: str = "", most: int | None = None, after: str | None = None
) -> Iterator[Sequence[Job]]:
    """Jobs by name, at most so many: a few, then more at once, since who asks for a few reads no more than it needs."""
    size, jobs = _FIRST_PAGE, islice(walk_jobs(store, prefix, after), most)
    while page := list(islice(jobs, size)):
        yield page
        size = min(2 * size, _PAGE)


def newest_status(store: CheckpointManager, key: str) -> Checkpoint | None:
    """The newest status record of a run; found by tag, however many steps and items came after it (I6)."""
    newest = store.list(key, tags={"kind": "run"}, limit=1)
    return newest[0] if newest and newest[0].metadata.get("kind") == "run" else None


def status_of(record: Checkpoint) -> RunStatus:
    """The status of a run by its newest status record, for everybody who shows or decides by it.

    One that is said to be running is abandoned when its process surely does not exist any more: it resumes at once.
    Anybody who may save can write a record that says nothing we know: it is unreadable, and breaks nothing else.
    """
    recorded = record.metadata.get("status")
    if recorded not in _RECORDED:
        return RunStatus.UNREADABLE
    status = RunStatus(str(recorded))
    is_abandoned = status is RunStatus.RUNNING and is_gone(record.metadata.get("owner"))
    return RunStatus.ABANDONED if is_abandoned else status


def save_status(
    store: CheckpointManager,
    lease: Lease,
    status: RunStatus,
    state: object,
    metadata: Mapping[str, object],
    then: Then | None = None,
) -> None:
    store.save_request(replace(status_request(lease, status, metadata), then=then), state)


def status_request(lease: Lease, status: RunStatus, metadata: Mapping[str, object]) -> Request:
    """A status record of a run."""
    return parse_request(
        lease.job,
        f"run {status}",
        CheckpointLevel.PIPELINE,
        tags={"kind": "run"},
        metadata={**metadata, "kind": "run", "status": str(status)},
        lease=lease,
    )


def held_by_another(key: str, error: LeaseHeld) -> LeaseHeld:
    return LeaseHeld(
        f"run {key} has another owner: {error.message}",
        hint="one process at a time works on a run; wait for it, stop it, or use another key",
    )
