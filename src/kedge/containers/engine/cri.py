"""The pods of a node, as its engine tells them to a kubelet (CRI v1): containerd's or CRI-O's socket."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kedge.containers.protobuf import Message, encode
from kedge.errors import NotFound

from .grpc import call

# Where engines listen, the usual one first.
ADDRESSES = (
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
    "/run/crio/crio.sock",
)
_STATES = ("created", "running", "exited", "unknown")
_STATUS_S = 10.0  # a container that is being created waits for it


@dataclass(frozen=True, slots=True)
class Pod:
    id: str
    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PodContainer:
    id: str
    name: str
    state: str  # created, running, exited, unknown
    attempt: int  # how often the kubelet had to start it again
    image: str
    pod: Pod


def find_address(given: str | None = None) -> str:
    """The engine's socket: the one given, $CONTAINERD_ADDRESS, or the first of the usual ones that is there."""
    if given := given or os.environ.get("CONTAINERD_ADDRESS"):
        return given.removeprefix("unix://")
    for address in ADDRESSES:
        if Path(address).is_socket():
            return address
    raise NotFound("no engine socket found at the usual places", hint="give it with --address")


def containers(address: str) -> list[PodContainer]:
    """All containers of all pods, in the order of namespaces, pods, names, and their starts."""
    pods = {pod.id: pod for pod in map(_pod, _ask(address, "ListPodSandbox").messages(1))}
    listed = []
    for answer in _ask(address, "ListContainers").messages(1):
        if (pod := pods.get(answer.text(2))) is not None:  # else the pod went away between the two answers
            name, image = answer.message(3), answer.message(4).text(1)
            state = _STATES[min(answer.number(6), len(_STATES) - 1)]
            listed.append(PodContainer(answer.text(1), name.text(1), state, name.number(2), image, pod))
    return sorted(listed, key=lambda c: (c.pod.namespace, c.pod.name, c.name, c.attempt))


def pod(address: str, sandbox: str) -> Pod:
    """One pod by the ID of its sandbox."""
    answer = _ask(address, "PodSandboxStatus", encode([(1, sandbox)]), _STATUS_S)
    return _pod(answer.message(1), labels=7, annotations=8)


def _ask(address: str, method: str, request: bytes = b"", timeout_s: float = 60) -> Message:
    return call(address, f"/runtime.v1.RuntimeService/{method}", request, timeout_s=timeout_s)


def _pod(answer: Message, labels: int = 5, annotations: int = 6) -> Pod:
    name = answer.message(2)
    return Pod(
        id=answer.text(1),
        namespace=name.text(3),
        name=name.text(1),
        uid=name.text(2),
        labels=_map(answer, labels),
        annotations=_map(answer, annotations),
    )


def _map(answer: Message, field: int) -> dict[str, str]:
    return {entry.text(1): entry.text(2) for entry in answer.messages(field)}
