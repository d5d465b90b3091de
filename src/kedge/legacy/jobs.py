"""jobs: `from kedge.legacy.jobs import CheckpointManager`. Both of its interfaces, on a store.

Corrected: IDs are no paths, order is that of saving, delete says what happened, approvals cannot be passed by.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kedge import manager
from kedge.model import Checkpoint, CheckpointId
from kedge.ports import Checkpoints
from kedge.process.workflow import ApprovalStatus, CheckpointCallback, ExecutionState, StepState, Workflows

from . import store_in
from .importers.common import name_of

CheckpointState = StepState

__all__ = ["ApprovalStatus", "CheckpointManager", "CheckpointState", "ExecutionState"]

_MOST = 118  # as imported jobs are named


class CheckpointManager(manager.CheckpointManager):
    """save, list, restore, delete, cleanup, and workflow executions with approvals. Any text is a job ID."""

    def __init__(
        self,
        storage_dir: str | os.PathLike[str] | None = None,
        storage_path: str | os.PathLike[str] | None = None,
    ) -> None:
        chosen = storage_path if storage_path is not None else storage_dir
        super().__init__(store_in("./checkpoints" if chosen is None else chosen))
        self._workflows = Workflows(self)

    # Checkpoints

    def save(self, job_id: str, step_name: str, state: object, **options: Any) -> CheckpointId:
        return super().save(name_of(job_id, most=_MOST), step_name, state, **options)

    def list(self, job_id: str, **options: Any) -> Checkpoints:
        """Oldest first, each with checkpoint_id, job_id, step_name, timestamp, workflow_version; [] if unknown."""
        return super().list(name_of(job_id, most=_MOST), **options)

    def restore(self, job_id: str, checkpoint_id: str | None = None) -> Any:
        """The state; FileNotFoundError when there is none, ValueError when it is damaged."""
        chosen = None if checkpoint_id is None else name_of(checkpoint_id)
        return super().restore(name_of(job_id, most=_MOST), chosen)

    def delete(self, job_id: str, checkpoint_id: str) -> bool:
        return super().delete(name_of(job_id, most=_MOST), name_of(checkpoint_id))

    def cleanup(self, job_id: str, keep_last: int = 10) -> int:
        return super().cleanup(name_of(job_id, most=_MOST), keep_last)

    def get_latest_checkpoint(self, job_id: str) -> Checkpoint | None:
        newest = self.list(job_id, limit=1)
        return newest[0] if newest else None

    def cleanup_job(self, job_id: str) -> int:
        """Delete all checkpoints of a job; answers how many."""
        return sum(self.delete(job_id, checkpoint.id) for checkpoint in self.walk(job_id))

    # Workflows

    def register_checkpoint_callback(self, checkpoint_name: str, callback: CheckpointCallback) -> None:
        self._workflows.register_checkpoint_callback(checkpoint_name, callback)

    def register_approval_callback(self, callback: CheckpointCallback) -> None:
        self._workflows.register_approval_callback(callback)

    def start_workflow_execution(
        self, correlation_id: str, workflow_name: str, initial_data: Mapping[str, Any] | None = None
    ) -> str:
        return self._workflows.start_workflow_execution(correlation_id, workflow_name, initial_data)

    def create_checkpoint(
        self,
        execution_id: str,
        checkpoint_name: str,
        agent_id: str,
        input_data: Any = None,
        approval_required: bool = False,
    ) -> dict[str, Any]:
        """ValueError when there is no such execution. With approval_required both wait until somebody decides."""
        return self._workflows.create_checkpoint(
            execution_id, checkpoint_name, agent_id, input_data, approval_required=approval_required
        )

    def complete_checkpoint(
        self, execution_id: str, checkpoint_name: str, output_data: Any = None, success: bool = True
    ) -> bool:
        return self._workflows.complete_checkpoint(execution_id, checkpoint_name, output_data, success)

    def pause_execution(self, execution_id: str) -> bool:
        return self._workflows.pause_execution(execution_id)

    def resume_execution(self, execution_id: str) -> bool:
        return self._workflows.resume_execution(execution_id)

    def approve_checkpoint(self, execution_id: str, checkpoint_name: str, approved: bool = True) -> bool:
        return self._workflows.approve_checkpoint(execution_id, checkpoint_name, approved)

    def get_execution_status(self, execution_id: str) -> dict[str, Any]:
        return self._workflows.get_execution_status(execution_id)

    def list_executions(self, state_filter: ExecutionState | str | None = None) -> Any:
        return self._workflows.list_executions(state_filter)

    def get_checkpoint_history(self, execution_id: str) -> Any:
        """The checkpoints of an execution as they are now, oldest first."""
        return self._workflows.get_execution(execution_id)["checkpoints"]

    def cleanup_old_executions(self, max_age_days: float = 30) -> int:
        return self._workflows.cleanup_old_executions(max_age_days)
