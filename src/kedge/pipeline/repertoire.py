"""The pipelines that a worker has, and what it says of those that it is asked for and does not have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kedge.manager import CheckpointManager
from kedge.model import RunStatus

from .declaration import Pipeline
from .entries import RECOVERY, RUNNING, Entry, queue_job, queue_of
from .owner import newest_status, status_of


class Repertoire:
    """Pipelines by name."""

    def __init__(
        self, store: CheckpointManager, pipelines: Mapping[str, Pipeline[..., object]], tell: Callable[[str, str], None]
    ) -> None:
        self._store = store
        self._pipelines = pipelines
        self._tell = tell
        self._missing: set[str] = set()

    def __getitem__(self, name: str) -> Pipeline[..., Any]:
        return self._pipelines[name]

    def has(self, entry: Entry, job: str) -> bool:
        """Whether the worker can carry out an entry of a queue. A pipeline that it does not have is told once."""
        name = entry.pipeline
        if name in self._pipelines:
            return True
        if name not in self._missing and (entry.state != RUNNING or self._is_abandoned(entry)):
            self._missing.add(name)
            queue = "" if job == queue_job(RECOVERY) else f" --queue {queue_of(job)}"
            self._tell(
                f"pipeline {name}",
                f"is not in this worker's file, so run {entry.key} waits; start a worker with the file that has it: "
                f"kedge worker FILE.py{queue}",
            )
        return False

    def _is_abandoned(self, entry: Entry) -> bool:
        """Else another worker is at it, which has the pipeline."""
        newest = newest_status(self._store, entry.key)
        return newest is not None and status_of(newest) is RunStatus.ABANDONED
