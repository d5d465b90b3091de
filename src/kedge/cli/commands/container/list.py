"""`kedge container list`: checkpoints of containers, or what containerd runs and what is stored of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Number, Session, store_command
from kedge.cli.containers import Stores, list_checkpoints
from kedge.terminal.tables import Column
from kedge.terminal.text import age, size

if TYPE_CHECKING:
    from kedge.containers.engine.containerd import Task
    from kedge.containers.runtime.marks import Mark
    from kedge.model import Checkpoint


@store_command(
    "list",
    json_keys='{"checkpoints": [{…}]}, oldest first; with --containerd {"containers": [{id, namespace, image, runtime, '
    'state, can_freeze, obstacle, key, is_opted_in, memory_bytes, generations, "last": {…}|null}]}',
)
@click.argument("key", default="")
@click.option("--limit", type=Number(1), default=20, help="Show at most this many of each key.  [default: 20]")
@click.option("--containerd", is_flag=True, help="List the containers of containerd, and what is stored of them.")
@click.option("--address", metavar="SOCKET", help="containerd's socket, if it is not at one of the usual places.")
@click.option("--containerd-namespace", metavar="NAME", help="One of its namespaces, such as k8s.io.  [default: all]")
def list_command(
    session: Session, key: str, limit: int, containerd: bool, address: str | None, containerd_namespace: str | None
) -> None:
    """List the checkpoints of container KEY, or of all; with --containerd, list running containers."""
    if containerd or address or containerd_namespace:
        _list_engine(session, address, containerd_namespace)
    else:
        list_checkpoints(session, "container", key, limit)


@dataclass(frozen=True, slots=True)
class EngineContainer:
    """A container of containerd, how large it is, and its checkpoints under `key`."""

    task: Task
    key: str
    is_opted_in: bool
    memory_bytes: int
    checkpoints: Sequence[Checkpoint]

    @property
    def last(self) -> Checkpoint | None:
        return self.checkpoints[-1] if self.checkpoints else None

    def to_json(self) -> dict[str, object]:
        facts = {
            name: getattr(self.task, name) for name in ("id", "namespace", "image", "runtime", "state", "obstacle")
        }
        return {
            **facts,
            "can_freeze": not self.task.obstacle,
            "key": self.key,
            "is_opted_in": self.is_opted_in,
            "memory_bytes": self.memory_bytes,
            "generations": len(self.checkpoints),
            "last": None if self.last is None else self.last.to_json(),
        }


_COLUMNS: tuple[Column[EngineContainer], ...] = (
    Column("CONTAINER", lambda c: f"{c.task.namespace}/{c.task.id[:24]}", look="id"),
    Column("IMAGE", lambda c: c.task.image, drop=4),
    Column("MEMORY", lambda c: size(c.memory_bytes), ">", drop=2, is_whole=True),
    Column("KEY", lambda c: c.key if c.is_opted_in or c.checkpoints else "-", drop=3),
    Column("CHECKPOINTS", lambda c: str(len(c.checkpoints)), ">", drop=5),
    Column("LAST", lambda c: age(c.last.created_at) if c.last else "-", ">", drop=1, is_whole=True),
    Column("CAN BE CHECKPOINTED", lambda c: c.task.obstacle or "yes"),
)


def _list_engine(session: Session, address: str | None, namespace: str | None) -> None:
    from kedge.containers.engine.containerd import tasks
    from kedge.containers.engine.cri import find_address
    from kedge.containers.runtime.marks import find_mark, marks

    marked = {container.name: find_mark(container) for container in marks()}
    with Stores(session) as stores:
        containers = [_described(task, marked.get(task.id), stores) for task in tasks(find_address(address), namespace)]
    empty = "containerd has no container"
    session.answer_list("containers", containers, _COLUMNS, EngineContainer.to_json, empty=empty)


def _described(task: Task, mark: Mark | None, stores: Stores) -> EngineContainer:
    from kedge.containers.preemption import memory_bytes
    from kedge.containers.snapshot import generations

    key = task.id if mark is None else mark.key
    checkpoints = generations(stores.of({} if mark is None else mark.environment), "container", key)
    return EngineContainer(task, key, mark is not None, memory_bytes(task.pid) if task.pid else 0, checkpoints)
