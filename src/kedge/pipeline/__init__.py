"""Durable pipelines: plain Python that is killed anywhere and goes on where it was.

with kedge.run("nightly", store="my-store") as run:
    rows = run.step("download", download, url, retries=3, timeout_s=60)
    with run.stage("tiles"):
        out = run.map(process, tiles, key=tile_id, workers=2)

run     one execution under a key; a job of the store
stage   a part of a run: its name is in the paths of its steps
step    a call whose result is kept: it runs once, ever; inside another step, a substep
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from .approval import Approval, PendingApproval, decide, find_approvals, pending_approvals
from .background import Background, start, start_call
from .declaration import Pipeline, current_run, pipeline, step
from .failure import ItemError, StepFailed
from .inbox import send
from .place import idempotency_key
from .queues import Handle, Queue, Submission
from .retry import Retry
from .run import Run
from .schedules import Rule, schedule, schedule_call
from .signals import Paused
from .streams import follow

run = Run
queue = Queue

__all__ = [
    "Approval", "Background", "Handle", "ItemError", "Paused", "PendingApproval", "Pipeline", "Queue", "Retry", "Rule",
    "Run", "StepFailed", "Submission", "current_run", "decide", "find_approvals", "follow", "idempotency_key",
    "pending_approvals", "pipeline", "queue", "run", "schedule", "schedule_call", "send", "start", "start_call", "step",
]  # fmt: skip


class _Decorator(ModuleType):
    """`kedge.pipeline` is this package as soon as any part of it is imported, and the decorator all the same."""

    def __call__(self, *args: Any, **kwargs: object) -> object:
        return pipeline(*args, **kwargs)


sys.modules[__name__].__class__ = _Decorator
