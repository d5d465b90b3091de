"""Ending a run for good, whether a process is at work on it, it is paused, or it waits in a queue."""

from __future__ import annotations

from collections.abc import Mapping

from kedge.errors import Conflict, LeaseHeld, NotFound
from kedge.manager import CheckpointManager
from kedge.model import QUEUE_PREFIX, RunStatus

from .entries import Entry, drop_entry, entries_of, queue_of
from .groups import advance
from .inbox import CANCEL, post
from .limits import QueueLimits
from .owner import newest_status, save_status, take_lease, walk_jobs


def cancel(store: CheckpointManager, key: str, *, ttl_s: float = 30.0) -> bool:
    """End a run for good. True when it is done; False when its owner, still at work, was told to stop."""
    is_cancelled = _is_cancelled(_facts(store, key, _entries(store, key)))
    if not is_cancelled:
        post(store, key, CANCEL, "")
    try:
        with take_lease(store, key, ttl_s) as lease:  # whoever has it has the entries, too: no worker takes them now
            entries = _entries(store, key)
            facts = _facts(store, key, entries)
            if not _is_cancelled(facts):
                save_status(store, lease, RunStatus.CANCELLED, {}, {**facts, "waiting": []})
            for _, entry in entries:
                drop_entry(store, entry.id)
            for job, group in {(job, entry.group) for job, entry in entries if entry.group}:
                advance(store, job, group, QueueLimits(store, queue_of(job)).current().group_concurrency)
    except LeaseHeld:
        return is_cancelled
    return True


def _entries(store: CheckpointManager, key: str) -> list[tuple[str, Entry]]:
    """(job of the queue, entry) of the run, in whatever queue it is; the oldest first, as they replace each other."""
    names = (job.name for job in walk_jobs(store, QUEUE_PREFIX))
    jobs = [name for name in names if name == QUEUE_PREFIX + queue_of(name)]  # schedules are no runs
    return [(job, entry) for job in jobs for entry in entries_of(store.list(job, tags={"run": key}))]


def _facts(store: CheckpointManager, key: str, entries: list[tuple[str, Entry]]) -> Mapping[str, object]:
    """What the newest status record says; of a run that has not begun, what its entry says."""
    newest = newest_status(store, key)
    if newest is None:
        if not entries:
            raise NotFound(f"there is no run {key}", hint="kedge runs list shows the runs")
        job, entry = entries[0]
        return {"pipeline": entry.pipeline, "queue": queue_of(job)}
    if newest.metadata.get("status") == RunStatus.COMPLETED:
        raise Conflict(f"run {key} is completed", hint="there is nothing to cancel")
    return newest.metadata


def _is_cancelled(facts: Mapping[str, object]) -> bool:
    return facts.get("status") == RunStatus.CANCELLED
