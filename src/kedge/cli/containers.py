"""What the commands of containers, pods and processes share: options, stores of engines, and how results are shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from kedge.terminal.tables import Column
from kedge.terminal.text import age, safe, size

from .command import Decorator, Session

if TYPE_CHECKING:
    from kedge.containers.checkpoint import Checkpointed
    from kedge.containers.restore import Restored
    from kedge.manager import CheckpointManager
    from kedge.model import Checkpoint

Function = Callable[..., None]


def dump_options(function: Function) -> Function:
    """Options for ties to the outside that may be checkpointed."""
    for name, text in (
        ("--file-locks", "Checkpoint file locks."),
        ("--shell-job", "Allow a process with a controlling terminal."),
        ("--ext-unix-sk", "Allow Unix sockets that are connected to the outside."),
        ("--tcp-established", "Checkpoint open TCP connections."),
    ):
        function = click.option(name, is_flag=True, help=text)(function)
    return function


def chosen_options(given: Mapping[str, bool]) -> list[str]:
    return [f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given]


def runtime_options(function: Function) -> Function:
    """Options that say where a container is found."""
    runtimes = click.Choice(["runc", "crun", "podman", "containerd", "docker"])
    function = click.option("--root", metavar="DIR", help="The runtime's --root, if it is not the usual one.")(function)
    return click.option("--runtime", type=runtimes, help="The runtime or engine that runs it.")(function)


gpu_option: Decorator = click.option(
    "--gpu",
    type=click.Choice(["auto", "require", "off"]),
    default="auto",
    show_default=True,
    help="NVIDIA GPU memory: include it if there is any, require it, or leave GPUs alone.",
)

address_option: Decorator = click.option(
    "--address",
    metavar="SOCKET",
    help="The engine's socket.  [default: $CONTAINERD_ADDRESS, else the first of the usual ones]",
)


def show_phase(phase: str) -> None:
    """Show progress on stderr, if that is a terminal."""
    if sys.stderr.isatty():
        click.echo(f"  … {safe(phase)}", err=True)


class Stores(ExitStack):
    """The stores of what is worked on, each opened once: --store, or that of a container's engine."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        from kedge.containers.runtime import settings

        self._session = session
        session.export_key()
        self._node = settings.adopt()
        self._open: dict[str, CheckpointManager] = {}

    def of(self, environment: Mapping[str, str]) -> CheckpointManager:
        from kedge.containers.runtime.marks import store_of

        settings = {**self._node, **environment}
        if own := os.environ.get("KEDGE_STORE"):
            settings = {"KEDGE_STORE": own, **settings}
        place = self._session.store or settings.get("KEDGE_STORE", "")
        if place not in self._open:
            opened = self._session.of_memory().open(create=True) if self._session.store else store_of(settings)
            self._open[place] = self.enter_context(opened)
        return self._open[place]


def key_of(checkpoint: Checkpoint) -> str:
    """The key under which a container or a process is checkpointed."""
    return checkpoint.job.partition(":")[2]


def _phases(phases_ms: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} {ms:.0f} ms" for phase, ms in phases_ms.items())


def answer_checkpointed(session: Session, checkpointed: Checkpointed, *, was_left_running: bool) -> None:
    checkpoint, sockets = checkpointed.checkpoint, checkpointed.sockets
    session.answer_facts(
        {
            "checkpoint": checkpoint.to_json(),
            "phases_ms": dict(checkpointed.phases_ms),
            "paused_ms": checkpointed.paused_ms,
            "sockets": sockets,
        },
        [
            ("checkpoint", checkpoint.id),
            ("job", checkpoint.job),
            ("size", f"{size(checkpoint.size_bytes)}, {size(checkpoint.stored_bytes)} of it new"),
            ("phases", _phases(checkpointed.phases_ms)),
            ("paused", f"{checkpointed.paused_ms:.0f} ms" if was_left_running else ""),
            ("left out", ", ".join(f"{path} (a socket)" for path in sockets)),
        ],
    )


def answer_restored(session: Session, kind: str, restored: Restored) -> None:
    phases_ms = dict(restored.phases_ms)
    document = {"id": restored.id, "pid": restored.pid, "checkpoint": restored.checkpoint.id, "phases_ms": phases_ms}
    facts = [(kind, restored.id), ("pid", str(restored.pid)), ("checkpoint", restored.checkpoint.id)]
    session.answer_facts(document, [*facts, ("phases", _phases(phases_ms))])


def _paused(checkpoint: Checkpoint) -> str:
    paused_ms = checkpoint.metadata.get("paused_ms")
    return f"{paused_ms:.0f} ms" if isinstance(paused_ms, int | float) else "ended"


_COLUMNS: tuple[Column[Checkpoint], ...] = (
    Column("KEY", key_of, look="name"),
    Column("CHECKPOINT", lambda c: c.id, look="id", is_whole=True),
    Column("AGE", lambda c: age(c.created_at), ">", drop=1, is_whole=True),
    Column("PROCESSES", lambda c: str(c.metadata.get("processes", "")), ">", drop=3),
    Column("MEMORY", lambda c: size(int(str(c.metadata.get("memory_bytes") or 0))), ">", drop=2, is_whole=True),
    Column("ADDED", lambda c: size(c.stored_bytes), ">", "dim", drop=4, is_whole=True),
    Column("PAUSED", _paused, ">", drop=5),
    Column("STATUS", lambda c: str(c.status), drop=6),
)


def list_checkpoints(session: Session, kind: str, key: str, limit: int) -> None:
    """The checkpoints of one key, or of all containers or processes."""
    from kedge.containers.snapshot import job_of

    with session.of_memory().open() as manager:
        jobs = [job_of(kind, key)] if key else [job.name for job in manager.jobs(f"{kind}:")]
        checkpoints = [checkpoint for job in jobs for checkpoint in manager.list(job, limit=limit)]
    empty = f"no checkpoints of {kind} {safe(key)}" if key else f"no checkpoints of any {kind} yet"
    session.answer_list("checkpoints", checkpoints, _COLUMNS, lambda checkpoint: checkpoint.to_json(), empty=empty)
