"""Retention: what a policy would delete, then deleting it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from kedge.care.retention import RetentionPolicy
from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.model import Job
from kedge.server import schemas
from kedge.server.auth import Reads, Writes
from kedge.server.gate import GatedRoute
from kedge.server.responses import JsonAnswer

from . import API, PROBLEMS

router = APIRouter(prefix=API, tags=["retention"], responses=PROBLEMS, route_class=GatedRoute)


@router.post("/retention/plan", response_model=schemas.Plan)
async def plan(access: Reads, wish: schemas.PlanRequest) -> Any:
    """What the policy would delete and keep, and why. Nothing is changed."""
    policy = _policy(wish.policy)
    made = await access.ask(lambda store: store.apply(policy, job=wish.job))
    return JsonAnswer(made.to_json(is_applied=False))


@router.post("/retention/apply", response_model=schemas.Plan)
async def apply(access: Writes, wish: schemas.PlanRequest) -> Any:
    """Delete what the policy does not keep; answers what was deleted and kept."""
    policy = _policy(wish.policy)
    done = await access.ask(lambda store: store.apply(policy, job=wish.job, dry_run=False))
    return JsonAnswer(done.to_json(is_applied=True))


@router.put("/jobs/{job}/retention", response_model=schemas.Job)
async def set_retention(access: Writes, job: schemas.Name, wish: schemas.SetRetention) -> object:
    """The policy that is applied after saves of this job; null ends that."""
    policy = None if wish.policy is None else _policy(wish.policy)

    def change(store: CheckpointManager) -> Job:
        if store.catalogue.job(job) is not None:
            store.set_retention(job, policy)
        if (changed := store.catalogue.job(job)) is None:
            raise NotFound(f"job {job} not found", hint="GET /api/v1/jobs lists the jobs")
        return changed

    return JsonAnswer((await access.ask(change)).to_json())


def _policy(wish: schemas.Policy) -> RetentionPolicy:
    return RetentionPolicy(**wish.model_dump(exclude_unset=True))
