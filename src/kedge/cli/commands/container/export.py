"""`kedge container export`: a checkpoint as an archive that another engine reads."""

from __future__ import annotations

import os

import click

from kedge.cli.command import Session, store_command
from kedge.terminal.text import safe, size

_FORMATS = ("podman", "cri", "containerd", "oci")


@store_command("export", json_keys='{"id": …, "path": …, "format": …, "size_bytes": …}')
@click.argument("checkpoint", metavar="ID|KEY")
@click.argument("path", type=click.Path())
@click.option("--format", "format_", type=click.Choice(_FORMATS), required=True, help="The format of the archive.")
@click.option(
    "--compress",
    type=click.Choice(("none", "gzip", "zstd")),
    help="How to compress it.  [default: as that engine does]",
)
@click.option("--force", is_flag=True, help="Replace PATH if it exists.")
def export_command(
    session: Session, checkpoint: str, path: str, format_: str, compress: str | None, force: bool
) -> None:
    """Write a container checkpoint as an archive for another engine.

    podman restores only containers that came from podman, because the archive must hold podman's own configuration.
    checkpointctl reads the archives of all containers.
    """
    from kedge.containers import snapshot
    from kedge.containers.archive.export import export

    with session.of_memory().open() as manager:
        source = snapshot.find(manager, "container", checkpoint)
        stored, content = snapshot.load(manager, source.id)
        written = export(stored, content, path, format=format_, compression=compress, overwrite=force)
    session.answer(
        {"id": source.id, "path": os.path.abspath(path), "format": format_, "size_bytes": written},
        f"wrote {safe(path)}: {size(written)}, {format_}, from {source.id}",
    )
    if content.volumes:
        left = safe(", ".join(sorted(content.volumes)))
        click.echo(f"left out, because no such format has volumes: {left}", err=True)
