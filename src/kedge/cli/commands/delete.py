"""`kedge delete`: checkpoints of a job, all or none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, apply_option, store_command
from kedge.cli.names import JobName, Ref, job_named, refuse_other_job, require_job
from kedge.errors import Conflict, NotFound
from kedge.terminal.text import count_of, size, style

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager


@store_command("delete", json_keys='{"job": …, "deleted": [IDs]}; with --all and without --apply, nothing is deleted')
@click.argument("job", type=JobName())
@click.argument("refs", metavar="[ID]...", nargs=-1, type=Ref())
@click.option("--all", "is_whole", is_flag=True, help="Delete the job: all its checkpoints and its policy.")
@click.option("--even-pinned", is_flag=True, help="With --all, delete pinned checkpoints too.")
@click.option("--missing-ok", is_flag=True, help="Ignore IDs that do not exist.")
@apply_option("With --all: delete. Without this, only say what would be deleted.")
def delete_command(
    session: Session,
    job: str,
    refs: tuple[str, ...],
    is_whole: bool,
    even_pinned: bool,
    missing_ok: bool,
    is_applied: bool,
) -> None:
    """Delete checkpoints of JOB, or the whole job with --all --apply.

    If any ID does not exist or is pinned, nothing is deleted. `kedge gc` frees the space.
    """
    if is_whole == bool(refs):
        raise click.UsageError("give the IDs of checkpoints, or --all to delete the job")
    if even_pinned and not is_whole:
        raise click.UsageError("--even-pinned is for --all; unpin a single checkpoint with kedge pin ID --off")
    if is_whole:
        _delete_job(session, job, even_pinned=even_pinned, missing_ok=missing_ok, is_applied=is_applied)
        return
    with session.open() as manager:
        doomed = dict.fromkeys(filter(None, (_deletable(manager, job, ref, missing_ok) for ref in refs)))
        deleted = [checkpoint_id for checkpoint_id in doomed if manager.delete(job, checkpoint_id)]
    session.answer(
        {"job": job, "deleted": deleted}, *(f"{style(checkpoint_id, 'id')}  deleted" for checkpoint_id in deleted)
    )
    if not deleted and not session.as_json:
        click.echo("nothing to delete", err=True)


def _delete_job(session: Session, job: str, *, even_pinned: bool, missing_ok: bool, is_applied: bool) -> None:
    with session.open() as manager:
        there = job_named(manager, job) if missing_ok else require_job(manager, job)
        if there is None or not is_applied:
            held = "" if there is None else f"{count_of(there.checkpoints, 'checkpoint')}, {size(there.size_bytes)}"
            plan = f"would delete job {job} ({held}); run it again with --apply" if held else "nothing to delete"
            session.answer({"job": job, "deleted": []}, plan)
            return
        ids = [checkpoint.id for checkpoint in manager.walk(job)] if session.as_json else []
        count = manager.delete_job(job, even_pinned=even_pinned)
    session.answer({"job": job, "deleted": ids}, f"{style(job, 'id')}  deleted, with {count_of(count, 'checkpoint')}")


def _deletable(manager: CheckpointManager, job: str, ref: str, missing_ok: bool) -> str | None:
    """The ID of a checkpoint that may be deleted; None for one that does not exist, if that is fine."""
    try:
        checkpoint = manager.find(ref)
    except NotFound:
        if missing_ok:
            return None
        raise
    refuse_other_job(checkpoint, job)
    if ref == job:
        raise NotFound(f"{ref} is the job, not a checkpoint", hint=f"kedge list {job} shows its IDs")
    if checkpoint.is_pinned:
        raise Conflict(f"checkpoint {checkpoint.id} is pinned", hint=f"unpin it: kedge pin {checkpoint.id} --off")
    return checkpoint.id
