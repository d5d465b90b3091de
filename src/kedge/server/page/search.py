"""Find anything: jobs, runs, executions, checkpoints, by name, step, tag or metadata, in any part of their text.

One look reads a bounded number of jobs in the order of their names, of each a bounded number of its newest checkpoints,
and says how far it came; the next one goes on behind it, and passes over no job that was not looked at. When all jobs
were looked at, looks at older checkpoints follow, job by job. So each costs the same however much there is (I6).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from itertools import islice, pairwise
from operator import attrgetter
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Job

from .kinds import STATUSES, About, Kind, about, named_kind
from .templates import PageRoute, Reader, answer
from .views import views_of

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_LOOK_JOBS = 1000  # at once
_LOOK_ABOUT = 300  # of them, asked what they are
_LOOK_CHECKPOINTS = 1500
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

    @property
    def tags(self) -> dict[str, str] | None:
        """What the index finds by itself: a tag with its value."""
        name, equals, value = self.tag.partition("=")
        return {name: value} if equals else None

    def is_recent(self, moment: datetime) -> bool:
        return self.since is None or moment >= self.since

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
    number: int  # of hits; fewer may be shown
    after: str | None = None  # the next look begins behind this job
    older: str | None = None  # the next look is at older checkpoints and begins here: job:number
    is_deep: bool = False  # there are older checkpoints that were not read


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
    older: Annotated[str | None, Query(pattern="^.{0,128}:[0-9]{1,17}$")] = None,
    passed: Annotated[int, Query(ge=0, le=10**12)] = 0,
    seen: Annotated[int, Query(ge=0, le=10**15)] = 0,
    deep: Literal["", "yes"] = "",
) -> Response:
    """`after` and `older` say where this look begins, `passed` and `seen` how much the looks before it have read.

    A look that has found nothing is followed by the next one, without being asked.
    """
    wanted = Wanted(q.lower().split(), kind, status, tag.strip(), _begin(since))
    chosen = {"q": q, "kind": kind, "status": status, "tag": tag, "since": since, "sort": sort}

    def facts(store: CheckpointManager) -> dict[str, Any]:
        hits = None
        if any((q, kind, status, tag, since)):
            hits = (
                find_older(store, wanted, sort, older) if older else find(store, wanted, sort, after, deep=bool(deep))
            )
        read = Read(passed + hits.jobs_read, seen + hits.checkpoints_read) if hits else Read(0, 0)
        given = {name: value for name, value in chosen.items() if value}
        more = _following(given, hits, read) if hits else None
        options: dict[str, Any] = {
            "views": views_of(access) if hits is None else [],
            "kinds": Kind,
            "statuses": STATUSES,
            "spans": SPANS,
            "sorts": SORTS,
        }
        explained = [(checkpoint, places(wanted.words, checkpoint)) for checkpoint in hits.checkpoints] if hits else []
        return {**chosen, **options, "hits": hits, "explained": explained, "more": more, "read": read}

    return await answer(request, access, "search.html", facts)


@dataclass(frozen=True, slots=True)
class Read:
    jobs: int
    checkpoints: int


def _begin(since: str) -> datetime | None:
    return datetime.now(UTC) - SPANS[since] if since else None


def _following(given: Mapping[str, str], hits: Hits, read: Read) -> str | None:
    """The address of the next look."""
    if hits.after is None and hits.older is None:
        return None
    place = {"older": hits.older} if hits.older else {"after": hits.after, "deep": "yes" if hits.is_deep else ""}
    counts = {"passed": read.jobs, "seen": read.checkpoints}
    return f"/search?{urlencode({**given, **{name: value for name, value in place.items() if value}, **counts})}"


def find(store: CheckpointManager, wanted: Wanted, sort: str, after: str | None, *, deep: bool = False) -> Hits:
    """A look at the jobs behind `after`; `deep`: an earlier one has left out older checkpoints."""
    jobs = store.jobs("", _LOOK_JOBS, after)
    named = [job for job in jobs if wanted.is_recent(job.updated_at) and _may_be(wanted, job.name)]
    known = cache(partial(about, store))
    matching = [] if wanted.tag else [job for job in named if wanted.is_in(job.name)]
    asked = matching[:_LOOK_ABOUT] if wanted.kind or wanted.status else matching
    hits = [job for job in asked if asked is matching or _is(wanted, known(job.name))]
    seen = _checkpoints(store, wanted, named, known) if wanted.is_of_checkpoints else _Seen(len(named))
    hits.sort(key=attrgetter(*_JOB_KEYS[sort]), reverse=sort != "name")
    left = {job.name for job in (*matching[len(asked) :], *named[seen.jobs :])}
    following = jobs[-1].name if len(jobs) == _LOOK_JOBS else None
    if left:  # not the first one, which is always looked at
        following = next(job.name for job, behind in pairwise(jobs) if behind.name in left)
    shown = [JobHit(job, known(job.name)) for job in hits[:_SHOWN]]
    is_deep = deep or seen.has_older
    older = ":0" if following is None and is_deep else None
    number = len(hits) + len(seen.hits)
    return Hits(shown, _sorted(seen.hits, sort), len(jobs), seen.checkpoints, number, following, older, is_deep)


_JOB_KEYS = {"updated": ("updated_at",), "name": ("name",), "size": ("size_bytes",)}
_CHECKPOINT_KEYS = {"updated": ("created_at",), "name": ("job", "seq"), "size": ("size_bytes",)}


def _sorted(checkpoints: list[Checkpoint], sort: str) -> Sequence[Checkpoint]:
    return sorted(checkpoints, key=attrgetter(*_CHECKPOINT_KEYS[sort]), reverse=sort != "name")[:_SHOWN]


def find_older(store: CheckpointManager, wanted: Wanted, sort: str, older: str) -> Hits:
    """A look at the checkpoints that `find` has left out: of long histories, in the order of their jobs' names."""
    name, _, below = older.rpartition(":")
    known = cache(partial(about, store))
    jobs = store.jobs("", _LOOK_JOBS, name or None)
    long = [job.name for job in jobs if job.checkpoints > _OF_EACH and _may_be(wanted, job.name)]
    places = [(name, int(below))] * bool(int(below)) + [(job, 0) for job in long]
    seen, following = _Seen(), ""
    for job, place in places:
        if seen.checkpoints >= _LOOK_CHECKPOINTS or seen.asked >= _LOOK_ABOUT:
            break
        seen.asked += bool(wanted.kind)
        is_wanted = not wanted.kind or _is(wanted, known(job))
        left = _read_older(store, wanted, job, place, seen) if is_wanted else 0
        following = f"{job}:{left}"
        if left:
            break
    else:
        following = f"{jobs[-1].name}:0" if len(jobs) == _LOOK_JOBS else ""
    return Hits([], _sorted(seen.hits, sort), 0, seen.checkpoints, len(seen.hits), older=following or None)


def _read_older(store: CheckpointManager, wanted: Wanted, job: str, below: int, seen: _Seen) -> int:
    """Read a job's checkpoints before this number (0: before its newest ones); before which number some are left."""
    if not below:
        newest = store.list(job, tags=wanted.tags, limit=_OF_EACH)
        seen.checkpoints += len(newest)
        below = newest[0].seq if len(newest) == _OF_EACH else 0
    while below and seen.checkpoints < _LOOK_CHECKPOINTS:
        page = store.list(job, tags=wanted.tags, limit=_OF_EACH, before=below)
        seen.checkpoints += len(page)
        seen.hits += [checkpoint for checkpoint in page if _is_hit(wanted, checkpoint)]
        is_over = len(page) < _OF_EACH or not wanted.is_recent(page[0].created_at)  # and so is what was saved before
        below = 0 if is_over else page[0].seq
    return below


def _may_be(wanted: Wanted, job: str) -> bool:
    """What a name alone can rule out."""
    kind = named_kind(job)
    if kind is None:
        return wanted.kind in ("", Kind.JOB, Kind.RUN, Kind.WORKFLOW)
    return wanted.kind == kind or (not wanted.kind and kind is not Kind.INTERNAL)


def _is(wanted: Wanted, job: About) -> bool:
    return wanted.kind in ("", job.kind) and wanted.status in ("", job.status)


@dataclass(slots=True)
class _Seen:
    jobs: int = 0
    checkpoints: int = 0
    asked: int = 0  # jobs, what they are
    has_older: bool = False
    hits: list[Checkpoint] = field(default_factory=list)


def _checkpoints(store: CheckpointManager, wanted: Wanted, jobs: Sequence[Job], known: Callable[[str], About]) -> _Seen:
    """The newest of each job."""
    seen = _Seen()
    for job in jobs:
        if seen.checkpoints >= _LOOK_CHECKPOINTS or seen.asked >= _LOOK_ABOUT:
            break
        seen.jobs += 1
        if wanted.kind:
            seen.asked += 1
            if not _is(wanted, known(job.name)):
                continue
        newest = store.list(job.name, tags=wanted.tags, limit=_OF_EACH + 1)
        seen.has_older |= len(newest) > _OF_EACH
        newest = newest[-_OF_EACH:]
        seen.checkpoints += len(newest)
        seen.hits += [checkpoint for checkpoint in newest if _is_hit(wanted, checkpoint)]
    return seen


def _is_hit(wanted: Wanted, checkpoint: Checkpoint) -> bool:
    if not wanted.is_recent(checkpoint.created_at):
        return False
    if wanted.tag and wanted.tag.partition("=")[0] not in checkpoint.tags:
        return False
    if not wanted.words:
        return True
    tags = (f"{name}={value}" for name, value in checkpoint.tags.items())
    metadata = json.dumps(dict(checkpoint.metadata), ensure_ascii=False, default=str)
    return wanted.is_in(checkpoint.id, checkpoint.step, *tags, metadata)


_PLACES = 3


def places(words: Sequence[str], checkpoint: Checkpoint) -> list[str]:
    """The metadata that a checkpoint was found by, where its name and its tags do not show why."""
    shown = "\n".join((checkpoint.step, *(f"{name}={value}" for name, value in checkpoint.tags.items()))).lower()
    hidden = [word for word in words if word not in shown]
    facts = (f"{name}: {_short(value)}" for name, value in checkpoint.metadata.items())
    return list(islice((fact for fact in facts if any(word in fact.lower() for word in hidden)), _PLACES))


def _short(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:79] + "…"
