"""Filling a new private directory with the entries of a table: chunks are read, verified and written in parallel."""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from kedge.blobs.workers import Workers
from kedge.chunks import Entry, StoredStream, allocate
from kedge.errors import CheckpointError, Validation, storage_error

from .directories import Directories
from .stored_files import Part, parts_of_chunks
from .table import APART, BLOCK_DEVICE, CHARACTER_DEVICE, DIRECTORY, FIFO, FILE, Table, shown

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_WORKERS = min(4, 1 + (os.cpu_count() or 1))  # one waits for the disk while the others verify and write
_EMPTY_AT_ONCE = 256
_TASK_BYTES = 2 << 20  # measured best, from 1 to 8 MiB: fewer hand-overs between threads, and still in the caches
_TYPES = {FIFO: stat.S_IFIFO, CHARACTER_DEVICE: stat.S_IFCHR, BLOCK_DEVICE: stat.S_IFBLK}
_NO_ID = 0xFFFFFFFF  # for chown(2): unchanged

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Wishes:
    """The options of a restore."""

    overwrite: bool = False
    owners: bool | None = None  # whether to restore them; None: if we are root
    setuid: bool = False  # restore set-user-ID and set-group-ID bits
    exact: bool = False  # fifos, devices and extended attributes, too
    durable: bool = True
    progress: Progress | None = None  # called with (done, total) in bytes

    def dress(self, fd: int, table: Table, row: int) -> None:
        """Set owner, attributes, mode and time of an open file or directory, in the order that keeps them all."""
        if self.has_owners:
            uid, gid = table.uid[row], table.gid[row]
            os.fchown(fd, -1 if uid == _NO_ID else uid, -1 if gid == _NO_ID else gid)
        for name, value in table.attributes.get(row, {}).items():  # after chown, which would remove capabilities
            os.setxattr(fd, name, value)
        os.fchmod(fd, table.mode[row] & (0o7777 if self.setuid else 0o1777))
        os.utime(fd, ns=(table.mtime_ns[row], table.mtime_ns[row]))

    @property
    def has_owners(self) -> bool:
        return os.geteuid() == 0 if self.owners is None else self.owners


@dataclass(slots=True)
class _LargeFile:
    """A file with several chunks. One writer at a time: several are slower, not faster."""

    fd: int
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)


class Filling:
    """Writes the entries of `table` below the directory `root`, a descriptor that the caller closes."""

    def __init__(
        self, table: Table, stream: StoredStream | None, root: int, wishes: Wishes, *, sync_each: bool = False
    ) -> None:
        self._table = table
        self._stream = stream
        self._root = root
        self._wishes = wishes
        self._sync_each = sync_each
        self._local = threading.local()
        self._large: dict[int, _LargeFile] = {}
        self._cleanup = ExitStack()

    def run(self) -> None:
        if self._table.is_exact and not self._wishes.exact:
            raise Validation(
                "the tree holds fifos, devices or extended attributes",
                hint="exact=True restores them too; it needs root, and is only for trees you trust",
            )
        with self._cleanup:
            self._make_directories()
            try:
                self._write_files()
            finally:
                for file in self._large.values():
                    os.close(file.fd)
            self._make_links()
            self._make_special()

    def _make_directories(self) -> None:
        for row in self._table.rows(DIRECTORY):
            if row:
                with self._naming(row):
                    os.mkdir(self._table.names[row], 0o700, dir_fd=self._directory_of(row))

    def _write_files(self) -> None:
        total = self._stream.size_bytes if self._stream is not None else 0
        done = 0
        waiting: deque[tuple[Future[None], int]] = deque()
        with Workers(_WORKERS, "kedge-restore", keep=_WORKERS) as pool:
            try:
                for work, size in self._tasks():
                    waiting.append((pool.submit(work), size))
                    while len(waiting) > 2 * _WORKERS or (waiting and waiting[0][0].done()):
                        future, size = waiting.popleft()
                        future.result()
                        done += size
                        if self._wishes.progress is not None:
                            self._wishes.progress(done, total)
                for future, _ in waiting:
                    future.result()
                if self._wishes.progress is not None:
                    self._wishes.progress(total, total)
            except BaseException:
                for future, _ in waiting:
                    future.cancel()
                raise

    def _tasks(self) -> Iterator[tuple[Callable[[], None], int]]:
        files = self._table.rows(FILE) + self._table.rows(APART)
        empty = [row for row in files if not self._table.data_bytes(row)]
        for first in range(0, len(empty), _EMPTY_AT_ONCE):
            yield partial(self._write_empty, empty[first : first + _EMPTY_AT_ONCE]), 0
        if self._stream is None:
            return
        group: list[tuple[Entry, list[Part]]] = []  # small chunks are located and read together
        size = 0
        for entry, parts in parts_of_chunks(self._table, self._stream):
            for part in parts:
                if part.start == 0 and part.size_bytes < self._table.data_bytes(part.row):
                    with self._naming(part.row):
                        fd = self._create(part.row)
                        self._large[part.row] = _LargeFile(fd, self._table.data_bytes(part.row))
                        os.ftruncate(fd, self._table.size[part.row])
            group.append((entry, parts))
            size += entry.size_bytes
            if size >= _TASK_BYTES:
                yield partial(self._write_chunks, self._stream, group), size
                group, size = [], 0
        if group:
            yield partial(self._write_chunks, self._stream, group), size

    def _write_empty(self, rows: list[int]) -> None:
        for row in rows:
            with self._naming(row), self._created(row) as fd:
                os.ftruncate(fd, self._table.size[row])

    def _write_chunks(self, stream: StoredStream, group: list[tuple[Entry, list[Part]]]) -> None:
        memory = self._buffer(sum(entry.size_bytes for entry, _ in group))
        stream.reader.read_row([entry for entry, _ in group], memory, of=stream.of)
        for part, is_zero in _joined(group):
            self._write_part(part, memory[part.offset : part.offset + part.size_bytes], is_zero=is_zero)

    def _write_part(self, part: Part, data: memoryview, *, is_zero: bool) -> None:
        with self._naming(part.row):
            large = self._large.get(part.row)
            if large is None:
                with self._created(part.row) as fd:
                    if is_zero or part.row in self._table.sparse:
                        os.ftruncate(fd, self._table.size[part.row])
                    if not is_zero:
                        self._write(fd, part, data)
                return
            with large.lock:
                if not is_zero:
                    self._write(large.fd, part, data)
                large.left -= part.size_bytes
                if not large.left:
                    self._finish(large.fd, part.row)
                    os.close(self._large.pop(part.row).fd)

    def _write(self, fd: int, part: Part, data: memoryview) -> None:
        for offset, length in self._table.segments(part.row, part.start, part.size_bytes):
            piece, data = data[:length], data[length:]
            while piece:
                count = os.pwrite(fd, piece, offset)
                piece, offset = piece[count:], offset + count

    def _make_links(self) -> None:
        table = self._table
        with Directories(table, os.dup(self._root)) as directories_of_files:
            for row, first in table.links.items():
                with self._naming(row):
                    os.link(
                        table.names[first],
                        table.names[row],
                        src_dir_fd=directories_of_files.fd(table.parent[first]),
                        dst_dir_fd=self._directory_of(row),
                        follow_symlinks=False,
                    )
        for row, target in table.targets.items():
            with self._naming(row):
                name, fd = table.names[row], self._directory_of(row)
                os.symlink(target, name, dir_fd=fd)
                self._dress(row, name, fd)

    def _make_special(self) -> None:
        """Create fifos and devices. Nobody else can change their directory, so paths are safe here."""
        table = self._table
        for row, kind in enumerate(table.kind):
            if kind not in _TYPES:
                continue
            with self._naming(row):
                name, fd = table.names[row], self._directory_of(row)
                device = os.makedev(*table.devices[row]) if row in table.devices else 0
                os.mknod(name, 0o600 | _TYPES[kind], device, dir_fd=fd)
                self._dress(row, name, fd)
                os.chmod(name, table.mode[row], dir_fd=fd)

    def _dress(self, row: int, name: bytes, fd: int) -> None:
        """Give what is no file or directory its owner, attributes and time, by its name."""
        table = self._table
        if self._wishes.has_owners:
            os.chown(name, table.uid[row], table.gid[row], dir_fd=fd, follow_symlinks=False)
        for attribute, value in table.attributes.get(row, {}).items():
            os.setxattr(os.path.join(b"/proc/self/fd/%d" % fd, name), attribute, value, follow_symlinks=False)
        os.utime(name, ns=(table.mtime_ns[row], table.mtime_ns[row]), dir_fd=fd, follow_symlinks=False)

    def _create(self, row: int) -> int:
        return os.open(self._table.names[row], NEW_FILE, 0o600, dir_fd=self._directory_of(row))

    @contextmanager
    def _created(self, row: int) -> Iterator[int]:
        fd = self._create(row)
        try:
            yield fd
            self._finish(fd, row)
        finally:
            os.close(fd)

    def _finish(self, fd: int, row: int) -> None:
        self._wishes.dress(fd, self._table, row)
        if self._sync_each:
            os.fsync(fd)

    def _directory_of(self, row: int) -> int:
        """Return a descriptor of a row's directory, for this thread, valid until the next call."""
        directories: Directories | None = getattr(self._local, "directories", None)
        if directories is None:
            directories = self._local.directories = Directories(self._table, os.dup(self._root))
            self._cleanup.enter_context(directories)
        return directories.fd(self._table.parent[row])

    def _buffer(self, size: int) -> memoryview:
        """Return this thread's memory for several chunks, so large that it begins on a page, for direct reads."""
        buffer: memoryview | None = getattr(self._local, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = self._local.buffer = allocate(max(size, _TASK_BYTES + (1 << 20)))
        return buffer[:size]

    @contextmanager
    def _naming(self, row: int) -> Iterator[None]:
        """Errors of the operating system name the entry."""
        try:
            yield
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise storage_error("write", shown(self._table.path(row)), error) from error


def _joined(group: list[tuple[Entry, list[Part]]]) -> Iterator[tuple[Part, bool]]:
    """Yield the parts of consecutive chunks, with offsets from the first chunk, and whether they are zeros.

    Adjacent parts of a file are joined.
    """
    last: Part | None = None
    is_last_zero = False
    begin = 0
    for entry, parts in group:
        for part in parts:
            offset = begin + part.offset
            if (
                last is not None
                and (last.row, is_last_zero) == (part.row, entry.is_zero)
                and last.start + last.size_bytes == part.start
                and last.offset + last.size_bytes == offset
            ):
                last = Part(last.row, last.start, last.offset, last.size_bytes + part.size_bytes)
                continue
            if last is not None:
                yield last, is_last_zero
            last, is_last_zero = Part(part.row, part.start, offset, part.size_bytes), entry.is_zero
        begin += entry.size_bytes
    if last is not None:
        yield last, is_last_zero
