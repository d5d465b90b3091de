"""What dumped processes had open: files, pipes, sockets, and the rest by kind."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from kedge.containers.protobuf import Message

from .image_files import ImageFiles

Records = Callable[[ImageFiles, str, str], Iterator[Message]]

_KINDS = {
    1: "file", 2: "pipe", 3: "fifo", 4: "inet", 5: "unix", 6: "eventfd", 7: "epoll", 8: "inotify", 9: "signalfd",
    10: "packet", 11: "tty", 12: "fanotify", 13: "netlink", 14: "namespace", 15: "tun", 16: "external", 17: "timerfd",
    18: "memfd", 19: "bpf", 20: "pidfd",
}  # fmt: skip
_TCP_STATES = {
    1: "established", 2: "syn-sent", 3: "syn-received", 4: "fin-wait-1", 5: "fin-wait-2", 6: "time-wait", 7: "closed",
    8: "close-wait", 9: "last-ack", 10: "listening", 11: "closing",
}  # fmt: skip
_PROTOCOLS = {1: "ICMP", 6: "TCP", 17: "UDP", 58: "ICMPv6", 136: "UDPLITE", 255: "RAW", 262: "MPTCP"}
_UNIX_TYPES = {1: "stream", 2: "datagram", 5: "seqpacket"}
_LISTENING = 10


@dataclass(frozen=True, slots=True)
class OpenFile:
    """One descriptor. `name` is a path, an address, or empty; `detail` says more of sockets and of deleted files."""

    fd: int  # -1 where it is not about a descriptor
    kind: str
    name: str = ""
    detail: str = ""
    peer: str = ""
    is_writable: bool = False

    @classmethod
    def of(cls, fd: int, kind: int, known: OpenFile | None) -> OpenFile:
        if known is None:
            return cls(fd, _KINDS.get(kind, "unknown"))
        return cls(fd, known.kind, known.name, known.detail, known.peer, known.is_writable)

    @property
    def is_socket(self) -> bool:
        return self.kind in ("inet", "unix", "packet", "netlink")


def open_files(
    files: ImageFiles, names: frozenset[str], records: Records
) -> tuple[Mapping[int, str], Mapping[int, OpenFile]]:
    """(paths of regular files by ID, all open files by ID), from files.img or, of an older CRIU, one image a kind."""
    opened: dict[int, OpenFile] = {}
    if "files.img" in names:
        for record in records(files, "files.img", "files"):
            kind, identity = record.number(1), record.number(2)
            opened[identity] = _described(kind, record)
    for name, kind in (("reg-files", 1), ("inetsk", 4), ("unixsk", 5)):
        if f"{name}.img" in names:
            for record in records(files, f"{name}.img", name):
                opened[record.number(1)] = _DESCRIBE[kind](record)
    return {identity: file.name for identity, file in opened.items() if file.kind == "file"}, opened


def _described(kind: int, record: Message) -> OpenFile:
    field, describe = _FIELDS.get(kind), _DESCRIBE.get(kind)
    if field is None or describe is None or field not in record:
        return OpenFile(-1, _KINDS.get(kind, "unknown"))
    return describe(record.message(field))


def _regular(record: Message) -> OpenFile:
    name = record.text(6)
    return OpenFile(
        -1,
        "file",
        name if name.startswith("/") or not name else f"/{name}",
        is_writable=record.number(2) & os.O_ACCMODE != os.O_RDONLY,
    )


def _inet(record: Message) -> OpenFile:
    family, protocol, state = record.number(3), record.number(5), record.number(6)
    name = _PROTOCOLS.get(protocol, f"protocol {protocol}") + ("6" if family == socket.AF_INET6 else "")
    says_state = protocol in (6, 262)
    peer = record.numbers(12)
    return OpenFile(
        -1,
        "inet",
        _address(family, record.numbers(11), record.number(7)),
        detail=f"{name} {_TCP_STATES.get(state, 'unknown')}" if says_state else name,
        peer=_address(family, peer, record.number(8)) if record.number(8) or any(peer) else "",
    )


def _address(family: int, words: list[int], port: int) -> str:
    """An address as CRIU keeps it: the words of the kernel's structure, as this machine reads them."""
    try:
        packed = struct.pack(f"<{len(words)}I", *words)
        if family == socket.AF_INET6 and len(packed) == 16:
            return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{port}"
        if family == socket.AF_INET and len(packed) == 4:
            return f"{socket.inet_ntop(socket.AF_INET, packed)}:{port}"
    except (struct.error, ValueError):
        pass
    return f"?:{port}"


def _unix(record: Message) -> OpenFile:
    raw = record.bytes(11)
    name = raw.decode("utf-8", "backslashreplace").rstrip("\0") if raw[:1] != b"\0" else _abstract(raw)
    kind = _UNIX_TYPES.get(record.number(3), "unknown")
    detail = f"{kind} listening" if record.number(4) == _LISTENING else kind
    return OpenFile(-1, "unix", name, detail=detail, peer=str(record.number(8)) if record.number(8) else "")


def _abstract(name: bytes) -> str:
    return "@" + name[1:].decode("utf-8", "backslashreplace").replace("\0", "@")


def _pipe(record: Message) -> OpenFile:
    return OpenFile(-1, "pipe", f"pipe:{record.number(2)}", is_writable=record.number(3) & os.O_ACCMODE != os.O_RDONLY)


_FIELDS = {1: 3, 2: 18, 4: 4, 5: 16}  # where file_entry keeps each kind
_DESCRIBE: dict[int, Callable[[Message], OpenFile]] = {1: _regular, 2: _pipe, 4: _inet, 5: _unix}
