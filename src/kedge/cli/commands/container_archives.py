"""`kedge container inspect`, `export` and `import`: what is in a checkpoint, and archives of other engines."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Number, Session, store_command
from kedge.cli.output import emit
from kedge.errors import NotFound, Validation
from kedge.terminal.tables import Column, print_facts, print_table
from kedge.terminal.text import count_of, safe, size, style

if TYPE_CHECKING:
    from kedge.containers.criu.images import Process
    from kedge.containers.inspection import Inspection

_FORMATS = ("podman", "cri", "containerd", "oci", "arch")
_MAX_BYTES = 1 << 36
_SHOWN = 20  # of changed files, and of what was left out
_ARCHIVE = re.compile(r"/|\.(tar(\.\w+)?|tgz)$")


@store_command(
    "inspect",
    json_keys='{"source", "engine", "format", "config", "sizes", "statistics", "processes": [{pid, parent, name, '
    'state, command, threads, memory_bytes, files, sockets}], "mounts", "changes", "environment"}',
)
@click.argument("source", metavar="FILE|ID|KEY")
@click.option("--tree", "as_tree", is_flag=True, help="Show processes as a tree, with their files and sockets.")
@click.option("--env", "with_environment", is_flag=True, help="Show the names of environment variables.")
@click.option("--reveal", is_flag=True, help="Show their values too, which are often secrets.")
@click.option("--changes", "all_changes", is_flag=True, help="Show all changed files.")
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
    """Show what is in a checkpoint, or in an archive.

    Shows processes, memory, sockets, files and times, also of archives of other engines. A name without "/" that does
    not end like an archive (.tar, .tar.zst, .tgz) is looked up in the store first.
    """
    from kedge.containers.archive.tar import Limits
    from kedge.containers.inspection import inspect_archive

    is_there = os.path.exists(source)
    content = None if is_there and _ARCHIVE.search(source) else _stored(session, source, reveal, is_needed=not is_there)
    if content is None:
        content = inspect_archive(source, limits=Limits(total_bytes=max_bytes), reveal=reveal)
    elif is_there:
        click.echo(f"{safe(source)} is in the store; ./{safe(source)} shows what has that name here", err=True)
    if session.as_json:
        emit(_document(content, with_environment or reveal))
        return
    print_facts(_facts(content))
    click.echo()
    if as_tree:
        _print_tree(content)
    else:
        print_table(_columns(content), content.processes)
    _print_changes(content, None if all_changes else _SHOWN)
    if with_environment or reveal:
        click.echo()
        print_facts(sorted(content.environment.items()))


def _stored(session: Session, name: str, reveal: bool, *, is_needed: bool) -> Inspection | None:
    """The checkpoint of that ID or key; None if there is none, and none is needed."""
    from kedge.containers import snapshot
    from kedge.containers.inspection import inspect_stored

    with ExitStack() as stack:
        try:
            manager = stack.enter_context(session.of_memory().open())
            checkpoint = snapshot.find(manager, "container", name)
        except (NotFound, Validation):
            if is_needed:
                raise
            return None
        return inspect_stored(manager, checkpoint.id, reveal=reveal)


def _facts(content: Inspection) -> list[tuple[str, str]]:
    config, figures = content.config, content.statistics or {}
    pages = f"{size(content.pages_bytes)} of memory" if content.pages_bytes else ""
    times = [
        f"{what} {figures[key] / 1000:.1f} ms"
        for key, what in (("freezing_us", "pausing"), ("frozen_us", "paused"), ("memory_dump_us", "memory"))
        if key in figures
    ]
    written = f"{figures['pages_written']:,} pages written" if "pages_written" in figures else ""
    return [
        ("checkpoint" if content.format == "kedge" else "archive", content.source),
        ("container", config.name),
        ("id", config.id),
        ("image", config.image_name),
        ("runtime", config.runtime),
        ("engine", content.engine + (f" ({content.format} archive)" if content.format != "kedge" else "")),
        ("created", _moment(config.created_at)),
        ("checkpointed", _moment(config.checkpointed_at)),
        ("images", ", ".join(filter(None, (size(content.images_bytes), pages)))),
        ("changed files", f"{size(content.rootfs_bytes)} in {count_of(len(content.changes), 'path')}"),
        ("CRIU", ", ".join(filter(None, (*times, written)))),
    ]


def _moment(text: str) -> str:
    return "" if text.startswith("0001-") else text


def _columns(content: Inspection) -> tuple[Column[Process], ...]:
    return (
        Column("PID", lambda process: str(process.pid), ">"),
        Column("PARENT", lambda process: str(process.parent or ""), ">", drop=3),
        Column("NAME", lambda process: process.name, look="name"),
        Column("STATE", lambda process: process.state, drop=2),
        Column("THREADS", lambda process: str(len(process.threads)), ">", drop=4),
        Column("MEMORY", lambda process: size(process.memory_bytes), ">"),
        Column("FILES", lambda process: str(len(process.files) - _sockets(process)), ">", drop=1),
        Column("SOCKETS", lambda process: str(_sockets(process) or ""), ">", drop=1),
        Column("COMMAND", lambda process: " ".join(content.commands.get(process.pid, ()))),
    )


def _sockets(process: Process) -> int:
    return sum(file.is_socket for file in process.files)


def _print_tree(content: Inspection) -> None:
    children: dict[int, list[Process]] = {}
    known = {process.pid for process in content.processes}
    for process in content.processes:
        children.setdefault(process.parent if process.parent in known else 0, []).append(process)
    waiting = [(process, 0) for process in reversed(children.get(0, []))]
    while waiting:
        process, depth = waiting.pop()
        indent = "  " * min(depth, 40)
        command = " ".join(content.commands.get(process.pid, ())) or process.name
        threads = count_of(len(process.threads), "thread")
        about = style(f"{process.state}, {size(process.memory_bytes)}, {threads}", "dim")
        click.echo(f"{indent}{style(f'[{process.pid}]', 'id')} {safe(command)}  {about}")
        for file in process.files:
            peer = f" → {safe(file.peer)}" if file.peer else ""
            detail = f" {safe(file.detail)}" if file.detail else ""
            click.echo(f"{indent}    {file.fd:>4} {style(file.kind, 'type')}{detail} {safe(file.name)}{peer}")
        waiting += [(child, depth + 1) for child in reversed(children.get(process.pid, []))]


def _print_changes(content: Inspection, most: int | None) -> None:
    if not content.changes:
        return
    click.echo()
    for path, kind in content.changes[:most]:
        mark = style("deleted", "bad") if kind == "deleted" else style(kind, "dim")
        click.echo(f"{mark}  /{safe(path)}")
    if most is not None and len(content.changes) > most:
        click.echo(style(f"{len(content.changes) - most:,} more: --changes shows all", "dim"))


def _document(content: Inspection, with_environment: bool) -> dict[str, object]:
    return {
        "source": content.source,
        "engine": content.engine,
        "format": content.format,
        "config": content.config.document(),
        "sizes": {
            "images_bytes": content.images_bytes,
            "pages_bytes": content.pages_bytes,
            "rootfs_bytes": content.rootfs_bytes,
        },
        "statistics": None if content.statistics is None else dict(content.statistics),
        "processes": [_process_document(content, process) for process in content.processes],
        "mounts": [{"destination": place, "type": kind, "source": origin} for place, kind, origin in content.mounts],
        "changes": [{"path": path, "kind": kind} for path, kind in content.changes],
        **({"environment": dict(content.environment)} if with_environment else {}),
    }


def _process_document(content: Inspection, process: Process) -> dict[str, object]:
    def files(is_socket: bool) -> list[dict[str, object]]:
        return [
            {"fd": file.fd, "kind": file.kind, "name": file.name, "detail": file.detail, "peer": file.peer}
            for file in process.files
            if file.is_socket == is_socket
        ]

    return {
        "pid": process.pid,
        "parent": process.parent,
        "name": process.name,
        "state": process.state,
        "command": list(content.commands.get(process.pid, ())),
        "executable": process.executable,
        "threads": [{"tid": thread.tid, "name": thread.name} for thread in process.threads],
        "memory_bytes": process.memory_bytes,
        "files": files(is_socket=False),
        "sockets": files(is_socket=True),
    }


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
    """Write a checkpoint as an archive for another engine.

    podman restores only containers that came from podman, because the archive must hold podman's own configuration.
    checkpointctl reads the archives of all containers. For ARCH, PATH is a directory.
    """
    from kedge.containers import snapshot
    from kedge.containers.archive.export import export
    from kedge.legacy import arch

    with session.of_memory().open() as manager:
        source = snapshot.find(manager, "container", checkpoint)
        stored, content = snapshot.load(manager, source.id)
        if format_ == "arch":
            written = arch.export(stored, content, path, overwrite=force)
        else:
            written = export(stored, content, path, format=format_, compression=compress, overwrite=force)
    session.answer(
        {"id": source.id, "path": os.path.abspath(path), "format": format_, "size_bytes": written},
        f"wrote {safe(path)}: {size(written)}, {format_}, from {source.id}",
    )
    if content.volumes:
        left = safe(", ".join(sorted(content.volumes)))
        click.echo(f"volumes left out, because this format cannot hold them: {left}", err=True)


@store_command(
    "import", json_keys='{"id": …, "job": …, "format": …, "stored_bytes": …, "is_new": bool, "left_out": […]}'
)
@click.argument("path", type=click.Path())
@click.option("--key", metavar="NAME", help="The key of the checkpoint.  [default: its own name]")
@click.option(
    "--max-bytes",
    type=Number(1),
    default=_MAX_BYTES,
    help="Refuse archives that are larger than this when unpacked.  [default: 64 GiB]",
)
@click.option("--work", type=click.Path(), help="Where to unpack.  [default: $TMPDIR]")
def import_command(session: Session, path: str, key: str | None, max_bytes: int, work: str | None) -> None:
    """Import an archive of another engine as a checkpoint.

    Reads archives of podman, CRI-O, kubelet and containerd, and checkpoint images. Archives are not trusted: Kedge does
    not follow links, create devices, or apply annotations and mounts from them.
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
