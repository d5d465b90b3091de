"""`kedge stats`: numbers of a store or of a job."""

from __future__ import annotations

import click

from kedge.cli.command import Session, store_command
from kedge.cli.names import JobName, require_job
from kedge.terminal.text import size

_LABELS = {
    "last_seq": "saved so far",
    "size_bytes": "size of all states",
    "stored_bytes": "added to the store",
    "plain_bytes": "in chunks, before compression",
    "chunk_bytes": "stored in chunks",
    "inline_bytes": "of those, in the index",
    "pack_bytes": "in packs",
}


@store_command("stats", json_keys="the statistics by name; those that end in _bytes are in bytes.")
@click.argument("job", required=False, type=JobName())
def stats_command(session: Session, job: str | None) -> None:
    """Show statistics of the store, or of JOB."""
    with session.open() as manager:
        if job is not None:
            require_job(manager, job)
        numbers = dict(manager.stats(job))
        place = manager.place
    facts = [
        (_LABELS.get(name, name.replace("_", " ")), size(number) if name.endswith("_bytes") else f"{number:,}")
        for name, number in numbers.items()
    ]
    stored = numbers.get("stored_bytes", 0)
    if stored and numbers.get("size_bytes", 0) > 1.05 * stored:
        facts.append(("sharing, compression", f"{numbers['size_bytes'] / stored:.1f} × smaller"))
    session.answer_facts(numbers, [("job" if job else "store", job or place), *facts])
