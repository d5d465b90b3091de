"""An execution of a workflow: its checkpoints and their transitions. Nothing here knows a store.

execution    running → paused ⇄ running → completed or failed
checkpoint   active → completed, failed; paused while its approval is pending; skipped
approval     pending → approved or denied, once, by a named actor; an expired one is denied
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import uuid4

from kedge.errors import Conflict, NotFound
from kedge.model import MAX_STEP_CHARACTERS
from kedge.pipeline.approval import Approval, PendingApproval, parse_moment


class ExecutionState(StrEnum):
    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"


class StepState(StrEnum):
    """The status of a workflow's checkpoint."""

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
    """The effect of a denial on the execution."""

    FAIL = "fail"
    SKIP = "skip"  # the checkpoint is skipped, the execution continues
    PAUSE = "pause"  # it stays paused forever


UNREADABLE = "unreadable"  # the state of an invalid execution, as of a checkpoint that another program saved


class Unreadable(Conflict):
    """A checkpoint marked as an execution is not one: another program saved it."""


@dataclass(slots=True)
class Step:
    """A checkpoint of an execution. Stored, and returned to callers, as a dictionary of these fields."""

    checkpoint_id: str
    checkpoint_name: str
    agent_id: str
    correlation_id: str
    state: str = StepState.ACTIVE.value
    started_at: str = ""
    completed_at: str | None = None
    input_data: Any = None
    output_data: object = None
    error_details: object = None
    approval_required: bool = False
    approval_status: str | None = None  # None: it needs no approval
    approval_actor: str | None = None
    approval_comment: str = ""
    approval_at: str | None = None
    approval_expires_at: str | None = None
    on_denied: str = OnDenied.FAIL.value
    metadata: Any = None  # of imported ones

    @property
    def is_pending(self) -> bool:
        return self.approval_status == ApprovalStatus.PENDING

    def document(self) -> dict[str, Any]:
        """Return a copy that the caller may change."""
        return deepcopy(_document(self))


@dataclass(slots=True)
class Execution:
    """A whole execution. Its methods raise Conflict for what its state does not allow, and then change nothing."""

    execution_id: str
    correlation_id: str
    workflow_name: str
    state: str = ExecutionState.RUNNING.value
    started_at: str = ""
    completed_at: str | None = None
    current_checkpoint: str | None = None  # an ID
    checkpoints: list[Step] = field(default_factory=list)
    global_data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, document: Any) -> Execution:
        """Parse the result of `document`, or an importer's. Raises Unreadable for anything else."""
        try:
            steps = [Step(**step) for step in document["checkpoints"]]
            execution = cls(**{**document, "checkpoints": steps})
        except (TypeError, KeyError) as error:
            raise Unreadable("it does not have the fields of an execution") from error
        texts = [execution.execution_id, *(text for step in steps for text in (step.checkpoint_id, step.state))]
        optional = [execution.current_checkpoint, *(step.approval_status for step in steps)]
        is_sound = execution.state in tuple(ExecutionState) and isinstance(execution.global_data, dict)
        is_sound = is_sound and all(isinstance(text, str) for text in texts)
        if not is_sound or not all(text is None or isinstance(text, str) for text in optional):
            raise Unreadable("a field has the wrong type")
        return execution

    def document(self) -> dict[str, Any]:
        return {**_document(self), "checkpoints": [_document(step) for step in self.checkpoints]}

    # Changes

    def create(
        self,
        name: str,
        agent_id: str,
        data: object,
        approval_required: bool,
        expires_s: float | None,
        on_denied: OnDenied,
    ) -> Step:
        self._require_running("only a running one goes on")
        step = Step(uuid4().hex, name, agent_id, self.correlation_id, started_at=now(), input_data=data)
        step.on_denied = on_denied.value
        if approval_required:
            step.approval_required = True
            step.approval_status = ApprovalStatus.PENDING.value
            step.approval_expires_at = None if expires_s is None else now(expires_s)
            step.state = StepState.PAUSED.value
            self.state = ExecutionState.PAUSED.value
        self.checkpoints.append(step)
        self.current_checkpoint = step.checkpoint_id
        return step

    def complete(self, name_or_id: str, data: object, success: bool) -> Step | None:
        """Complete a checkpoint; None if it was complete. A failed checkpoint fails the execution."""
        step = self.find(name_or_id)
        if step.approval_required and step.approval_status != ApprovalStatus.APPROVED:
            raise Conflict(
                f"the approval of {name_or_id} is {step.approval_status}",
                hint="nothing continues before it is approved",
            )
        if step.state != StepState.ACTIVE:
            return None
        self._require_running("resume it first")
        step.completed_at = now()
        if success:
            step.state, step.output_data = StepState.COMPLETED.value, data
        else:
            step.state, step.error_details = StepState.FAILED.value, data
            self._end(ExecutionState.FAILED)
        return step

    def apply(self, step: Step, decision: Approval) -> None:
        """Apply a decision. A denied checkpoint with on_denied="pause" stays paused, and so does the execution."""
        step.approval_status = (ApprovalStatus.APPROVED if decision.approved else ApprovalStatus.DENIED).value
        step.approval_actor = decision.actor
        step.approval_comment = decision.comment
        step.approval_at = decision.decided_at
        if decision.approved:
            step.state = StepState.ACTIVE.value
        elif step.on_denied == OnDenied.FAIL:
            step.state = StepState.FAILED.value
            self._end(ExecutionState.FAILED)
            return
        elif step.on_denied == OnDenied.SKIP:
            step.state = StepState.SKIPPED.value
            step.completed_at = now()
        if all(other.state != StepState.PAUSED for other in self.checkpoints):
            self.state = ExecutionState.RUNNING.value

    def pause(self) -> bool:
        """Pause; return False if it was paused."""
        self.refuse_ended()
        is_running = self.state == ExecutionState.RUNNING
        self.state = ExecutionState.PAUSED.value
        return is_running

    def resume(self) -> bool:
        """Resume; return False if it was running. Nothing resumes past an approval that is pending or denied."""
        self.refuse_ended()
        for step in self.checkpoints:
            if step.state == StepState.PAUSED:
                raise Conflict(
                    f"the approval of {step.checkpoint_name} is {step.approval_status}",
                    hint="it has to be approved first" if step.is_pending else "it is final",
                )
        is_paused = self.state == ExecutionState.PAUSED
        self.state = ExecutionState.RUNNING.value
        return is_paused

    def end(self, state: ExecutionState) -> bool:
        """End; return False if it had ended this way. A successful end needs all checkpoints to be done."""
        if self.state == state:
            return False
        self.refuse_ended()
        unfinished = [
            step.checkpoint_name
            for step in self.checkpoints
            if step.state in (StepState.ACTIVE, StepState.PAUSED, StepState.PENDING)
        ]
        if state is ExecutionState.COMPLETED and unfinished:
            raise Conflict(f"{', '.join(unfinished)} of {self.execution_id} is not done", hint="complete it first")
        self._end(state)
        return True

    def _end(self, state: ExecutionState) -> None:
        self.state = state.value
        self.completed_at = now()

    def _require_running(self, hint: str) -> None:
        if self.state != ExecutionState.RUNNING:
            raise Conflict(f"execution {self.execution_id} is {self.state}", hint=hint)

    @property
    def has_ended(self) -> bool:
        return self.state in (ExecutionState.COMPLETED, ExecutionState.FAILED)

    def refuse_ended(self) -> None:
        if self.has_ended:
            raise Conflict(f"execution {self.execution_id} is {self.state}", hint="start a new one")

    # Looking

    def find(self, name_or_id: str, *, is_pending: bool = False) -> Step:
        """Find a step by ID; by name the newest open one, or with a pending approval, or else the newest."""
        for step in self.checkpoints:
            if step.checkpoint_id == name_or_id:
                return step
        named = [step for step in self.checkpoints if step.checkpoint_name == name_or_id]
        if not named:
            raise NotFound(
                f"execution {self.execution_id} has no checkpoint {name_or_id}",
                hint="get_execution() shows its checkpoints",
            )
        open_states = (StepState.ACTIVE, StepState.PAUSED)
        fitting = [step for step in named if (step.is_pending if is_pending else step.state in open_states)]
        return (fitting or named)[-1]

    def pending(self) -> list[Step]:
        """Return the checkpoints that wait for a decision; none once the execution has ended."""
        return [] if self.has_ended else [step for step in self.checkpoints if step.is_pending]

    def asked(self, step: Step) -> PendingApproval:
        """Return the approval that a checkpoint waits for, as it is listed with those of runs."""
        return PendingApproval(
            self.execution_id,
            "execution",
            _text(step.checkpoint_name),
            step.checkpoint_id,
            _text(f"{self.workflow_name}: {step.agent_id} asks to continue"),
            parse_moment(step.started_at),
            parse_moment(step.approval_expires_at),
        )

    def status(self) -> dict[str, Any]:
        """Return a summary of the execution."""
        names = {step.checkpoint_id: step.checkpoint_name for step in self.checkpoints}
        states = [step.state for step in self.checkpoints]
        return {
            "execution_id": self.execution_id,
            "correlation_id": self.correlation_id,
            "workflow_name": self.workflow_name,
            "state": self.state,
            "current_checkpoint": names.get(self.current_checkpoint or ""),
            "started_at": self.started_at,
            "completed_at": self.completed_at,
            "total_checkpoints": len(states),
            "completed_checkpoints": states.count(StepState.COMPLETED),
            "failed_checkpoints": states.count(StepState.FAILED),
            "pending_approvals": len(self.pending()),
        }


def now(later_s: float = 0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=later_s)).isoformat(timespec="microseconds")


def _document(value: Step | Execution) -> dict[str, object]:
    """Return the fields by name; `dataclasses.asdict` would also convert callers' values."""
    return {f.name: getattr(value, f.name) for f in fields(value)}


def _text(value: object) -> str:
    """Return text for metadata, because imported values may be anything."""
    return str(value).encode("utf-8", "backslashreplace").decode()[:MAX_STEP_CHARACTERS]
