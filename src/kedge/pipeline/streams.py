"""Streams: values that a run gives out while it is at work, in order. Each is the result of a step with a tag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from blake3 import blake3

from kedge.manager import CheckpointManager
from kedge.model import QUEUE_PREFIX, Checkpoint, RunStatus, parse_step

from .entries import DEAD, RECOVERY, entries_of, queue_job
from .inbox import StoreLike, opened, parse_run_key
from .owner import newest_status, status_of

WAIT_S = 1.0
_PAGE = 100
_ENDED = (RunStatus.COMPLETED, RunStatus.CANCELLED, RunStatus.FAILED)


def stream_tags(name: str) -> dict[str, str]:
    return {"stream": blake3(name.encode()).hexdigest(16)}


def follow(store: StoreLike, key: str, name: str) -> Iterator[Any]:
    """The values of `run.emit(name, value)` of a run, from the first one on, as they come; from any process.

    Ends when the run has completed, failed for good or was cancelled. A run that has not begun yet is waited for.
    `store` may be a path or URL.
    """
    parse_run_key(key)
    parse_step(name)
    with opened(store) as manager:
        for record in follow_records(manager, key, stream_tags(name)):
            state = manager.load(record.id)
            yield state["result"]


def follow_records(store: CheckpointManager, key: str, tags: Mapping[str, str] | None = None) -> Iterator[Checkpoint]:
    """The records of a run, or those with these tags, from the first one on, as they come; until the run has ended."""
    after = 0
    while True:
        seen = store.events(limit=1, newest=True)
        has_ended = _has_ended(store, key)  # before the look at the records: none comes after the end
        page = store.list(key, tags=tags, after=after, limit=_PAGE)
        for record in page:
            after = record.seq
            yield record
        if not page and has_ended:
            return
        if not page:
            store.events(seen[-1].id if seen else 0, limit=1, wait_s=WAIT_S)


def _has_ended(store: CheckpointManager, key: str) -> bool:
    newest = newest_status(store, key)
    if newest is None or (status := status_of(newest)) not in _ENDED:
        return False
    return status is not RunStatus.FAILED or not _is_tried_again(store, newest)


def _is_tried_again(store: CheckpointManager, failed: Checkpoint) -> bool:
    """Whether a worker tries the run again, or has not decided yet: this is its status record."""
    queue = failed.metadata.get("queue")
    job = QUEUE_PREFIX + queue if isinstance(queue, str) else queue_job(RECOVERY)
    return any(entry.state != DEAD for entry in entries_of(store.list(job, tags={"run": failed.job})))
