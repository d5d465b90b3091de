"""Jobs: their list, the history of one as a graph, cleaning up, copying, and changing many checkpoints at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Form, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from kedge.care.policies import policy_in_words
from kedge.care.retention import RetentionPolicy
from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointLevel, Job, parse_name
from kedge.terminal.series import numbers_in
from kedge.terminal.text import count_of, size

from .charts import sparkline, timeline
from .conversation import newest_conversation
from .generations import generations_of
from .graph import MAX_LANES, Row, lanes_of, lay_out
from .kinds import About, Kind, about, jobs_of
from .memory import memory_of
from .templates import PageRoute, Reader, Writer, answer, find_job, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_JOBS = 50
_ROWS = 50
_THREAD_ROWS = 20  # below the conversation
_MOST_ROWS = 2000  # of a part of a history that is drawn again; a longer one is left as it is
_SPARK = 40
_SUBGRAPHS = 50
_KINDS = (Kind.JOB, Kind.RUN, Kind.WORKFLOW, Kind.THREAD, Kind.CONTAINER)  # those that people look for

Seq = Annotated[int | None, Query(ge=1, le=(1 << 53) - 1)]
Start = Annotated[int | None, Query(ge=0, le=(1 << 53) - 1)]


@dataclass(frozen=True, slots=True)
class JobRow:
    job: Job
    about: About
    note: str
    spark: Markup


# Jobs that Kedge keeps for itself, in words.
_OWN = {"llm:cache": "cached LLM answers", "llm:calls": "the cost of LLM calls", "llm:flights": "LLM calls in progress"}


@router.get("/")
async def jobs(
    request: Request,
    access: Reader,
    prefix: Annotated[str, Query(max_length=128)] = "",
    kind: Literal["", "job", "run", "workflow", "thread", "container", "queue", "internal"] = "",
    after: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        page, following = jobs_of(store, kind, prefix, after or None, _JOBS)
        rows = [_job_row(store, job, is_) for job, is_ in page]
        chosen = {
            "prefix": prefix,
            "kind": kind,
            "kinds": [("", "all"), *((choice, f"{choice}s") for choice in _KINDS)],
        }
        return {"jobs": rows, **chosen, "after": following, "is_first": not after}

    return await answer(request, access, "jobs.html", facts)


def _job_row(store: CheckpointManager, job: Job, is_: About) -> JobRow:
    recent = store.list(job.name, limit=_SPARK)
    label = f"size of the last {len(recent)} checkpoints, the newest {size(recent[-1].size_bytes)}" if recent else ""
    spark = sparkline([c.size_bytes for c in recent], label)
    return JobRow(job, is_, _OWN.get(job.name, ""), spark)


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a history. It is drawn again by itself when the job changes, down to the same row."""

    name: str
    rows: Sequence[Row]
    lanes: int
    lanes_left: str  # open below it: with them the next part begins
    address: str  # of this part as it will be
    older: str | None  # of the next part
    older_page: str | None


@router.get("/jobs/{job}")
async def job(
    request: Request,
    access: Reader,
    job: str,
    before: Seq = None,
    down_to: Seq = None,
    lanes: Annotated[str, Query(max_length=130 * MAX_LANES)] = "",
    messages: Start = None,
    every: bool = False,
    part: Literal["", "about", "rows"] = "",
) -> Response:
    """A job and its history, newest first; a thread as a conversation (from number `messages` on), and a container by
    its generations.

    `rows` is a part of the history alone: below `before`, and with `down_to` no further than that. Following a job
    asks for the same part again, so that what was loaded stays, however much has come on top. What tasks of a thread
    wrote on the way to its checkpoints is only there with `every`.
    """
    base = f"{request.scope.get('root_path', '')}/jobs/{quote(job, safe='')}"

    def facts(store: CheckpointManager) -> dict[str, Any]:
        record = find_job(store, job)
        is_ = about(store, job)
        level = CheckpointLevel.STEP if is_.kind is Kind.THREAD and not every else None
        shown, older = _read(store, job, before, down_to, level)
        history = _part(base, shown, older, before, lanes, down_to or record.last_seq + 1, every)
        marks = [(c.created_at, f"#{c.seq} {c.step[:80]}", c.is_pinned or bool(c.tags)) for c in reversed(shown)]
        return {
            "job": record,
            "history": history,
            "is_redrawn": down_to is not None,
            "is_first": before is None,
            "timeline": timeline(marks[-_ROWS:]),
            "policy": policy_in_words(record.retention),
            "about": is_,
            "hides_some": level is not None,
            **({} if part else _as_what_it_is(request, store, job, is_, before, messages)),
            "has_numbers": any(True for c in shown for _ in numbers_in(c.metadata)),
        }

    if part == "rows" and down_to is not None and await access.ask(lambda store: _is_long(store, job, before, down_to)):
        return Response(status_code=204)  # too long to be drawn again: what is shown stays as it is
    template = {"": "job.html", "about": "about_job.html", "rows": "history_part.html"}[part]
    return await answer(request, access, template, facts)


def _as_what_it_is(
    request: Request, store: CheckpointManager, job: str, is_: About, before: int | None, start: int | None
) -> dict[str, object]:
    """What the page of a thread, or of a container, shows above its history."""
    outlines = memory_of(request).outlines
    is_thread, is_container = is_.kind is Kind.THREAD, is_.kind is Kind.CONTAINER
    return {
        "conversation": newest_conversation(store, outlines, job, start) if is_thread else None,
        "subgraphs": [subgraph.name for subgraph in store.jobs(f"{job}@", limit=_SUBGRAPHS)] if is_thread else [],
        "generations": generations_of(store, outlines, job, before) if is_container else None,
    }


def _read(
    store: CheckpointManager, job: str, before: int | None, down_to: int | None, level: CheckpointLevel | None
) -> tuple[list[Checkpoint], Checkpoint | None]:
    """Rows, newest first, and the checkpoint saved before the last of them."""
    if down_to is None:
        most = _ROWS if level is None else _THREAD_ROWS
        checkpoints = store.list(job, limit=most + 1, before=before, level=level)[::-1]
        return checkpoints[:most], checkpoints[most] if len(checkpoints) > most else None
    checkpoints = store.list(job, after=down_to - 1, before=before, limit=_MOST_ROWS, level=level)[::-1]
    older = store.list(job, before=down_to, limit=1, level=level)
    return checkpoints, older[0] if older else None


def _is_long(store: CheckpointManager, job: str, before: int | None, down_to: int) -> bool:
    newest = before - 1 if before is not None else find_job(store, job).last_seq
    return newest - down_to >= _MOST_ROWS


def _part(
    base: str,
    shown: Sequence[Checkpoint],
    older: Checkpoint | None,
    before: int | None,
    lanes: str,
    empty_at: int,
    every: bool,  # whether nothing is left out
) -> Part:
    open_lanes = [parse_name("checkpoint ID", lane) if lane else "" for lane in lanes.split(",")] if lanes else []
    laid, left = lay_out(shown, open_lanes[:MAX_LANES], older.id if older else None)
    lowest = shown[-1].seq if shown else empty_at
    filters = {"every": "yes"} if every else {}
    above: dict[str, object] = {"part": "rows", "lanes": lanes, "down_to": lowest, **filters}
    if before is not None:
        above["before"] = before
    lanes_left = ",".join(left)
    below = {"before": lowest, "lanes": lanes_left, **filters}
    return Part(
        f"rows-{before or 'newest'}",
        laid,
        lanes_of(laid),
        lanes_left,
        f"{base}?{urlencode(above)}",
        f"{base}?{urlencode({**below, 'part': 'rows'})}" if older else None,
        f"{base}?{urlencode(below)}" if older else None,
    )


@router.get("/jobs/{job}/cleanup")
async def plan_cleanup(
    request: Request, access: Reader, job: str, keep_last: Annotated[int, Query(ge=1, le=100)]
) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        find_job(store, job)
        preview = memory_of(request).previews.look(store, RetentionPolicy(keep_last=keep_last), job)
        following = f"{request.url.path}?keep_last={keep_last}"
        return {"plan": preview, "job": job, "keep_last": keep_last, "following": following}

    return await answer(request, access, "cleanup.html", facts)


@router.post("/jobs/{job}/cleanup")
async def clean_up(
    request: Request, access: Writer, job: str, keep_last: Annotated[int, Form(ge=1, le=100)]
) -> Response:
    gone = await access.ask(lambda store: store.cleanup(job, keep_last))
    return see(request, f"/jobs/{quote(job, safe='')}", f"{count_of(gone, 'checkpoint')} deleted.")


@router.post("/jobs/{job}/copy")
async def copy(request: Request, access: Writer, job: str, new_job: Annotated[str, Form(max_length=200)]) -> Response:
    made = await access.ask(lambda store: store.copy(job, new_job))
    text = f"{count_of(len(made), 'checkpoint')} copied; no byte is stored twice."
    return see(request, f"/jobs/{quote(new_job, safe='')}", text)


@router.post("/jobs/{job}/chosen")
async def change_chosen(
    request: Request,
    access: Writer,
    job: str,
    id: Annotated[list[str], Form(max_length=_MOST_ROWS)],
    do: Annotated[Literal["pin", "unpin", "tag", "delete"], Form()],
    tag: Annotated[str, Form(max_length=200)] = "",
) -> Response:
    """Pin, unpin, tag (name, or name=value) or delete checkpoints of a job; nothing if one of them is not there."""

    def change(store: CheckpointManager) -> str:
        chosen = [store.get(entry) for entry in id]
        if foreign := next((entry for entry in chosen if entry.job != job), None):
            raise NotFound(f"job {job} has no checkpoint {foreign.id}", hint="choose again on the page of the job")
        if do == "delete":
            store.catalogue.delete([entry.id for entry in chosen], actor=store.actor)
            return "deleted"
        name, _, value = tag.strip().partition("=")
        for entry in chosen:
            store.tag(entry.id, **{name: value}) if do == "tag" else store.pin(entry.id, do == "pin")
        return {"pin": "pinned", "unpin": "unpinned", "tag": f"tagged {name}"}[do]

    done = await access.ask(change)
    return see(request, f"/jobs/{quote(job, safe='')}", f"{count_of(len(id), 'checkpoint')} {done}.")
