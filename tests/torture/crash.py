"""What a program does to the disk, read from a trace of its system calls; crash_disks.py says what a cut may leave.

A model stricter than any one file system, in the manner of ALICE: whatever was not synced may be there or not, each
write and each name by itself, writes also in part. Syncing a file does not sync its name; syncing a directory syncs
the names in it. Finds missing syncs that ext4 or xfs happen to hide.
"""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

TRACED = (
    "openat,write,pwrite64,writev,pwritev,pwritev2,lseek,ftruncate,truncate,fallocate,fsync,fdatasync,"
    "rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,link,linkat,symlink,symlinkat"
)
STRACE_OPTIONS = ("-y", "-xx", "-s", "100000000", "-e", f"trace={TRACED}")

_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+|\?)")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_FILE = re.compile(r"(-?\d+|AT_FDCWD)<((?:\\x[0-9a-f]{2})*)>")
_IGNORED = re.compile(r".*-shm$|.*/lock$")  # rebuilt after a crash; empty


def _bytes(hexed: str) -> bytes:
    return bytes.fromhex(hexed.replace("\\x", ""))


@dataclass(eq=False)
class Inode:
    is_directory: bool
    content: bytes = b""  # before the trace


@dataclass(eq=False)
class Op:
    """One change of the disk. `files` are the inodes whose sync makes it durable."""

    text: str
    issued: int
    done: int
    files: tuple[Inode, ...]
    is_name: bool
    durable: float = float("inf")  # from this moment on it survives
    offset: int = 0
    data: bytes | None = None
    size: int | None = None  # truncate to; or, with `grow`, extend to at least
    grow: bool = False
    remove: tuple[Inode, str] | None = None
    add: tuple[Inode, str, Inode] | None = None

    def __str__(self) -> str:
        names = [
            bytes.fromhex(name.replace("\\x", "")).decode(errors="replace") for name in _TEXT.findall(self.text[:600])
        ]
        held = _FILE.search(self.text)
        file = _bytes(held[2]).decode(errors="replace") if held and not self.is_name else " → ".join(names)
        what = f"{len(self.data)} at {self.offset}" if self.data is not None else f"to {self.size}" if self.size else ""
        return f"{self.text.partition('(')[0]} {file} {what}".rstrip()


@dataclass
class Trace:
    """What happened below one directory, and what was told to the outside, each with its moment."""

    root: Inode
    names: dict[tuple[Inode, str], Inode]  # before the trace
    ops: list[Op] = field(default_factory=list)
    messages: list[tuple[int, tuple[object, ...]]] = field(default_factory=list)
    syncs: list[int] = field(default_factory=list)
    end: int = 0


def snapshot(folder: Path) -> Trace:
    """The state before the trace, all of it durable."""
    trace = Trace(Inode(is_directory=True), {})

    def add(parent: Inode, path: Path) -> None:
        for child in sorted(path.iterdir()):
            inode = Inode(child.is_dir(), b"" if child.is_dir() else child.read_bytes())
            trace.names[parent, child.name] = inode
            if child.is_dir():
                add(inode, child)

    add(trace.root, folder)
    return trace


def read_trace(before: Trace, log: Path, folder: str) -> Trace:
    """Fill in what a log says of `folder`."""
    reader = _Reader(before, folder)
    pending: dict[str, tuple[int, str]] = {}
    with log.open() as lines:
        for moment, line in enumerate(lines, 1):
            thread, _, text = line.rstrip("\n").partition(" ")
            text = text.lstrip()
            begun = moment
            if text.endswith("<unfinished ...>"):
                pending[thread] = (moment, text.removesuffix("<unfinished ...>"))
                continue
            if text.startswith("<... "):
                begun, head = pending.pop(thread)
                text = head + text.partition("resumed>")[2]
            if (call := _CALL.match(text)) and not call[3].startswith(("-", "?")):
                reader.call(call[1], call[2], int(call[3]), begun, moment, text[:200])
            before.end = moment
    return before


class _Reader:
    def __init__(self, trace: Trace, folder: str) -> None:
        self.trace = trace
        self.folder = PurePosixPath(folder)
        self.names = dict(trace.names)  # as the running process sees them
        self.sizes: dict[Inode, int] = {inode: len(inode.content) for inode in self.names.values()}
        self.offsets: dict[int, int] = {}

    def _find(self, path: PurePosixPath) -> Inode | None:
        """The inode at a path; None when it is elsewhere or does not exist."""
        if not path.is_relative_to(self.folder):
            return None
        inode: Inode | None = self.trace.root
        for part in path.relative_to(self.folder).parts:
            inode = self.names.get((inode, part)) if inode else None
        return inode

    def _paths(self, arguments: str) -> list[PurePosixPath]:
        """Path arguments made absolute with the directory in front of them (AT_FDCWD or a handle)."""
        found = []
        base = PurePosixPath("/")
        for match in re.finditer(rf"{_FILE.pattern}|{_TEXT.pattern}", arguments):
            if match[2] is not None:
                base = PurePosixPath(_bytes(match[2]).decode())
            elif match[3] is not None:
                found.append(base / _bytes(match[3]).decode())
        return found

    def call(self, name: str, arguments: str, result: int, begun: int, done: int, text: str) -> None:
        if name in ("write", "pwrite64", "fsync", "fdatasync", "ftruncate", "fallocate", "lseek"):
            handle = _FILE.match(arguments)
            if handle:
                self._on_handle(name, handle, arguments[handle.end() :], result, begun, done, text)
        elif name in ("writev", "pwritev", "pwritev2", "truncate", "symlink", "symlinkat"):
            if any(path.is_relative_to(self.folder) for path in self._paths(arguments)) or str(self.folder) in text:
                raise NotImplementedError(text)
        else:
            self._on_name(name, arguments, result, begun, done, text)

    def _on_handle(
        self, name: str, handle: re.Match[str], rest: str, result: int, begun: int, done: int, text: str
    ) -> None:
        number, path = int(handle[1]), _bytes(handle[2]).decode(errors="replace")
        if path.startswith("socket:") and name == "write":
            data = _TEXT.search(rest)
            assert data
            _, message = pickle.loads(_bytes(data[1])[4:])  # of our own child
            self.trace.messages.append((done, message))
            return
        inode = self._find(PurePosixPath(path))
        if inode is None or _IGNORED.fullmatch(path):
            return
        if name in ("fsync", "fdatasync"):
            self.trace.syncs.append(done)
            for op in self.trace.ops:
                if inode in op.files and op.done < begun:
                    op.durable = min(op.durable, done)
            return
        if name == "lseek":
            self.offsets[number] = result
            return
        op = Op(text, begun, done, (inode,), is_name=False)
        size = self.sizes.get(inode, 0)
        if name in ("write", "pwrite64"):
            data = _TEXT.search(rest)
            assert data
            op.data = _bytes(data[1])[:result]
            if name == "pwrite64":
                op.offset = int(rest.rpartition(",")[2])
            else:
                op.offset = self.offsets.get(number, 0)
                self.offsets[number] = op.offset + result
            self.sizes[inode] = max(size, op.offset + result)
        elif name == "ftruncate":
            op.size = self.sizes[inode] = int(rest.rpartition(",")[2])
        else:
            _, mode, offset, length = rest.split(", ")
            if mode != "0":
                raise NotImplementedError(text)
            op.size, op.grow = int(offset) + int(length), True
            self.sizes[inode] = max(size, op.size)
        self.trace.ops.append(op)

    def _on_name(self, name: str, arguments: str, result: int, begun: int, done: int, text: str) -> None:
        paths = self._paths(arguments)
        if not paths or not all(path.is_relative_to(self.folder) for path in paths):
            return
        path = paths[0]
        parent = self._find(path.parent)
        here = self._find(path)
        if parent is None or _IGNORED.fullmatch(str(path)):
            return
        if name == "openat":
            self.offsets[result] = 0
            if here is None and "O_CREAT" in arguments:
                here = Inode(is_directory=False)
                self._add_name(parent, path.name, here, begun, done, text)
            elif here is not None and "O_TRUNC" in arguments:
                self.trace.ops.append(Op(text, begun, done, (here,), is_name=False, size=0))
                self.sizes[here] = 0
            if "O_APPEND" in arguments and here is not None:
                self.offsets[result] = self.sizes.get(here, 0)
        elif name in ("mkdir", "mkdirat"):
            self._add_name(parent, path.name, Inode(is_directory=True), begun, done, text)
        elif name in ("unlink", "unlinkat", "rmdir"):
            del self.names[parent, path.name]
            self.trace.ops.append(Op(text, begun, done, (parent,), is_name=True, remove=(parent, path.name)))
        elif name in ("link", "linkat"):
            target = self._find(paths[1].parent)
            assert here is not None
            assert target is not None
            self.names[target, paths[1].name] = here
            op = Op(text, begun, done, (target,), is_name=True, add=(target, paths[1].name, here))
            self.trace.ops.append(op)
        elif name in ("rename", "renameat", "renameat2"):
            target = self._find(paths[1].parent)
            assert here is not None
            assert target is not None
            del self.names[parent, path.name]
            self.names[target, paths[1].name] = here
            op = Op(text, begun, done, (parent, target), is_name=True)
            op.remove, op.add = (parent, path.name), (target, paths[1].name, here)
            self.trace.ops.append(op)

    def _add_name(self, parent: Inode, name: str, inode: Inode, begun: int, done: int, text: str) -> None:
        self.names[parent, name] = inode
        self.sizes[inode] = 0
        self.trace.ops.append(Op(text, begun, done, (parent,), is_name=True, add=(parent, name, inode)))
