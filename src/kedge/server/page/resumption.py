"""Which runs can be resumed, and handing one to the application's runner."""

from __future__ import annotations

from kedge.errors import Conflict, InvalidName
from kedge.manager import CheckpointManager
from kedge.model import RunStatus
from kedge.pipeline.entries import DEAD, Entry, entries_of, queue_job
from kedge.pipeline.history import RunSummary, check_resumable, find_run
from kedge.server.auth import Access
from kedge.server.runner import resume


def can_resume(run: RunSummary, *, has_failed_items: bool) -> bool:
    return (
        run.status not in (RunStatus.RUNNING, RunStatus.CANCELLED)
        and not run.queue
        and not run.is_denied
        and (run.status is not RunStatus.COMPLETED or has_failed_items)
    )


def can_requeue(run: RunSummary, *, has_failed_items: bool) -> bool:
    """Whether a queue's workers can try the failed items of a completed run again."""
    return bool(run.queue) and run.status is RunStatus.COMPLETED and has_failed_items


def failed_entry(store: CheckpointManager, run: RunSummary) -> Entry | None:
    """The entry of a run that failed or died in its queue: DEAD if its workers have given it up."""
    if not run.queue or run.status in (RunStatus.COMPLETED, RunStatus.CANCELLED):
        return None
    only = {} if run.status is RunStatus.FAILED else {"state": DEAD}
    try:
        records = store.list(queue_job(run.queue), tags={"run": run.key, **only}, limit=1)
    except InvalidName:  # anybody who may save can write such a record
        return None
    return next(entries_of(records), None)


async def start_again(access: Access, key: str) -> None:
    """Have the runner start the run again; refused where that makes no sense."""

    def state_of(store: CheckpointManager) -> object:
        run = find_run(store, key)
        if run.status is RunStatus.RUNNING:
            raise Conflict(f"run {key} is at work", hint="it can be resumed when it has stopped")
        check_resumable(store, run)
        newest = store.load_latest(key)
        return None if newest is None else newest[1]

    await resume(access.service, key, await access.ask(state_of))
