"""Jobs: which there are."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from kedge.errors import NotFound
from kedge.server import schemas
from kedge.server.auth import Reads, Writes
from kedge.server.gate import GatedRoute

from . import API, PROBLEMS

router = APIRouter(prefix=API, tags=["jobs"], responses=PROBLEMS, route_class=GatedRoute)

PageSize = Annotated[int, Query(ge=1, le=1000, description="The most entries on one page.")]
Prefix = Annotated[str, Query(max_length=128, description="Only names with this prefix.", examples=["nightly"])]
NameCursor = Annotated[schemas.Name | None, Query(description="Continue listing after this name: next_cursor.")]


@router.get("/jobs", response_model=schemas.JobPage)
async def list_jobs(access: Reads, prefix: Prefix = "", limit: PageSize = 50, cursor: NameCursor = None) -> object:
    """Jobs by name."""
    jobs = await access.ask(lambda store: store.jobs(prefix, limit + 1, cursor))
    page = jobs[:limit]
    return {"jobs": [job.to_json() for job in page], "next_cursor": page[-1].name if len(jobs) > limit else None}


@router.get("/jobs/{job}", response_model=schemas.Job)
async def get_job(access: Reads, job: schemas.Name) -> object:
    """One job, with its counters and its retention policy."""
    jobs = await access.ask(lambda store: store.jobs(job, 1))
    if not jobs or jobs[0].name != job:
        raise NotFound(f"job {job} not found", hint="GET /api/v1/jobs lists the jobs")
    return jobs[0].to_json()


@router.delete("/jobs/{job}", response_model=schemas.DeletedJob)
async def delete_job(
    access: Writes,
    job: schemas.Name,
    even_pinned: Annotated[bool, Query(description="Delete pinned checkpoints too.")] = False,
) -> object:
    """Delete all checkpoints of a job and its retention policy. A pinned checkpoint is a conflict."""
    deleted = await access.ask(lambda store: store.delete_job(job, even_pinned=even_pinned))
    return {"job": job, "deleted": deleted}
