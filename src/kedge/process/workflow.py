"""Workflows with people in them: executions, their checkpoints, and approvals that are decided once.

An execution is a job of the store, and every change to it is a checkpoint of that job that holds the whole execution:
its history is the list of them. Each change is made under a short lease, so that of two processes that decide at the
same time one gets a Conflict.

    execution    running → paused ⇄ running → completed or failed
    checkpoint   active → completed, failed; paused while its approval is pending; skipped
    approval     pending → approved or denied, once, by a named actor; an expired one is denied
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import Any
from uuid import uuid4

from kedge.errors import Conflict, LeaseHeld, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import (
    Checkpoint,
    CheckpointLevel,
    Job,
    Lease,
    parse_choice,
    parse_decision,
    parse_limit,
    parse_name,
    parse_step,
)

_PREFIX = "exec_"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@+-]+")
_LEASE_S = 10.0
_PAGE = 200

State = dict[str, Any]
CheckpointCallback = Callable[[str, Mapping[str, Any]], object]


class ExecutionState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"


class StepState(StrEnum):
    """Where a checkpoint of a workflow is."""

    PENDING = "pending"
    ACTIVE = "active"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"


class ApprovalStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    DENIED = "denied"


class OnDenied(StrEnum):
    """What a denial does to the execution."""

    FAIL = "fail"
    SKIP = "skip"  # the checkpoint is skipped, the execution goes on
    PAUSE = "pause"  # it stays where it is, for good


class UnknownExecution(NotFound, ValueError):
    """There is no such execution."""


class Workflows:
    """The executions of a store. Thread-safe, and many processes may work on the same executions."""

    def __init__(self, store: CheckpointManager, *, wait_s: float = 10.0) -> None:
        self._store = store
        self._wait_s = wait_s
        self._callbacks: dict[str, list[CheckpointCallback]] = {}
        self._approval_callbacks: list[CheckpointCallback] = []

    def register_checkpoint_callback(self, checkpoint_name: str, callback: CheckpointCallback) -> None:
        """Call `callback(execution_id, checkpoint)` when a checkpoint of this name was created or completed here."""
        self._callbacks.setdefault(checkpoint_name, []).append(callback)

    def register_approval_callback(self, callback: CheckpointCallback) -> None:
        """Call `callback(execution_id, checkpoint)` when an approval was asked for here."""
        self._approval_callbacks.append(callback)

    # Changing

    def start_workflow_execution(
        self, correlation_id: str, workflow_name: str, initial_data: Mapping[str, Any] | None = None
    ) -> str:
        """A new execution; its ID."""
        slug = _NOT_IN_NAMES.sub("-", correlation_id)[:60].strip("-._@+") or "x"
        execution_id = f"{_PREFIX}{slug}_{int(time.time())}_{uuid4().hex[:8]}"
        state: State = {
            "execution_id": execution_id,
            "correlation_id": correlation_id,
            "workflow_name": workflow_name,
            "state": ExecutionState.RUNNING.value,
            "started_at": _now(),
            "completed_at": None,
            "current_checkpoint": None,
            "checkpoints": [],
            "global_data": dict(initial_data or {}),
        }
        with self._store.lease(execution_id, _LEASE_S) as lease:
            self._save(lease, "start", state)
        return execution_id

    def create_checkpoint(
        self,
        execution_id: str,
        checkpoint_name: str,
        agent_id: str,
        input_data: Any = None,
        approval_required: bool = False,
        *,
        expires_s: float | None = None,
        on_denied: OnDenied | str = OnDenied.FAIL,
    ) -> dict[str, Any]:
        """A new checkpoint of a running execution. With approval_required both wait until somebody decides."""
        parse_step(checkpoint_name)
        rule = parse_choice(OnDenied, on_denied)
        if expires_s is not None and (isinstance(expires_s, bool) or not 0 < expires_s <= 10 * 366 * 86_400):
            raise Validation(f"expires_s={expires_s!r} makes no sense", hint="use seconds above 0")
        with self._changing(execution_id, f"create {checkpoint_name}") as state:
            if state["state"] != ExecutionState.RUNNING:
                raise Conflict(f"execution {execution_id} is {state['state']}", hint="only a running one goes on")
            made: dict[str, Any] = {
                "checkpoint_id": uuid4().hex,
                "checkpoint_name": checkpoint_name,
                "agent_id": agent_id,
                "correlation_id": state["correlation_id"],
                "state": (StepState.PAUSED if approval_required else StepState.ACTIVE).value,
                "started_at": _now(),
                "completed_at": None,
                "input_data": input_data,
                "output_data": None,
                "error_details": None,
                "approval_required": bool(approval_required),
                "approval_status": ApprovalStatus.PENDING.value if approval_required else None,
                "approval_actor": None,
                "approval_comment": "",
                "approval_at": None,
                "approval_expires_at": _later(expires_s) if approval_required and expires_s else None,
                "on_denied": rule.value,
            }
            state["checkpoints"].append(made)
            state["current_checkpoint"] = made["checkpoint_id"]
            if approval_required:
                state["state"] = ExecutionState.PAUSED.value
        self._tell(execution_id, made, asks=bool(approval_required))
        return deepcopy(made)

    def complete_checkpoint(
        self, execution_id: str, checkpoint_name: str, output_data: Any = None, success: bool = True
    ) -> bool:
        """Complete the newest open checkpoint of a name, or the one with an ID. False when it was completed before.

        A failed one fails the execution. One whose approval is pending or denied is a Conflict.
        """
        with self._changing(execution_id, f"complete {checkpoint_name}") as state:
            found = _find(state, checkpoint_name)
            if found["approval_required"] and found["approval_status"] != ApprovalStatus.APPROVED:
                raise Conflict(
                    f"the approval of {checkpoint_name} is {found['approval_status']}", hint="nothing goes on behind it"
                )
            if found["state"] != StepState.ACTIVE:
                return False
            if state["state"] != ExecutionState.RUNNING:
                raise Conflict(f"execution {execution_id} is {state['state']}", hint="resume it first")
            found["state"] = (StepState.COMPLETED if success else StepState.FAILED).value
            found["completed_at"] = _now()
            found["output_data" if success else "error_details"] = output_data
            if not success:
                _end(state, ExecutionState.FAILED)
        self._tell(execution_id, found)
        return True

    def approve_checkpoint(
        self,
        execution_id: str,
        checkpoint_name: str,
        approved: bool,
        *,
        actor: str | None = None,
        comment: str = "",
    ) -> bool:
        """Decide, once and for good; answers `approved`. Conflict when it was decided, or has expired."""
        approved = parse_decision(approved)
        who = actor or self._store.actor
        with self._changing(execution_id, f"{'approve' if approved else 'deny'} {checkpoint_name}") as state:
            found = _find(state, checkpoint_name, pending=True)
            if found["approval_status"] is None:
                raise Conflict(f"{checkpoint_name} needs no approval", hint="complete it instead")
            if found["approval_status"] != ApprovalStatus.PENDING:
                raise Conflict(
                    f"{checkpoint_name} was {found['approval_status']} by {found['approval_actor']}",
                    hint="a decision is final",
                )
            _decide(state, found, approved, who, comment)
        self._tell(execution_id, found)
        return approved

    def pause_execution(self, execution_id: str) -> bool:
        """False when it was paused already."""
        with self._changing(execution_id, "pause") as state:
            _refuse_ended(state)
            if state["state"] == ExecutionState.PAUSED:
                return False
            state["state"] = ExecutionState.PAUSED.value
        return True

    def resume_execution(self, execution_id: str) -> bool:
        """Go on; False when it was running. Nothing resumes past an approval that is pending or denied."""
        with self._changing(execution_id, "resume") as state:
            _refuse_ended(state)
            for checkpoint in state["checkpoints"]:
                if checkpoint["state"] == StepState.PAUSED:
                    raise Conflict(
                        f"the approval of {checkpoint['checkpoint_name']} is {checkpoint['approval_status']}",
                        hint="it has to be approved first"
                        if checkpoint["approval_status"] == "pending"
                        else "it is final",
                    )
            if state["state"] == ExecutionState.RUNNING:
                return False
            state["state"] = ExecutionState.RUNNING.value
        return True

    def complete_execution(self, execution_id: str, success: bool = True) -> bool:
        """End it; a successful end needs all checkpoints to be done. False when it had ended so."""
        wanted = ExecutionState.COMPLETED if success else ExecutionState.FAILED
        with self._changing(execution_id, f"end {wanted}") as state:
            if state["state"] == wanted:
                return False
            _refuse_ended(state)
            is_open = [
                c["checkpoint_name"] for c in state["checkpoints"] if c["state"] in ("active", "paused", "pending")
            ]
            if success and is_open:
                raise Conflict(f"{', '.join(is_open)} of {execution_id} is not done", hint="complete it first")
            _end(state, wanted)
        return True

    # Looking

    def get_execution(self, execution_id: str) -> dict[str, Any]:
        """The whole execution as it is now."""
        state = self._load(execution_id)
        return self._expired(execution_id) if _expire(state) else state

    def get_execution_status(self, execution_id: str) -> dict[str, Any]:
        state = self.get_execution(execution_id)
        checkpoints = state["checkpoints"]
        names = {c["checkpoint_id"]: c["checkpoint_name"] for c in checkpoints}
        return {
            **{name: state[name] for name in ("execution_id", "correlation_id", "workflow_name", "state")},
            "current_checkpoint": names.get(state["current_checkpoint"]),
            "started_at": state["started_at"],
            "completed_at": state["completed_at"],
            "total_checkpoints": len(checkpoints),
            "completed_checkpoints": _count(checkpoints, state=StepState.COMPLETED),
            "failed_checkpoints": _count(checkpoints, state=StepState.FAILED),
            "pending_approvals": _count(checkpoints, approval_status=ApprovalStatus.PENDING),
        }

    def list_executions(
        self,
        state_filter: ExecutionState | str | None = None,
        *,
        limit: int | None = None,
        after: str | None = None,
        most_jobs: int | None = None,
    ) -> list[dict[str, Any]]:
        """The status of all executions by ID, or of those in a state: the first `limit` behind the ID `after`.

        With `most_jobs` no more jobs than that are looked at.
        """
        wanted = None if state_filter is None else parse_choice(ExecutionState, state_filter)
        return list(islice(self._statuses(wanted, after, most_jobs), parse_limit(limit)))

    def get_checkpoint_history(self, execution_id: str) -> list[dict[str, Any]]:
        """Every change, oldest first: what, when, by whom, and the state it led to."""
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
        """Delete executions that ended longer ago; answers how many. Those that have not ended stay."""
        if isinstance(max_age_days, bool) or not isinstance(max_age_days, int | float) or not max_age_days >= 0:
            raise Validation(f"max_age_days={max_age_days!r}", hint="use a number of days from 0 on")
        limit = datetime.now(UTC) - timedelta(days=max_age_days)
        removed = 0
        for execution_id, newest in self._executions():
            if newest.metadata.get("state") in ("completed", "failed") and newest.created_at < limit:
                for checkpoint in self._store.walk(execution_id):
                    self._store.delete(execution_id, checkpoint.id)
                removed += 1
        return removed

    # Inside

    @contextmanager
    def _changing(self, execution_id: str, change: str) -> Iterator[State]:
        """The newest state under a lease; saved when the block ends and has changed it."""
        self._load(execution_id)
        with ExitStack() as stack:
            lease = self._take_lease(stack, execution_id)
            state = self._load(execution_id)
            if _expire(state):
                self._save(lease, "expire", state)
            before = deepcopy(state)
            yield state
            if state != before:
                self._save(lease, change, state)

    def _take_lease(self, stack: ExitStack, execution_id: str) -> Lease:
        """Changes are short: wait for that of another process."""
        until = time.monotonic() + self._wait_s
        while True:
            try:
                return stack.enter_context(self._store.lease(execution_id, _LEASE_S))
            except LeaseHeld:
                if time.monotonic() >= until:
                    raise
                time.sleep(0.02)

    def _expired(self, execution_id: str) -> State:
        with self._changing(execution_id, "expire") as state:
            return state

    def _load(self, execution_id: str) -> State:
        found = self._store.load_latest(parse_name("execution ID", execution_id))
        if found is None or found[0].metadata.get("kind") != "execution":
            raise UnknownExecution(f"execution {execution_id} not found", hint="list_executions() shows what there is")
        state: Any = found[1]
        return state  # type: ignore[no-any-return]

    def _save(self, lease: Lease, change: str, state: State) -> None:
        expires = any(c["approval_expires_at"] and c["approval_status"] == "pending" for c in state["checkpoints"])
        metadata = {
            "kind": "execution",
            "state": state["state"],
            "workflow": state["workflow_name"],
            "actor": self._store.actor,
            "expires": expires,
        }
        self._store.save(lease.job, change, state, level=CheckpointLevel.PIPELINE, metadata=metadata, lease=lease)

    def _statuses(
        self, wanted: ExecutionState | None, after: str | None, most_jobs: int | None
    ) -> Iterator[dict[str, Any]]:
        for execution_id, newest in self._executions(after, most_jobs):
            if wanted and newest.metadata.get("state") != wanted and not newest.metadata.get("expires"):
                continue
            status = self.get_execution_status(execution_id)
            if wanted is None or status["state"] == wanted:
                yield status

    def _executions(self, after: str | None = None, most_jobs: int | None = None) -> Iterator[tuple[str, Checkpoint]]:
        for job in islice(self._jobs(after), most_jobs):
            newest = self._store.list(job.name, limit=1)
            if newest and newest[0].metadata.get("kind") == "execution":
                yield job.name, newest[0]

    def _jobs(self, after: str | None) -> Iterator[Job]:
        while page := self._store.jobs(_PREFIX, _PAGE, after):
            after = page[-1].name
            yield from page

    def _tell(self, execution_id: str, checkpoint: Mapping[str, Any], *, asks: bool = False) -> None:
        """Callbacks come after the change is durable, and outside the lease: they may change the execution again."""
        for callback in [
            *(self._approval_callbacks if asks else ()),
            *self._callbacks.get(checkpoint["checkpoint_name"], ()),
        ]:
            callback(execution_id, deepcopy(dict(checkpoint)))


def _find(state: State, name_or_id: str, *, pending: bool = False) -> dict[str, Any]:
    """By ID; by name the newest that is open, or whose approval is pending, else the newest."""
    for checkpoint in state["checkpoints"]:
        if checkpoint["checkpoint_id"] == name_or_id:
            return checkpoint  # type: ignore[no-any-return]
    named = [c for c in state["checkpoints"] if c["checkpoint_name"] == name_or_id]
    if not named:
        raise NotFound(
            f"execution {state['execution_id']} has no checkpoint {name_or_id}",
            hint="get_execution() shows its checkpoints",
        )
    fitting = [
        c for c in named if (c["approval_status"] == "pending" if pending else c["state"] in ("active", "paused"))
    ]
    return (fitting or named)[-1]  # type: ignore[no-any-return]


def _decide(state: State, checkpoint: dict[str, Any], approved: bool, actor: str, comment: str) -> None:
    checkpoint["approval_status"] = (ApprovalStatus.APPROVED if approved else ApprovalStatus.DENIED).value
    checkpoint["approval_actor"] = actor
    checkpoint["approval_comment"] = comment
    checkpoint["approval_at"] = _now()
    if approved:
        checkpoint["state"] = StepState.ACTIVE.value
    elif checkpoint["on_denied"] == OnDenied.FAIL:
        checkpoint["state"] = StepState.FAILED.value
        _end(state, ExecutionState.FAILED)
        return
    elif checkpoint["on_denied"] == OnDenied.SKIP:
        checkpoint["state"] = StepState.SKIPPED.value
        checkpoint["completed_at"] = _now()
    else:
        return
    if not any(c["state"] == StepState.PAUSED for c in state["checkpoints"]):
        state["state"] = ExecutionState.RUNNING.value


def _expire(state: State) -> bool:
    """Deny what nobody decided in time."""
    now, is_changed = _now(), False
    for checkpoint in state["checkpoints"]:
        until = checkpoint["approval_expires_at"]
        if checkpoint["approval_status"] == ApprovalStatus.PENDING and until is not None and until <= now:
            _decide(state, checkpoint, False, "expiry", "nobody decided in time")
            is_changed = True
    return is_changed


def _refuse_ended(state: State) -> None:
    if state["state"] in (ExecutionState.COMPLETED, ExecutionState.FAILED):
        raise Conflict(f"execution {state['execution_id']} is {state['state']}", hint="start a new one")


def _end(state: State, how: ExecutionState) -> None:
    state["state"] = how.value
    state["completed_at"] = _now()


def _count(checkpoints: list[dict[str, Any]], **wanted: str) -> int:
    return sum(all(c[name] == value for name, value in wanted.items()) for c in checkpoints)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _later(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat(timespec="microseconds")
