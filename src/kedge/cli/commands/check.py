"""`kedge check`: verifies everything stored, and repairs a damaged index."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, store_command
from kedge.cli.findings import OLD_KEY_IN_USE
from kedge.cli.names import JobName
from kedge.cli.output import emit
from kedge.errors import Corrupted, NotFound, Validation
from kedge.terminal.progress import progress
from kedge.terminal.text import count_of, print_labelled, safe, size, style

if TYPE_CHECKING:
    from kedge.care.repair import RepairReport
    from kedge.care.verify import VerifyReport


@store_command(
    "check",
    json_keys='{"ok": bool, "deep": bool, "checkpoints", "chunks": in packs, "bytes_read": of these, "unused_packs", '
    '"problems": [{subject, what, fix}], "corrupted": [IDs], "old_data_keys": [IDs] while a rekey --rewrite is not '
    'finished, "repaired": null or {checkpoints, from_packs, corrupted, '
    "is_index_complete, old_index}}. Exit code 6 when something is wrong, or was lost with the old index; 7 when "
    "something could not be read.",
)
@click.argument("job", required=False, type=JobName())
@click.option("--quick", is_flag=True, help="Check only that everything exists; do not read the data.")
@click.option("--repair", is_flag=True, help="If the index is damaged, build a new one from its remains and the packs.")
def check_command(session: Session, job: str | None, quick: bool, repair: bool) -> None:
    """Read everything stored, of JOB or of the whole store, and verify it against its digests.

    Checkpoints that cannot be loaded are marked as corrupted, so that a restore skips them. If data cannot be read at
    the moment, the check ends, and nothing is marked.

    With --repair, no other process may have the store open. The old index is kept beside the new one. Small states of
    the last few seconds may exist only in the index: those that cannot be read from the old one are lost.
    """
    if repair and job:
        raise click.UsageError("--repair works on the whole store: leave JOB out")
    repaired = repair_index(session.at_rest()) if repair else None
    with session.open() as manager, progress("checking", unit="bytes") as report:
        result = manager.verify(job, deep=not quick, progress=report)
        old_keys = (manager.encryption or {}).get("old_data_keys", [])
    is_whole = repaired is None or repaired.is_index_complete
    if session.as_json:
        emit(
            {
                "ok": result.is_ok and is_whole,
                "deep": not quick,
                **asdict(result),
                "old_data_keys": old_keys,
                "repaired": None if repaired is None else asdict(repaired),
            }
        )
    else:
        print_repair(repaired)
        _print_result(result, is_deep=not quick, is_whole=is_whole)
        if old_keys:
            print_labelled("!", "warn", OLD_KEY_IN_USE)
    if not (result.is_ok and is_whole):
        click.get_current_context().exit(Corrupted.exit_code)


def repair_index(session: Session) -> RepairReport | None:
    """Build a new index, if the present one cannot be opened or finds something wrong with itself."""
    from kedge.care.repair import repair
    from kedge.care.repair_files import refile
    from kedge.manager import actor_here
    from kedge.urls import directory_of, find_lock, without_secrets

    try:
        with session.open() as manager:
            if all(problem.subject != "index" for problem in manager.verify(deep=False).problems):
                return None
    except (Corrupted, NotFound):
        pass  # NotFound: the marker is gone; repair says if there is no store at all
    directory = directory_of(session.url)
    if directory is None:
        raise Validation(
            f"{without_secrets(session.url)} is not a store in a directory, so its index cannot be repaired",
            hint="kedge check without --repair works with every store",
        )
    lock = find_lock(session.key, None)
    repair_it = refile if session.url.startswith("files:") else repair
    return repair_it(directory, actor=actor_here(), master=lock.master if lock else None)


def print_repair(repaired: RepairReport | None) -> None:
    if repaired is None:
        return
    packs = f", {repaired.from_packs:,} of them known from packs only" if repaired.from_packs else ""
    click.echo(f"{style('✓', 'good')} new index with {count_of(repaired.checkpoints, 'checkpoint')}{packs}")
    if not repaired.is_index_complete:
        lost = (
            "small states that were not copied to packs yet are lost; "
            f"all others are known to the packs, and {repaired.from_packs:,} came back from there"
        )
        print_labelled("!", "warn", f"the old index could not be read to its end: checkpoints may be missing: {lost}")
        print_labelled("  →", "dim", "if you have a copy of the store, compare kedge jobs of both")
    if repaired.old_index:
        click.echo(style(f"  the old index is {safe(repaired.old_index)}", "dim"))


def _print_result(result: VerifyReport, *, is_deep: bool, is_whole: bool) -> None:
    for fix, problems in groupby(result.problems, key=lambda problem: problem.fix):
        for problem in problems:
            print_labelled("✗", "bad", f"{problem.subject}: {problem.what}")
        print_labelled("  →", "dim", fix)
    checked = _checked(result, is_deep=is_deep)
    if result.is_ok:
        verdict = "all is well" if is_whole else "what is there now is whole"
        click.echo(f"{style('✓', 'good')} {verdict}: {checked}")
    else:
        bad = count_of(len(result.corrupted), "checkpoint")
        click.echo(f"{count_of(len(result.problems), 'problem')}, {bad} cannot be loaded ({checked})")
    if result.unused_packs:
        click.echo(style(f"{count_of(result.unused_packs, 'unused pack')}: kedge gc removes them", "dim"))


def _checked(result: VerifyReport, *, is_deep: bool) -> str:
    """What was checked. Data in the index is verified with its checkpoint, even by a quick check."""
    checkpoints = count_of(result.checkpoints, "checkpoint")
    if not result.chunks:
        return f"{checkpoints}, with all data in the index" if result.checkpoints else checkpoints
    packed = f"{size(result.bytes_read)} read" if is_deep else "there, not read"
    return f"{checkpoints}, with {count_of(result.chunks, 'chunk')} in packs ({packed}), other data in the index"
