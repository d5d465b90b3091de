"""`kedge pod wake`."""

from __future__ import annotations

import click

from kedge.cli.command import Session, store_command
from kedge.cli.containers import Stores, key_of
from kedge.terminal.text import safe


@store_command("wake", json_keys='{"woken": [{checkpoint…}]}')
@click.argument("name", metavar="NAMESPACE/POD|NAMESPACE/OWNER|KEY")
def wake_command(session: Session, name: str) -> None:
    """Wake a hibernating workload: its next start restores the checkpoint.

    If a controller recreates the pod, its name may be different by then: name the controller, or the key.
    """
    from kedge.containers.pods import wake

    with Stores(session) as stores:
        woken = wake(stores.of({}), name)
    session.answer(
        {"woken": [checkpoint.to_json() for checkpoint in woken]},
        *(f"{safe(key_of(checkpoint))}: its next start restores {checkpoint.id}" for checkpoint in woken),
    )
