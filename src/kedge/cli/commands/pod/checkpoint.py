"""`kedge pod checkpoint`, and what it shares with `hibernate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Session, store_command
from kedge.cli.containers import Stores, address_option, gpu_option, key_of, show_phase
from kedge.cli.failures import describe
from kedge.errors import CheckpointError
from kedge.terminal.tables import Column
from kedge.terminal.text import safe, size

if TYPE_CHECKING:
    from kedge.containers.checkpoint import Checkpointed
    from kedge.containers.pods import Workload

OUTCOME_KEYS = (
    '{"containers": [{namespace, pod, container, id, key, "checkpoint": {…}|null, "frozen_ms": …, '
    '"error": {code, message, hint}|null}]}'
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one container of a pod: a checkpoint, or the error."""

    workload: Workload
    frozen: Checkpointed | None = None
    error: CheckpointError | None = None

    @property
    def key(self) -> str:
        return self.workload.key if self.frozen is None else key_of(self.frozen.checkpoint)

    def to_json(self) -> dict[str, object]:
        container = self.workload.container
        document: dict[str, object] = {
            "namespace": container.pod.namespace,
            "pod": container.pod.name,
            "container": container.name,
            "id": container.id,
            "key": self.key,
            "checkpoint": None,
            "frozen_ms": None,
            "error": None,
        }
        if self.frozen is not None:
            document |= {"checkpoint": self.frozen.checkpoint.to_json(), "frozen_ms": self.frozen.frozen_ms}
        if self.error is not None:
            code, message, hint, _ = describe(self.error)
            document["error"] = {"code": code, "message": message, "hint": hint}
        return document


_COLUMNS: tuple[Column[Outcome], ...] = (
    Column("CONTAINER", lambda o: o.workload.container.name, look="name"),
    Column("KEY", lambda o: o.key, drop=2),
    Column("CHECKPOINT", lambda o: o.frozen.checkpoint.id if o.frozen else "failed", look="id", is_whole=True),
    Column("SIZE", lambda o: size(o.frozen.checkpoint.size_bytes) if o.frozen else "", ">", drop=1, is_whole=True),
    Column("ADDED", lambda o: size(o.frozen.checkpoint.stored_bytes) if o.frozen else "", ">", drop=3, is_whole=True),
)


@store_command("checkpoint", json_keys=OUTCOME_KEYS)
@click.argument("name", metavar="NAMESPACE/POD[/CONTAINER]")
@address_option
@gpu_option
def checkpoint_command(session: Session, name: str, address: str | None, gpu: str) -> None:
    """Checkpoint a pod of this node: all containers that opted in, or the one that is named.

    They keep running. Exit code 1 if any of them could not be checkpointed.
    """
    from kedge.containers.pods import checkpoint

    checkpoint_pod(session, name, address, gpu, checkpoint)


def checkpoint_pod(
    session: Session, name: str, address: str | None, gpu: str, action: Callable[..., Checkpointed]
) -> None:
    """Do `action` with each container of a pod, and say what became of it."""
    from kedge.containers.engine.cri import find_address
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.pods import PodName, find

    pod = PodName.parse(name)
    outcomes: list[Outcome] = []
    with Stores(session) as stores:
        for workload in find(find_address(address), pod):
            show_phase(workload.name)
            try:
                frozen = action(workload, stores.of(workload.environment), [GpuMemory(gpu)])
                outcomes.append(Outcome(workload, frozen))
            except CheckpointError as error:
                outcomes.append(Outcome(workload, error=error))
    session.answer_list("containers", outcomes, _COLUMNS, Outcome.to_json)
    failed = [(outcome.workload, outcome.error) for outcome in outcomes if outcome.error is not None]
    for workload, reason in () if session.as_json else failed:
        _, message, hint, _ = describe(reason)
        click.echo(f"{safe(workload.container.name)}: {safe('. '.join(filter(None, (message, hint))))}", err=True)
    if failed:
        click.get_current_context().exit(1)
