"""Find anything: jobs, runs, executions, checkpoints, by name, step, tag or metadata, in any part of their text.

One look reads a bounded number of jobs and checkpoints, the newest of each job first, and says how far it came; the
next one goes on behind it. So it costs the same however much there is (I6).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Job

from .kinds import STATUSES, About, Kind, about, named_kind
from .templates import PageRoute, Reader, answer

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_LOOK_JOBS = 2000  # at once
_LOOK_ABOUT = 500  # of them, asked what they are
_LOOK_CHECKPOINTS = 3000
_OF_EACH = 200
_SHOWN = 50

SPANS = {"hour": timedelta(hours=1), "day": timedelta(days=1), "week": timedelta(weeks=1), "month": timedelta(days=30)}
SORTS = ("updated", "name", "size")


@dataclass(frozen=True, slots=True)
class Wanted:
    words: Sequence[str]  # in lower case; all of them
    kind: str
    status: str
    tag: str
    since: datetime | None

    @property
    def is_of_checkpoints(self) -> bool:
        """Whether it can be said of a checkpoint: one has no kind and no status of a run."""
        return bool(self.words or self.tag) and not self.status

    def is_in(self, *texts: str) -> bool:
        text = "\n".join(texts).lower()
        return all(word in text for word in self.words)


@dataclass(frozen=True, slots=True)
class JobHit:
    job: Job
    about: About


@dataclass(frozen=True, slots=True)
class Hits:
    jobs: Sequence[JobHit]
    checkpoints: Sequence[Checkpoint]
    jobs_read: int
    checkpoints_read: int
    after: str | None  # the next look begins behind this job
    is_cut: bool  # there are more hits than are shown, or older checkpoints that were not read


@router.get("/search")
async def search(
    request: Request,
    access: Reader,
    q: Annotated[str, Query(max_length=200)] = "",
    kind: Literal["", "job", "run", "workflow", "thread", "container", "queue", "internal"] = "",
    status: Literal["", "running", "paused", "completed", "failed", "cancelled", "abandoned", "unreadable"] = "",
    tag: Annotated[str, Query(max_length=200)] = "",
    since: Literal["", "hour", "day", "week", "month"] = "",
    sort: Literal["updated", "name", "size"] = "updated",
    after: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    wanted = Wanted(q.lower().split(), kind, status, tag.strip(), _begin(since))
    chosen = {"q": q, "kind": kind, "status": status, "tag": tag, "since": since, "sort": sort}

    def facts(store: CheckpointManager) -> dict[str, Any]:
        hits = find(store, wanted, sort, after) if any((q, kind, status, tag, since)) else None
        given = {name: value for name, value in chosen.items() if value}
        more = f"/search?{urlencode({**given, 'after': hits.after})}" if hits and hits.after else None
        options = {"kinds": Kind, "statuses": STATUSES, "spans": SPANS, "sorts": SORTS}
        return {**chosen, **options, "hits": hits, "more": more}

    return await answer(request, access, "search.html", facts)


def _begin(since: str) -> datetime | None:
    return datetime.now(UTC) - SPANS[since] if since else None


def find(store: CheckpointManager, wanted: Wanted, sort: str, after: str | None) -> Hits:
    jobs = store.jobs("", _LOOK_JOBS, after)
    recent = sorted(jobs, key=lambda job: job.updated_at, reverse=True)
    if wanted.since is not None:
        recent = [job for job in recent if job.updated_at >= wanted.since]
    named = [job for job in recent if _may_be(wanted, job.name)]
    hits = [] if wanted.tag else _jobs(store, wanted, [job for job in named if wanted.is_in(job.name)])
    checkpoints, read = _checkpoints(store, wanted, named) if wanted.is_of_checkpoints else ([], 0)
    keys: dict[str, Any] = {
        "updated": (lambda hit: hit.job.updated_at, lambda c: c.created_at, True),
        "name": (lambda hit: hit.job.name, lambda c: (c.job, c.seq), False),
        "size": (lambda hit: hit.job.size_bytes, lambda c: c.size_bytes, True),
    }
    job_key, checkpoint_key, is_descending = keys[sort]
    hits.sort(key=job_key, reverse=is_descending)
    checkpoints.sort(key=checkpoint_key, reverse=is_descending)
    is_cut = len(hits) > _SHOWN or len(checkpoints) > _SHOWN or read >= _LOOK_CHECKPOINTS
    following = jobs[-1].name if len(jobs) == _LOOK_JOBS else None
    return Hits(hits[:_SHOWN], checkpoints[:_SHOWN], len(jobs), read, following, is_cut)


def _may_be(wanted: Wanted, job: str) -> bool:
    """What a name alone can rule out."""
    kind = named_kind(job)
    if kind is None:
        return wanted.kind in ("", Kind.JOB, Kind.RUN, Kind.WORKFLOW)
    return wanted.kind == kind or (not wanted.kind and kind is not Kind.INTERNAL)


def _jobs(store: CheckpointManager, wanted: Wanted, named: Sequence[Job]) -> list[JobHit]:
    """The recently changed ones first: so many that one page has all it shows."""
    hits: list[JobHit] = []
    for job in named[:_LOOK_ABOUT]:
        known = about(store, job.name)
        if (not wanted.kind or known.kind == wanted.kind) and (not wanted.status or known.status == wanted.status):
            hits.append(JobHit(job, known))
        if len(hits) > _SHOWN:
            break
    return hits


def _checkpoints(store: CheckpointManager, wanted: Wanted, jobs: Sequence[Job]) -> tuple[list[Checkpoint], int]:
    hits: list[Checkpoint] = []
    read = 0
    for job in jobs:
        if read >= _LOOK_CHECKPOINTS or len(hits) > 4 * _SHOWN:
            break
        if wanted.kind and about(store, job.name).kind != wanted.kind:
            continue
        newest = list(_newest(store, wanted, job.name, min(_OF_EACH, _LOOK_CHECKPOINTS - read)))
        read += len(newest)
        hits += [checkpoint for checkpoint in newest if _is_hit(wanted, checkpoint)]
    return hits, read


def _newest(store: CheckpointManager, wanted: Wanted, job: str, limit: int) -> Iterator[Checkpoint]:
    """With a tag and its value, found by the index; else all."""
    name, equals, value = wanted.tag.partition("=")
    yield from store.list(job, tags={name: value} if equals else None, limit=limit)


def _is_hit(wanted: Wanted, checkpoint: Checkpoint) -> bool:
    if wanted.since is not None and checkpoint.created_at < wanted.since:
        return False
    if wanted.tag and wanted.tag.partition("=")[0] not in checkpoint.tags:
        return False
    if not wanted.words:
        return True
    tags = (f"{name}={value}" for name, value in checkpoint.tags.items())
    metadata = json.dumps(dict(checkpoint.metadata), ensure_ascii=False, default=str)
    return wanted.is_in(checkpoint.id, checkpoint.step, *tags, metadata)
