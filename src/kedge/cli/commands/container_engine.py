"""What engines run, beside what is kept of it: `kedge container list --containerd`, and the stores of containers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.session import Session, emit
from kedge.terminal.tables import Column, print_table
from kedge.terminal.text import age, size

if TYPE_CHECKING:
    from kedge.containers.engine.containerd import Task
    from kedge.containers.runtime.marks import Mark
    from kedge.manager import CheckpointManager


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

        told = {**self._node, **environment}
        if own := os.environ.get("KEDGE_STORE"):
            told = {"KEDGE_STORE": own, **told}
        place = self._session.store or told.get("KEDGE_STORE", "")
        if place not in self._open:
            opened = self._session.open(create=True) if self._session.store else store_of(told)
            self._open[place] = self.enter_context(opened)
        return self._open[place]


def list_engine(session: Session, address: str | None, namespace: str | None) -> None:
    """What containerd has: whether it can be frozen, how large it is, and what is kept of it."""
    from kedge.containers.engine.containerd import tasks
    from kedge.containers.engine.cri import find_address
    from kedge.containers.runtime.marks import find_mark, marks

    marked = {container.name: find_mark(container) for container in marks()}
    with Stores(session) as stores:
        found = [_described(one, marked.get(one.id), stores) for one in tasks(find_address(address), namespace)]
    if session.as_json:
        last = [None if told["last"] is None else told["last"].to_json() for told in found]
        emit({"containers": [{**told, "last": one} for told, one in zip(found, last, strict=True)]})
        return
    columns = (
        Column("CONTAINER", look="id"),
        Column("IMAGE", drop=4),
        Column("MEMORY", ">", drop=2, is_whole=True),
        Column("KEPT AS", drop=3),
        Column("KEPT", ">", drop=5),
        Column("LAST", ">", drop=1, is_whole=True),
        Column("CAN BE FROZEN"),
    )
    rows = [
        (
            f"{told['namespace']}/{told['id'][:24]}",
            told["image"],
            size(told["memory_bytes"]),
            told["key"] if told["is_opted_in"] or told["generations"] else "-",
            str(told["generations"]),
            age(told["last"].created_at) if told["last"] else "-",
            told["obstacle"] or "yes",
        )
        for told in found
    ]
    print_table(columns, rows)
    if not found:
        click.echo("containerd has no container", err=True)


def _described(one: Task, mark: Mark | None, stores: Stores) -> dict[str, Any]:
    from kedge.containers.preemption import memory_bytes
    from kedge.containers.snapshot import generations

    key = one.id if mark is None else mark.key
    kept = generations(stores.of({} if mark is None else mark.environment), "container", key)
    return {
        "id": one.id, "namespace": one.namespace, "image": one.image, "runtime": one.runtime, "state": one.state,
        "can_freeze": not one.obstacle, "obstacle": one.obstacle, "key": key, "is_opted_in": mark is not None,
        "memory_bytes": memory_bytes(one.pid) if one.pid else 0, "generations": len(kept),
        "last": kept[-1] if kept else None,
    }  # fmt: skip
