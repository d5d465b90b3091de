"""`kedge pod hibernate`."""

from __future__ import annotations

import click

from kedge.cli.command import Session, store_command
from kedge.cli.containers import address_option, gpu_option

from .checkpoint import OUTCOME_KEYS, checkpoint_pod


@store_command("hibernate", json_keys=OUTCOME_KEYS)
@click.argument("name", metavar="NAMESPACE/POD[/CONTAINER]")
@address_option
@gpu_option
def hibernate_command(session: Session, name: str, address: str | None, gpu: str) -> None:
    """Checkpoint the containers of a pod that opted in, end them, and hold them back until kedge pod wake.

    Until then, every node that uses the store refuses to start the workload, and says why. A container that cannot be
    checkpointed keeps running.
    """
    from kedge.containers.pods import hibernate

    checkpoint_pod(session, name, address, gpu, hibernate)
