"""Checkpoints of containers: which are kept. Checkpointing and restoring need the container's own machine."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter

from kedge.manager import CheckpointManager
from kedge.server import schemas
from kedge.server.auth import Reads
from kedge.server.gate import GatedRoute
from kedge.server.responses import JsonAnswer

from . import API, PROBLEMS
from .jobs import NameCursor, PageSize
from .runs import page_of

router = APIRouter(prefix=API, tags=["containers"], responses=PROBLEMS, route_class=GatedRoute)

_PREFIX = "container:"


@router.get("/containers", response_model=schemas.CheckpointPage)
async def list_containers(access: Reads, limit: PageSize = 50, cursor: NameCursor = None) -> object:
    """The newest checkpoint of each container; its history is that of its job."""

    def find(store: CheckpointManager) -> tuple[list[dict[str, object]], str | None]:
        def newest(job: str) -> Iterator[dict[str, object]]:
            yield from (checkpoints.to_json() for checkpoints in store.list(job, limit=1))

        return page_of(store, _PREFIX, cursor, limit, newest)

    checkpoints, following = await access.ask(find)
    return JsonAnswer({"checkpoints": checkpoints, "next_cursor": following})
