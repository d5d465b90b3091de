"""`kedge container restore`."""

from __future__ import annotations

from pathlib import Path

import click

from kedge.cli.command import Session, store_command
from kedge.cli.containers import gpu_option, phases, show_phase


@store_command("restore", json_keys='{"id": …, "pid": …, "checkpoint": …, "phases_ms": {load, files, restore}}')
@click.argument("name", metavar="KEY|ID")
@click.option("--new-id", metavar="ID", help="The container's new ID.  [default: the one it had]")
@click.option("--bundle", metavar="DIR", help="Its bundle.  [default: where it was]")
@click.option("--root", metavar="DIR", help="The runtime's --root.  [default: the one it had]")
@gpu_option
def restore_command(
    session: Session, name: str, new_id: str | None, bundle: str | None, root: str | None, gpu: str
) -> None:
    """Restore a container from the newest intact checkpoint of KEY, or from the checkpoint ID.

    Its files are restored first. If the restore fails, they are put back as they were. If its standard streams were
    pipes, the container gets those of this command.
    """
    from kedge.containers.bundle import ContainerTarget
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.restore import restore_newest

    with session.of_memory().open() as manager:
        restored = restore_newest(
            manager,
            "container",
            name,
            lambda taken: ContainerTarget.of(
                taken, new_id=new_id, bundle=None if bundle is None else Path(bundle), root=root
            ),
            companions=[GpuMemory(gpu)],
            report=show_phase,
        )
    session.answer_facts(
        {
            "id": restored.id,
            "pid": restored.pid,
            "checkpoint": restored.checkpoint.id,
            "phases_ms": dict(restored.phases_ms),
        },
        [
            ("container", restored.id),
            ("pid", str(restored.pid)),
            ("checkpoint", restored.checkpoint.id),
            ("phases", phases(restored.phases_ms)),
        ],
    )
