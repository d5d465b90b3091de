"""Images of CRIU made by hand: as small as they can be, and as wrong as a test wants them."""

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from kedge.containers.criu.images import COMMON, MAGIC, SERVICE
from kedge.containers.protobuf import encode

Fields = Sequence[tuple[int, int | bytes | str]]


def image(kind: str, records: Iterable[Fields]) -> bytes:
    head = b"" if kind == "inventory" else struct.pack("<I", SERVICE if kind == "stats" else COMMON)
    bodies = [encode(fields) for fields in records]
    return head + struct.pack("<I", MAGIC[kind]) + b"".join(struct.pack("<I", len(body)) + body for body in bodies)


def ipv4(text: str) -> int:
    return int.from_bytes(bytes(map(int, text.split("."))), "little")


def write_dump(
    directory: Path, *, processes: Sequence[tuple[int, int, str]] = ((1, 0, "init"), (7, 1, "worker"))
) -> None:
    """A dump of processes (PID, parent, name); each has 2 pages, its arguments and environment in the second."""
    directory.mkdir(exist_ok=True)

    def put(name: str, kind: str, records: Iterable[Fields]) -> None:
        (directory / name).write_bytes(image(kind, records))

    put("inventory.img", "inventory", [[(1, 2), (2, 1), (6, 2), (8, 1234)]])
    put("pstree.img", "pstree", [[(1, pid), (2, parent), (3, 1), (4, 1), (5, pid)] for pid, parent, _ in processes])
    put("files.img", "files", [
        [(1, 1), (2, 1), (3, encode([(1, 1), (2, 1), (3, 42), (6, "/data/log")]))],
        [(1, 1), (2, 9), (3, encode([(1, 9), (2, 0), (3, 0), (6, "usr/bin/app")]))],
        [(1, 4), (2, 2), (4, encode([(1, 2), (3, 2), (5, 6), (6, 10), (7, 8080), (11, ipv4("10.0.0.1"))]))],
        [(1, 5), (2, 3), (16, encode([(1, 3), (3, 1), (4, 10), (11, b"\0name\0x")]))],
        [(1, 17), (2, 4)],
    ])  # fmt: skip
    put("fdinfo-5.img", "fdinfo", [[(1, n), (2, 0), (3, kind), (4, fd)] for n, kind, fd in
                                   ((1, 1, 0), (2, 4, 3), (3, 5, 4), (4, 17, 5), (77, 2, 6))])  # fmt: skip
    for number, (pid, _, name) in enumerate(processes, start=1):
        put(f"core-{pid}.img", "core", [[(1, 1), (3, encode([(1, 1), (6, name)])), (4, encode([(2, 5)]))]])
        text = f"{name}\0--flag\0".encode()
        variables = b"TOKEN=secret\0LANG=C\0"
        start = 0x7000
        areas = [(14, encode([(1, 0x1000), (2, 0x3000)])), (14, encode([(1, 0x7000), (2, 0x8000)]))]
        middle, end = start + len(text), start + len(text) + len(variables)
        put(f"mm-{pid}.img", "mm", [[(8, start), (9, middle), (10, middle), (11, end), (12, 9), *areas]])
        put(f"pagemap-{pid}.img", "pagemap", [
            [(1, number)], [(1, 0x1000), (2, 1), (4, 4)], [(1, 0x2000), (2, 1), (4, 1)],
            [(1, 0x7000), (2, 1), (4, 4 | 2), (5, 1)],
        ])  # fmt: skip
        page = (text + variables).ljust(4096, b"\0")
        (directory / f"pages-{number}.img").write_bytes(bytes([number]) * 4096 + page)
    put("stats-dump", "stats", [[(1, encode([(1, 10), (2, 250), (3, 5), (4, 6), (5, 70), (6, 0), (7, 2), (9, 0)]))]])
