"""Verify and gc in the background, with progress: one of each kind at a time, remembered for a while."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from holdfast.errors import CheckpointError, Conflict, NotFound

Report = Callable[[int, int], None]
_REMEMBERED = 200


@dataclass(slots=True)
class Task:
    """A piece of long work, and how far it is. Each worker process knows its own."""

    id: str
    kind: str
    namespace: str
    actor: str
    status: str = "running"  # running, completed, failed
    done: int = 0
    total: int = 0
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    ended_at: str | None = None
    result: dict[str, Any] | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Tasks:
    def __init__(self) -> None:
        self._tasks: OrderedDict[str, Task] = OrderedDict()
        self._threads: dict[str, threading.Thread] = {}
        self._lock = threading.Lock()

    def start(
        self,
        kind: str,
        namespace: str,
        actor: str,
        work: Callable[[Report], dict[str, Any]],
        ended: Callable[[Task], None] = lambda _: None,
    ) -> Task:
        """Begin; Conflict while one of the same kind is at work in the same namespace."""
        with self._lock:
            for other in self._tasks.values():
                if (other.kind, other.namespace, other.status) == (kind, namespace, "running"):
                    raise Conflict(f"{kind} is at work already, as task {other.id}", hint="wait for it")
            task = Task(f"{kind}-{secrets.token_hex(6)}", kind, namespace, actor)
            self._tasks[task.id] = task
            while len(self._tasks) > _REMEMBERED:
                self._tasks.popitem(last=False)
            thread = threading.Thread(target=self._run, args=(task, work, ended), name=f"holdfast-{task.id}")
            self._threads[task.id] = thread
            thread.start()
        return task

    def get(self, task_id: str, namespace: str) -> Task:
        task = self._tasks.get(task_id)
        if task is None or task.namespace != namespace:
            raise NotFound(f"task {task_id[:80]} not found", hint="tasks are remembered by the worker that ran them")
        return task

    def all(self, namespace: str) -> list[Task]:
        with self._lock:
            return [task for task in reversed(self._tasks.values()) if task.namespace == namespace]

    def close(self) -> None:
        """Wait for what is at work: it is safe to kill, but whoever started it wants to know its end."""
        for thread in list(self._threads.values()):
            thread.join()

    def _run(self, task: Task, work: Callable[[Report], dict[str, Any]], ended: Callable[[Task], None]) -> None:
        def report(done: int, total: int) -> None:
            task.done, task.total = done, total

        try:
            task.result = work(report)
            task.status = "completed"
        except CheckpointError as error:
            task.error, task.status = str(error), "failed"
        except Exception as error:  # noqa: BLE001 - told by the task; nobody else waits for it
            task.error, task.status = f"unexpected: {type(error).__name__}", "failed"
        finally:
            task.ended_at = datetime.now(UTC).isoformat()
            self._threads.pop(task.id, None)
            ended(task)
