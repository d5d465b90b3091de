"""Verify and gc in the background, with progress: one of each kind at a time in a namespace, by any worker.

A task is a job in the namespace of the tokens, its newest checkpoint says how far it is: so every worker and host on
the store can tell, and the task of a worker that was killed is seen to have stopped. A lease keeps a second one out.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from kedge.blobs.workers import repeating
from kedge.errors import CheckpointError, Conflict, LeaseHeld, NotFound
from kedge.manager import CheckpointManager

from .metrics import Metrics
from .problems import without_paths

Report = Callable[[int, int], None]
Work = Callable[[CheckpointManager, Report], dict[str, object]]

_PREFIX = "task."
_KINDS = ("gc", "verify")
_LISTED = 100
_SAVE_EVERY_S = 1.0
_LEASE_S = 30.0
_log = logging.getLogger("kedge.server")


class Tasks:
    """`records` opens the manager of the namespace in which tasks are kept."""

    def __init__(self, records: Callable[[], CheckpointManager], metrics: Metrics) -> None:
        self._records = records
        self._metrics = metrics
        self._threads: set[threading.Thread] = set()

    def start(self, kind: str, store: CheckpointManager, work: Work) -> dict[str, Any]:
        """Begin; Conflict while one of the same kind is at work in the same namespace."""
        records = self._records()
        # Newer tasks have smaller names, so that the newest are listed first.
        task_id = f"{kind}-{(1 << 44) - time.time_ns() // 1_000_000:011x}{secrets.token_hex(4)}"
        lock = f"lock.{kind}.{store.namespace}"[:128]
        holding = records.lease(lock, _LEASE_S)
        try:
            holding.__enter__()
        except LeaseHeld:
            raise Conflict(f"{kind} is at work in {store.namespace} already", hint="wait for it") from None
        task = {
            "id": task_id,
            "kind": kind,
            "namespace": store.namespace,
            "actor": store.actor,
            "status": "running",
            "done": 0,
            "total": 0,
            "started_at": _now(),
            "ended_at": None,
            "result": None,
            "error": None,
        }
        try:
            self._save(task)
        except BaseException:
            holding.__exit__(None, None, None)
            raise
        thread = threading.Thread(target=self._run, args=(dict(task), holding, store, work), name=f"kedge-{task_id}")
        self._threads.add(thread)
        thread.start()
        return task

    def collect_garbage(self, store: CheckpointManager, report: Report, *, dry_run: bool = False) -> dict[str, object]:
        """The work of a gc."""
        freed = store.gc(dry_run=dry_run, progress=report)
        if not dry_run:
            self._metrics.gc_freed.inc(freed.bytes_freed)
        return asdict(freed)

    def _tidy(self, namespace: str) -> None:
        """Give back what the service's own records took: nobody else collects their namespace."""
        records = self._records()
        for kind in _KINDS:
            prefix = _job(namespace, f"{kind}-")
            newest = records.jobs(prefix, _LISTED)
            for job in records.jobs(prefix, after=newest[-1].name) if len(newest) == _LISTED else ():
                records.delete_job(job.name)
        records.gc()

    def get(self, task_id: str, namespace: str) -> dict[str, Any]:
        task = self._newest(_job(namespace, task_id))
        if task is None:
            raise NotFound(f"task {task_id[:80]} not found", hint="GET /api/v1/tasks lists them")
        return task

    def all(self, namespace: str) -> list[dict[str, Any]]:
        records = self._records()
        tasks = []
        for kind in _KINDS:
            jobs = records.jobs(_job(namespace, f"{kind}-"), _LISTED)
            tasks += [task for job in jobs if (task := self._newest(job.name)) is not None]
        return sorted(tasks, key=lambda task: str(task["started_at"]), reverse=True)[:_LISTED]

    def close(self) -> None:
        """Wait for what is at work: it is safe to kill, but whoever started it wants to know its end."""
        for thread in list(self._threads):
            thread.join()

    def _newest(self, job: str) -> dict[str, object] | None:
        latest = self._records().load_latest(job)
        if latest is None:
            return None
        newest, task = latest
        silent_s = (datetime.now(UTC) - newest.created_at).total_seconds()
        if task["status"] == "running" and silent_s > 2 * _LEASE_S:
            lost = {"status": "failed", "error": "its worker has stopped", "ended_at": newest.timestamp}
            return {**task, **lost}
        return dict(task)

    def _save(self, task: dict[str, Any]) -> None:
        records = self._records()
        job = _job(task["namespace"], task["id"])
        before = records.list(job, limit=1)
        records.save(job, task["status"], task)
        for old in before:
            records.delete(job, old.id)

    def _run(self, task: dict[str, Any], holding: Any, store: CheckpointManager, work: Work) -> None:
        saved_at = time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal saved_at
            task["done"], task["total"] = done, total
            if time.monotonic() - saved_at >= _SAVE_EVERY_S:
                saved_at = time.monotonic()
                self._save(task)

        def beat() -> None:
            """Say that the work still goes on, also while it reports nothing."""
            with suppress(CheckpointError):  # the work itself will hear of it
                self._save(task)

        try:
            with repeating(beat, _LEASE_S, "kedge-task-beat"):
                task["result"] = work(store, report)
            task["status"] = "completed"
        except CheckpointError as error:
            task["error"], task["status"] = without_paths(str(error)), "failed"
        except Exception as error:  # noqa: BLE001 - told by the task; nobody else waits for it
            _log.error("task %s failed", task["id"], exc_info=error)
            task["error"], task["status"] = f"unexpected: {type(error).__name__}", "failed"
        finally:
            task["ended_at"] = _now()
            self._metrics.tasks.labels(task["kind"], task["status"]).inc()
            holding.__exit__(None, None, None)  # first: who reads that it has ended may start the next one
            try:
                self._save(task)
                if task["kind"] == "gc":
                    self._tidy(task["namespace"])  # last: what it copies to packs is not deleted right behind it
            except CheckpointError as error:
                _log.error("the end of task %s cannot be recorded: %s", task["id"], error)
            self._threads.discard(threading.current_thread())


def _job(namespace: str, task_id: str) -> str:
    place = hashlib.sha256(namespace.encode()).hexdigest()[:16]  # two names may be too long for one
    return f"{_PREFIX}{place}.{task_id}"[:128]


def _now() -> str:
    return datetime.now(UTC).isoformat()
