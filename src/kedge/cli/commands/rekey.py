"""`kedge rekey`: other keys for an encrypted store."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, store_command
from kedge.errors import Corrupted, Validation
from kedge.terminal.progress import progress
from kedge.terminal.text import count_of, safe, style

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager


@store_command(
    "rekey",
    json_keys='{"master": ID, "key": ID, "is_rewritten": bool, "checkpoints": rewritten, "unreadable": [IDs]}. '
    "Exit code 6 when some could not be read: the old data key stays until they are deleted.",
)
@click.option("--new-key", metavar="KEY", help="The new master key: file:PATH, command:PROGRAM, or the key itself.")
@click.option(
    "--rewrite", is_flag=True, help="Also create a new data key and rewrite everything, for example after a key leaked."
)
def rekey_command(session: Session, new_key: str | None, rewrite: bool) -> None:
    """Change the keys of the namespace.

    With --new-key, only the keyring is rewritten; the data does not change. If somebody else may know the old key, add
    --rewrite: every checkpoint is encrypted again, and the old data is removed. Other processes can keep saving. If the
    command is killed, run the same command again: it continues.
    """
    if new_key is None and not rewrite:
        raise click.UsageError("give --new-key, --rewrite, or both")
    with _open(session, new_key) as manager, progress("rewriting", unit="checkpoints") as report:
        done = manager.rekey(new_key, rewrite=rewrite, progress=report)
        if rewrite and not done.unreadable:
            manager.gc()
    lines = [f"{style('✓', 'good')} master key {done.master}, data key {done.key}"]
    if rewrite:
        lines.append(f"{count_of(done.checkpoints, 'checkpoint')} rewritten")
    lines += [
        f"{style('✗', 'bad')} {safe(checkpoint_id)} cannot be read: delete it, then run this again"
        for checkpoint_id in done.unreadable
    ]
    session.answer(asdict(done), *lines)
    if done.unreadable:
        click.get_current_context().exit(Corrupted.exit_code)


def _open(session: Session, new_key: str | None) -> CheckpointManager:
    """Open the store with its old key, or with the new one if a killed command had already changed it."""
    try:
        return session.open()
    except Validation as refused:
        if new_key is None:
            raise
        try:
            manager = session._replace(key=new_key).open()
        except Validation:
            raise refused from None
    click.echo("the store already uses the new master key: continuing with it", err=True)
    return manager
