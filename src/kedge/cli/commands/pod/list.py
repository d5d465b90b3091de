"""`kedge pod list`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import click

from kedge.cli.command import Session, store_command
from kedge.cli.containers import Stores, address_option, key_of
from kedge.cli.output import emit
from kedge.terminal.tables import Column, print_table
from kedge.terminal.text import age, size

if TYPE_CHECKING:
    from kedge.containers.pods import Workload
    from kedge.containers.volumes import Volume
    from kedge.model import Checkpoint


@dataclass(frozen=True, slots=True)
class Running:
    """A container of a pod that runs, and its checkpoints."""

    workload: Workload
    memory_bytes: int
    checkpoints: Sequence[Checkpoint]
    volumes: Sequence[Volume]

    def to_json(self) -> dict[str, object]:
        container = self.workload.container
        return {
            "namespace": container.pod.namespace,
            "pod": container.pod.name,
            "container": container.name,
            "id": container.id,
            "state": container.state,
            "key": self.workload.key,
            "is_opted_in": self.workload.is_opted_in,
            "memory_bytes": self.memory_bytes,
            "generations": len(self.checkpoints),
            "last": self.checkpoints[-1].to_json() if self.checkpoints else None,
            "volumes": [volume.to_json() for volume in self.volumes],
        }

    def row(self) -> Row:
        pod = self.workload.container.pod
        return Row(
            f"{pod.namespace}/{pod.name}",
            self.workload.container.name,
            self.workload.key if self.workload.is_opted_in else "-",
            size(self.memory_bytes),
            str(len(self.checkpoints)),
            age(self.checkpoints[-1].created_at) if self.checkpoints else "-",
            ", ".join(self.left_volumes()) or "-",
        )

    def left_volumes(self) -> list[str]:
        """Where volumes are mounted that the next pod has only if somebody sees to it."""
        return [volume.destination for volume in self.volumes if not volume.is_saved and not volume.is_made_anew]


class Row(NamedTuple):
    """A container, running or hibernating."""

    pod: str
    container: str
    key: str
    memory: str
    checkpoints: str
    last: str
    not_saved: str = ""


_COLUMNS: tuple[Column[Row], ...] = (
    Column("POD", lambda row: row.pod, look="name"),
    Column("CONTAINER", lambda row: row.container, look="name"),
    Column("KEY", lambda row: row.key, drop=3),
    Column("MEMORY", lambda row: row.memory, ">", drop=2, is_whole=True),
    Column("CHECKPOINTS", lambda row: row.checkpoints, ">", drop=4),
    Column("LAST", lambda row: row.last, ">", drop=1, is_whole=True),
    Column("VOLUMES NOT SAVED", lambda row: row.not_saved, drop=5),
)


@store_command(
    "list",
    json_keys='{"containers": [{namespace, pod, container, id, state, key, is_opted_in, memory_bytes, generations, '
    '"last": {…}|null, "volumes": [{path, kind, is_saved, reason}]}], "asleep": [{checkpoint…}]}',
)
@click.argument("namespace_of_pods", metavar="[NAMESPACE]", default="")
@address_option
def list_command(session: Session, namespace_of_pods: str, address: str | None) -> None:
    """List the containers of the pods of this node, their checkpoints, and what hibernates."""
    from kedge.containers.engine.cri import find_address
    from kedge.containers.hibernation import sleepers
    from kedge.containers.pods import workloads

    with Stores(session) as stores:
        running = [
            _described(workload, stores)
            for workload in workloads(find_address(address))
            if namespace_of_pods in ("", workload.container.pod.namespace) and workload.container.state == "running"
        ]
        prefix = f"{namespace_of_pods}+" if namespace_of_pods else ""
        asleep = list(sleepers(stores.of({}), prefix))
    if session.as_json:
        containers = [container.to_json() for container in running]
        emit({"containers": containers, "asleep": [checkpoint.to_json() for checkpoint in asleep]})
    elif running or asleep:
        print_table(_COLUMNS, [*(container.row() for container in running), *map(_sleeping_row, asleep)])
    else:
        click.echo("no container of a pod runs here, and none hibernates", err=True)


def _described(workload: Workload, stores: Stores) -> Running:
    from kedge.containers.preemption import memory_bytes
    from kedge.containers.snapshot import generations
    from kedge.errors import CheckpointError

    checkpoints = generations(stores.of(workload.environment), "container", workload.key)
    try:
        container = workload.find()
    except CheckpointError:  # it ended meanwhile
        return Running(workload, 0, checkpoints, [])
    return Running(workload, memory_bytes(container.pid), checkpoints, workload.volumes(container))


def _sleeping_row(checkpoint: Checkpoint) -> Row:
    pod = checkpoint.metadata.get("pod")
    facts = pod if isinstance(pod, dict) else {}
    name = f"{facts.get('namespace', '')}/{facts.get('name', '')}"
    return Row(name, str(facts.get("container", "")), key_of(checkpoint), "asleep", "", age(checkpoint.created_at))
