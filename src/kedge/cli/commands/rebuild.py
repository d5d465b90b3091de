"""`kedge rebuild`: a new index from the packs."""

from __future__ import annotations

from dataclasses import asdict

import click

from kedge.cli.command import Session, is_url, store_command
from kedge.cli.output import emit
from kedge.errors import Corrupted
from kedge.terminal.progress import progress
from kedge.terminal.text import count_of, style

from .check import print_repair, repair_index


@store_command(
    "rebuild",
    json_keys='{"packs": read, "found": checkpoints they describe, "added", "from_packs": of those, known from packs '
    'alone, "corrupted": [IDs], "locked": {ID of another key: saves under it}, "closed": {namespace: ID of its key}, '
    '"repaired": as in check}. Exit code 6 when some cannot be loaded.',
)
def rebuild_command(session: Session) -> None:
    """Rebuild the index from the packs, after it was lost or restored from an old backup.

    Existing entries are not changed. Small states of the last few seconds that were not yet copied to packs are lost,
    and so are tags and pins set after a save. Checkpoints deleted since the backup may come back. Stop all programs
    that save first.
    """
    from kedge.urls import take_over

    session = session.at_rest()
    repaired = None if is_url(session.url) else repair_index(session)
    take_over(session.url)
    with session.open(create=is_url(session.url)) as manager, progress("reading packs", unit="packs") as report:
        result = manager.rebuild(progress=report)
    if session.as_json:
        emit({**asdict(result), "repaired": None if repaired is None else asdict(repaired)})
    else:
        print_repair(repaired)
        packs = count_of(result.packs, "pack describes", "packs describe")
        click.echo(f"{packs} {count_of(result.found, 'checkpoint')}; {result.added:,} added")
        for master, count in result.locked.items():
            names = ", ".join(name for name, wanted in result.closed.items() if wanted == master)
            again = f": run it again with that --key and --namespace {names}; gc keeps them until then" if names else ""
            text = f"{count_of(count, 'save')} under key {master}{again}"
            click.echo(f"{style('!', 'warn')} {text}", err=True)
        for checkpoint_id in result.corrupted:
            click.echo(f"{style('cannot be loaded', 'bad')}  {checkpoint_id}", err=True)
    if result.corrupted:
        click.get_current_context().exit(Corrupted.exit_code)
