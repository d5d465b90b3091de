"""`kedge runs watch`: a live view of a run, in whatever process it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kedge.cli.command import Session, store_command
from kedge.cli.names import JobName
from kedge.cli.output import emit
from kedge.terminal.text import count_of, exactly, safe, style

if TYPE_CHECKING:
    from kedge.model import Checkpoint

_LOOKS = {"ran": "good", "failed": "bad", "completed": "good", "paused": "warn", "error": "bad", "warning": "warn"}


@store_command("watch", json_keys="one object per line for each record of the run: {id, seq, at, kind, path, …}")
@click.argument("run", type=JobName())
@click.option("--wait", is_flag=True, help="Wait for a run that has not begun yet.")
@click.pass_context
def watch_command(ctx: click.Context, session: Session, run: str, wait: bool) -> None:
    """Show the steps, items, log lines and status changes of a run as they happen, until it ends.

    Begins with what has happened so far. Exits with 1 if the run failed or was cancelled.
    """
    from kedge.errors import NotFound
    from kedge.pipeline.owner import newest_status
    from kedge.pipeline.streams import follow_records

    status = ""
    with session.open() as manager:
        if newest_status(manager, run) is None:
            if not wait:
                raise NotFound(f"there is no run {run}", hint="check its key: kedge runs list; --wait waits for it")
            click.echo(f"waiting for run {run} to begin", err=True)
        for record in follow_records(manager, run):
            status = str(record.metadata.get("status", status))
            if session.as_json:
                emit({"id": record.id, "seq": record.seq, "at": record.timestamp, **record.metadata}, indent=None)
            elif line := _line(record):
                click.echo(style(exactly(record.created_at)[:-4], "dim") + "  " + line)
    ctx.exit(0 if status == "completed" else 1)


def _line(record: Checkpoint) -> str:
    """A record in one line; "" for one that people need not see."""
    from kedge.pipeline.progress import duration

    about: Any = record.metadata
    kind, name = about.get("kind"), safe(record.step)
    if kind == "run":
        word = str(about.get("status"))
        waits = [f"waits for {wait.get('for')} {wait.get('name')}" for wait in about.get("waiting") or ()]
        facts = "; ".join(waits) if word == "paused" else str(about.get("error") or "")
        return f"{style(word, _LOOKS.get(word, 'dim'))}  run {safe(record.job)}" + (f"  {safe(facts)}" if facts else "")
    if kind == "step":
        return f"{style('ran', 'good')}  {name}  {duration(float(about.get('seconds') or 0))}"
    if kind == "attempt":
        return f"{style('failed', 'bad')}  {name}  {safe(str(about.get('error')))}"
    if kind == "items":
        failed = f", {about['failed']:,} failed" if about.get("failed") else ""
        return f"{style('ran', 'good')}  {name}  {count_of(int(about.get('items') or 0), 'item')}{failed}"
    if kind == "log":
        level = str(about.get("level", "info"))
        fields = about.get("fields")
        pairs = [f"{key}={value}" for key, value in fields.items()] if isinstance(fields, dict) else []
        return f"{style(level, _LOOKS.get(level, 'dim'))}  {safe(' '.join([str(about.get('text')), *pairs]))}"
    return ""
