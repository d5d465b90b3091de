"""Checkpoints of containers: which are kept. Checkpointing and restoring need the container's own machine."""

from __future__ import annotations

from fastapi import APIRouter

from kedge.manager import CheckpointManager
from kedge.server import schemas
from kedge.server.auth import Reads
from kedge.server.gate import GatedRoute

from . import API, PROBLEMS
from .jobs import NameCursor, PageSize
from .runs import page_of

router = APIRouter(prefix=API, tags=["containers"], responses=PROBLEMS, route_class=GatedRoute)

_PREFIX = "container:"


@router.get("/containers", response_model=schemas.CheckpointPage)
async def list_containers(access: Reads, limit: PageSize = 50, cursor: NameCursor = None) -> object:
    """The newest checkpoint of each container; its history is that of its job."""

    def newest(store: CheckpointManager, job: str) -> list[object]:
        return [checkpoint.to_json() for checkpoint in store.list(job, limit=1)]

    return await page_of(access, "checkpoints", _PREFIX, cursor, limit, newest)
