"""Pods for tests: the calls that a kubelet makes of containerd (CRI v1 over gRPC), as far as tests need them.

HTTP/2 is spoken with one connection for each call, without compression of headers; what the answer's headers say is not
read. An answer without a message is a failure: the reason is in containerd's log.
"""

import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.containers.wire import Message, encode

_DATA, _HEADERS, _RESET, _SETTINGS, _PING = 0, 1, 3, 4, 6
_ACK = _END_STREAM = 1
_END_HEADERS = 4
# network: the pod's, or that of the node; processes: those of each container
_OWN_NETWORK, _HOST_NETWORK = encode([(1, 0), (2, 1)]), encode([(1, 2), (2, 1)])


class Failed(Exception):
    pass


class Cri:
    def __init__(self, address: Path, image: str) -> None:
        self._address = address
        self._image = image
        self._configs: dict[str, tuple[bytes, bytes]] = {}

    # Pods

    def run_pod(self, name: str, annotations: Mapping[str, str] = {}, *, host_network: bool = True) -> str:
        """A pod with the runtime handler `holdfast`."""
        network = _HOST_NETWORK if host_network else _OWN_NETWORK
        metadata = encode([(1, name), (2, f"uid-{name}"), (3, "default")])
        notes = [(7, encode([(1, key), (2, value)])) for key, value in annotations.items()]
        linux = encode([(2, encode([(1, network)]))])
        config = encode([(1, metadata), *notes, (8, linux)])
        pod = Message(self.call("RunPodSandbox", encode([(1, config), (2, "holdfast")]))).text(1)
        self._configs[pod] = config, network
        return pod

    def start(
        self,
        pod: str,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] = {},
        annotations: Mapping[str, str] = {},
    ) -> str:
        """A running container of a pod."""
        fields: list[tuple[int, int | bytes | str]] = [(1, encode([(1, name)])), (2, encode([(1, self._image)]))]
        fields += [(3, word) for word in command]
        fields += [(6, encode([(1, key), (2, value)])) for key, value in environment.items()]
        fields.append((7, encode([(1, "/usr"), (2, "/usr"), (3, 1)])))
        fields += [(10, encode([(1, key), (2, value)])) for key, value in annotations.items()]
        config, network = self._configs[pod]
        fields.append((15, encode([(2, encode([(3, network)]))])))
        request = encode([(1, pod), (2, encode(fields)), (3, config)])
        container = Message(self.call("CreateContainer", request)).text(1)
        self.call("StartContainer", encode([(1, container)]))
        return container

    def stop(self, container: str, grace_s: int = 20) -> None:
        self.call("StopContainer", encode([(1, container), (2, grace_s)]))

    def remove_pod(self, pod: str) -> None:
        """With all its containers."""
        self.call("StopPodSandbox", encode([(1, pod)]))
        self.call("RemovePodSandbox", encode([(1, pod)]))

    # gRPC

    def call(self, method: str, request: bytes, timeout_s: float = 60) -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(self._address))
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b""))
            path = f"/runtime.v1.RuntimeService/{method}"
            connection.sendall(_frame(_HEADERS, _END_HEADERS, 1, _headers(path)))
            connection.sendall(_frame(_DATA, _END_STREAM, 1, struct.pack(">BI", 0, len(request)) + request))
            answer = _answer(connection)
        if len(answer) < 5:
            raise Failed(method)
        return answer[5:]


def _answer(connection: socket.socket) -> bytes:
    data = b""
    with connection.makefile("rb") as stream:
        while head := stream.read(9):
            length, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
            body = stream.read(length)
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                connection.sendall(_frame(kind, _ACK, 0, body if kind == _PING else b""))
            elif kind == _DATA:
                data += body
            if kind == _RESET or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
                break
    return data


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + body


def _headers(path: str) -> bytes:
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost",
              "content-type": "application/grpc", "te": "trailers"}  # fmt: skip
    pairs = [
        bytes([0, len(name)]) + name.encode() + bytes([len(text)]) + text.encode() for name, text in fields.items()
    ]
    return b"".join(pairs)
