"""Retention: the policy of a job, or one for all jobs now; what it would delete is shown before it is told to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import Response

from kedge.care.policies import policy_in_words, rules_of
from kedge.care.records import needed_for
from kedge.care.retention import RetentionPolicy
from kedge.errors import Validation
from kedge.manager import CheckpointManager
from kedge.model import CheckpointLevel
from kedge.terminal.text import count_of

from .memory import memory_of
from .templates import PageRoute, Reader, Writer, answer, find_job, see

router = APIRouter(route_class=PageRoute, include_in_schema=False)

COUNTS = ("keep_last", "hourly", "daily", "weekly", "monthly")
LEVELS = ("keep_last_per_level", "min_per_level")
RULES = (*COUNTS, "keep_within", "keep_tags", *LEVELS)
_MOST_PLANNED = 200_000  # checkpoints; more are for the command line, which shows progress
_MOST_JOBS = 1000
_LONGEST = 400

Part = Annotated[Literal["", "plan"], Query()]


def _tried(
    keep_last: str = "",
    hourly: str = "",
    daily: str = "",
    weekly: str = "",
    monthly: str = "",
    keep_within: str = "",
    keep_tags: str = "",
    keep_last_per_level: str = "",
    min_per_level: str = "",
) -> dict[str, str]:
    """The policy in an address, as somebody typed it."""
    return _given(locals())


Tried = Annotated[dict[str, str], Depends(_tried)]


@router.get("/jobs/{job}/retention")
async def retention(request: Request, access: Reader, job: str, tried: Tried, part: Part = "") -> Response:
    """A job's policy, or the one that is being tried, with what it would delete now."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        record = find_job(store, job)
        rules = tried or rules_of(record.retention)
        return {
            "job": job,
            "rules": rules,
            "stored": policy_in_words(record.retention),
            **_previewed(request, store, rules, job),
        }

    return await answer(request, access, "plan.html" if part else "retention.html", facts)


@router.post("/jobs/{job}/retention")
async def change_retention(request: Request, access: Writer, job: str) -> Response:
    form = {name: str(value) for name, value in (await request.form()).items()}
    do = form.get("do", "")
    if do == "forget":
        text = "The job has no policy of its own any more."
        await access.ask(lambda store: store.set_retention(job, None))
    elif do == "store":
        policy = policy_of(_given(form))
        await access.ask(lambda store: store.set_retention(job, policy))
        text = "The policy is saved with the job and applied after each save."
    elif do == "apply":
        policy = policy_of(_given(form))
        done = await access.ask(lambda store: store.apply(policy, job=job, dry_run=False))
        text = _deleted(len(done.delete))
    else:
        raise Validation("that is not something to do with a policy", hint="go back and choose again")
    return see(request, f"/jobs/{quote(job, safe='')}" + ("" if do == "apply" else "/retention"), text)


@router.get("/retention")
async def retention_of_all(request: Request, access: Reader, rules: Tried, part: Part = "") -> Response:
    """One policy tried on all jobs, and the jobs that have one of their own."""

    def facts(store: CheckpointManager) -> dict[str, Any]:
        owners = [(job.name, policy_in_words(job.retention)) for job in store.jobs(limit=_MOST_JOBS) if job.retention]
        return {"job": None, "rules": rules, "stored": "", "owners": owners, **_previewed(request, store, rules, None)}

    return await answer(request, access, "plan.html" if part else "retention.html", facts)


@router.post("/retention")
async def clean_all(request: Request, access: Writer) -> Response:
    form = {name: str(value) for name, value in (await request.form()).items()}
    policy = policy_of(_given(form))
    done = await access.ask(lambda store: store.apply(policy, dry_run=False))
    return see(request, "/retention", _deleted(len(done.delete)))


def _deleted(count: int) -> str:
    return f"{count_of(count, 'checkpoint')} deleted. The next gc frees {'its' if count == 1 else 'their'} space."


def _previewed(
    request: Request, store: CheckpointManager, rules: Mapping[str, str], job: str | None
) -> dict[str, object]:
    """What the rules would delete, or what is wrong with them."""
    warning = needed_for(store.catalogue, job) if job is not None else ""
    facts: dict[str, object] = {"plan": None, "problem": "", "warning": warning, "following": ""}
    if not rules:
        return facts
    if job is None and store.stats()["checkpoints"] > _MOST_PLANNED:
        return {**facts, "problem": "There is too much to look through here: kedge cleanup --all-jobs does it."}
    try:
        facts["plan"] = memory_of(request).previews.look(store, policy_of(rules), job)
    except Validation as error:
        return {**facts, "problem": f"{error.message}. {error.hint.capitalize()}."}
    return {**facts, "following": f"{request.url.path}?{urlencode({**rules, 'part': 'plan'})}"}


def _given(fields: Mapping[str, str]) -> dict[str, str]:
    """The rules somebody has filled in."""
    return {name: text for name in RULES if (text := str(fields.get(name, "")).strip())}


def policy_of(rules: Mapping[str, str]) -> RetentionPolicy:
    """The policy that texts of a form mean; Validation where they mean none."""
    wanted: dict[str, Any] = {}
    for name, text in rules.items():
        if len(text) > _LONGEST:
            raise Validation(f"{name} is too long", hint="use fewer of them")
        if name in COUNTS:
            wanted[name] = _count(name, text)
        elif name == "keep_tags":
            wanted[name] = text.replace(",", " ").split()
        elif name in LEVELS:
            pairs = (pair.partition("=") for pair in text.replace(",", " ").split())
            wanted[name] = {level: _count(name, number) for level, _, number in pairs}
        else:
            wanted[name] = text
    return RetentionPolicy(**wanted)


def _count(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        shown = name.replace("_", " ")
        levels = ", ".join(CheckpointLevel)
        hint = f"write it like step=10, stage=3; levels are {levels}" if name in LEVELS else "use a whole number"
        raise Validation(f"“{text[:40]}” is no number for {shown}", hint=hint)
    return int(text)
