"""`kedge jobs`: the jobs of a store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kedge.cli.command import Number, Session, store_command
from kedge.cli.names import JobName
from kedge.terminal.tables import Column
from kedge.terminal.text import age, size

if TYPE_CHECKING:
    from kedge.model import Job


def _policy(job: Job) -> str:
    from kedge.care.policies import policy_in_words

    return policy_in_words(job.retention)


_COLUMNS: tuple[Column[Job], ...] = (
    Column("JOB", lambda job: job.name, look="id", is_whole=True),
    Column("CHECKPOINTS", lambda job: f"{job.checkpoints:,}", ">", is_whole=True),
    Column("SIZE", lambda job: size(job.size_bytes), ">", is_whole=True),
    Column("ADDED", lambda job: size(job.stored_bytes), ">", "dim", is_whole=True, drop=2),
    Column("LAST SAVE", lambda job: age(job.updated_at), ">", is_whole=True, drop=1),
    Column("POLICY", _policy, look="dim", drop=3),
)


@store_command(
    "jobs",
    json_keys='{"jobs": [{name, checkpoints, last_seq, size_bytes, stored_bytes, created_at, updated_at, retention}]}',
)
@click.argument("prefix", default="", type=JobName())
@click.option("--limit", type=Number(1), help="Show at most this many.")
@click.option("--after", metavar="JOB", help="Continue listing after this name.")
def jobs_command(session: Session, prefix: str, limit: int | None, after: str | None) -> None:
    """List the jobs whose names begin with PREFIX."""
    with session.open() as manager:
        jobs = manager.jobs(prefix, limit, after)
    session.answer_list(
        "jobs",
        jobs,
        _COLUMNS,
        lambda job: job.to_json(),
        empty="no jobs" + (f" that begin with {prefix}" if prefix else " yet"),
    )
