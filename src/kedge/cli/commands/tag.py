"""`kedge tag`: names and values that users give to a checkpoint."""

from __future__ import annotations

import click

from kedge.cli.command import Session, store_command
from kedge.cli.names import Ref
from kedge.cli.pairs import parse_pairs
from kedge.errors import Validation
from kedge.store.reference import REFERENCE_HELP
from kedge.terminal.checkpoints import notes
from kedge.terminal.text import safe, style


@store_command("tag", note=f"ID is: {REFERENCE_HELP}", json_keys="the checkpoint, as in list.")
@click.argument("ref", metavar="ID", type=Ref())
@click.argument("pairs", metavar="[K=V]...", nargs=-1)
@click.option("--remove", metavar="K", multiple=True, help="Remove this tag; repeatable.")
def tag_command(session: Session, ref: str, pairs: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Set or remove tags of checkpoint ID."""
    tags: dict[str, str | None] = {**parse_pairs("tag", pairs)}
    if both := sorted(tags.keys() & set(remove)):
        raise Validation(f"tag {both[0]} is both set and removed", hint="give it once")
    tags.update(dict.fromkeys(remove))
    if not tags:
        raise click.UsageError("give K=V to set a tag, or --remove K")
    with session.open() as manager:
        changed = manager.tag(manager.find(ref).id, **tags)
    session.answer(changed.to_json(), f"{style(changed.id, 'id')}  {safe(notes(changed)) or 'no tags'}")
