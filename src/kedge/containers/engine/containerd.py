"""Containers as containerd knows them, over its socket: those of pods too, and those that no runtime of ours has."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kedge.containers.protobuf import Message

from .grpc import call

_SERVICES = "/containerd.services"
_STATES = ("unknown", "created", "running", "stopped", "paused", "pausing")
_RUNC = ("io.containerd.runc.", "io.containerd.kedge.")


@dataclass(frozen=True, slots=True)
class Task:
    """A container of containerd, and its process if it has one."""

    id: str
    namespace: str
    image: str
    runtime: str
    labels: Mapping[str, str]
    spec: Mapping[str, Any]
    state: str  # none, created, running, stopped, paused
    pid: int

    @property
    def obstacle(self) -> str:
        """Why it cannot be checkpointed; "" when it can, as far as containerd knows."""
        if not self.runtime.startswith(_RUNC):
            return f"its runtime is {self.runtime}"
        if (self.spec.get("annotations") or {}).get("io.kubernetes.cri.container-type") == "sandbox":
            return "it is the sandbox of a pod"
        return "" if self.state in ("running", "paused") else "it does not run"


def namespaces(address: str) -> list[str]:
    return [answer.text(1) for answer in _ask(address, "", "namespaces", "Namespaces").messages(1)]


def tasks(address: str, namespace: str | None = None) -> Iterator[Task]:
    """The containers of one of containerd's namespaces, or of all."""
    for space in [namespace] if namespace is not None else namespaces(address):
        tasks_now = _ask(address, space, "tasks", "Tasks").messages(1)
        running = {task.text(2) or task.text(1): task for task in tasks_now}
        for container in _ask(address, space, "containers", "Containers").messages(1):
            process = running.get(container.text(1))
            state = "none" if process is None else _STATES[min(process.number(4), len(_STATES) - 1)]
            yield Task(
                id=container.text(1),
                namespace=space,
                image=container.text(3),
                runtime=container.message(4).text(1),
                labels={label.text(1): label.text(2) for label in container.messages(2)},
                spec=_spec(container),
                state=state,
                pid=process.number(3) if process is not None and state in ("running", "paused") else 0,
            )


def _spec(container: Message) -> dict[str, object]:
    try:
        spec = json.loads(container.message(5).bytes(2) or b"{}")
    except ValueError:  # of a runtime that has its own kind of configuration
        return {}
    return spec if isinstance(spec, dict) else {}


def _ask(address: str, namespace: str, package: str, service: str) -> Message:
    headers = {"containerd-namespace": namespace} if namespace else {}
    return call(address, f"{_SERVICES}.{package}.v1.{service}/List", headers=headers)
