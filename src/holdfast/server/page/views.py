"""The pages: jobs, histories, checkpoints, comparisons, storage, activity, signing in."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Form, Query, Request
from markupsafe import Markup
from starlette.responses import Response

from holdfast.browsing import StoredState
from holdfast.cli.text import size
from holdfast.errors import CheckpointError, Corrupted, NotFound, Validation
from holdfast.manager import CheckpointManager
from holdfast.model import Checkpoint, Job, parse_name
from holdfast.pipeline.owner import newest_status
from holdfast.retention import RetentionPolicy
from holdfast.server.auth import find_token, forget_token, keep_token, public, service_of
from holdfast.server.runner import resume
from holdfast.server.tasks import Report

from . import states
from .charts import sparkline, timeline
from .comparing import shown_changes
from .graph import MAX_LANES, lanes_of, lay_out
from .rendering import NAMESPACE, Administrator, PageRoute, Reader, Writer, answer, page, pretty, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

_JOBS = 50
_ROWS = 100
_SPARK = 40
_EVENTS = 200
_GROWN = 20
_NEXT = re.compile(r"/(?!/)[A-Za-z0-9._~!$&'()*+,;=:@%/-]*")

Text = Annotated[str, Query(max_length=4096)]
_outlines = states.Outlines()


# --- jobs ---


@dataclass(frozen=True, slots=True)
class JobRow:
    job: Job
    status: str
    spark: Markup


@router.get("/")
async def jobs(
    request: Request,
    access: Reader,
    prefix: Annotated[str, Query(max_length=128)] = "",
    after: Annotated[str | None, Query(max_length=128)] = None,
) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        found = store.jobs(prefix, _JOBS + 1, after or None)
        rows = [_job_row(store, job) for job in found[:_JOBS]]
        following = rows[-1].job.name if len(found) > _JOBS else None
        return {"jobs": rows, "prefix": prefix, "after": following}

    return await answer(request, access, "jobs.html", facts)


def _job_row(store: CheckpointManager, job: Job) -> JobRow:
    recent = store.list(job.name, limit=_SPARK)
    status = recent[-1].metadata if recent else {}
    kind = status.get("kind")
    if kind == "execution":
        text = str(status.get("state", ""))
    else:
        run = newest_status(store, job.name) if kind is not None else None
        text = str(run.metadata.get("status", "")) if run is not None else ""
    label = f"size of the last {len(recent)} checkpoints, the newest {size(recent[-1].size_bytes)}" if recent else ""
    return JobRow(job, text, sparkline([c.size_bytes for c in recent], label))


@router.get("/jobs/{job}")
async def job(
    request: Request,
    access: Reader,
    job: str,
    before: Annotated[int | None, Query(ge=1)] = None,
    lanes: Annotated[str, Query(max_length=130 * MAX_LANES)] = "",
    rows: bool = False,
) -> Response:
    """A job's history; with `rows`, only the older part of it, to be put below."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        found = _job(store, job)
        newest_first = store.list(job, limit=_ROWS + 1, before=before)[::-1]
        shown, older = newest_first[:_ROWS], newest_first[_ROWS:]
        open_lanes = [parse_name("checkpoint ID", each) if each else "" for each in lanes.split(",")] if lanes else []
        laid, left = lay_out(shown, open_lanes[:MAX_LANES], older[0].id if older else None)
        base = f"{request.scope.get('root_path', '')}/jobs/{quote(job, safe='')}"
        cursor = {"before": shown[-1].seq, "lanes": ",".join(left)} if older else None
        run = newest_status(store, job)
        marks = [(c.created_at, f"#{c.seq} {c.step[:80]}", c.is_pinned or bool(c.tags)) for c in reversed(shown)]
        return {
            "job": found,
            "rows": laid,
            "lanes": lanes_of(laid),
            "older_url": f"{base}?{urlencode({**cursor, 'rows': 'true'})}" if cursor else None,
            "older_page": f"{base}?{urlencode(cursor)}" if cursor else None,
            "timeline": timeline(marks),
            "policy": _in_words(found.retention),
            "run": str(run.metadata.get("status")) if run is not None else None,
        }

    return await answer(request, access, "history_rows.html" if rows else "job.html", facts)


def _job(store: CheckpointManager, name: str) -> Job:
    found = store.jobs(parse_name("job", name), 1)
    if not found or found[0].name != name:
        raise NotFound(f"there is no job {name}", hint="it may have been misspelt; the list of jobs shows all")
    return found[0]


@router.get("/jobs/{job}/cleanup")
async def plan_cleanup(
    request: Request, access: Reader, job: str, keep_last: Annotated[int, Query(ge=1, le=100)]
) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        plan = store.apply(RetentionPolicy(keep_last=keep_last), job=job)
        return {"going": plan.delete, "kept": len(plan.keep), "frees": plan.frees_bytes}

    return await answer(request, access, "cleanup_plan.html", facts)


@router.get("/jobs/{job}/retention")
async def plan_retention(request: Request, access: Reader, job: str) -> Response:
    """What the job's own policy would delete now."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        found = _job(store, job)
        if found.retention is None:
            raise NotFound(f"job {job} has no retention policy", hint="store.set_retention gives it one")
        plan = store.apply(RetentionPolicy.from_json(found.retention), job=job)
        return {"going": plan.delete, "kept": len(plan.keep), "frees": plan.frees_bytes}

    return await answer(request, access, "cleanup_plan.html", facts)


def _in_words(policy: str | None) -> str:
    """The rules of a policy, such as "keep last 5, daily 3"."""
    rules: dict[str, object] = json.loads(policy) if policy else {}
    return ", ".join(f"{name.replace('_', ' ')} {_rule_in_words(rule)}" for name, rule in rules.items())


def _rule_in_words(rule: object) -> str:
    if isinstance(rule, dict):
        return " ".join(f"{name}: {number}" for name, number in rule.items())
    return " ".join(map(str, rule)) if isinstance(rule, list) else str(rule)


@router.post("/jobs/{job}/cleanup")
async def clean_up(
    request: Request, access: Writer, job: str, keep_last: Annotated[int, Form(ge=1, le=100)]
) -> Response:
    gone = await access.ask(lambda store: store.cleanup(job, keep_last))
    return see(request, f"/jobs/{quote(job, safe='')}", f"{gone:,} checkpoints deleted.")


@router.post("/jobs/{job}/copy")
async def copy(request: Request, access: Writer, job: str, new_job: Annotated[str, Form(max_length=200)]) -> Response:
    made = await access.ask(lambda store: store.copy(job, new_job))
    return see(request, f"/jobs/{quote(new_job, safe='')}", f"{len(made):,} checkpoints copied; they share every byte.")


# --- checkpoints ---


@router.get("/checkpoints/{checkpoint_id}")
async def checkpoint(request: Request, access: Reader, checkpoint_id: str) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        found = store.get(checkpoint_id)
        level, problem = None, ""
        try:
            level = states.level_at(_outlines.open(store, found.id), "")
        except Corrupted as error:
            problem = str(error)
        before = store.list(found.job, limit=1, before=found.seq)
        return {
            "c": found,
            "level": level,
            "problem": problem,
            "previous": before[0].id if before else found.parent,
            "metadata_json": pretty(dict(found.metadata)),
        }

    return await answer(request, access, "checkpoint.html", facts)


@router.get("/checkpoints/{checkpoint_id}/level")
async def level(
    request: Request, access: Reader, checkpoint_id: str, path: Text = "", start: Annotated[int, Query(ge=0)] = 0
) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        state = _outlines.open(store, checkpoint_id)
        return {"c": state.checkpoint, "level": states.level_at(state, path, start)}

    return await answer(request, access, "level.html", facts)


@router.get("/checkpoints/{checkpoint_id}/array")
async def array(request: Request, access: Reader, checkpoint_id: str, path: Text) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        state = _outlines.open(store, checkpoint_id)
        return {"c": state.checkpoint, "facts": states.array_at(state, path)}

    return await answer(request, access, "array.html", facts)


@router.get("/checkpoints/{checkpoint_id}/text")
async def text(request: Request, access: Reader, checkpoint_id: str, path: Text) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        shown, length = states.text_at(_outlines.open(store, checkpoint_id), path)
        return {"text": shown, "length": length}

    return await answer(request, access, "text.html", facts)


@router.get("/checkpoints/{checkpoint_id}/thumbnail.png")
async def thumbnail(access: Reader, checkpoint_id: str, path: Text) -> Response:
    def draw(store: CheckpointManager) -> bytes:
        state: StoredState = _outlines.open(store, checkpoint_id)
        return states.thumbnail_at(state, path)

    return Response(await access.ask(draw), media_type="image/png")


@router.post("/checkpoints/{checkpoint_id}/pin")
async def pin(
    request: Request, access: Writer, checkpoint_id: str, pinned: Annotated[str, Form(pattern="^(yes|no)$")]
) -> Response:
    await access.ask(lambda store: store.pin(checkpoint_id, pinned == "yes"))
    return see(request, _address(checkpoint_id), "Pinned." if pinned == "yes" else "Unpinned.")


@router.post("/checkpoints/{checkpoint_id}/tag")
async def tag(
    request: Request,
    access: Writer,
    checkpoint_id: str,
    name: Annotated[str, Form(max_length=200)],
    value: Annotated[str, Form(max_length=2000)] = "",
    remove: Annotated[str, Form(max_length=3)] = "",
) -> Response:
    await access.ask(lambda store: store.tag(checkpoint_id, **{name: None if remove else value}))
    return see(request, _address(checkpoint_id), f"Tag {name} {'removed' if remove else 'set'}.")


@router.post("/checkpoints/{checkpoint_id}/delete")
async def delete(request: Request, access: Writer, checkpoint_id: str) -> Response:
    def remove(store: CheckpointManager) -> Checkpoint:
        found = store.get(checkpoint_id)
        store.delete(found.job, found.id)
        return found

    gone = await access.ask(remove)
    return see(request, f"/jobs/{quote(gone.job, safe='')}", f"{gone.id} is deleted.")


@router.post("/checkpoints/{checkpoint_id}/branch")
async def branch(
    request: Request, access: Writer, checkpoint_id: str, job: Annotated[str, Form(max_length=200)]
) -> Response:
    made, _ = await access.ask(lambda store: store.resume_from(checkpoint_id, job))
    return see(request, _address(made.id), f"This is the newest checkpoint of {made.job} now.")


@router.post("/checkpoints/{checkpoint_id}/resume")
async def restore_and_resume(request: Request, access: Writer, checkpoint_id: str) -> Response:
    found = await access.ask(lambda store: store.get(checkpoint_id))
    state = await access.ask(lambda store: store.load(found.id))
    await resume(access.service, found.job, state)
    return see(request, _address(found.id), f"{found.job} was resumed from here.")


def _address(checkpoint_id: str) -> str:
    return f"/checkpoints/{quote(checkpoint_id, safe='')}"


@router.get("/compare")
async def compare(
    request: Request, access: Reader, id: Annotated[Sequence[str], Query(min_length=1, max_length=100)], keep: str = ""
) -> Response:
    """Two checkpoints, the older first unless `keep` is given; one is compared with the newest of its job."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        chosen = [store.get(each) for each in id[:2]]
        if len(id) > 2 or not chosen:
            raise Validation("two checkpoints can be compared", hint="choose two in the history of a job")
        if len(chosen) == 1:
            chosen += store.list(chosen[0].job, limit=1)
        old, new = chosen
        if not keep and old.job == new.job and old.seq > new.seq:
            old, new = new, old
        diff = store.diff(old.id, new.id)
        return {"old": old, "new": new, "diff": diff, "changes": shown_changes(diff.changes)}

    return await answer(request, access, "compare.html", facts)


# --- the store ---


@router.get("/storage")
async def storage(request: Request, access: Reader) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        numbers = store.stats()
        largest = sorted(store.jobs(limit=1000), key=lambda job: -job.stored_bytes)[:_GROWN]
        grown = [
            {
                "name": job.name,
                "stored_bytes": job.stored_bytes,
                "size_bytes": job.size_bytes,
                "ratio": f"{max(0.0, 1 - job.stored_bytes / job.size_bytes):.0%}" if job.size_bytes else "",
            }
            for job in largest
        ]
        return {"numbers": _numbers(numbers), "grown": grown, "tasks": access.service.tasks.all(access.namespace)[:10]}

    return await answer(request, access, "storage.html", facts)


def _numbers(numbers: Any) -> list[tuple[str, str, str]]:
    saved, held = numbers["size_bytes"], numbers["stored_bytes"]
    garbage = max(0, numbers["pack_bytes"] - (numbers["chunk_bytes"] - numbers["inline_bytes"]))
    return [
        ("Checkpoints", f"{numbers['checkpoints']:,}", f"in {numbers['jobs']:,} jobs"),
        ("States saved", size(saved), "as the jobs see them"),
        ("Stored", size(held), "each piece once, compressed"),
        ("Deduplication and compression", f"{saved / held:.1f} ×" if held else "–", "saved : stored"),
        ("Packs", size(numbers["pack_bytes"]), f"{numbers['packs']:,} files"),
        ("gc could free", size(garbage), "at most"),
    ]


@router.post("/storage/{kind}")
async def care(request: Request, access: Administrator, kind: Literal["verify", "gc"]) -> Response:
    def work(store: CheckpointManager, report: Report) -> dict[str, Any]:
        return asdict(store.gc(progress=report) if kind == "gc" else store.verify(progress=report))

    await access.ask(lambda store: access.service.tasks.start(kind, store, work))
    return see(request, "/storage", f"{kind} is at work.")


@router.get("/activity")
async def activity(request: Request, access: Reader) -> Response:
    def facts(store: CheckpointManager) -> dict[str, Any]:
        return {"events": store.events(limit=_EVENTS, newest=True)[::-1]}

    return await answer(request, access, "activity.html", facts)


# --- signing in ---


@router.get("/login")
@public
async def login(request: Request, next: Annotated[str, Query(max_length=2000)] = "") -> Response:
    return page(request, None, "login.html", {"problem": "", "next": next})


@router.post("/login")
@public
async def sign_in(
    request: Request,
    token: Annotated[str, Form(max_length=200)],
    next: Annotated[str, Form(max_length=2000)] = "",
) -> Response:
    if await find_token(service_of(request), token.strip()) is None:
        facts = {"problem": "This token is unknown, expired or revoked.", "next": next}
        return page(request, None, "login.html", facts, status=401)
    root = request.scope.get("root_path", "")
    wanted = next.removeprefix(root) if _NEXT.fullmatch(next) else "/"
    response = see(request, wanted or "/")
    keep_token(request, response, token.strip())
    return response


@router.post("/logout")
async def sign_out(request: Request, access: Reader) -> Response:
    response = see(request, "/login")
    forget_token(request, response)
    return response


@router.post("/namespace")
async def choose_namespace(
    request: Request, access: Reader, namespace: Annotated[str, Form(max_length=128)]
) -> Response:
    if namespace not in access.caller.namespaces:
        raise CheckpointError(f"namespace {namespace} is not open to you", hint="ask for a token for it")
    response = see(request, "/")
    root = request.scope.get("root_path", "")
    response.set_cookie(NAMESPACE, namespace, path=root or "/", httponly=True, samesite="strict")
    return response
