"""Names of jobs and checkpoints on the command line, and their completion in shells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import click
from click.shell_completion import CompletionItem

from .command import Session

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager
    from kedge.model import Checkpoint, Job

_T = TypeVar("_T")


def refuse_other_job(checkpoint: Checkpoint, job: str) -> None:
    from kedge.errors import NotFound

    if checkpoint.job != job:
        raise NotFound(f"checkpoint {checkpoint.id} not found in job {job}", hint=f"it belongs to job {checkpoint.job}")


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
    """Ask the store that the half-typed line names; nothing if that fails, because a shell cannot show errors."""
    from kedge.errors import CheckpointError

    given = {**ctx.find_root().params, **{k: v for k, v in ctx.params.items() if v is not None}}
    session = Session(given.get("store"), given.get("namespace") or "default", key=given.get("store_key"))
    try:
        with session.open() as manager:
            return ask(manager)
    except (CheckpointError, OSError):
        return []
