"""`kedge container restore`."""

from __future__ import annotations

import sys

import click

from kedge.cli.session import Session, emit, store_command
from kedge.terminal.tables import print_facts

from .container_checkpoint import gpu_option


@store_command("restore", json_keys='{"id": …, "pid": …, "checkpoint": …, "phases_ms": {load, files, restore}}')
@click.argument("name", metavar="KEY|ID")
@click.option("--new-id", metavar="ID", help="The container's new ID.  [default: the one it had]")
@click.option("--bundle", metavar="DIR", help="Its bundle.  [default: where it was]")
@click.option("--root", metavar="DIR", help="The runtime's --root.  [default: the one it had]")
@gpu_option
def restore_command(
    session: Session, name: str, new_id: str | None, bundle: str | None, root: str | None, gpu: str
) -> None:
    """Restore a container: the newest sound checkpoint of KEY, or the one with that ID.

    Its files are put in place first; what they were comes back if the restore fails. The container gets the standard
    streams of this command where its own were pipes.
    """
    from pathlib import Path

    from kedge.containers.bundle import ContainerTarget
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.restore import restore_newest

    with session.open() as manager:
        restored = restore_newest(
            manager,
            "container",
            name,
            lambda taken: ContainerTarget.of(
                taken, new_id=new_id, bundle=None if bundle is None else Path(bundle), root=root
            ),
            companions=[GpuMemory(gpu)],
            report=_report if sys.stderr.isatty() else None,
        )
    facts = {
        "id": restored.id,
        "pid": restored.pid,
        "checkpoint": restored.checkpoint.id,
        "phases_ms": dict(restored.phases_ms),
    }
    if session.as_json:
        emit(facts)
        return
    phases = ", ".join(f"{phase} {ms:.0f} ms" for phase, ms in restored.phases_ms.items())
    print_facts(
        [
            ("container", restored.id),
            ("pid", str(restored.pid)),
            ("checkpoint", restored.checkpoint.id),
            ("phases", phases),
        ]
    )


def _report(phase: str) -> None:
    click.echo(f"  … {phase}", err=True)
