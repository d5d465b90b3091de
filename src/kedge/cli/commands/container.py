"""`kedge container`: checkpoints of running containers, and what they need. Archives are in `container_archives`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kedge.cli.command import Number, Session, command_group, remember, store_command
from kedge.cli.containers import (
    Stores,
    answer_checkpointed,
    answer_restored,
    chosen_options,
    dump_options,
    gpu_option,
    list_checkpoints,
    runtime_options,
    show_phase,
)
from kedge.cli.findings import answer_findings
from kedge.cli.output import emit
from kedge.errors import Validation
from kedge.terminal.tables import Column, print_facts
from kedge.terminal.text import age, safe, size

from .container_archives import export_command, import_command, inspect_command

if TYPE_CHECKING:
    from kedge.containers.engine.containerd import Task
    from kedge.containers.runtime.marks import Mark
    from kedge.model import Checkpoint


@store_command(
    "checkpoint",
    json_keys='{"checkpoint": {…}, "phases_ms": {dump, files, store}, "paused_ms": …, "sockets": [path…]}',
)
@click.argument("container")
@runtime_options
@click.option("--key", metavar="NAME", help="The key of its checkpoints.  [default: the container's ID]")
@click.option("--leave-running", is_flag=True, help="Let it continue afterwards.")
@gpu_option
@dump_options
def checkpoint_command(
    session: Session,
    container: str,
    runtime: str | None,
    root: str | None,
    key: str | None,
    leave_running: bool,
    gpu: str,
    **options: bool,
) -> None:
    """Checkpoint a container.

    Saves its processes and files, from the same moment. It ends once its checkpoint is durable; with --leave-running it
    continues. If anything fails, it continues, too.
    """
    from kedge.containers.bundle import ContainerSource
    from kedge.containers.checkpoint import Request, make_checkpoint
    from kedge.containers.engine.runc import find_container
    from kedge.containers.gpu.memory import GpuMemory

    target = find_container(container, runtime, root)
    with session.of_memory().open(create=True) as manager:
        checkpointed = make_checkpoint(
            manager,
            ContainerSource.of(target),
            Request(key or target.id, leave_running=leave_running, options=chosen_options(options)),
            gpu=GpuMemory(gpu),
            report=show_phase,
        )
    answer_checkpointed(session, checkpointed, was_left_running=leave_running)


@store_command("restore", json_keys='{"id": …, "pid": …, "checkpoint": …, "phases_ms": {load, files, restore}}')
@click.argument("name", metavar="KEY|ID")
@click.option("--new-id", metavar="ID", help="The container's new ID.  [default: the one it had]")
@click.option("--bundle", metavar="DIR", help="Its bundle.  [default: where it was]")
@click.option("--root", metavar="DIR", help="The runtime's --root.  [default: the one it had]")
@gpu_option
def restore_command(
    session: Session, name: str, new_id: str | None, bundle: str | None, root: str | None, gpu: str
) -> None:
    """Restore a container.

    It is restored from the newest intact checkpoint of KEY, or from the checkpoint ID. Its files are restored first. If
    the restore fails, they are put back as they were. If its standard streams were pipes, the container gets those of
    this command.
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
            gpu=GpuMemory(gpu),
            report=show_phase,
        )
    answer_restored(session, "container", restored)


@store_command(
    "list",
    json_keys='{"checkpoints": [{…}]}, oldest first; with --containerd {"containers": [{id, namespace, image, runtime, '
    'state, can_checkpoint, obstacle, key, is_opted_in, memory_bytes, generations, "last": {…}|null}]}',
)
@click.argument("key", default="")
@click.option("--limit", type=Number(1), default=20, help="Show at most this many of each key.  [default: 20]")
@click.option("--containerd", is_flag=True, help="List the containers of containerd, and what is stored of them.")
@click.option("--address", metavar="SOCKET", help="containerd's socket, if it is not at one of the usual places.")
@click.option("--containerd-namespace", metavar="NAME", help="One of its namespaces, such as k8s.io.  [default: all]")
def list_command(
    session: Session, key: str, limit: int, containerd: bool, address: str | None, containerd_namespace: str | None
) -> None:
    """List checkpoints of containers.

    Lists those of KEY, or all; with --containerd, the running containers of containerd.
    """
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
            "can_checkpoint": not self.task.obstacle,
            "key": self.key,
            "is_opted_in": self.is_opted_in,
            "memory_bytes": self.memory_bytes,
            "generations": len(self.checkpoints),
            "last": None if self.last is None else self.last.to_json(),
        }


_CONTAINERS: tuple[Column[EngineContainer], ...] = (
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
    session.answer_list("containers", containers, _CONTAINERS, EngineContainer.to_json, empty=empty)


def _described(task: Task, mark: Mark | None, stores: Stores) -> EngineContainer:
    from kedge.containers.preemption import memory_bytes
    from kedge.containers.snapshot import generations

    key = task.id if mark is None else mark.key
    checkpoints = generations(stores.of({} if mark is None else mark.environment), "container", key)
    return EngineContainer(task, key, mark is not None, memory_bytes(task.pid) if task.pid else 0, checkpoints)


@store_command("preflight", json_keys='{"ok": bool, "findings": [{subject, status, what, fix}]}')
@click.argument("container")
@runtime_options
@click.option("--target", metavar="HOST.json", type=click.Path(exists=True, dir_okay=False),
              help="The output of kedge container doctor --json on the machine to restore it on.")  # fmt: skip
@dump_options
def preflight_command(
    session: Session, container: str, runtime: str | None, root: str | None, target: str | None, **options: bool
) -> None:
    """Check whether a container can be checkpointed.

    Does not touch it. With --target, also checks whether it can be restored on that machine.
    """
    from kedge.containers import hosts, preflight
    from kedge.containers.engine.runc import find_container
    from kedge.containers.runtime.marks import find_mark
    from kedge.containers.snapshot import TIES

    running = find_container(container, runtime, root)
    is_opted_in = find_mark(Path(running.root, running.id)) is not None
    given = [*chosen_options(options), *(TIES if is_opted_in else ())]
    findings = list(preflight.check_container(running, given))
    if target is not None:
        try:
            findings += preflight.check_target(hosts.facts(), json.loads(Path(target).read_text())["host"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Validation(
                f"{target} does not describe a machine: {error}", hint="kedge container doctor --json there writes it"
            ) from error
    answer_findings(session, findings, 1)


@store_command(
    "doctor", json_keys='{"ok": bool, "findings": [{subject, status, what, fix}], "host": facts for preflight --target}'
)
def doctor_command(session: Session) -> None:
    """Check what this machine can do, and how to add the rest.

    Checks CRIU, the container runtimes, the kernel and your permissions.
    """
    from kedge.containers.doctor import findings
    from kedge.containers.hosts import facts

    answer_findings(session, findings(), 1, host=facts())


_ATTEMPTS: tuple[Column[dict[str, str]], ...] = (
    Column("ATTEMPT", lambda attempt: attempt["attempt"], look="id", is_whole=True),
    Column("ACTION", lambda attempt: attempt["action"]),
    Column("SUBJECT", lambda attempt: attempt["subject"]),
    Column("RESULT", lambda attempt: attempt["result"]),
)


@store_command(
    "logs", json_keys='{"attempt", "action", "subject", "result", "cause", "fix", "log"}, or {"attempts": [{…}]}'
)
@click.argument("attempt", default="")
def logs_command(session: Session, attempt: str) -> None:
    """Show the log of an attempt, and what it means.

    ATTEMPT is an ID, or `latest`. Without it, list the attempts.
    """
    from kedge.containers.attempts import Attempt, attempts, find_attempt
    from kedge.containers.criu.log import explain

    def described(attempt: Attempt, *names: str) -> dict[str, str]:
        facts = attempt.facts()
        return {"attempt": attempt.id, **{name: str(facts.get(name, "")) for name in names}}

    if not attempt:
        every = [described(known, "action", "subject", "result") for known in attempts()]
        session.answer_list("attempts", every, _ATTEMPTS, dict, empty="no attempts yet")
        return
    chosen = find_attempt(attempt)
    answer = described(chosen, "action", "subject", "result", "error")
    log = chosen.log()
    cause = explain(log) if answer["result"] == "failed" else None
    answer |= {"cause": cause.cause if cause else "", "fix": cause.fix if cause else ""}
    if session.as_json:
        emit({**answer, "log": log})
        return
    for line in log.splitlines():
        click.echo(safe(line))
    print_facts(answer.items())


def _adopt_store(store: str | None, namespace: str | None, store_key: str | None, as_json: bool) -> None:
    from kedge.containers.runtime import settings

    settings.adopt_store()
    remember(store, namespace, store_key, as_json)


container_command = command_group(
    "container",
    [
        checkpoint_command,
        restore_command,
        list_command,
        inspect_command,
        export_command,
        import_command,
        preflight_command,
        doctor_command,
        logs_command,
    ],
    callback=_adopt_store,
    text="Checkpoint a running container, with processes and files from the same moment, and restore it here or "
    "elsewhere.\n\n"
    "Needs root, runc (by itself or under containerd, Docker or podman) and CRIU; kedge container doctor says what is "
    "missing. The default store is the one that /etc/kedge/runc.env names for this machine's engines, if there is one.",
)
