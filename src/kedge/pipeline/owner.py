"""The status of a run and who owns it; how the next process notices at once that an owner on its machine is gone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from kedge.errors import LeaseHeld
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointLevel, Lease, RunStatus
from kedge.store.lease import is_holder_gone, machine, started


def this_process() -> dict[str, object]:
    """What another process can recognise this one by, though numbers of processes are used again."""
    return {**machine(), "pid": os.getpid(), "started": started(os.getpid())}


def is_gone(owner: object) -> bool:
    """Whether a process surely does not exist any more; False when that cannot be known from here."""
    if not isinstance(owner, Mapping) or not isinstance(owner.get("pid"), int):
        return False
    here = machine()
    if not here["boot"] or any(owner.get(part) != value for part, value in here.items()):
        return False
    return started(owner["pid"]) != owner.get("started")


@contextmanager
def take_lease(store: CheckpointManager, key: str, ttl_s: float) -> Iterator[Lease]:
    """A context that holds the lease of a run; that of a dead owner on this machine is ended first.

    Without this, a run killed a second ago could only go on when its lease has run out.
    """
    with ExitStack() as stack:
        try:
            lease = stack.enter_context(store.lease(key, ttl_s))
        except LeaseHeld as error:
            if not is_holder_gone(error.holder):
                raise
            store.break_lease(Lease(key, error.token, error.holder, ttl_s))
            lease = stack.enter_context(store.lease(key, ttl_s))
        yield lease


def newest_status(store: CheckpointManager, key: str) -> Checkpoint | None:
    """The newest status record of a run; found by tag, however many steps and items came after it (I6)."""
    found = store.list(key, tags={"kind": "run"}, limit=1)
    return found[0] if found and found[0].metadata.get("kind") == "run" else None


def save_status(
    store: CheckpointManager, lease: Lease, status: RunStatus, state: object, metadata: Mapping[str, object]
) -> None:
    store.save(
        lease.job,
        f"run {status}",
        state,
        level=CheckpointLevel.PIPELINE,
        tags={"kind": "run"},
        metadata={**metadata, "kind": "run", "status": str(status)},
        lease=lease,
    )


def held_by_another(key: str, error: LeaseHeld) -> LeaseHeld:
    return LeaseHeld(
        f"run {key} has another owner: {error.message}",
        hint="one process at a time works on a run; wait for it, stop it, or use another key",
    )
