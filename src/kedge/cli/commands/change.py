"""`kedge tag`, `pin`, `delete`: what may change about checkpoints that are there."""

from __future__ import annotations

import click

from kedge.cli.naming import REF_HELP, JobName, Ref, find
from kedge.cli.pairs import parse_pairs
from kedge.cli.session import Session, emit, store_command
from kedge.terminal.rows import notes
from kedge.terminal.text import safe, style


@store_command("tag", note=f"ID is: {REF_HELP}", json_keys="the checkpoint, as in list.")
@click.argument("ref", metavar="ID", type=Ref())
@click.argument("pairs", metavar="[K=V]...", nargs=-1)
@click.option("--remove", metavar="K", multiple=True, help="Remove this tag; repeatable.")
def tag_command(session: Session, ref: str, pairs: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Set tags K=V of checkpoint ID, or remove some."""
    from kedge.errors import Validation

    tags: dict[str, str | None] = {**parse_pairs("tag", pairs)}
    if both := sorted(tags.keys() & set(remove)):
        raise Validation(f"tag {both[0]} is both set and removed", hint="decide for one")
    tags.update(dict.fromkeys(remove))
    if not tags:
        raise click.UsageError("give K=V to set a tag, or --remove K")
    with session.open() as manager:
        changed = manager.tag(find(manager, ref).id, **tags)
    if session.as_json:
        emit(changed.to_json())
    else:
        click.echo(f"{style(changed.id, 'id')}  {safe(notes(changed)) or 'no tags'}")


@store_command("pin", note=f"ID is: {REF_HELP}", json_keys="the checkpoint, as in list.")
@click.argument("ref", metavar="ID", type=Ref())
@click.option("--off", is_flag=True, help="Let go of it again.")
def pin_command(session: Session, ref: str, off: bool) -> None:
    """Keep checkpoint ID from every cleanup and delete."""
    with session.open() as manager:
        changed = manager.pin(find(manager, ref).id, not off)
    if session.as_json:
        emit(changed.to_json())
    else:
        click.echo(f"{style(changed.id, 'id')}  {'pinned' if changed.is_pinned else 'no longer pinned'}")


@store_command("delete", json_keys='{"job": …, "deleted": [IDs]}')
@click.argument("job", type=JobName())
@click.argument("refs", metavar="ID...", nargs=-1, required=True, type=Ref())
@click.option("--missing-ok", is_flag=True, help="An ID that does not exist is no error.")
def delete_command(session: Session, job: str, refs: tuple[str, ...], missing_ok: bool) -> None:
    """Delete checkpoints of JOB. All IDs are looked up first: if one is wrong, nothing is deleted.

    Their space comes back with `kedge gc`. Pinned ones are refused.
    """
    from kedge.errors import Conflict, NotFound

    with session.open() as manager:
        doomed: dict[str, bool] = {}
        for ref in refs:
            try:
                found = find(manager, ref)
            except NotFound:
                if missing_ok:
                    continue
                raise
            if found.job != job:
                raise NotFound(f"checkpoint {found.id} not found in job {job}", hint=f"it belongs to job {found.job}")
            if ref == job:
                raise NotFound(f"{ref} is the job, not a checkpoint", hint=f"kedge list {job} shows its IDs")
            if found.is_pinned:
                raise Conflict(f"checkpoint {found.id} is pinned", hint=f"kedge pin {found.id} --off lets go of it")
            doomed[found.id] = True
        deleted = [each for each in doomed if manager.delete(job, each)]
    if session.as_json:
        emit({"job": job, "deleted": deleted})
        return
    for each in deleted:
        click.echo(f"{style(each, 'id')}  deleted")
    if not deleted:
        click.echo("nothing to delete", err=True)
