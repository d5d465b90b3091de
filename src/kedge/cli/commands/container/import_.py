"""`kedge container import`: an archive of another engine as a checkpoint."""

from __future__ import annotations

import click

from kedge.cli.command import Number, Session, store_command
from kedge.terminal.text import safe, size, style

MAX_BYTES = 1 << 36
_SHOWN = 20  # of what was left out


@store_command(
    "import", json_keys='{"id": …, "job": …, "format": …, "stored_bytes": …, "is_new": bool, "left_out": […]}'
)
@click.argument("path", type=click.Path())
@click.option("--key", metavar="NAME", help="The key of the checkpoint.  [default: its own name]")
@click.option(
    "--max-bytes",
    type=Number(1),
    default=MAX_BYTES,
    help="Refuse archives that are larger than this when unpacked.  [default: 64 GiB]",
)
@click.option("--work", type=click.Path(), help="Where to unpack.  [default: $TMPDIR]")
def import_command(session: Session, path: str, key: str | None, max_bytes: int, work: str | None) -> None:
    """Import an archive of podman, CRI-O, kubelet or containerd, or a checkpoint image, as a checkpoint.

    Archives are not trusted: Kedge does not follow links, create devices, or apply annotations and mounts from them.
    """
    from kedge.containers.archive.importer import import_archive
    from kedge.containers.archive.tar import Limits

    with session.of_memory().open(create=True) as manager:
        result = import_archive(manager, path, key=key, limits=Limits(total_bytes=max_bytes), work=work)
    checkpoint = result.checkpoint
    stored = f"{size(checkpoint.stored_bytes)} stored" if result.is_new else "imported before, nothing stored again"
    session.answer(
        {
            "id": checkpoint.id,
            "job": checkpoint.job,
            "format": result.archive_format,
            "stored_bytes": checkpoint.stored_bytes,
            "is_new": result.is_new,
            "left_out": [list(pair) for pair in result.left_out],
        },
        f"{style(checkpoint.id, 'id')}  of {checkpoint.job}, {stored}",
    )
    if session.as_json:
        return
    for name, what in result.left_out[:_SHOWN]:
        click.echo(f"left out: {safe(name)}: {safe(what)}", err=True)
    if len(result.left_out) > _SHOWN:
        click.echo(f"left out: {len(result.left_out) - _SHOWN:,} more", err=True)
