"""CRIU's images: which processes were dumped, with which memory, files and sockets.

An image is a magic number or two and then records, each a length and a protobuf message. Only the fields used here are
known; all others are passed over, so that images of older and newer CRIUs can be read. Images may come from anyone:
sizes, counts and the shape of the process tree are checked, and what no CRIU wrote is Corrupted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kedge.containers.protobuf import Message, NotAMessage, u32
from kedge.errors import Corrupted, NotFound

from .image_files import Directory, ImageFiles
from .open_files import OpenFile, open_files

MAX_IMAGE_BYTES = 128 << 20  # of one that is not pages
MAX_RECORD_BYTES = 16 << 20
MAX_RECORDS = 2_000_000
MAX_PROCESSES = 65_536  # and threads
MAX_PARENTS = 4096  # how deep a tree of processes may be
MAX_TEXT_BYTES = 1 << 20  # of a command line, or an environment
PAGE_BYTES = 4096

COMMON, SERVICE = 0x54564319, 0x55105940
MAGIC = {
    "inventory": 0x58313116,
    "pstree": 0x50273030,
    "core": 0x55053847,
    "ids": 0x54432030,
    "mm": 0x57492820,
    "pagemap": 0x56084025,
    "fdinfo": 0x56213732,
    "files": 0x56303138,
    "reg-files": 0x50363636,
    "inetsk": 0x56443851,
    "unixsk": 0x54373943,
    "stats": 0x57093306,
    "userns": 0x55474906,
    "seccomp": 0x64413049,
}
_STATES = {1: "running", 2: "dead", 3: "stopped", 6: "zombie"}
_PARENT, _PRESENT = 1, 4
_FILE_SHARED = 1 << 7  # of an area of memory


@dataclass(frozen=True, slots=True)
class Window:
    """Pages that follow one another in the memory of a process."""

    address: int
    size_bytes: int
    offset: int | None  # in the file of pages; None: they are not in it, but in an earlier dump or to come


@dataclass(frozen=True, slots=True)
class Pagemap:
    """The memory of a process or, with name "shmem-…", of several: what is not in a window is zero or a file's."""

    name: str  # a PID, or shmem-…
    pages_file: str
    windows: tuple[Window, ...]

    @property
    def stored_bytes(self) -> int:
        return sum(window.size_bytes for window in self.windows if window.offset is not None)


@dataclass(frozen=True, slots=True)
class Thread:
    tid: int
    name: str


@dataclass(frozen=True, slots=True)
class Process:
    """A dumped process. Numbers are those inside of its container."""

    pid: int
    parent: int  # 0: the root
    name: str  # the first 15 bytes of it, as the kernel keeps it
    state: str  # running, stopped, zombie, dead
    threads: tuple[Thread, ...]
    memory_bytes: int  # in these images
    executable: str
    files: tuple[OpenFile, ...]


def check_inventory(source: str | os.PathLike[str] | ImageFiles) -> None:
    """NotFound when the directory holds no images, Corrupted when inventory.img is none."""
    files = image_files(source)
    try:
        record = first_record(files, "inventory.img", "inventory")
    except NotFound as error:
        raise NotFound(
            f"there is no dump in {files.place}: inventory.img is missing", hint="a dump writes it last"
        ) from error
    with damage(files, "inventory.img"):
        for field in (1, 2, 6, 8):  # its version, how it names descriptors, its LSM, its time
            record.number(field)


def processes(source: str | os.PathLike[str] | ImageFiles) -> tuple[Process, ...]:
    """All dumped processes, parents before their children."""
    files = image_files(source)
    names = files.names()
    rows = _process_rows(files)
    with damage(files, "files.img"):
        paths, opened = open_files(files, names, records)
    return tuple(_process(files, names, row, paths, opened) for row in rows)


def _process_rows(files: ImageFiles) -> list[Message]:
    """pstree.img in its order, which must be that of a tree: a parent is known before its children."""
    rows: list[Message] = []
    depth = {0: 0}
    threads = 0
    with damage(files, "pstree.img"):
        for row in records(files, "pstree.img", "pstree"):
            pid, parent = row.number(1), row.number(2)
            if not 0 < pid < 1 << 31 or pid in depth:
                raise NotAMessage(f"process {pid} is there twice or cannot be")
            if parent not in depth and rows:
                raise NotAMessage(f"process {pid} comes before its parent {parent}")
            depth[pid] = depth.get(parent, 0) + 1
            threads += len(row.numbers(5))
            if max(len(depth), threads) > MAX_PROCESSES or depth[pid] > MAX_PARENTS:
                raise NotAMessage("too many processes")
            rows.append(row)
    if not rows:
        raise Corrupted(f"pstree.img of {files.place} names no process", hint="take another checkpoint")
    return rows


def _process(
    files: ImageFiles, names: frozenset[str], row: Message, paths: Mapping[int, str], opened: Mapping[int, OpenFile]
) -> Process:
    pid = row.number(1)
    with damage(files, f"core-{pid}.img"):
        core = first_record(files, f"core-{pid}.img", "core") if f"core-{pid}.img" in names else Message()
        task = core.message(3)
        threads = tuple(_thread(files, names, tid, task) for tid in row.numbers(5))
        memory = first_record(files, f"mm-{pid}.img", "mm") if f"mm-{pid}.img" in names else Message()
        areas = list(memory.messages(14))
        pages = _pagemap(files, f"pagemap-{pid}.img").stored_bytes if f"pagemap-{pid}.img" in names else 0
        return Process(
            pid=pid,
            parent=row.number(2),
            name=task.text(6),
            state=_STATES.get(task.number(1), "unknown"),
            threads=threads,
            memory_bytes=pages,
            executable=paths.get(memory.number(12), ""),
            files=(*_files_of(files, names, pid, core, opened), *_mapped_files(areas, opened)),
        )


def _thread(files: ImageFiles, names: frozenset[str], tid: int, task: Message) -> Thread:
    own = first_record(files, f"core-{tid}.img", "core").message(5) if f"core-{tid}.img" in names else Message()
    return Thread(tid, own.text(13) or task.text(6))


def _files_of(
    files: ImageFiles, names: frozenset[str], pid: int, core: Message, opened: Mapping[int, OpenFile]
) -> tuple[OpenFile, ...]:
    """The descriptors of a process; processes that share a table of descriptors name the same one."""
    ids = core.message(4) if 4 in core else None
    if ids is None and f"ids-{pid}.img" in names:
        ids = first_record(files, f"ids-{pid}.img", "ids")
    table = f"fdinfo-{pid if ids is None else ids.number(2)}.img"
    if table not in names:
        return ()
    with damage(files, table):
        return tuple(
            OpenFile.of(record.number(4), record.number(3), opened.get(record.number(1)))
            for record in records(files, table, "fdinfo")
        )


def _mapped_files(areas: Sequence[Message], opened: Mapping[int, OpenFile]) -> Iterator[OpenFile]:
    """The files that a process writes through its memory; their descriptors may be closed."""
    shared = {area.number(4) for area in areas if area.number(7) & _FILE_SHARED}
    for file in filter(None, map(opened.get, sorted(shared))):
        if file.is_writable:
            yield OpenFile(-1, "mapped", file.name, is_writable=True)


def pagemap(source: str | os.PathLike[str] | ImageFiles) -> tuple[Pagemap, ...]:
    """The memory of each process, and what several share, as windows of addresses."""
    files = image_files(source)
    wanted = [name for name in sorted(files.names()) if re.fullmatch(r"pagemap-(shmem-)?\d{1,20}\.img", name)]
    return tuple(_pagemap(files, name) for name in wanted)


def _pagemap(files: ImageFiles, name: str) -> Pagemap:
    with damage(files, name):
        in_order = records(files, name, "pagemap")
        head = next(in_order, None)
        if head is None:
            raise NotAMessage("no head")
        windows, offset = [], 0
        for record in in_order:
            window = _window(record, offset)
            windows.append(window)
            if window.offset is not None:
                offset += window.size_bytes
        return Pagemap(name[len("pagemap-") : -len(".img")], f"pages-{head.number(1)}.img", tuple(windows))


def _window(record: Message, offset: int) -> Window:
    flags = record.number(4) if 4 in record else _PARENT if record.number(3) else _PRESENT
    pages = record.number(5) if 5 in record else record.number(2)
    address = record.number(1)
    if pages > 1 << 52 or address + pages * PAGE_BYTES > 1 << 64:
        raise NotAMessage("pages beyond all addresses")
    is_here = bool(flags & _PRESENT) and not flags & _PARENT
    return Window(address, pages * PAGE_BYTES, offset if is_here else None)


def command_line(source: str | os.PathLike[str] | ImageFiles, pid: int) -> tuple[str, ...]:
    """The arguments a process was started with, from its memory; () where they are not in these images."""
    return _strings(image_files(source), pid, 8)


def environment(source: str | os.PathLike[str] | ImageFiles, pid: int) -> dict[str, str]:
    """The variables a process was started with, from its memory."""
    pairs = (line.partition("=") for line in _strings(image_files(source), pid, 10))
    return {name: value for name, equals, value in pairs if equals}


def _strings(files: ImageFiles, pid: int, field: int) -> tuple[str, ...]:
    if f"mm-{pid}.img" not in files.names():
        return ()
    with damage(files, f"mm-{pid}.img"):
        record = first_record(files, f"mm-{pid}.img", "mm")
        start, end = record.number(field), record.number(field + 1)
        data = _memory(files, pid, start, min(max(end - start, 0), MAX_TEXT_BYTES))
    text = data.decode("utf-8", "backslashreplace").rstrip("\0")
    return tuple(text.split("\0")) if text else ()


def _memory(files: ImageFiles, pid: int, start: int, length: int) -> bytes:
    """Some of a process's memory; b"" unless all of it is in these images."""
    if f"pagemap-{pid}.img" not in files.names():
        return b""
    memory = _pagemap(files, f"pagemap-{pid}.img")
    parts, position, end = [], start, start + length
    for window in memory.windows:
        stop = window.address + window.size_bytes
        if window.offset is not None and window.address <= position < min(stop, end):
            size = min(stop, end) - position
            parts.append(files.read(memory.pages_file, window.offset + position - window.address, size))
            position += size
    return b"".join(parts) if position == end else b""


_DUMP_FIGURES = {
    1: "freezing_us", 2: "frozen_us", 3: "memory_dump_us", 4: "memory_write_us", 5: "pages_scanned",
    6: "pages_in_parent", 7: "pages_written", 9: "pages_lazy", 12: "shared_pages_scanned",
    13: "shared_pages_in_parent", 14: "shared_pages_written",
}  # fmt: skip


def statistics(source: str | os.PathLike[str] | ImageFiles) -> dict[str, int]:
    """CRIU's own figures of a dump, from its stats-dump; times in microseconds."""
    files = image_files(source)
    with damage(files, "stats-dump"):
        figures = first_record(files, "stats-dump", "stats").message(1)
        return {name: figures.number(number) for number, name in _DUMP_FIGURES.items() if number in figures}


# The records of an image.


def records(files: ImageFiles, name: str, kind: str) -> Iterator[Message]:
    """The messages of an image. NotFound, or Corrupted when its magic number is another or a record is cut off."""
    with damage(files, name):
        yield from map(Message, raw_records(files, name, kind)[1])


def raw_records(files: ImageFiles, name: str, kind: str) -> tuple[memoryview, list[memoryview]]:
    """The head of an image, and the bytes of each record."""
    with damage(files, name):
        data = memoryview(files.read(name, 0, MAX_IMAGE_BYTES + 1))
        if len(data) > MAX_IMAGE_BYTES:
            raise NotAMessage(f"more than {MAX_IMAGE_BYTES:,} bytes")
        position = 4
        magic = u32(data, 0)
        if magic in (COMMON, SERVICE):
            magic, position = u32(data, 4), 8
        if magic != MAGIC[kind]:
            raise NotAMessage(f"its magic number {magic:#x} is not that of {kind}")
        head = data[:position]
        bodies: list[memoryview] = []
        while position < len(data):
            size = u32(data, position)
            position += 4
            if len(bodies) >= MAX_RECORDS:
                raise NotAMessage("too many records")
            if size > MAX_RECORD_BYTES or size > len(data) - position:
                raise NotAMessage("a record is cut off")
            bodies.append(data[position : position + size])
            position += size
        return head, bodies


def first_record(files: ImageFiles, name: str, kind: str) -> Message:
    with damage(files, name):
        record = next(records(files, name, kind), None)
        if record is None:
            raise NotAMessage("no record")
        return record


@contextmanager
def damage(files: ImageFiles, name: str) -> Iterator[None]:
    """What no CRIU wrote is Corrupted, and says in which file."""
    try:
        yield
    except NotAMessage as error:
        raise Corrupted(f"{name} of {files.place} is damaged: {error}", hint="take another checkpoint") from error


def image_files(source: str | os.PathLike[str] | ImageFiles) -> ImageFiles:
    return Directory(source) if isinstance(source, str | os.PathLike) else source
