"""The status of a run and who owns it; how the next process notices at once that an owner on its machine is gone."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import AbstractContextManager

from holdfast.errors import LeaseHeld
from holdfast.manager import CheckpointManager
from holdfast.model import Checkpoint, CheckpointLevel, Lease, RunStatus


def this_process() -> dict[str, object]:
    """What another process can recognise this one by, though numbers of processes are used again."""
    return {**_machine(), "pid": os.getpid(), "started": _started(os.getpid())}


def is_gone(owner: object) -> bool:
    """Whether a process surely does not exist any more; False when that cannot be known from here."""
    if not isinstance(owner, Mapping) or not isinstance(owner.get("pid"), int):
        return False
    machine = _machine()
    if not machine["boot"] or any(owner.get(part) != value for part, value in machine.items()):
        return False
    return _started(owner["pid"]) != owner.get("started")


def take_lease(store: CheckpointManager, key: str, ttl_s: float) -> AbstractContextManager[Lease]:
    """A context that holds the lease of a run; that of a dead owner on this machine is ended first.

    Without this, a run killed a second ago could only go on when its lease has run out.
    """
    newest = newest_status(store, key)
    if newest is not None and is_gone(newest.metadata.get("owner")):
        token = newest.metadata.get("token")
        if isinstance(token, int):
            store.break_lease(Lease(key, token, "", ttl_s))
    return store.lease(key, ttl_s)


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


def _machine() -> dict[str, object]:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        processes = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        boot, processes = "", 0
    return {"host": socket.gethostname(), "boot": boot, "processes": processes}


def _started(pid: int) -> str | None:
    """When a process started, in the kernel's count; None when there is no such process, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
