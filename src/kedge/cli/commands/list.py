"""`kedge list`: the checkpoints of a job."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.command import LEVELS, Number, Session, store_command
from kedge.cli.names import JobName
from kedge.cli.output import emit_lists
from kedge.cli.pairs import parse_json_pairs, parse_pairs
from kedge.terminal.checkpoints import print_checkpoints
from kedge.terminal.text import count_of, size, style

if TYPE_CHECKING:
    from kedge.model import Checkpoint

_PRINTED_AT_ONCE = 1000


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
@click.option("--limit", type=Number(1), help="Only the newest N.  [default: 50 on a terminal, else all]")
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

    SIZE is the size of the state, ADDED what it added to the store.
    """
    is_terminal = sys.stdout.isatty() and not session.as_json
    most = limit or (50 if is_terminal else None)
    filters: dict[str, Any] = {
        "level": level,
        "tags": parse_pairs("--tag", tags),
        "metadata": parse_json_pairs("--metadata", metadata),
        "before": _position(before),
    }
    with session.open() as manager:
        if most is None:
            checkpoints: Iterator[Checkpoint] = manager.walk(job, **filters)
        else:  # one more tells whether there are more
            checkpoints = iter(manager.list(job, limit=most + 1 if is_terminal else most, **filters))
        first = next(checkpoints, None)
        if first is None and not (level or tags or metadata or before):
            from kedge.errors import NotFound

            raise NotFound(f"job {job} has no checkpoint", hint="kedge jobs lists the jobs")
        checkpoints = chain([] if first is None else [first], checkpoints)
        if session.as_json:
            emit_lists({"job": job}, {"checkpoints": (checkpoint.to_json() for checkpoint in checkpoints)})
        elif first is None:
            click.echo("no checkpoint matches", err=True)
        elif is_terminal and most is not None:
            _print_newest(list(checkpoints), most)
        else:
            _print_all(checkpoints)


def _print_newest(checkpoints: Sequence[Checkpoint], most: int) -> None:
    shown = checkpoints[-most:]
    print_checkpoints(shown)
    total = f"{count_of(len(shown), 'checkpoint')}, {size(sum(c.size_bytes for c in shown))}"
    more = f"; there are older ones: --before {shown[0].seq}, or --limit" if len(shown) < len(checkpoints) else ""
    click.echo(style(f"{total}{more}", "dim"))


def _print_all(checkpoints: Iterator[Checkpoint]) -> None:
    """Page by page; the columns are as wide as a page needs them."""
    has_titles = True
    while page := list(islice(checkpoints, _PRINTED_AT_ONCE)):
        print_checkpoints(page, has_titles=has_titles)
        has_titles = False


def _position(text: str | None) -> str | int | None:
    """`--before` takes an ID, or a number with or without #."""
    if text is None:
        return None
    digits = text.removeprefix("#")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else text
