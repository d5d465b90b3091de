"""What LLM calls cost, and what the cache saved."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from kedge.llm import Bill, totals
from kedge.llm.cache import JOB
from kedge.manager import CheckpointManager
from kedge.server import schemas
from kedge.server.auth import Reads
from kedge.server.gate import GatedRoute
from kedge.server.responses import JsonAnswer

from . import API, PROBLEMS

router = APIRouter(prefix=API, tags=["llm"], responses=PROBLEMS, route_class=GatedRoute)


@router.get("/llm/stats", response_model=schemas.LlmStats)
async def llm_stats(
    access: Reads,
    by: Annotated[list[Literal["model", "run", "step"]] | None, Query(description="Group by these.")] = None,
    run: Annotated[schemas.Name | None, Query(description="Only calls of this run.")] = None,
) -> object:
    """Money spent on calls that were made, and saved by those answered from the store. Unpriced calls are counted."""
    fields = tuple(dict.fromkeys(by or ["model"]))

    def add_up(store: CheckpointManager) -> dict[str, object]:
        bills = totals(store, run=run, by=fields)
        record = store.catalogue.job(JOB)
        groups = [{"key": dict(zip(fields, key, strict=True)), "bill": bill.to_json()} for key, bill in bills.items()]
        return {
            "answers": record.checkpoints if record else 0,
            "size_bytes": record.size_bytes if record else 0,
            "total": sum(bills.values(), Bill()).to_json(),
            "groups": groups,
        }

    return JsonAnswer(await access.ask(add_up))
