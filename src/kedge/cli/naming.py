"""How users name checkpoints on the command line, and how shells complete those names.

ID        a checkpoint            JOB#7     the checkpoint of JOB with sequence number 7
JOB       its newest checkpoint   REF~2     the one two before REF, in the same job
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager
    from kedge.model import Checkpoint, Job

_T = TypeVar("_T")

REF_HELP = "ID, JOB (its newest), JOB#7 (by number), or any of these with ~1 for the one before."

_REF = re.compile(r"(?P<base>[^~#]+)(?:#(?P<seq>\d{1,15}))?(?:~(?P<back>\d{0,9}))?")


def find(manager: CheckpointManager, ref: str) -> Checkpoint:
    """The checkpoint a user means; NotFound says what is missing."""
    from kedge.errors import InvalidName, NotFound

    parts = _REF.fullmatch(ref)
    if parts is None:
        raise InvalidName(f"{ref[:80]!r} does not name a checkpoint", hint=REF_HELP)
    base, seq = parts["base"], parts["seq"]
    back = int(parts["back"] or 1) if parts["back"] is not None else 0
    if seq is not None:
        near = manager.list(base, limit=1, before=int(seq) + 1)
        if not near or near[0].seq != int(seq):
            raise NotFound(f"job {base} has no checkpoint #{seq}", hint=f"kedge list {base} shows what it has")
        checkpoint = near[0]
    else:
        checkpoint = _by_id(manager, base) or _newest(manager, base)
    if not back:
        return checkpoint
    earlier = manager.list(checkpoint.job, limit=back, before=checkpoint.seq)
    if len(earlier) < back:
        count = "only 1 checkpoint" if len(earlier) == 1 else f"only {len(earlier)} checkpoints"
        raise NotFound(
            f"job {checkpoint.job} has {count} before #{checkpoint.seq}",
            hint=f"kedge list {checkpoint.job} shows what it has",
        )
    return earlier[0]


def refuse_other_job(checkpoint: Checkpoint, job: str) -> None:
    from kedge.errors import NotFound

    if checkpoint.job != job:
        raise NotFound(f"checkpoint {checkpoint.id} not found in job {job}", hint=f"it belongs to job {checkpoint.job}")


def _by_id(manager: CheckpointManager, text: str) -> Checkpoint | None:
    from kedge.errors import NotFound

    try:
        return manager.get(text)
    except NotFound:
        return None


def _newest(manager: CheckpointManager, job: str) -> Checkpoint:
    """The newest checkpoint of a job that is not marked corrupted (I4)."""
    from kedge.errors import Corrupted, NotFound

    page = manager.list(job, limit=1)
    while page:
        for checkpoint in reversed(page):
            if checkpoint.status != "corrupted":
                return checkpoint
        page = manager.list(job, limit=100, before=page[0].seq)
    if damaged := manager.list(job, limit=1):
        raise Corrupted(
            f"every checkpoint of job {job} is marked corrupted, such as {damaged[0].id}",
            hint="run kedge check; put lost files back, or restore one by its ID to see what is wrong",
        )
    raise NotFound(
        f"no checkpoint and no job is called {job}",
        hint="kedge jobs lists the jobs, kedge list JOB the checkpoints of one",
    )


def job_named(manager: CheckpointManager, name: str) -> Job | None:
    """A job by its exact name."""
    from kedge.model import parse_name

    near = manager.jobs(parse_name("job", name), 1)  # sorted: of all names with this beginning it comes first
    return near[0] if near and near[0].name == name else None


def require_job(manager: CheckpointManager, name: str) -> Job:
    from kedge.errors import NotFound

    job = job_named(manager, name)
    if job is None:
        raise NotFound(f"there is no job {name}", hint="kedge jobs lists the jobs")
    return job


class JobName(click.ParamType[str]):
    """A job on the command line; shells complete it from the store."""

    name = "job"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(job.name) for job in _completing(ctx, lambda manager: manager.jobs(incomplete, 100))]


class Ref(click.ParamType[str]):
    """A checkpoint on the command line; shells complete jobs first, and the IDs of the job before it."""

    name = "ref"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        job = ctx.params.get("job")
        if isinstance(job, str):
            newest = _completing(ctx, lambda manager: manager.list(job, limit=50))
            return [CompletionItem(c.id, help=c.step) for c in reversed(newest) if c.id.startswith(incomplete)]
        return JobName().shell_complete(ctx, param, incomplete)


def _completing(ctx: click.Context, ask: Callable[[CheckpointManager], Sequence[_T]]) -> Sequence[_T]:
    """Answers from the store the half-typed line names; nothing where that fails, for a shell has no use for errors."""
    from kedge.errors import CheckpointError

    from .command import Session

    given = {**ctx.find_root().params, **{k: v for k, v in ctx.params.items() if v is not None}}
    session = Session(given.get("store"), given.get("namespace") or "default", key=given.get("store_key"))
    try:
        with session.open() as manager:
            return ask(manager)
    except (CheckpointError, OSError):
        return []
