"""Pods for tests: the calls that a kubelet makes of containerd (CRI v1 over gRPC), as far as tests need them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from kedge.containers.engine import grpc
from kedge.containers.protobuf import Message, encode
from kedge.errors import Conflict

# network: the pod's, or that of the node; processes: those of each container
_OWN_NETWORK, _HOST_NETWORK = encode([(1, 0), (2, 1)]), encode([(1, 2), (2, 1)])
_HOST_PID = encode([(1, 0), (2, 2)])
_USR = ("/usr", "/usr", True)


class Failed(Exception):
    pass


class Cri:
    def __init__(self, address: Path, image: str, *, answer_s: float = 180) -> None:
        self._address = address
        self._answer_s = answer_s
        self._image = image
        self._configs: dict[str, tuple[bytes, bytes]] = {}

    # Pods

    def run_pod(
        self,
        name: str,
        annotations: Mapping[str, str] = {},
        *,
        labels: Mapping[str, str] = {},
        host_network: bool = True,
        host_pid: bool = False,
        privileged: bool = False,
        handler: str = "kedge",
        logs: Path | None = None,
    ) -> str:
        """A pod of that runtime handler, with the labels that a kubelet gives it besides its own; `logs`: where."""
        network = _HOST_PID if host_pid else _HOST_NETWORK if host_network else _OWN_NETWORK
        metadata = encode([(1, name), (2, f"uid-{name}"), (3, "default")])
        notes = [(7, encode([(1, key), (2, value)])) for key, value in annotations.items()]
        named = {"io.kubernetes.pod.name": name, "io.kubernetes.pod.namespace": "default", **labels}
        marks = [(6, encode([(1, key), (2, value)])) for key, value in named.items()]
        linux = encode([(2, encode([(1, network), (6, int(privileged))]))])
        config = encode([(1, metadata), *([(3, str(logs))] if logs else []), *marks, *notes, (8, linux)])
        pod = self.call("RunPodSandbox", encode([(1, config), (2, handler)])).text(1)
        self._configs[pod] = config, network
        return pod

    def start(
        self,
        pod: str,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] = {},
        annotations: Mapping[str, str] = {},
        *,
        attempt: int = 0,
        log: str = "",
        image: str = "",
        mounts: Sequence[tuple[str, str, bool]] = (_USR,),
        privileged: bool = False,
        stdin: bool = False,
    ) -> str:
        """A running container of a pod. `mounts`: of the node, where, and whether that is only for reading.
        `stdin`: it listens to who attaches."""
        fields: list[tuple[int, int | bytes | str]] = [
            (1, encode([(1, name), (2, attempt)])),
            (2, encode([(1, image or self._image)])),
        ]
        fields += [(3, word) for word in command]
        fields += [(6, encode([(1, key), (2, value)])) for key, value in environment.items()]
        fields += [(7, encode([(1, there), (2, source), (3, int(ro))])) for source, there, ro in mounts]
        fields += [(10, encode([(1, key), (2, value)])) for key, value in annotations.items()]
        fields += [(11, log)] if log else []
        fields += [(12, 1)] if stdin else []
        config, network = self._configs[pod]
        fields.append((15, encode([(2, encode([(2, int(privileged)), (3, network)]))])))
        request = encode([(1, pod), (2, encode(fields)), (3, config)])
        container = self.call("CreateContainer", request).text(1)
        self.call("StartContainer", encode([(1, container)]))
        return container

    def execute(self, container: str, *command: str) -> tuple[bytes, bytes, int]:
        """What a program in it says, to stdout and to stderr, and its exit status."""
        done = self.call("ExecSync", encode([(1, container), *((2, word) for word in command), (3, 100)]))
        return done.bytes(1), done.bytes(2), done.number(3)

    def state(self, container: str) -> tuple[str, int]:
        """created, running, exited or unknown; and its exit status."""
        told = self.call("ContainerStatus", encode([(1, container)])).message(1)
        return ("created", "running", "exited", "unknown")[told.number(3)], told.number(7)

    def exec_url(self, container: str, *command: str) -> str:
        """Where a program in it is spoken with, all streams of it."""
        words = [(2, word) for word in command]
        return self.call("Exec", encode([(1, container), *words, (4, 1), (5, 1), (6, 1)])).text(1)

    def attach_url(self, container: str) -> str:
        """Where the container itself is."""
        return self.call("Attach", encode([(1, container), (2, 1), (4, 1), (5, 1)])).text(1)

    def stop(self, container: str, grace_s: int = 100) -> None:
        self.call("StopContainer", encode([(1, container), (2, grace_s)]))

    def remove_pod(self, pod: str) -> None:
        """With all its containers."""
        self.call("StopPodSandbox", encode([(1, pod)]))
        self.call("RemovePodSandbox", encode([(1, pod)]))

    def call(self, method: str, request: bytes) -> Message:
        try:
            path = f"/runtime.v1.RuntimeService/{method}"
            return grpc.call(str(self._address), path, request, timeout_s=self._answer_s)
        except Conflict as error:
            raise Failed(method) from error
