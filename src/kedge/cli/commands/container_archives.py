"""`kedge container export | import | inspect`: archives of other engines, and what is in them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from kedge.cli.session import Number, Session, emit, store_command
from kedge.terminal.tables import Column, print_facts, print_table
from kedge.terminal.text import count_of, safe, size, style

if TYPE_CHECKING:
    from kedge.containers.criu.images import Process
    from kedge.containers.inspection import Inspection

_FORMATS = ("podman", "cri", "containerd", "oci", "containerd-index")
_MAX_BYTES = 1 << 36
_SHOWN_CHANGES = 20


@store_command("export", json_keys='{"id": …, "path": …, "format": …, "size_bytes": …}')
@click.argument("checkpoint", metavar="ID|KEY")
@click.argument("path", type=click.Path())
@click.option("--format", "format_", type=click.Choice(_FORMATS), required=True, help="Whose archive to write.")
@click.option("--compress", type=click.Choice(("none", "gzip", "zstd")), help="[default: as that engine does]")
@click.option("--force", is_flag=True, help="Replace PATH if it exists.")
def export_command(
    session: Session, checkpoint: str, path: str, format_: str, compress: str | None, force: bool
) -> None:
    """Write a checkpoint of a container as an archive that another engine reads.

    podman restores what came from podman; of other containers checkpointctl reads the archive, and podman does not
    restore it, because it wants its own configuration of the container in it.
    """
    from kedge.containers import snapshot
    from kedge.containers.archive.export import export

    with session.open() as manager:
        found = snapshot.find(manager, "container", checkpoint)
        kept, taken = snapshot.load(manager, found.id)
        written = export(kept, taken, path, format=format_, compression=compress, overwrite=force)
    if session.as_json:
        emit({"id": found.id, "path": os.path.abspath(path), "format": format_, "size_bytes": written})
    else:
        click.echo(f"wrote {safe(path)}: {size(written)}, {format_}, from {found.id}")


@store_command(
    "import", json_keys='{"id": …, "job": …, "format": …, "stored_bytes": …, "is_new": bool, "left_out": […]}'
)
@click.argument("path", type=click.Path())
@click.option("--key", metavar="NAME", help="The container it becomes a checkpoint of.  [default: its own name]")
@click.option(
    "--max-bytes", type=Number(1), default=_MAX_BYTES, help="Refuse more than this, unpacked.  [default: 64 GiB]"
)
@click.option("--work", type=click.Path(), help="Where to unpack.  [default: $TMPDIR]")
def import_command(session: Session, path: str, key: str | None, max_bytes: int, work: str | None) -> None:
    """Save an archive of podman, CRI-O, kubelet or containerd, or a checkpoint image, as a checkpoint.

    Archives are taken for hostile: links, devices, annotations and mounts in them are never acted on.
    """
    from kedge.containers.archive.importer import import_archive
    from kedge.containers.archive.tar import Limits

    with session.open(create=True) as manager:
        done = import_archive(manager, path, key=key, limits=Limits(total_bytes=max_bytes), work=work)
    found = done.checkpoint
    if session.as_json:
        emit(
            {
                "id": found.id,
                "job": found.job,
                "format": done.archive_format,
                "stored_bytes": found.stored_bytes,
                "is_new": done.is_new,
                "left_out": [list(pair) for pair in done.left_out],
            }
        )
        return
    told = f"{size(found.stored_bytes)} stored" if done.is_new else "imported before: nothing is stored again"
    click.echo(f"{style(found.id, 'id')}  of {found.job}, {told}")
    for name, what in done.left_out[:_SHOWN_CHANGES]:
        click.echo(f"left out: {safe(name)}: {safe(what)}", err=True)
    if len(done.left_out) > _SHOWN_CHANGES:
        click.echo(f"left out: {len(done.left_out) - _SHOWN_CHANGES:,} more", err=True)


@store_command(
    "inspect",
    json_keys='{"source", "engine", "format", "config", "sizes", "statistics", "processes": [{pid, parent, name, '
    'state, command, threads, memory_bytes, files, sockets}], "mounts", "changes", "environment"}',
)
@click.argument("source", metavar="FILE|ID|KEY")
@click.option("--tree", "as_tree", is_flag=True, help="Processes as a tree, with their files and sockets.")
@click.option("--env", "with_environment", is_flag=True, help="Names of the environment's variables.")
@click.option("--reveal", is_flag=True, help="Their values too: they are often secrets.")
@click.option("--changes", "all_changes", is_flag=True, help="All changed files, not only the first.")
@click.option("--max-bytes", type=Number(1), default=_MAX_BYTES, help="Refuse larger archives.  [default: 64 GiB]")
def inspect_command(
    session: Session,
    source: str,
    as_tree: bool,
    with_environment: bool,
    reveal: bool,
    all_changes: bool,
    max_bytes: int,
) -> None:
    """Show what is in an archive of any engine, or in a checkpoint: processes, memory, sockets, files, times."""
    from kedge.containers.archive.tar import Limits
    from kedge.containers.inspection import inspect_archive, inspect_stored

    if os.path.exists(source):
        found = inspect_archive(source, limits=Limits(total_bytes=max_bytes), reveal=reveal)
    else:
        from kedge.containers import snapshot

        with session.open() as manager:
            checkpoint = snapshot.find(manager, "container", source)
            found = inspect_stored(manager, checkpoint.id, reveal=reveal)
    if session.as_json:
        emit(_document(found, with_environment or reveal))
        return
    _print_facts(found)
    click.echo()
    if as_tree:
        _print_tree(found)
    else:
        _print_processes(found)
    _print_changes(found, None if all_changes else _SHOWN_CHANGES)
    if with_environment or reveal:
        click.echo()
        print_facts(sorted(found.environment.items()))


def _print_facts(found: Inspection) -> None:
    config, figures = found.config, found.statistics.values if found.statistics is not None else {}
    pages = f"{size(found.pages_bytes)} of memory" if found.pages_bytes else ""
    times = [
        f"{what} {figures[key] / 1000:.1f} ms"
        for key, what in (("freezing_us", "freezing"), ("frozen_us", "frozen"), ("memory_dump_us", "memory"))
        if key in figures
    ]
    written = f"{figures['pages_written']:,} pages written" if "pages_written" in figures else ""
    print_facts(
        [
            ("container", config.name),
            ("id", config.id),
            ("image", config.image_name),
            ("runtime", config.runtime),
            ("engine", found.engine + (f" ({found.format} archive)" if found.format != "kedge" else "")),
            ("created", _moment(config.created_at)),
            ("checkpointed", _moment(config.checkpointed_at)),
            ("images", ", ".join(filter(None, (size(found.images_bytes), pages)))),
            ("changed files", f"{size(found.rootfs_bytes)} in {count_of(len(found.changes), 'path')}"),
            ("CRIU", ", ".join(filter(None, (*times, written)))),
        ]
    )


def _moment(text: str) -> str:
    return "" if text.startswith("0001-") else text


def _print_processes(found: Inspection) -> None:
    columns = (
        Column("PID", align=">"),
        Column("PARENT", align=">", drop=3),
        Column("NAME", look="name"),
        Column("STATE", drop=2),
        Column("THREADS", align=">", drop=4),
        Column("MEMORY", align=">"),
        Column("FILES", align=">", drop=1),
        Column("SOCKETS", align=">", drop=1),
        Column("COMMAND"),
    )
    print_table(columns, [_row(found, one) for one in found.processes])


def _row(found: Inspection, one: Process) -> tuple[str, ...]:
    sockets = sum(file.is_socket for file in one.files)
    return (
        str(one.pid),
        str(one.parent or ""),
        one.name,
        one.state,
        str(len(one.threads)),
        size(one.memory_bytes),
        str(len(one.files) - sockets),
        str(sockets or ""),
        " ".join(found.commands.get(one.pid, ())),
    )


def _print_tree(found: Inspection) -> None:
    children: dict[int, list[Process]] = {}
    known = {one.pid for one in found.processes}
    for one in found.processes:
        children.setdefault(one.parent if one.parent in known else 0, []).append(one)
    waiting = [(one, 0) for one in reversed(children.get(0, []))]
    while waiting:
        one, depth = waiting.pop()
        indent = "  " * min(depth, 40)
        command = " ".join(found.commands.get(one.pid, ())) or one.name
        about = style(f"{one.state}, {size(one.memory_bytes)}, {count_of(len(one.threads), 'thread')}", "dim")
        click.echo(f"{indent}{style(f'[{one.pid}]', 'id')} {safe(command)}  {about}")
        for file in one.files:
            peer = f" → {safe(file.peer)}" if file.peer else ""
            detail = f" {safe(file.detail)}" if file.detail else ""
            click.echo(f"{indent}    {file.fd:>4} {style(file.kind, 'type')}{detail} {safe(file.name)}{peer}")
        waiting += [(child, depth + 1) for child in reversed(children.get(one.pid, []))]


def _print_changes(found: Inspection, most: int | None) -> None:
    if not found.changes:
        return
    click.echo()
    for path, kind in found.changes[:most]:
        mark = style("deleted", "bad") if kind == "deleted" else style(kind, "dim")
        click.echo(f"{mark}  /{safe(path)}")
    if most is not None and len(found.changes) > most:
        click.echo(style(f"{len(found.changes) - most:,} more: --changes shows all", "dim"))


def _document(found: Inspection, with_environment: bool) -> dict[str, object]:
    return {
        "source": found.source,
        "engine": found.engine,
        "format": found.format,
        "config": found.config.document(),
        "sizes": {
            "images_bytes": found.images_bytes,
            "pages_bytes": found.pages_bytes,
            "rootfs_bytes": found.rootfs_bytes,
        },
        "statistics": None if found.statistics is None else dict(found.statistics.values),
        "processes": [_process_document(found, one) for one in found.processes],
        "mounts": [{"destination": place, "type": kind, "source": origin} for place, kind, origin in found.mounts],
        "changes": [{"path": path, "kind": kind} for path, kind in found.changes],
        **({"environment": dict(found.environment)} if with_environment else {}),
    }


def _process_document(found: Inspection, one: Process) -> dict[str, object]:
    files = [
        {"fd": file.fd, "kind": file.kind, "name": file.name, "detail": file.detail, "peer": file.peer}
        for file in one.files
    ]
    return {
        "pid": one.pid,
        "parent": one.parent,
        "name": one.name,
        "state": one.state,
        "command": list(found.commands.get(one.pid, ())),
        "executable": one.executable,
        "threads": [{"tid": thread.tid, "name": thread.name} for thread in one.threads],
        "memory_bytes": one.memory_bytes,
        "files": [file for file, known in zip(files, one.files, strict=True) if not known.is_socket],
        "sockets": [file for file, known in zip(files, one.files, strict=True) if known.is_socket],
    }
