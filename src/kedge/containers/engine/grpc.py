"""One call of a gRPC service on a Unix socket, as containerd and CRI-O offer them.

HTTP/2 with one connection for each call. Headers are sent without compression, and those of the answer are not read:
an answer without a message is a refusal, whose reason is in the log of who was asked. That keeps a client of some
hundred lines where a library would be tens of megabytes.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import BinaryIO

from kedge.containers.protobuf import Message, NotAMessage
from kedge.errors import Conflict, NotFound, Unavailable, Validation

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GO_AWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MAX_BYTES = 256 << 20
_WINDOW = (1 << 31) - 1  # we read all of an answer, so nobody needs to wait for our leave
_SEND_BYTES = 16384  # of one frame, and of what may be sent before the other side has said anything: 65,535 in all


def call(
    address: str, path: str, request: bytes = b"", *, headers: Mapping[str, str] | None = None, timeout_s: float = 60
) -> Message:
    """What the method at `path` answers. Unavailable when nobody listens; Conflict when it is refused."""
    if len(request) > 60_000:
        raise Validation(f"a request of {len(request)} bytes to {path}", hint="ask for less at once")
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(timeout_s)
            connection.connect(address)
            window = struct.pack(">HI", 4, _WINDOW)
            connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, window))
            connection.sendall(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW - 65535)))
            connection.sendall(_frame(_HEADERS, _END_HEADERS, 1, _headers(path, headers or {})))
            data = struct.pack(">BI", 0, len(request)) + request
            for start in range(0, len(data), _SEND_BYTES):
                is_last = start + _SEND_BYTES >= len(data)
                connection.sendall(_frame(_DATA, _END_STREAM if is_last else 0, 1, data[start : start + _SEND_BYTES]))
            with connection.makefile("rb") as stream:
                answer = _answer(connection, stream)
    except FileNotFoundError:
        raise NotFound(f"there is no socket at {address}", hint="give the engine's with --address") from None
    except OSError as error:
        raise Unavailable(
            f"{address} does not answer: {error}", hint="is the engine running, and are you root?"
        ) from error
    if len(answer) < 5 or len(answer) - 5 != int.from_bytes(answer[1:5]):
        raise Conflict(f"{path.rpartition('/')[2]} was refused by the engine at {address}", hint="its log says why")
    try:
        return Message(answer[5:])
    except NotAMessage as error:
        raise Unavailable(
            f"{path} returned an invalid message: {error}", hint="is that the engine's socket?"
        ) from error


def _answer(connection: socket.socket, stream: BinaryIO) -> bytes:
    data = bytearray()
    while head := stream.read(9):
        length, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
        body = stream.read(length)
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            connection.sendall(_frame(kind, _ACK, 0, body if kind == _PING else b""))
        elif kind == _DATA:
            data += body
        if len(data) > _MAX_BYTES:
            raise OSError("it answers more than anybody can have asked for")
        if kind in (_RESET, _GO_AWAY) or (kind in (_DATA, _HEADERS) and flags & _END_STREAM):
            break
    return bytes(data)


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + body


def _headers(path: str, more: Mapping[str, str]) -> bytes:
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost",
              "content-type": "application/grpc", "te": "trailers", **more}  # fmt: skip
    pairs = [(name.encode(), text.encode()) for name, text in fields.items()]
    if any(len(part) > 126 for pair in pairs for part in pair):
        raise Validation("a name for the engine is too long", hint="use at most 126 characters")
    return b"".join(bytes([0, len(name)]) + name + bytes([len(text)]) + text for name, text in pairs)
