"""jobs: `from kedge.legacy.jobs import CheckpointManager`. Both of its interfaces, on a store.

Corrected: IDs are no paths, order is that of saving, delete says what happened, a decision is final, approvals cannot
be passed by.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, Self

from kedge.errors import NotFound
from kedge.process.workflow import ApprovalStatus, ExecutionState, StepState, Workflows

from . import open_in
from .importers.common import SAVED_HERE, legacy, name_of
from .importers.jobs import MOST_JOB_NAME, old_id_of

CheckpointState = StepState

__all__ = [
    "ApprovalStatus", "CheckpointExecution", "CheckpointManager", "CheckpointMeta", "CheckpointState", "ExecutionState",
    "WorkflowExecution", "enhance_planner_with_checkpoints",
]  # fmt: skip


class CheckpointMeta(NamedTuple):
    """What a list says of a checkpoint."""

    checkpoint_id: str
    job_id: str
    step_name: str
    timestamp: str
    workflow_version: str


@dataclass
class CheckpointExecution:
    """A checkpoint of a workflow execution."""

    checkpoint_name: str
    agent_id: str
    correlation_id: str
    state: CheckpointState = CheckpointState.PENDING
    started_at: str | None = None
    completed_at: str | None = None
    input_data: dict[str, Any] = field(default_factory=dict)
    output_data: dict[str, object] = field(default_factory=dict)
    error_details: str | None = None
    approval_required: bool = False
    approval_status: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        for name in ("input_data", "output_data", "metadata"):
            known[name] = {} if known.get(name) is None else known[name]
        return cls(**{**known, "state": CheckpointState(known.get("state", "pending"))})


@dataclass
class WorkflowExecution:
    """An execution of a workflow with its checkpoints."""

    execution_id: str
    correlation_id: str
    workflow_name: str
    started_at: str
    current_checkpoint: str | None = None
    state: str = "running"
    checkpoints: list[CheckpointExecution] = field(default_factory=list)
    global_data: dict[str, Any] = field(default_factory=dict)
    completed_at: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        steps = [CheckpointExecution.from_dict(step) for step in data.get("checkpoints", ())]
        return cls(**{**known, "checkpoints": steps})


class CheckpointManager:
    """save, list, restore, delete, cleanup, and workflow executions with approvals. Any text is a job ID.

    Files that the jobs system left in the directory are imported at the first opening. `store` is the store behind it.
    """

    def __init__(
        self, storage_dir: str | os.PathLike[str] | None = None, storage_path: str | os.PathLike[str] | None = None
    ) -> None:
        chosen = storage_path if storage_path is not None else storage_dir
        self.storage_dir = self.storage_path = Path("./checkpoints" if chosen is None else chosen)
        self.store = open_in("./checkpoints" if chosen is None else chosen, "jobs")
        self._workflows = Workflows(self.store)

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Checkpoints

    def save(self, job_id: str, step_name: str, state: object) -> str:
        job = name_of(job_id, most=MOST_JOB_NAME)
        metadata = {} if job == job_id else {"legacy": legacy("jobs", job=job_id, **{SAVED_HERE: True})}
        return self.store.save(job, step_name, state, metadata=metadata)

    def list(self, job_id: str) -> list[CheckpointMeta]:
        """Oldest first; [] for an unknown job."""
        return [
            CheckpointMeta(old_id_of(c), job_id, c.step, c.timestamp, c.schema_version)
            for c in self.store.list(name_of(job_id, most=MOST_JOB_NAME))
        ]

    def restore(self, job_id: str, checkpoint_id: str) -> Any:
        """The state; FileNotFoundError when there is none, ValueError when it is damaged."""
        return self.store.restore(name_of(job_id, most=MOST_JOB_NAME), name_of(checkpoint_id))

    def delete(self, job_id: str, checkpoint_id: str) -> bool:
        return self.store.delete(name_of(job_id, most=MOST_JOB_NAME), name_of(checkpoint_id))

    def cleanup(self, job_id: str, keep_last: int = 10) -> int:
        return self.store.cleanup(name_of(job_id, most=MOST_JOB_NAME), keep_last)

    def get_latest_checkpoint(self, job_id: str) -> str | None:
        """The ID of the newest checkpoint."""
        newest = self.store.list(name_of(job_id, most=MOST_JOB_NAME), limit=1)
        return old_id_of(newest[0]) if newest else None

    def cleanup_job(self, job_id: str) -> int:
        """Delete all checkpoints of a job; return how many."""
        job = name_of(job_id, most=MOST_JOB_NAME)
        return sum(self.store.delete(job, checkpoint.id) for checkpoint in self.store.walk(job))

    # Workflows

    def register_checkpoint_callback(
        self, checkpoint_name: str, callback: Callable[[CheckpointExecution], object]
    ) -> None:
        """`callback(checkpoint)` when one of this name completed or failed."""

        def ended(_: str, step: Mapping[str, Any]) -> None:
            if step["state"] in (CheckpointState.COMPLETED, CheckpointState.FAILED):
                callback(CheckpointExecution.from_dict(step))

        self._workflows.register_checkpoint_callback(checkpoint_name, ended)

    def register_approval_callback(self, callback: Callable[[str, CheckpointExecution], object]) -> None:
        """`callback(execution_id, checkpoint)` when an approval is wanted."""
        self._workflows.register_approval_callback(
            lambda execution_id, step: callback(execution_id, CheckpointExecution.from_dict(step))
        )

    def start_workflow_execution(
        self, correlation_id: str, workflow_name: str, initial_data: dict[str, Any] | None = None
    ) -> WorkflowExecution:
        execution_id = self._workflows.start_workflow_execution(correlation_id, workflow_name, initial_data)
        return WorkflowExecution.from_dict(self._workflows.get_execution(execution_id))

    def create_checkpoint(
        self,
        execution_id: str,
        checkpoint_name: str,
        agent_id: str,
        input_data: Any = None,
        approval_required: bool = False,
    ) -> CheckpointExecution:
        """ValueError when there is no such execution. With approval_required both wait until somebody decides."""
        step = self._workflows.create_checkpoint(execution_id, checkpoint_name, agent_id, input_data, approval_required)
        return CheckpointExecution.from_dict(step)

    def complete_checkpoint(
        self, execution_id: str, checkpoint_name: str, output_data: Any, success: bool = True
    ) -> bool:
        """False when there is no such execution or checkpoint."""
        return self._known(
            lambda: self._workflows.complete_checkpoint(execution_id, checkpoint_name, output_data, success)
        )

    def pause_execution(self, execution_id: str, checkpoint_name: str | None = None) -> bool:
        """False when there is no such execution. It pauses wherever it is."""
        return self._known(lambda: self._workflows.pause_execution(execution_id) or True)

    def resume_execution(self, execution_id: str) -> bool:
        """False when there is no such execution, or it was not paused. Nothing resumes past an open approval."""
        return self._known(lambda: self._workflows.resume_execution(execution_id))

    def approve_checkpoint(self, execution_id: str, checkpoint_name: str, approved: bool = True) -> bool:
        """False when there is no such checkpoint, or it needs no approval; else the decision is made."""

        def decide() -> bool:
            steps = self._workflows.get_execution(execution_id)["checkpoints"]
            if not any(s["checkpoint_name"] == checkpoint_name and s["approval_required"] for s in steps):
                return False
            self._workflows.approve_checkpoint(execution_id, checkpoint_name, approved)
            return True

        return self._known(decide)

    def get_execution_status(self, execution_id: str) -> dict[str, Any] | None:
        try:
            return self._workflows.get_execution_status(execution_id)
        except NotFound:
            return None

    def list_executions(self, state_filter: str | None = None) -> Any:
        return self._workflows.list_executions(state_filter)

    def get_checkpoint_history(self, execution_id: str) -> Any:
        """The checkpoints of an execution as they are now, oldest first; [] for an unknown one."""
        try:
            steps = self._workflows.get_execution(execution_id)["checkpoints"]
        except NotFound:
            return []
        return [CheckpointExecution.from_dict(step).to_dict() for step in steps]

    def cleanup_old_executions(self, max_age_days: float = 30) -> None:
        self._workflows.cleanup_old_executions(max_age_days)

    @staticmethod
    def _known(change: Callable[[], bool]) -> bool:
        try:
            return change()
        except NotFound:
            return False


_APPROVED_FIRST = ("write_file", "upload_gist", "add_frontmatter")


def enhance_planner_with_checkpoints(planner: Any, checkpoint_manager: CheckpointManager) -> object:
    """Give a planner's `_execute_capability(capability, state)` a checkpoint around each call."""
    execute = planner._execute_capability

    def with_checkpoint(capability: str, state: Any) -> object:
        execution_id, name = f"exec_{state.correlation_id}", f"pre_{capability}"
        checkpoint_manager.create_checkpoint(
            execution_id, name, "planner", {"capability": capability, "state_data": state.data},
            approval_required=capability in _APPROVED_FIRST,
        )  # fmt: skip
        try:
            result = execute(capability, state)
        except Exception as error:
            checkpoint_manager.complete_checkpoint(execution_id, name, {"success": False, "error": str(error)}, False)
            raise
        output = {"success": True, "result": "capability_executed"}
        checkpoint_manager.complete_checkpoint(execution_id, name, output)
        return result

    planner._execute_capability = with_checkpoint
    planner.checkpoint_manager = checkpoint_manager
    return planner
