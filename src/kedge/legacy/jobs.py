"""jobs: `from kedge.legacy.jobs import CheckpointManager`. Both of its interfaces, on a store.

Corrected: IDs are no paths, order is that of saving, delete says what happened, approvals cannot be passed by.
"""

from __future__ import annotations

import os
from typing import Any

from kedge import manager
from kedge.model import Checkpoint, CheckpointId
from kedge.ports import Checkpoints
from kedge.process.workflow import ApprovalStatus, ExecutionState, StepState, Workflows

from . import store_in
from .importers.common import name_of

CheckpointState = StepState

__all__ = ["ApprovalStatus", "CheckpointManager", "CheckpointState", "ExecutionState"]

_MOST = 118  # as imported jobs are named


def _of_workflows(name: str) -> Any:
    """A method of Workflows, under its own name."""
    return property(lambda self: getattr(self._workflows, name))


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

    def approve_checkpoint(self, execution_id: str, checkpoint_name: str, approved: bool = True) -> bool:
        return self._workflows.approve_checkpoint(execution_id, checkpoint_name, approved)

    def get_checkpoint_history(self, execution_id: str) -> Any:
        """The checkpoints of an execution as they are now, oldest first."""
        return self._workflows.get_execution(execution_id)["checkpoints"]

    register_checkpoint_callback = _of_workflows("register_checkpoint_callback")
    register_approval_callback = _of_workflows("register_approval_callback")
    start_workflow_execution = _of_workflows("start_workflow_execution")
    complete_checkpoint = _of_workflows("complete_checkpoint")
    pause_execution = _of_workflows("pause_execution")
    resume_execution = _of_workflows("resume_execution")
    get_execution_status = _of_workflows("get_execution_status")
    list_executions = _of_workflows("list_executions")
    cleanup_old_executions = _of_workflows("cleanup_old_executions")
