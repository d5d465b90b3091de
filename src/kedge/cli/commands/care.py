"""`kedge check`, `gc`, `stats`: the health of a store, in numbers."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

import click

from kedge.chunks import INLINE_BYTES
from kedge.cli.naming import JobName
from kedge.cli.session import Session, emit, is_url, store_command
from kedge.errors import Corrupted, NotFound
from kedge.terminal.progress import progress
from kedge.terminal.tables import print_facts
from kedge.terminal.text import count_of, labelled, safe, size, style, terminal_width

if TYPE_CHECKING:
    from kedge.care.repair import RepairReport
    from kedge.care.verify import VerifyReport


@store_command(
    "check",
    json_keys='{"ok": bool, "deep": bool, "checkpoints", "chunks": in packs, "bytes_read": of these, "unused_packs", '
    '"problems": [{subject, what, fix}], "corrupted": [IDs], "repaired": null or {checkpoints, from_packs, corrupted, '
    "is_index_complete, old_index}}. Exit code 6 when something is wrong, or was lost with the old index; 7 when "
    "something could not be looked at.",
)
@click.argument("job", required=False, type=JobName())
@click.option("--quick", is_flag=True, help="Only that everything named exists; do not read the bytes.")
@click.option("--repair", is_flag=True, help="If the index is damaged, make a new one from what is left and the packs.")
def check_command(session: Session, job: str | None, quick: bool, repair: bool) -> None:
    """Read everything stored, of JOB or of the whole store, and prove it against its digests.

    Checkpoints that cannot be loaded are marked corrupted, so that restoring passes them over. What cannot be read at
    the moment ends the check and is not marked. With --repair
    no other process may have the store open; the old index is kept beside the new one. States up to 64 KiB
    are in the index only: those that the old one no longer gives are lost.
    """
    if repair and job:
        raise click.UsageError("--repair is for the whole store: leave JOB out")
    mended = _repair(session.at_rest()) if repair else None
    with session.open() as manager, progress("checking", unit="bytes") as report:
        found = manager.verify(job, deep=not quick, progress=report)
    is_whole = mended is None or mended.is_index_complete
    if session.as_json:
        repaired = None if mended is None else asdict(mended)
        emit({"ok": found.is_ok and is_whole, "deep": not quick, **asdict(found), "repaired": repaired})
    else:
        if mended is not None:
            _print_repair(mended)
        _print_check(found, is_deep=not quick, is_whole=is_whole)
    if not (found.is_ok and is_whole):
        click.get_current_context().exit(Corrupted.exit_code)


@store_command(
    "rebuild",
    json_keys='{"packs": read, "found": checkpoints they tell of, "added", "corrupted": [IDs], "locked": '
    '{ID of another key: saves under it}, "repaired": '
    "as in check}. Exit code 6 when some cannot be loaded.",
)
def rebuild_command(session: Session) -> None:
    """After the index was lost, or put back from an old backup: add to it what the packs still know.

    Whatever the index has stays as it is. States up to 64 KiB are in the index alone and do not come back, nor do
    tags and pins that were set later; something deleted since the backup may. Stop savers first.
    """
    from kedge.urls import take_over

    session = session.at_rest()
    mended = None if is_url(session.url) else _repair(session)
    take_over(session.url)
    with session.open(create=is_url(session.url)) as manager, progress("reading packs", unit="packs") as report:
        found = manager.rebuild(progress=report)
    if session.as_json:
        emit({**asdict(found), "repaired": None if mended is None else asdict(mended)})
    else:
        if mended is not None:
            _print_repair(mended)
        told = f"{count_of(found.packs, 'pack tells', 'packs tell')} of {count_of(found.found, 'checkpoint')}"
        click.echo(f"{told}; {found.added:,} added")
        for master, count in found.locked.items():
            more = f"{count:,} are under key {master}: run it again with that key and its --namespace"
            click.echo(f"{style('!', 'warn')} {more}", err=True)
        for checkpoint_id in found.corrupted:
            click.echo(f"{style('cannot be loaded', 'bad')}  {checkpoint_id}", err=True)
    if found.corrupted:
        click.get_current_context().exit(Corrupted.exit_code)


@store_command("migrate", json_keys='{"store": …, "from": format before, 0 when there was none, "to": format now}')
def migrate_command(session: Session) -> None:
    """Make the store's tables, or bring them to this version of Kedge. Opening a store does the same.

    Forwards only, in one transaction, while others wait; a store that a newer Kedge has written is refused. For
    databases whose ordinary users may not create tables: run this once as one who may.
    """
    from kedge.manager import without_secrets
    from kedge.urls import migrate

    before, after = migrate(session.url)
    place = without_secrets(session.url)
    if session.as_json:
        emit({"store": place, "from": before, "to": after})
    elif before == after:
        click.echo(f"{safe(place)} has format {after} already")
    else:
        click.echo(f"{safe(place)}: format {before or 'none'} → {after}")


def _repair(session: Session) -> RepairReport | None:
    """A new index, if the present one cannot be opened or finds something wrong with itself."""
    from kedge.care.repair import repair
    from kedge.manager import actor_here
    from kedge.urls import find_lock

    try:
        with session.open() as manager:
            if all(problem.subject != "index" for problem in manager.verify(deep=False).problems):
                return None
    except (Corrupted, NotFound):
        pass  # NotFound: the marker is gone; repair says if there is no store at all
    lock = find_lock(session.key, None)
    if session.url.startswith("files:"):
        from kedge.care.repair_files import refile
        from kedge.urls import directory_of

        path = directory_of(session.url)
        assert path is not None
        return refile(path, actor=actor_here(), master=lock.master if lock else None)
    return repair(session.directory(), actor=actor_here(), master=lock.master if lock else None)


def _print_repair(mended: RepairReport) -> None:
    packs = f", {mended.from_packs:,} of them known from packs only" if mended.from_packs else ""
    click.echo(f"{style('✓', 'good')} a new index with {count_of(mended.checkpoints, 'checkpoint')}{packs}")
    if not mended.is_index_complete:
        lost = (
            f"states up to {size(INLINE_BYTES)} are in the index only, and those that could not be read are lost; "
            f"larger ones are known to the packs, and {mended.from_packs:,} came back from there"
        )
        _say("!", "warn", f"the old index could not be read to its end, so checkpoints may be missing: {lost}")
        _say("  →", "dim", "if there is a copy of the store, compare kedge jobs of both")
    click.echo(style(f"  the old index is {safe(mended.old_index)}", "dim"))


def _say(label: str, look: str, text: str) -> None:
    for line in labelled(label, look, text, terminal_width()):
        click.echo(line)


def _print_check(found: VerifyReport, *, is_deep: bool, is_whole: bool) -> None:
    for fix, problems in groupby(found.problems, key=lambda problem: problem.fix):
        for problem in problems:
            _say("✗", "bad", f"{problem.subject}: {problem.what}")
        _say("  →", "dim", fix)
    counted = _counted(found, is_deep=is_deep)
    if found.is_ok:
        well = "all is well" if is_whole else "what is there now is whole"
        click.echo(f"{style('✓', 'good')} {well}: {counted}")
    else:
        bad = count_of(len(found.corrupted), "checkpoint")
        click.echo(f"{count_of(len(found.problems), 'problem')}, {bad} cannot be loaded ({counted})")
    if found.unused_packs:
        click.echo(style(f"{count_of(found.unused_packs, 'pack')} nobody uses: kedge gc removes them", "dim"))


def _counted(found: VerifyReport, *, is_deep: bool) -> str:
    """What was looked at. Data that the index holds itself is read and proved with its checkpoint, quick or not."""
    checkpoints = count_of(found.checkpoints, "checkpoint")
    if not found.chunks:
        return f"{checkpoints}, with all data in the index" if found.checkpoints else checkpoints
    packed = f"{size(found.bytes_read)} read" if is_deep else "there, not read"
    return f"{checkpoints}, with {count_of(found.chunks, 'chunk')} in packs ({packed}), other data in the index"


@store_command(
    "gc",
    json_keys='{"chunks_removed", "packs_removed", "packs_rewritten", "bytes_freed", "packs_kept", "bytes_kept", '
    '"damaged": [packs]}',
)
@click.option("--dry-run", is_flag=True, help="Only say what would be freed.")
def gc_command(session: Session, dry_run: bool) -> None:
    """Give back the space of deleted checkpoints. Safe while others save and load."""
    with session.open() as manager, progress("collecting", unit="packs") as report:
        found = manager.gc(dry_run=dry_run, progress=report)
    if session.as_json:
        emit(asdict(found))
        return
    if not (found.chunks_removed or found.packs_removed or found.packs_rewritten):
        click.echo("nothing to give back")
        return
    click.echo(
        f"{style(size(found.bytes_freed), 'name')} {'would be ' if dry_run else ''}freed: "
        f"{count_of(found.chunks_removed, 'chunk')} and {count_of(found.packs_removed, 'pack')} removed, "
        f"{found.packs_rewritten:,} rewritten"
    )
    click.echo(style(f"{size(found.bytes_kept)} in {count_of(found.packs_kept, 'pack')} stay", "dim"))
    for pack in found.damaged:
        click.echo(f"{style('✗', 'bad')} pack {safe(pack)} is damaged and was left alone: run kedge check")


_LABELS = {
    "jobs": "jobs",
    "checkpoints": "checkpoints",
    "last_seq": "saved so far",
    "size_bytes": "size of all states",
    "stored_bytes": "added to the store",
    "chunks": "chunks",
    "plain_bytes": "in chunks, before compression",
    "chunk_bytes": "stored in chunks",
    "inline_bytes": "of those, in the index",
    "packs": "packs",
    "pack_bytes": "in packs",
}


@store_command("stats", json_keys="the numbers by name; those that end in _bytes are bytes.")
@click.argument("job", required=False, type=JobName())
def stats_command(session: Session, job: str | None) -> None:
    """Show numbers of the store, or of JOB."""
    with session.open() as manager:
        numbers = dict(manager.stats(job))
        where = manager.place
    if session.as_json:
        emit(numbers)
        return
    facts = [
        (_LABELS.get(name, name.replace("_", " ")), size(number) if name.endswith("_bytes") else f"{number:,}")
        for name, number in numbers.items()
    ]
    stored = numbers.get("stored_bytes", 0)
    if stored and numbers.get("size_bytes", 0) > 1.05 * stored:
        facts.append(("sharing, compression", f"{numbers['size_bytes'] / stored:.1f} × smaller"))
    print_facts([("job" if job else "store", job or where), *facts])
