"""`kedge container checkpoint`."""

from __future__ import annotations

import click

from kedge.cli.command import Session, store_command
from kedge.cli.containers import (
    checkpoint_document,
    checkpoint_facts,
    chosen_options,
    dump_options,
    gpu_option,
    runtime_options,
    show_phase,
)


@store_command(
    "checkpoint",
    json_keys='{"checkpoint": {…}, "phases_ms": {dump, files, store}, "frozen_ms": …, "sockets": [path…]}',
)
@click.argument("container")
@runtime_options
@click.option("--key", metavar="NAME", help="The key of its checkpoints.  [default: the container's ID]")
@click.option("--leave-running", is_flag=True, help="Let it continue afterwards.")
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
    """Checkpoint CONTAINER: its processes and files, from the same moment.

    It ends once its checkpoint is durable; with --leave-running it continues. If anything fails, it continues, too.
    """
    from kedge.containers.bundle import ContainerSource
    from kedge.containers.checkpoint import Request, make_checkpoint
    from kedge.containers.engine.runc import find_container
    from kedge.containers.gpu.memory import GpuMemory

    target = find_container(container, runtime, root)
    with session.of_memory().open(create=True) as manager:
        frozen = make_checkpoint(
            manager,
            ContainerSource.of(target),
            Request(key or target.id, leave_running=leave_running, options=chosen_options(options)),
            companions=[GpuMemory(gpu)],
            report=show_phase,
        )
    session.answer_facts(
        {**checkpoint_document(frozen), "sockets": list(frozen.sockets)},
        [
            *checkpoint_facts(frozen),
            ("paused", f"{frozen.frozen_ms:.0f} ms" if leave_running else ""),
            ("left out", ", ".join(f"{path} (a socket)" for path in frozen.sockets)),
        ],
    )
