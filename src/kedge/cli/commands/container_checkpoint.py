"""`kedge container checkpoint` and `list`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

from kedge.cli.session import Number, Session, emit, store_command
from kedge.terminal.tables import Column, print_facts, print_table
from kedge.terminal.text import age, safe, size

if TYPE_CHECKING:
    from kedge.model import Checkpoint


def dump_options(function: Callable[..., None]) -> Callable[..., None]:
    """The options that say which ties to the world outside a dump may keep."""
    for name, text in (
        ("--file-locks", "Keep file locks."),
        ("--shell-job", "It has a terminal of its own."),
        ("--ext-unix-sk", "Unix sockets may lead outside."),
        ("--tcp-established", "Keep open TCP connections."),
    ):
        function = click.option(name, is_flag=True, help=text)(function)
    return function


def gpu_option(function: Callable[..., None]) -> Callable[..., None]:
    """Whether memory on GPUs is frozen and thawed with the processes."""
    return click.option(
        "--gpu",
        type=click.Choice(["auto", "require", "off"]),
        default="auto",
        show_default=True,
        help="Memory on NVIDIA GPUs: kept if there is any, must be there, or left alone.",
    )(function)


def chosen_options(given: Mapping[str, bool]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name, is_wanted in given.items() if is_wanted]


@store_command(
    "checkpoint",
    json_keys='{"checkpoint": {…}, "phases_ms": {dump, files, store}, "frozen_ms": …, "sockets": [path…]}',
)
@click.argument("container")
@click.option("--runtime", type=click.Choice(["runc", "crun", "podman", "containerd", "docker"]), help="Whose it is.")
@click.option("--root", metavar="DIR", help="The runtime's --root, if it is not the usual one.")
@click.option("--key", metavar="NAME", help="Under which name it is kept.  [default: the container's ID]")
@click.option("--leave-running", is_flag=True, help="Let it run on afterwards.")
@gpu_option
@dump_options
def checkpoint_command(
    session: Session,
    container: str,
    runtime: str | None,
    root: str | None,
    key: str | None,
    leave_running: bool,
    gpu: str,
    **options: bool,
) -> None:
    """Checkpoint CONTAINER into the store: its processes and files of one moment.

    It ends when its checkpoint is durable, or runs on with --leave-running. If anything fails, it runs on.
    """
    from kedge.containers.bundle import ContainerSource
    from kedge.containers.checkpoint import Request, make_checkpoint
    from kedge.containers.engine.runc import find_container
    from kedge.containers.gpu.memory import GpuMemory

    found = find_container(container, runtime, root)
    with session.open(create=True) as manager:
        made = make_checkpoint(
            manager,
            ContainerSource.of(found),
            Request(key or found.id, leave_running=leave_running, options=chosen_options(options)),
            companions=[GpuMemory(gpu)],
            report=_report if sys.stderr.isatty() else None,
        )
    if session.as_json:
        emit(
            {
                "checkpoint": made.checkpoint.to_json(),
                "phases_ms": dict(made.phases_ms),
                "frozen_ms": made.frozen_ms,
                "sockets": list(made.sockets),
            }
        )
        return
    print_facts(
        [
            ("checkpoint", made.checkpoint.id),
            ("job", made.checkpoint.job),
            ("size", f"{size(made.checkpoint.size_bytes)}, {size(made.checkpoint.stored_bytes)} of it new"),
            ("phases", ", ".join(f"{name} {ms:.0f} ms" for name, ms in made.phases_ms.items())),
            ("stood still", f"{made.frozen_ms:.0f} ms" if leave_running else ""),
            ("not kept", ", ".join(f"{path} (a socket)" for path in made.sockets)),
        ]
    )


def _report(phase: str) -> None:
    click.echo(f"  … {phase}", err=True)


@store_command(
    "list",
    json_keys='{"checkpoints": [{…}]}, oldest first; with --containerd {"containers": [{id, namespace, image, runtime, '
    'state, can_freeze, obstacle, key, is_opted_in, memory_bytes, generations, "last": {…}|null}]}',
)
@click.argument("key", default="")
@click.option("--limit", type=Number(1), default=20, help="At most this many of each key.  [default: 20]")
@click.option(
    "--containerd", is_flag=True, help="List what containerd has, whether it can be frozen, and what is kept."
)
@click.option("--address", metavar="SOCKET", help="containerd's socket, if it is not at one of the usual places.")
@click.option("--containerd-namespace", metavar="NAME", help="One of its namespaces, such as k8s.io.  [default: all]")
def list_command(
    session: Session, key: str, limit: int, containerd: bool, address: str | None, containerd_namespace: str | None
) -> None:
    """List what is kept of containers: of KEY, or of all. With --containerd, list what could be kept."""
    if containerd or address or containerd_namespace:
        from .container_engine import list_engine

        list_engine(session, address, containerd_namespace)
    else:
        list_kept(session, "container", "containers", key, limit)


def list_kept(session: Session, kind: str, kinds: str, key: str, limit: int) -> None:
    from kedge.containers.snapshot import job_of

    with session.open() as manager:
        jobs = [job_of(kind, key)] if key else [job.name for job in manager.jobs(f"{kind}:")]
        found = [checkpoint for job in jobs for checkpoint in manager.list(job, limit=limit)]
    if session.as_json:
        emit({"checkpoints": [one.to_json() for one in found]})
    elif found:
        print_kept(found)
    else:
        click.echo(f"nothing is kept of {safe(key) if key else kinds}", err=True)


def print_kept(found: list[Checkpoint]) -> None:
    columns = (
        Column("KEY", look="name"),
        Column("CHECKPOINT", look="id", is_whole=True),
        Column("AGE", ">", drop=1, is_whole=True),
        Column("PROCESSES", ">", drop=3),
        Column("MEMORY", ">", drop=2, is_whole=True),
        Column("ADDED", ">", "dim", drop=4, is_whole=True),
        Column("STOOD STILL", ">", drop=5),
        Column("STATUS", drop=6),
    )
    print_table(columns, [_row(one) for one in found])


def _row(one: Checkpoint) -> tuple[str, ...]:
    facts = one.metadata
    frozen = facts.get("frozen_ms")
    return (
        one.job.partition(":")[2],
        one.id,
        age(one.created_at),
        str(facts.get("processes", "")),
        size(int(str(facts.get("memory_bytes") or 0))),
        size(one.stored_bytes),
        f"{frozen:.0f} ms" if isinstance(frozen, int | float) else "ended",
        str(one.status),
    )
