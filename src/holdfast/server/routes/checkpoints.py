"""Checkpoints: finding them, looking into them, changing what may change."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from holdfast.asjson import checkpoint_json
from holdfast.errors import Validation
from holdfast.server import schemas
from holdfast.server.auth import Reads
from holdfast.server.routes import API

from .jobs import PageSize

router = APIRouter(prefix=API, tags=["checkpoints"])


@router.get("/jobs/{job}/checkpoints", response_model=schemas.CheckpointPage)
async def list_checkpoints(
    access: Reads,
    job: schemas.Name,
    level: Annotated[schemas.Level | None, Query()] = None,
    tag: Annotated[list[str] | None, Query(description="name=value; repeat for several.", max_length=64)] = None,
    order: Annotated[str, Query(pattern="^(newest|oldest)$", description="Which come first.")] = "newest",
    limit: PageSize = 50,
    cursor: Annotated[int | None, Query(ge=0, le=1 << 53, description="next_cursor of the page before.")] = None,
) -> Any:
    """The checkpoints of a job, without their states; an unknown job has none."""
    tags = _pairs(tag or [])
    place = {"after": cursor or 0} if order == "oldest" else {"before": cursor}
    found = await access.ask(lambda store: store.list(job, level=level, tags=tags, limit=limit + 1, **place))
    if order == "newest":
        found = found[::-1]
    page = found[:limit]
    following = str(page[-1].seq) if len(found) > limit else None
    return {"checkpoints": [checkpoint_json(c) for c in page], "next_cursor": following}


@router.get("/checkpoints/{checkpoint_id}", response_model=schemas.Checkpoint)
async def get_checkpoint(access: Reads, checkpoint_id: schemas.CheckpointId) -> Any:
    """One checkpoint without its state."""
    return checkpoint_json(await access.ask(lambda store: store.get(checkpoint_id)))


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise Validation(f"tag={text[:80]} has no value", hint="use tag=name=value")
        pairs[name] = value
    return pairs
