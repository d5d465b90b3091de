"""`kedge pin`: checkpoints that nothing deletes."""

from __future__ import annotations

import click

from kedge.cli.command import Session, store_command
from kedge.cli.names import Ref
from kedge.store.reference import REFERENCE_HELP
from kedge.terminal.text import style


@store_command("pin", note=f"ID is: {REFERENCE_HELP}", json_keys="the checkpoint, as in list.")
@click.argument("ref", metavar="ID", type=Ref())
@click.option("--off", is_flag=True, help="Remove the pin.")
def pin_command(session: Session, ref: str, off: bool) -> None:
    """Protect checkpoint ID from cleanup and deletion."""
    with session.open() as manager:
        changed = manager.pin(manager.find(ref).id, not off)
    state = "pinned" if changed.is_pinned else "no longer pinned"
    session.answer(changed.to_json(), f"{style(changed.id, 'id')}  {state}")
