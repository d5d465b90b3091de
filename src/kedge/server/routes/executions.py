"""Executions of workflows, and the approvals that they and runs wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Body, Query

from kedge.codec.json_view import to_json_view
from kedge.manager import CheckpointManager
from kedge.pipeline.approval import decide, pending_approvals
from kedge.process.workflow import Workflows
from kedge.server import run_schemas, schemas
from kedge.server.auth import Access, Reads, Writes
from kedge.server.gate import GatedRoute
from kedge.server.responses import JsonAnswer

from . import API, PROBLEMS
from .jobs import NameCursor, PageSize, Prefix
from .runs import page_of

router = APIRouter(prefix=API, tags=["executions"], responses=PROBLEMS, route_class=GatedRoute)

Execution = schemas.Name


@router.get("/executions", response_model=run_schemas.ExecutionPage)
async def list_executions(
    access: Reads,
    state: Annotated[str | None, Query(pattern="^(running|paused|completed|failed|unreadable)$")] = None,
    limit: PageSize = 50,
    cursor: NameCursor = None,
) -> object:
    """Executions by ID."""

    def look(store: CheckpointManager, name: str) -> Iterator[object]:
        newest = store.list(name, limit=1)
        if newest and newest[0].metadata.get("kind") == "execution":
            status = Workflows(store).get_execution_status(name)
            if state is None or status["state"] == state:
                yield status

    return await page_of(access, "executions", "exec_", cursor, limit, look)


@router.get("/executions/{execution_id}", response_model=run_schemas.ExecutionDetail)
async def get_execution(access: Reads, execution_id: Execution) -> object:
    """The whole execution, and every change that led to it."""

    def find(store: CheckpointManager) -> dict[str, object]:
        workflows = Workflows(store)
        state = to_json_view(workflows.get_execution(execution_id))
        return {"execution": state, "history": workflows.get_checkpoint_history(execution_id)}

    return JsonAnswer(await access.ask(find))


@router.post("/executions", status_code=201, response_model=run_schemas.Started)
async def start_execution(access: Writes, wish: run_schemas.StartExecution) -> object:
    """Begin an execution."""
    started = await _change(access, lambda w: w.start_workflow_execution(**wish.model_dump()))
    return {"execution_id": started}


@router.post("/executions/{execution_id}/checkpoints", status_code=201, response_model=dict[str, schemas.Json])
async def add_step(access: Writes, execution_id: Execution, wish: run_schemas.AddStep) -> object:
    """A new checkpoint of a running execution; with approval_required both wait for a decision."""
    return JsonAnswer(await _change(access, lambda w: w.create_checkpoint(execution_id, **wish.model_dump())), 201)


@router.post("/executions/{execution_id}/complete", response_model=run_schemas.Changed)
async def complete_step(access: Writes, execution_id: Execution, wish: run_schemas.CompleteStep) -> object:
    """Complete the newest open checkpoint of a name, or the one with an ID."""
    done = await _change(
        access, lambda w: w.complete_checkpoint(execution_id, wish.checkpoint, wish.output_data, wish.success)
    )
    return {"changed": done}


@router.post("/executions/{execution_id}/pause", response_model=run_schemas.Changed)
async def pause_execution(access: Writes, execution_id: Execution) -> object:
    """Pause a running execution."""
    return {"changed": await _change(access, lambda w: w.pause_execution(execution_id))}


@router.post("/executions/{execution_id}/resume", response_model=run_schemas.Changed)
async def resume_execution(access: Writes, execution_id: Execution) -> object:
    """Go on; nothing resumes past an approval that is pending or denied."""
    return {"changed": await _change(access, lambda w: w.resume_execution(execution_id))}


@router.post("/executions/{execution_id}/end", response_model=run_schemas.Changed)
async def end_execution(
    access: Writes, execution_id: Execution, wish: Annotated[run_schemas.EndExecution | None, Body()] = None
) -> object:
    """End an execution; a successful end needs all its checkpoints to be done."""
    success = wish is None or wish.success
    return {"changed": await _change(access, lambda w: w.complete_execution(execution_id, success))}


@router.get("/approvals", response_model=run_schemas.ApprovalPage, tags=["approvals"])
async def list_approvals(access: Reads, prefix: Prefix = "", limit: PageSize = 50, cursor: NameCursor = None) -> object:
    """What waits for somebody's decision."""
    return await page_of(access, "approvals", prefix, cursor, limit, _pending)


@router.post("/approvals", response_model=run_schemas.Decision, tags=["approvals"])
async def decide_approval(access: Writes, wish: run_schemas.Decide) -> object:
    """Approve or deny, for good: a second decision is a conflict. The token's name is kept with it."""
    actor = access.caller.actor
    await access.ask(lambda store: decide(store, wish.run, wish.name, wish.approved, actor=actor, comment=wish.comment))
    return {"run": wish.run, "name": wish.name, "approved": wish.approved, "actor": actor, "comment": wish.comment}


def _pending(store: CheckpointManager, name: str) -> Iterator[dict[str, Any]]:
    for approval in pending_approvals(store, name):
        yield {
            "run": approval.job,
            "name": approval.name,
            "kind": approval.kind,
            "prompt": approval.prompt,
            "asked_at": approval.asked_at.isoformat() if approval.asked_at else "",
            "expires_at": approval.expires_at.isoformat() if approval.expires_at else None,
        }


async def _change(access: Access, change: Callable[[Workflows], object]) -> object:
    return await access.ask(lambda store: change(Workflows(store)))
