"""`kedge delete`: checkpoints of a job, all or none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, store_command
from kedge.cli.naming import JobName, Ref, find, refuse_other_job
from kedge.errors import Conflict, NotFound
from kedge.terminal.text import style

if TYPE_CHECKING:
    from kedge.manager import CheckpointManager


@store_command("delete", json_keys='{"job": …, "deleted": [IDs]}')
@click.argument("job", type=JobName())
@click.argument("refs", metavar="ID...", nargs=-1, required=True, type=Ref())
@click.option("--missing-ok", is_flag=True, help="Ignore IDs that do not exist.")
def delete_command(session: Session, job: str, refs: tuple[str, ...], missing_ok: bool) -> None:
    """Delete checkpoints of JOB. All IDs are looked up first: if one is wrong, nothing is deleted.

    `kedge gc` frees their space. Pinned checkpoints are refused.
    """
    with session.open() as manager:
        doomed = dict.fromkeys(filter(None, (_deletable(manager, job, ref, missing_ok) for ref in refs)))
        deleted = [checkpoint_id for checkpoint_id in doomed if manager.delete(job, checkpoint_id)]
    session.answer(
        {"job": job, "deleted": deleted}, *(f"{style(checkpoint_id, 'id')}  deleted" for checkpoint_id in deleted)
    )
    if not deleted and not session.as_json:
        click.echo("nothing to delete", err=True)


def _deletable(manager: CheckpointManager, job: str, ref: str, missing_ok: bool) -> str | None:
    """The ID of a checkpoint that may be deleted; None for one that does not exist, if that is fine."""
    try:
        checkpoint = find(manager, ref)
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
