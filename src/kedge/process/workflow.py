"""Workflows with human approvals: executions whose steps are done elsewhere, by agents and people.

An execution is a job of the store. Every change is a checkpoint of that job with the whole execution, so its history is
that of the job. Each change is made under a short lease. Its approvals are those of runs (`pipeline.approval`): listed
with them, and decided once, in the inbox. The execution follows a decision when it is next read.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, TypeVar
from uuid import uuid4

from kedge.errors import Conflict, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import (
    INBOX_SUFFIX,
    MAX_STEP_CHARACTERS,
    Checkpoint,
    CheckpointLevel,
    Lease,
    parse_choice,
    parse_decision,
    parse_limit,
    parse_name,
    parse_step,
)
from kedge.pipeline.approval import Approval, decide_once, decision_of, expire
from kedge.pipeline.owner import job_pages, take_lease
from kedge.pipeline.wait import parse_seconds

from .execution import UNREADABLE, ApprovalStatus, Execution, ExecutionState, OnDenied, Step, StepState, Unreadable, now

__all__ = [
    "ApprovalStatus", "CheckpointCallback", "ExecutionState", "OnDenied", "StepState", "UnknownExecution", "Workflows",
]  # fmt: skip

T = TypeVar("T")

_PREFIX = "exec_"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@+-]+")
_LEASE_S = _WAIT_S = 10.0

CheckpointCallback = Callable[[str, Mapping[str, object]], object]


class UnknownExecution(NotFound, ValueError):
    """The execution does not exist."""


class Workflows:
    """The executions of a store. Thread-safe, and many processes may work on the same executions."""

    def __init__(self, store: CheckpointManager) -> None:
        self._store = store
        self._callbacks: dict[str, list[CheckpointCallback]] = {}
        self._approval_callbacks: list[CheckpointCallback] = []

    def register_checkpoint_callback(self, checkpoint_name: str, callback: CheckpointCallback) -> None:
        """Call `callback(execution_id, checkpoint)` when a checkpoint of this name is created or completed here."""
        self._callbacks.setdefault(checkpoint_name, []).append(callback)

    def register_approval_callback(self, callback: CheckpointCallback) -> None:
        """Call `callback(execution_id, checkpoint)` when an approval is requested here."""
        self._approval_callbacks.append(callback)

    # Changing

    def start_workflow_execution(
        self, correlation_id: str, workflow_name: str, initial_data: Mapping[str, object] | None = None
    ) -> str:
        """Start an execution and return its ID."""
        slug = _NOT_IN_NAMES.sub("-", correlation_id)[:60].strip("-._@+") or "x"
        execution_id = f"{_PREFIX}{slug}_{int(time.time())}_{uuid4().hex[:8]}"
        execution = Execution(execution_id, correlation_id, workflow_name, started_at=now())
        execution.global_data = dict(initial_data or {})
        with self._store.lease(execution_id, _LEASE_S) as lease:
            self._save(lease, "start", execution)
        return execution_id

    def create_checkpoint(
        self,
        execution_id: str,
        checkpoint_name: str,
        agent_id: str,
        input_data: object = None,
        approval_required: bool = False,
        *,
        expires_s: float | None = None,
        on_denied: OnDenied | str = OnDenied.FAIL,
    ) -> dict[str, Any]:
        """Create a checkpoint of a running execution. With approval_required both wait for a decision."""
        parse_step(checkpoint_name)
        rule = parse_choice(OnDenied, on_denied)
        if expires_s is not None and not parse_seconds("expires_s", expires_s):
            raise Validation("expires_s must be above 0 (got 0)")
        step = self._change(
            execution_id,
            f"create {checkpoint_name}",
            lambda e: e.create(checkpoint_name, agent_id, input_data, approval_required, expires_s, rule),
        )
        self._tell(execution_id, step, self._approval_callbacks if approval_required else ())
        return step.document()

    def complete_checkpoint(
        self, execution_id: str, checkpoint_name: str, output_data: object = None, success: bool = True
    ) -> bool:
        """Complete the newest open checkpoint of a name, or the one with an ID. Return False if it was complete.

        A failed one fails the execution. Raises Conflict if its approval is pending or denied.
        """
        change = f"complete {checkpoint_name}"
        step = self._change(execution_id, change, lambda e: e.complete(checkpoint_name, output_data, success))
        if step is not None:
            self._tell(execution_id, step)
        return step is not None

    def approve_checkpoint(
        self, execution_id: str, checkpoint_name: str, approved: bool, *, actor: str | None = None, comment: str = ""
    ) -> bool:
        """Approve or deny, finally; return `approved`. Raises Conflict if it was decided before, or has expired."""
        approved = parse_decision(approved)
        execution = self._current(execution_id)
        step = execution.find(checkpoint_name, is_pending=True)
        if step.approval_status is None:
            raise Conflict(f"{checkpoint_name} needs no approval", hint="complete it instead")
        if not step.is_pending:
            raise Conflict(
                f"{checkpoint_name} was {step.approval_status} by {step.approval_actor}", hint="a decision is final"
            )
        execution.refuse_ended()
        decide_once(self._store, execution.asked(step), approved, actor or self._store.actor, comment)
        self._tell(execution_id, self._current(execution_id).find(step.checkpoint_id))
        return approved

    def pause_execution(self, execution_id: str) -> bool:
        """Pause; return False if it was paused."""
        return self._change(execution_id, "pause", Execution.pause)

    def resume_execution(self, execution_id: str) -> bool:
        """Resume; return False if it was running. Nothing resumes past an approval that is pending or denied."""
        return self._change(execution_id, "resume", Execution.resume)

    def complete_execution(self, execution_id: str, success: bool = True) -> bool:
        """End; a successful end needs all checkpoints to be done. Return False if it had ended this way."""
        state = ExecutionState.COMPLETED if success else ExecutionState.FAILED
        return self._change(execution_id, f"end {state}", lambda e: e.end(state))

    # Looking

    def get_execution(self, execution_id: str) -> dict[str, Any]:
        """Return the whole execution as it is now."""
        return self._current(execution_id).document()

    def get_execution_status(self, execution_id: str) -> dict[str, Any]:
        """Return a summary; its state is "unreadable" if its checkpoint is not an execution."""
        try:
            return self._current(execution_id).status()
        except Unreadable:
            return Execution(execution_id, "", "", UNREADABLE).status()

    def list_executions(
        self,
        state_filter: ExecutionState | str | None = None,
        *,
        limit: int | None = None,
        after: str | None = None,
        most_jobs: int | None = None,
    ) -> list[dict[str, Any]]:
        """Return the status of all executions by ID, or of those in a state: the first `limit` after the ID `after`.

        With `most_jobs`, reads at most that many jobs.
        """
        state = None if state_filter is None else parse_choice(ExecutionState, state_filter)
        return list(islice(self._statuses(state, after, most_jobs), parse_limit(limit)))

    def get_checkpoint_history(self, execution_id: str) -> list[dict[str, Any]]:
        """Return every change, oldest first: what, when, by whom, and the resulting state."""
        self._load(execution_id)
        return [
            {
                "change": c.step,
                "at": c.timestamp,
                "id": c.id,
                "state": c.metadata.get("state"),
                "actor": c.metadata.get("actor"),
            }
            for c in self._store.walk(execution_id)
        ]

    def cleanup_old_executions(self, max_age_days: float = 30) -> int:
        """Delete executions that ended longer ago; return how many. Unfinished ones stay."""
        if isinstance(max_age_days, bool) or not isinstance(max_age_days, int | float) or not max_age_days >= 0:
            raise Validation(
                f"max_age_days must be at least 0 (got {max_age_days!r})", hint="use a number of days from 0 on"
            )
        limit = datetime.now(UTC) - timedelta(days=max_age_days)
        removed = 0
        for newest in self._newest():
            if newest.metadata.get("state") in ("completed", "failed") and newest.created_at < limit:
                for job in (newest.job + INBOX_SUFFIX, newest.job):
                    for checkpoint in self._store.walk(job):
                        self._store.delete(job, checkpoint.id)
                removed += 1
        return removed

    # Internal

    def _change(self, execution_id: str, name: str, change: Callable[[Execution], T]) -> T:
        """Make a change under the execution's lease and return its result; False and None mean that nothing changed."""
        self._load(execution_id)
        with take_lease(self._store, execution_id, _LEASE_S, _WAIT_S) as lease:
            execution = self._load(execution_id)
            for step, decision in self._decisions(execution):
                execution.apply(step, decision)
                verb = "approve" if decision.approved else "deny"
                self._save(lease, f"{verb} {step.checkpoint_name}", execution, decision.actor)
            answer = change(execution)
            if answer is not False and answer is not None:
                self._save(lease, name, execution)
            return answer

    def _current(self, execution_id: str) -> Execution:
        """Return the execution, after applying decisions made since its last change."""
        execution = self._load(execution_id)
        if self._decisions(execution):
            self._change(execution_id, "", lambda _: None)
            execution = self._load(execution_id)
        return execution

    def _decisions(self, execution: Execution) -> list[tuple[Step, Approval]]:
        """Return decisions, by people or by expiry, that the execution does not contain yet."""
        decisions = []
        for step in execution.pending():
            asked = execution.asked(step)
            decision = decision_of(self._store, asked.job, asked.id)
            if decision is None and asked.is_expired:
                decision = expire(self._store, asked)
            if decision is not None:
                decisions.append((step, decision))
        return decisions

    def _load(self, execution_id: str) -> Execution:
        newest = self._store.load_latest(parse_name("execution ID", execution_id))
        if newest is None or newest[0].metadata.get("kind") != "execution":
            raise UnknownExecution(f"execution {execution_id} not found", hint="list_executions() shows what there is")
        try:
            return Execution.parse(newest[1])
        except Unreadable as error:
            raise Unreadable(
                f"execution {execution_id} cannot be read: {error.message}",
                hint=f"delete its newest checkpoint: kedge delete {execution_id} {newest[0].id}",
            ) from error

    def _save(self, lease: Lease, change: str, execution: Execution, actor: str | None = None) -> None:
        metadata = {
            "kind": "execution",
            "state": execution.state,
            "workflow": execution.workflow_name,
            "actor": actor or self._store.actor,
            "waiting": [execution.asked(step).waiting() for step in execution.pending()],
        }
        self._store.save(
            lease.job,
            change[:MAX_STEP_CHARACTERS],
            execution.document(),
            level=CheckpointLevel.PIPELINE,
            metadata=metadata,
            lease=lease,
        )

    def _statuses(
        self, state: ExecutionState | None, after: str | None, most_jobs: int | None
    ) -> Iterator[dict[str, object]]:
        for newest in self._newest(after, most_jobs):
            # A paused one may have been decided meanwhile.
            if state is None or newest.metadata.get("state") in (state, ExecutionState.PAUSED):
                try:
                    status = self.get_execution_status(newest.job)
                except UnknownExecution:
                    continue  # deleted meanwhile
                if state is None or status["state"] == state:
                    yield status

    def _newest(self, after: str | None = None, most_jobs: int | None = None) -> Iterator[Checkpoint]:
        """Yield the newest checkpoint of each execution."""
        for page in job_pages(self._store, _PREFIX, most_jobs, after):
            newest = self._store.catalogue.newest([job.name for job in page])
            records = (newest[job.name] for job in page if job.name in newest)
            yield from (record for record in records if record.metadata.get("kind") == "execution")

    def _tell(self, execution_id: str, step: Step, callbacks: Iterable[CheckpointCallback] = ()) -> None:
        """Call the callbacks after the change is durable, outside the lease: they may change the execution again."""
        for callback in [*callbacks, *self._callbacks.get(step.checkpoint_name, ())]:
            callback(execution_id, step.document())
