"""`kedge pod list`, `checkpoint`, `hibernate`, `wake` and `guard`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kedge.cli.failures import describe
from kedge.cli.session import Session, emit, store_command
from kedge.terminal.tables import Column, print_table
from kedge.terminal.text import age, safe, size

from .container_checkpoint import gpu_option
from .container_engine import Stores

if TYPE_CHECKING:
    from kedge.containers.checkpoint import Checkpointed
    from kedge.containers.pods import Workload
    from kedge.model import Checkpoint


def address_option(function: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--address",
        metavar="SOCKET",
        help="The engine's socket.  [default: $CONTAINERD_ADDRESS, else the first of the usual ones]",
    )(function)


@store_command(
    "list",
    json_keys='{"containers": [{namespace, pod, container, id, state, key, is_opted_in, memory_bytes, generations, '
    '"last": {…}|null}], "asleep": [{checkpoint…}]}',
)
@click.argument("namespace_of_pods", metavar="[NAMESPACE]", default="")
@address_option
def list_command(session: Session, namespace_of_pods: str, address: str | None) -> None:
    """List the containers of the pods of this node, what is kept of them, and what sleeps."""
    from kedge.containers.engine.cri import find_address
    from kedge.containers.hibernation import sleepers
    from kedge.containers.pods import workloads

    with Stores(session) as stores:
        found = [
            one
            for one in workloads(find_address(address))
            if namespace_of_pods in ("", one.container.pod.namespace) and one.container.state == "running"
        ]
        rows = [_described(one, stores) for one in found]
        prefix = f"{namespace_of_pods}+" if namespace_of_pods else ""
        asleep = list(sleepers(stores.of({}), prefix))
    if session.as_json:
        last = [None if row.last is None else row.last.to_json() for row in rows]
        containers = [{**row.facts, "last": one} for row, one in zip(rows, last, strict=True)]
        emit({"containers": containers, "asleep": [one.to_json() for one in asleep]})
        return
    columns = (
        Column("POD", look="name"),
        Column("CONTAINER", look="name"),
        Column("KEPT AS", drop=3),
        Column("MEMORY", ">", drop=2, is_whole=True),
        Column("GENERATIONS", ">", drop=4),
        Column("LAST", ">", drop=1, is_whole=True),
    )
    print_table(columns, [_row(row) for row in rows] + [_sleeping_row(one) for one in asleep])
    if not rows and not asleep:
        click.echo("no container of a pod runs here, and nothing sleeps", err=True)


@dataclass(frozen=True, slots=True)
class _Described:
    facts: dict[str, Any]
    last: Checkpoint | None


def _described(one: Workload, stores: Stores) -> _Described:
    from kedge.containers.preemption import memory_bytes
    from kedge.containers.snapshot import generations
    from kedge.errors import CheckpointError

    container, pod = one.container, one.container.pod
    kept = generations(stores.of(one.environment), "container", one.key)
    try:
        memory = memory_bytes(one.find().pid)
    except CheckpointError:  # it ended meanwhile
        memory = 0
    facts = {
        "namespace": pod.namespace, "pod": pod.name, "container": container.name, "id": container.id,
        "state": container.state, "key": one.key, "is_opted_in": one.is_opted_in, "memory_bytes": memory,
        "generations": len(kept),
    }  # fmt: skip
    return _Described(facts, kept[-1] if kept else None)


def _row(row: _Described) -> tuple[str, ...]:
    facts = row.facts
    return (
        f"{facts['namespace']}/{facts['pod']}",
        facts["container"],
        facts["key"] if facts["is_opted_in"] else "-",
        size(facts["memory_bytes"]),
        str(facts["generations"]),
        age(row.last.created_at) if row.last else "-",
    )


def _sleeping_row(one: Checkpoint) -> tuple[str, ...]:
    pod = one.metadata.get("pod")
    told = pod if isinstance(pod, dict) else {}
    name = f"{told.get('namespace', '')}/{told.get('name', '')}"
    return name, str(told.get("container", "")), one.job.partition(":")[2], "asleep", "", age(one.created_at)


_OUTCOMES = (
    '{"containers": [{namespace, pod, container, id, key, "checkpoint": {…}|null, "frozen_ms": …, '
    '"error": {code, message, hint}|null}]}'
)


@store_command("checkpoint", json_keys=_OUTCOMES)
@click.argument("name", metavar="NAMESPACE/POD[/CONTAINER]")
@address_option
@gpu_option
def checkpoint_command(session: Session, name: str, address: str | None, gpu: str) -> None:
    """Checkpoint what runs in a pod of this node: all containers that opted in, or the one that is named.

    They run on. Exit code 1 when one of them could not be checkpointed.
    """
    from kedge.containers.pods import checkpoint

    _checkpoint_pod(session, name, address, gpu, checkpoint)


@store_command("hibernate", json_keys=_OUTCOMES)
@click.argument("name", metavar="NAMESPACE/POD[/CONTAINER]")
@address_option
@gpu_option
def hibernate_command(session: Session, name: str, address: str | None, gpu: str) -> None:
    """Checkpoint what opted in of a pod, end it, and hold it back until kedge pod wake.

    Whoever starts the workload again meanwhile, on whichever node of the store, is refused and told why. A container
    that cannot be checkpointed runs on.
    """
    from kedge.containers.pods import hibernate

    _checkpoint_pod(session, name, address, gpu, hibernate)


def _checkpoint_pod(
    session: Session, name: str, address: str | None, gpu: str, action: Callable[..., Checkpointed]
) -> None:
    from kedge.containers.engine.cri import find_address
    from kedge.containers.gpu.memory import GpuMemory
    from kedge.containers.pods import PodName, find
    from kedge.errors import CheckpointError

    wanted = PodName.parse(name)
    outcomes: list[dict[str, Any]] = []
    with Stores(session) as stores:
        for one in find(find_address(address), wanted):
            if sys.stderr.isatty():
                click.echo(f"  … {safe(one.name)}", err=True)
            pod = one.container.pod
            told: dict[str, Any] = {
                "namespace": pod.namespace, "pod": pod.name, "container": one.container.name, "id": one.container.id,
                "key": one.key, "checkpoint": None, "frozen_ms": None, "error": None,
            }  # fmt: skip
            try:
                made = action(one, stores.of(one.environment), [GpuMemory(gpu)])
            except CheckpointError as error:
                code, message, hint, _ = describe(error)
                told["error"] = {"code": code, "message": message, "hint": hint}
            else:
                told |= {"key": made.checkpoint.job.partition(":")[2], "frozen_ms": made.frozen_ms}
                told["checkpoint"] = made.checkpoint.to_json()
            outcomes.append(told)
    if session.as_json:
        emit({"containers": outcomes})
    else:
        _print_outcomes(outcomes)
    if any(told["error"] for told in outcomes):
        click.get_current_context().exit(1)


def _print_outcomes(outcomes: list[dict[str, Any]]) -> None:
    columns = (
        Column("CONTAINER", look="name"),
        Column("KEPT AS", drop=2),
        Column("CHECKPOINT", look="id", is_whole=True),
        Column("SIZE", ">", drop=1, is_whole=True),
        Column("ADDED", ">", drop=3, is_whole=True),
    )
    rows = []
    for told in outcomes:
        kept = told["checkpoint"]
        facts = (kept["id"], size(kept["size_bytes"]), size(kept["stored_bytes"])) if kept else ("not kept", "", "")
        rows.append((told["container"], told["key"], *facts))
    print_table(columns, rows)
    for told in outcomes:
        if told["error"]:
            why = ". ".join(filter(None, (told["error"]["message"], told["error"]["hint"])))
            click.echo(f"{safe(told['container'])}: {safe(why)}", err=True)


@store_command("wake", json_keys='{"woken": [{checkpoint…}]}')
@click.argument("name", metavar="NAMESPACE/POD|NAMESPACE/OWNER|KEY")
def wake_command(session: Session, name: str) -> None:
    """Let what hibernates come back: its next start, by whoever restarts it, goes on where it was.

    A pod that a controller recreates may have another name by then: give the controller's instead, or the key.
    """
    from kedge.containers.pods import wake

    with Stores(session) as stores:
        woken = wake(stores.of({}), name)
    if session.as_json:
        emit({"woken": [one.to_json() for one in woken]})
        return
    for one in woken:
        click.echo(f"{safe(one.job.partition(':')[2])}: its next start goes on from {one.id}")


@store_command("guard", json_keys='{"failed": [{job, reason}]}, one line for each round that had failures')
@click.option("--every", "every_s", type=click.FloatRange(1, 3600), default=60, show_default=True, metavar="SECONDS",
              help="How often; less than KEDGE_CLAIM_S, which is 300.")  # fmt: skip
@click.option("--once", is_flag=True, help="One round, then end.")
def guard_command(session: Session, every_s: float, once: bool) -> None:
    """Renew the claims of what lives on this node, until SIGTERM.

    With it, no container of another node takes over what lives here, and what died with its node is free after five
    minutes. One for each node.
    """
    from kedge.containers.runtime.claims import renew_here

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with Stores(session):
        while True:
            failed = renew_here()
            if failed and session.as_json:
                emit({"failed": [{"job": job, "reason": why} for job, why in failed]}, indent=None)
            for job, why in () if session.as_json else failed:
                click.echo(f"{safe(job)}: {safe(why)}", err=True)
            if once or stop.wait(every_s):
                break
