"""`kedge show`: a checkpoint, and its state as a tree."""

from __future__ import annotations

import json

import click

from kedge.cli.command import Number, Session, store_command
from kedge.cli.names import Ref
from kedge.cli.output import emit
from kedge.store.reference import REFERENCE_HELP
from kedge.terminal.tables import print_facts
from kedge.terminal.text import age, exactly, size, terminal_width


@store_command(
    "show",
    note=f"ID|JOB is: {REFERENCE_HELP}",
    json_keys='{"checkpoint": as in list, "path": …, "state": the state, what JSON cannot express as {"$type": …}, '
    'arrays without their content; of a tree of files "entries": [{path, kind, size_bytes, mode, mtime, target}]}',
)
@click.argument("ref", metavar="ID|JOB", type=Ref())
@click.option("--path", metavar="A/B", help="Only this part of the state.")
@click.option("--depth", type=Number(0), default=4, show_default=True, help="Open this many levels.")
@click.option("--items", type=Number(1), default=20, show_default=True, help="Show at most this many items of each.")
def show_command(session: Session, ref: str, path: str | None, depth: int, items: int) -> None:
    """Show a checkpoint: its facts, and its state as a tree.

    Arrays are shown by type and shape; their content is not read.
    """
    from kedge.codec.json_view import to_json_view
    from kedge.diff.outline import open_state, split_at_tree
    from kedge.terminal.entries import entries_below, entry_json, print_entries
    from kedge.terminal.tree import Limits, draw

    with session.open() as manager:
        state = open_state(manager.store, manager.find(ref).id)
        part, place, rest = split_at_tree(state.outline, path or "")
        is_tree = getattr(part, "kind", "") == "Tree"
        entries = entries_below(state.files_at(place), rest) if is_tree else []
    checkpoint = state.checkpoint
    if session.as_json:
        view = {"checkpoint": checkpoint.to_json(), "path": path or "", "state": to_json_view(part)}
        emit({**view, "entries": [entry_json(entry) for entry in entries]} if is_tree else view)
        return
    if path is None:
        pinned = ", pinned" if checkpoint.is_pinned else ""
        print_facts(
            [
                ("checkpoint", checkpoint.id),
                ("job", f"{checkpoint.job} · #{checkpoint.seq}"),
                ("step", f"{checkpoint.step} · level {checkpoint.level}"),
                ("parent", checkpoint.parent or ""),
                ("created", f"{exactly(checkpoint.created_at)} · {age(checkpoint.created_at)}"),
                ("size", f"{size(checkpoint.size_bytes)} · {size(checkpoint.stored_bytes)} added to the store"),
                ("status", f"{checkpoint.status}{pinned}"),
                ("digest", checkpoint.digest),
                ("tags", "  ".join(f"{name}={value}" for name, value in checkpoint.tags.items())),
                ("metadata", json.dumps(dict(checkpoint.metadata), ensure_ascii=False) if checkpoint.metadata else ""),
            ]
        )
        click.echo()
    for line in draw(part, Limits(depth, items), terminal_width(), name=place or "state"):
        click.echo(line)
    print_entries(entries, items)
