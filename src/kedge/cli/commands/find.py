"""`kedge jobs` and `kedge list`: what is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.naming import JobName
from kedge.cli.pairs import parse_json_pairs, parse_pairs
from kedge.cli.session import Number, Session, emit, emit_lists, store_command
from kedge.terminal.rows import print_checkpoints, print_jobs
from kedge.terminal.text import count_of, size, style

if TYPE_CHECKING:
    from kedge.model import Checkpoint

_PRINTED_AT_ONCE = 1000
LEVELS = click.Choice(["pipeline", "stage", "step", "substep"])


@store_command(
    "jobs",
    json_keys='{"jobs": [{name, checkpoints, last_seq, size_bytes, stored_bytes, created_at, updated_at, retention}]}',
)
@click.argument("prefix", default="", type=JobName())
@click.option("--limit", type=Number(1), help="At most this many.")
@click.option("--after", metavar="JOB", help="Go on behind this name (the last one of the page before).")
def jobs_command(session: Session, prefix: str, limit: int | None, after: str | None) -> None:
    """List the jobs whose names begin with PREFIX."""
    with session.open() as manager:
        jobs = manager.jobs(prefix, limit, after)
    if session.as_json:
        emit({"jobs": [job.to_json() for job in jobs]})
    elif jobs:
        print_jobs(jobs)
    else:
        click.echo("no jobs" + (f" that begin with {prefix}" if prefix else " yet"), err=True)


@store_command(
    "list",
    json_keys='{"job": …, "checkpoints": [{id, job, seq, step, level, parent, created_at, status, '
    "size_bytes, stored_bytes, digest, codec, schema_version, tags, pinned, metadata}]}",
)
@click.argument("job", type=JobName())
@click.option("--level", type=LEVELS, help="Only checkpoints of this level.")
@click.option("--tag", "tags", metavar="K=V", multiple=True, help="Only those with this tag; repeatable.")
@click.option(
    "--metadata",
    metavar="PATH=JSON",
    multiple=True,
    help='Only those whose metadata has this value: model.name="small", epoch=3; repeatable.',
)
@click.option("--limit", type=Number(1), help="The newest so many.  [default: 50 on a terminal, else all]")
@click.option("--before", metavar="ID|#", help="Only those older than this one: to page backwards.")
def list_command(
    session: Session,
    job: str,
    level: str | None,
    tags: tuple[str, ...],
    metadata: tuple[str, ...],
    limit: int | None,
    before: str | None,
) -> None:
    """List the checkpoints of JOB, oldest first.

    SIZE is the state, ADDED what it took on disk beyond what was stored already.
    """
    is_terminal = sys.stdout.isatty() and not session.as_json
    most = limit or (50 if is_terminal else None)
    wanted: dict[str, Any] = {
        "level": level,
        "tags": parse_pairs("--tag", tags),
        "metadata": parse_json_pairs("--metadata", metadata),
        "before": _position(before),
    }
    with session.open() as manager:
        if most is None:
            found: Iterator[Checkpoint] = manager.walk(job, **wanted)
        else:  # one more tells whether there are more
            found = iter(manager.list(job, limit=most + 1 if is_terminal else most, **wanted))
        first = next(found, None)
        if first is None and not (level or tags or metadata or before):
            from kedge.errors import NotFound

            raise NotFound(f"job {job} has no checkpoint", hint="kedge jobs lists the jobs")
        found = chain([] if first is None else [first], found)
        if session.as_json:
            emit_lists({"job": job}, {"checkpoints": (checkpoint.to_json() for checkpoint in found)})
        elif first is None:
            click.echo("no checkpoint fits", err=True)
        elif is_terminal and most is not None:
            _print_newest(list(found), most)
        else:
            _print_all(found)


def _print_newest(found: list[Checkpoint], most: int) -> None:
    shown = found[-most:]
    print_checkpoints(shown)
    total = f"{count_of(len(shown), 'checkpoint')}, {size(sum(c.size_bytes for c in shown))}"
    more = f"; there are older ones: --before {shown[0].seq}, or --limit" if len(shown) < len(found) else ""
    click.echo(style(f"{total}{more}", "dim"))


def _print_all(found: Iterator[Checkpoint]) -> None:
    """Page by page; the columns are as wide as a page needs them."""
    has_titles = True
    while page := list(islice(found, _PRINTED_AT_ONCE)):
        print_checkpoints(page, has_titles=has_titles)
        has_titles = False


def _position(text: str | None) -> str | int | None:
    """`--before` takes an ID, or a number with or without #."""
    if text is None:
        return None
    digits = text.removeprefix("#")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else text
