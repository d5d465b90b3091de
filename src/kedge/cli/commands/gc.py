"""`kedge gc`: frees the space of deleted checkpoints."""

from __future__ import annotations

from dataclasses import asdict

import click

from kedge.cli.command import Session, store_command
from kedge.terminal.progress import progress
from kedge.terminal.text import count_of, safe, size, style


@store_command(
    "gc",
    json_keys='{"chunks_removed", "packs_removed", "packs_rewritten", "bytes_freed", "packs_kept", "bytes_kept", '
    '"damaged": [packs]}',
)
@click.option("--dry-run", is_flag=True, help="Only report what would be freed.")
def gc_command(session: Session, dry_run: bool) -> None:
    """Free the space of deleted checkpoints. Safe while others save and load."""
    with session.open() as manager, progress("collecting", unit="packs") as report:
        result = manager.gc(dry_run=dry_run, progress=report)
    if not (result.chunks_removed or result.packs_removed or result.packs_rewritten):
        session.answer(asdict(result), "nothing to free")
        return
    removed = f"{count_of(result.chunks_removed, 'chunk')} and {count_of(result.packs_removed, 'pack')} removed"
    session.answer(
        asdict(result),
        f"{style(size(result.bytes_freed), 'name')} {'would be ' if dry_run else ''}freed: "
        f"{removed}, {result.packs_rewritten:,} rewritten",
        style(f"{size(result.bytes_kept)} in {count_of(result.packs_kept, 'pack')} still in use", "dim"),
        *(
            session.in_this_store(f"{style('✗', 'bad')} pack {safe(p)} is damaged and was left alone: run kedge check")
            for p in result.damaged
        ),
    )
