"""`kedge key`: creates a key, and shows the keys of a store."""

from __future__ import annotations

from pathlib import Path

import click

from kedge.cli.command import Session, command_group, store_command
from kedge.cli.findings import OLD_KEY_IN_USE
from kedge.cli.placement import place_file
from kedge.errors import Conflict
from kedge.store import not_over_http
from kedge.terminal.text import safe, style


@store_command("new", json_keys='{"key": …, "id": …}; with --out {"file": …, "id": …}')
@click.option(
    "--out", "path", metavar="FILE", type=click.Path(dir_okay=False), help="Write it to a new FILE (mode 0600)."
)
def new_command(session: Session, path: str | None) -> None:
    """Print a new random key, for $KEDGE_KEY, or write it to a file for $KEDGE_KEY_FILE.

    Kedge does not store the key. If you lose it, you lose the store.
    """
    from kedge.crypto import new_master_text, parse_master

    text = new_master_text()
    key_id = parse_master(text).id
    if path is not None:
        _write_secret(path, text)
        session.answer({"file": path, "id": key_id}, safe(path))
    else:
        session.answer({"key": text, "id": key_id}, text)
    if not session.as_json:
        click.echo(style(f"key {key_id}: keep it in a safe place, and a copy in another", "dim"), err=True)


def _write_secret(path: str, text: str) -> None:
    """A new file that only its owner can ever read, with all of the key or not at all, durable with its name.

    One that exists is left alone.
    """
    try:
        place_file(Path(path), lambda file: file.write(f"{text}\n".encode("ascii")), force=False, mode=0o600)
    except Conflict:
        raise Conflict(f"{path} exists already", hint="it may be the only copy of a key: choose another name") from None


@store_command(
    "show",
    json_keys='{"encrypted": bool, "cipher", "master_key": ID, "data_key": ID, "old_data_keys", "encrypts_names"}',
)
def show_command(session: Session) -> None:
    """Show how the store is encrypted. The IDs of its keys are not secret."""
    if session.url.startswith(("http://", "https://")):
        raise not_over_http("showing keys")
    with session.open() as manager:
        encryption = manager.encryption
    if encryption is None:
        session.answer({"encrypted": False}, "this store is not encrypted")
        return
    names = "names of jobs and steps too" if encryption["encrypts_names"] else "names of jobs and steps are readable"
    lines = [
        f"{encryption['cipher']}; {names}",
        f"master key {encryption['master_key']}, data key {encryption['data_key']}",
    ]
    if encryption["old_data_keys"]:
        lines.append(f"{style('!', 'warn')} {OLD_KEY_IN_USE}")
    session.answer({"encrypted": True, **encryption}, *lines)


key_command = command_group(
    "key", [new_command, show_command], text="Create a key for an encrypted store, or show the keys of a store."
)
