"""Runs, approvals and executions of workflows over the wire; as `schemas`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .schemas import Answer, Body, Json, Name, Page


class RunAnswer(Answer):
    key: str
    status: Literal["running", "paused", "completed", "failed", "cancelled", "abandoned", "unreadable"]
    pipeline: str | None
    version: str
    sessions: int
    steps_run: int
    steps_reused: int
    error: str
    updated_at: str
    is_abandoned: bool
    is_denied: bool = Field(description="An approval was denied: the run cannot be resumed.")
    waiting: list[dict[str, Json]]
    progress: dict[str, int | None] | None
    queue: str = Field(description="The queue whose workers carry it out; empty: none.")
    parent: str = Field(description="The run that started it; empty: none.")


class RunPage(Page):
    runs: list[RunAnswer]


class Step(Answer):
    path: str
    verdict: str = Field(examples=["ran", "reused", "failed", "kept", "stale", "map"])
    reason: str
    checkpoint: str | None
    seconds: float | None
    attempts: int


class LogLine(Answer):
    at: str
    level: str = Field(examples=["info", "warning"])
    text: str


class RunDetail(Answer):
    run: RunAnswer
    steps: list[Step]
    log: list[LogLine]


class FailedItem(Answer):
    key: str
    error: str
    attempts: int


class ItemBatch(Answer):
    """Items of a map that were recorded together."""

    checkpoint: str
    path: str
    at: str
    session: int
    items: int
    failed: list[FailedItem]


class ItemPage(Page):
    batches: list[ItemBatch]


class Signal(Body):
    name: Annotated[str, Field(min_length=1, max_length=1024, examples=["go"])]
    value: Json = None


class Sent(Answer):
    message: str


class Cancelled(Answer):
    run: str
    cancelled: bool = Field(description="false while its owner still works on a step; it stops before the next.")


class Approval(Answer):
    """Something a run or an execution waits for."""

    run: str
    name: str
    kind: Literal["run", "execution"]
    prompt: str
    asked_at: str
    expires_at: str | None


class ApprovalPage(Page):
    approvals: list[Approval]


class Decide(Body):
    run: Name = Field(description="A run, or an execution.")
    name: Annotated[str, Field(min_length=1, max_length=4096, examples=["publish"])]
    approved: bool
    comment: Annotated[str, Field(max_length=2000)] = ""


class Decision(Answer):
    run: str
    name: str
    approved: bool
    actor: str
    comment: str


class Execution(Answer):
    execution_id: str
    correlation_id: str
    workflow_name: str
    state: Literal["running", "paused", "completed", "failed", "unreadable"]
    current_checkpoint: str | None
    started_at: str
    completed_at: str | None
    total_checkpoints: int
    completed_checkpoints: int
    failed_checkpoints: int
    pending_approvals: int


class ExecutionPage(Page):
    executions: list[Execution]


class ExecutionDetail(Answer):
    execution: Json = Field(description="The whole execution, its checkpoints included.")
    history: list[dict[str, Json]]


class StartExecution(Body):
    correlation_id: Annotated[str, Field(min_length=1, max_length=256)]
    workflow_name: Annotated[str, Field(min_length=1, max_length=256)]
    initial_data: dict[str, Json] = Field(default={})


class Started(Answer):
    execution_id: str


class AddStep(Body):
    checkpoint_name: Annotated[str, Field(min_length=1, max_length=1024)]
    agent_id: Annotated[str, Field(max_length=256)]
    input_data: Json = None
    approval_required: bool = False
    expires_s: Annotated[float, Field(gt=0, le=316_224_000)] | None = None
    on_denied: Literal["fail", "skip", "pause"] = "fail"


class CompleteStep(Body):
    checkpoint: Annotated[str, Field(min_length=1, max_length=1024, description="Its name or ID.")]
    output_data: Json = None
    success: bool = True


class EndExecution(Body):
    success: bool = True


class Changed(Answer):
    changed: bool = Field(description="false when it was so already.")
