"""`kedge key`, `rekey`: making and changing the keys of encrypted stores."""

from __future__ import annotations

from dataclasses import asdict

import click

from kedge.cli.session import Session, emit, pass_on, shared_options, store_command
from kedge.errors import Corrupted
from kedge.terminal.progress import progress
from kedge.terminal.text import count_of, safe, style


@store_command("new", json_keys='{"key": …, "id": …}')
def new_command(session: Session) -> None:
    """Print a new random key, for $KEDGE_KEY or a file. It is kept nowhere: whoever loses it loses the store."""
    from kedge.crypto import new_master_text, parse_master

    text = new_master_text()
    if session.as_json:
        emit({"key": text, "id": parse_master(text).id})
        return
    click.echo(text)
    click.echo(style(f"key {parse_master(text).id}: keep it in a safe place, and a copy in another", "dim"), err=True)


@store_command(
    "show",
    json_keys='{"encrypted": bool, "cipher", "master_key": ID, "data_key": ID, "old_data_keys", "encrypts_names"}',
)
def show_command(session: Session) -> None:
    """Show how the store is encrypted, and the IDs of its keys, which are no secrets."""
    with session.open() as manager:
        found = manager.encryption
    if session.as_json:
        emit({"encrypted": found is not None, **(found or {})})
    elif found is None:
        click.echo("this store is not encrypted")
    else:
        names = "names of jobs and steps too" if found["encrypts_names"] else "names of jobs and steps are readable"
        click.echo(f"{found['cipher']}; {names}")
        click.echo(f"master key {found['master_key']}, data key {found['data_key']}")
        if found["old_data_keys"]:
            click.echo(f"{style('!', 'warn')} an old data key is still in use: kedge rekey --rewrite goes on")


key_command = click.Group(
    "key",
    commands=[new_command, show_command],
    callback=pass_on,
    params=shared_options(),
    help="Make a key for an encrypted store, or show which one a store has.",
    epilog="JSON: kedge key COMMAND --help",
)


@store_command(
    "rekey",
    json_keys='{"master": ID, "key": ID, "is_rewritten": bool, "checkpoints": written anew, "unreadable": [IDs]}. '
    "Exit code 6 when some could not be read: the old data key stays until they are deleted.",
)
@click.option("--new-key", metavar="KEY", help="The new master key: file:PATH, command:PROGRAM, or the key itself.")
@click.option("--rewrite", is_flag=True, help="Make a new data key too, and write everything anew: for a leaked key.")
def rekey_command(session: Session, new_key: str | None, rewrite: bool) -> None:
    """Change the keys of the namespace.

    With --new-key only the keyring is written again, nothing else: old and new data stay as they are. A key that
    somebody else may know needs --rewrite too: every checkpoint is encrypted anew, and what was there before is
    removed. Others may go on saving. Killed at any moment, the same command goes on.
    """
    if new_key is None and not rewrite:
        raise click.UsageError("give --new-key, --rewrite, or both")
    with session.open() as manager, progress("rewriting", unit="checkpoints") as report:
        done = manager.rekey(new_key, rewrite=rewrite, progress=report)
        if rewrite and not done.unreadable:
            manager.gc()
    if session.as_json:
        emit(asdict(done))
    else:
        click.echo(f"{style('✓', 'good')} master key {done.master}, data key {done.key}")
        if rewrite:
            click.echo(f"{count_of(done.checkpoints, 'checkpoint')} written anew")
        for checkpoint_id in done.unreadable:
            click.echo(f"{style('✗', 'bad')} {safe(checkpoint_id)} cannot be read: delete it, then run this again")
    if done.unreadable:
        click.get_current_context().exit(Corrupted.exit_code)
