"""`kedge pod`: pods of a Kubernetes node: what runs in them, checkpoints of it, and hibernation."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import click

from kedge.cli.command import Session, command_group, store_command
from kedge.cli.containers import Stores, address_option, gpu_option, key_of, show_phase
from kedge.cli.failures import describe
from kedge.cli.output import emit
from kedge.errors import CheckpointError
from kedge.model import mapping_of
from kedge.terminal.tables import Column, print_table
from kedge.terminal.text import age, safe, size

if TYPE_CHECKING:
    from kedge.containers.checkpoint import Checkpointed
    from kedge.containers.pods import Workload
    from kedge.containers.volumes import Volume
    from kedge.model import Checkpoint


def _names(workload: Workload) -> dict[str, object]:
    container = workload.container
    pod = container.pod
    return {"namespace": pod.namespace, "pod": pod.name, "container": container.name, "id": container.id}


@dataclass(frozen=True, slots=True)
class Running:
    """A container of a pod that runs, and its checkpoints."""

    workload: Workload
    memory_bytes: int
    checkpoints: Sequence[Checkpoint]
    volumes: Sequence[Volume]

    def to_json(self) -> dict[str, object]:
        return {
            **_names(self.workload),
            "state": self.workload.container.state,
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


_ROWS: tuple[Column[Row], ...] = (
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
    """List the containers of this node's pods, and what hibernates."""
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
        print_table(_ROWS, [*(container.row() for container in running), *map(_sleeping_row, asleep)])
    else:
        click.echo("no container of a pod runs here, and none hibernates", err=True)


def _described(workload: Workload, stores: Stores) -> Running:
    from kedge.containers.preemption import memory_bytes
    from kedge.containers.snapshot import generations

    checkpoints = generations(stores.of(workload.environment), "container", workload.key)
    try:
        container = workload.find()
    except CheckpointError:  # it ended meanwhile
        return Running(workload, 0, checkpoints, [])
    return Running(workload, memory_bytes(container.pid), checkpoints, workload.volumes(container))


def _sleeping_row(checkpoint: Checkpoint) -> Row:
    facts = mapping_of(checkpoint.metadata.get("pod"))
    name = f"{facts.get('namespace', '')}/{facts.get('name', '')}"
    return Row(name, str(facts.get("container", "")), key_of(checkpoint), "asleep", "", age(checkpoint.created_at))


_OUTCOME_KEYS = (
    '{"containers": [{namespace, pod, container, id, key, "checkpoint": {…}|null, "paused_ms": …, '
    '"error": {code, message, hint}|null}]}'
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one container of a pod: a checkpoint, or the error."""

    workload: Workload
    checkpointed: Checkpointed | None = None
    error: CheckpointError | None = None

    @property
    def checkpoint(self) -> Checkpoint | None:
        return None if self.checkpointed is None else self.checkpointed.checkpoint

    @property
    def key(self) -> str:
        return self.workload.key if self.checkpoint is None else key_of(self.checkpoint)

    def to_json(self) -> dict[str, object]:
        code, message, hint, _ = ("", "", "", 0) if self.error is None else describe(self.error)
        return {
            **_names(self.workload),
            "key": self.key,
            "checkpoint": None if self.checkpoint is None else self.checkpoint.to_json(),
            "paused_ms": None if self.checkpointed is None else self.checkpointed.paused_ms,
            "error": None if self.error is None else {"code": code, "message": message, "hint": hint},
        }


_OUTCOMES: tuple[Column[Outcome], ...] = (
    Column("CONTAINER", lambda o: o.workload.container.name, look="name"),
    Column("KEY", lambda o: o.key, drop=2),
    Column("CHECKPOINT", lambda o: o.checkpoint.id if o.checkpoint else "failed", look="id", is_whole=True),
    Column("SIZE", lambda o: size(o.checkpoint.size_bytes) if o.checkpoint else "", ">", drop=1, is_whole=True),
    Column("ADDED", lambda o: size(o.checkpoint.stored_bytes) if o.checkpoint else "", ">", drop=3, is_whole=True),
)


@store_command("checkpoint", json_keys=_OUTCOME_KEYS)
@click.argument("name", metavar="NAMESPACE/POD[/CONTAINER]")
@address_option
@gpu_option
def checkpoint_command(session: Session, name: str, address: str | None, gpu: str) -> None:
    """Checkpoint a pod of this node and let it continue.

    Checkpoints all containers that opted in, or the one that is named. Exit code 1 if any of them failed.
    """
    from kedge.containers.pods import checkpoint

    _checkpoint_pod(session, name, address, gpu, checkpoint)


def _checkpoint_pod(
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
                checkpointed = action(workload, stores.of(workload.environment), GpuMemory(gpu))
                outcomes.append(Outcome(workload, checkpointed))
            except CheckpointError as error:
                outcomes.append(Outcome(workload, error=error))
    session.answer_list("containers", outcomes, _OUTCOMES, Outcome.to_json)
    failed = [(outcome.workload, outcome.error) for outcome in outcomes if outcome.error is not None]
    for workload, reason in () if session.as_json else failed:
        _, message, hint, _ = describe(reason)
        click.echo(f"{safe(workload.container.name)}: {safe('. '.join(filter(None, (message, hint))))}", err=True)
    if failed:
        click.get_current_context().exit(1)


@store_command("hibernate", json_keys=_OUTCOME_KEYS)
@click.argument("name", metavar="NAMESPACE/POD[/CONTAINER]")
@address_option
@gpu_option
def hibernate_command(session: Session, name: str, address: str | None, gpu: str) -> None:
    """Checkpoint a pod, end it, and hold it back until it is woken.

    Concerns the containers that opted in. Until kedge pod wake, every node that uses the store refuses to start the
    workload, and says why. A container that cannot be checkpointed keeps running.
    """
    from kedge.containers.pods import hibernate

    _checkpoint_pod(session, name, address, gpu, hibernate)


@store_command("wake", json_keys='{"woken": [{checkpoint…}]}')
@click.argument("name", metavar="NAMESPACE/POD|NAMESPACE/OWNER|KEY")
def wake_command(session: Session, name: str) -> None:
    """Wake a hibernating pod: its next start restores it.

    If a controller recreates the pod, its name may be different by then: name the controller, or the key.
    """
    from kedge.containers.pods import wake

    with Stores(session) as stores:
        woken = wake(stores.of({}), name)
    session.answer(
        {"woken": [checkpoint.to_json() for checkpoint in woken]},
        *(f"{safe(key_of(checkpoint))}: its next start restores {checkpoint.id}" for checkpoint in woken),
    )


@store_command("guard", json_keys='{"failed": [{job, reason}]}, one line for each round that had failures')
@click.option("--every", "every_s", type=click.FloatRange(1, 3600), default=60, show_default=True, metavar="SECONDS",
              help="How often; less than KEDGE_CLAIM_S, which is 300.")  # fmt: skip
@click.option("--once", is_flag=True, help="Do one round, then end.")
def guard_command(session: Session, every_s: float, once: bool) -> None:
    """Renew the claims of what runs on this node.

    Runs until SIGTERM. Run one on each node. While it runs, no other node takes over these containers. If the node
    dies, its claims expire after five minutes. Containers that their engine created and never started,
    or forgot, are removed.
    """
    from kedge.containers.runtime.claims import renew_here
    from kedge.containers.runtime.orphans import Orphans

    seen = Orphans()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Stores(session):
        while True:
            failed = renew_here(seen)
            if failed and session.as_json:
                emit({"failed": [{"job": job, "reason": why} for job, why in failed]}, indent=None)
            for job, why in () if session.as_json else failed:
                click.echo(f"{safe(job)}: {safe(why)}", err=True)
            if once or stop.wait(every_s):
                break


pod_command = command_group(
    "pod",
    [list_command, checkpoint_command, hibernate_command, wake_command, guard_command],
    text="Checkpoint, hibernate and wake Kubernetes pods, on their node.\n\n"
    "Finds pods through the engine's socket (CRI). Checkpoints of opted-in containers go to the store of their "
    "engine, unless --store names another one. Needs root.",
)
