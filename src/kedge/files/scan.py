"""Listing files on disk without reading any of them."""

from __future__ import annotations

import errno
import fnmatch
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from kedge.errors import CheckpointError, Conflict, NotFound, Validation, storage_error

from .directories import OPEN_DIRECTORY, Directories
from .table import (
    APART,
    BLOCK_DEVICE,
    CHARACTER_DEVICE,
    DIRECTORY,
    FIFO,
    FILE,
    HARD_LINK,
    MAX_DEPTH,
    SYMLINK,
    Ranges,
    Table,
    shown,
)  # fmt: skip

BUNDLE_BYTES = 1 << 20  # smaller files are stored together, larger ones apart
STORE_MARKER = b"kedge-store"  # a directory with this file is a store, which is never saved by accident
_SPARSE_FROM_BYTES = 64 * 1024
_MAX_RANGES = 10_000  # a file with more holes than this is stored with its zeros

# A file written in the same clock tick as its scan may have changed afterwards, with the same times. Kernels stamp
# files with a clock of up to 10 ms. Times in whole seconds come from file systems without finer ones, the worst of
# which count in steps of two.
_TICK_NS = 50_000_000
_COARSE_TICK_NS = 2_000_000_000
_SECOND_NS = 1_000_000_000

_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()  # what os.fsencode uses

_SPECIAL = {
    stat.S_IFIFO: "a fifo",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


_KEPT_IN_EXACT_TREES = {stat.S_IFIFO: FIFO, stat.S_IFCHR: CHARACTER_DEVICE, stat.S_IFBLK: BLOCK_DEVICE}


@dataclass(frozen=True, slots=True)
class Options:
    exclude: tuple[str, ...] = ()
    skip_special: bool = False
    allow_changing: bool = False
    always_read: bool = False
    exact: bool = False  # extended attributes, fifos and devices, too
    without_attributes: frozenset[str] = frozenset()
    cuts: Mapping[bytes, Sequence[int]] = field(default_factory=dict)  # path → where its chunks end


@dataclass(frozen=True, slots=True)
class Scan:
    """Files as they were when scanned. Later readers check that they are still the same."""

    root: bytes  # absolute
    table: Table
    options: Options

    @property
    def is_tree(self) -> bool:
        return self.table.kind[0] == DIRECTORY

    def name(self, row: int) -> str:
        """Return the path of a row for messages."""
        return shown(os.path.join(self.root, self.table.path(row)) if row else self.root)

    def open_root(self) -> int:
        """Open the root, if it is still the scanned directory; for a single file, the directory it is in."""
        if not self.is_tree:
            return os.open(os.path.dirname(self.root), OPEN_DIRECTORY)
        fd = os.open(self.root, OPEN_DIRECTORY)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (self.table.device[0], self.table.inode[0]):
            os.close(fd)
            raise self.changed(0)
        return fd

    def changed(self, row: int) -> Conflict:
        return Conflict(
            f"{self.name(row)} changed while it was being saved",
            hint="save it again when nobody writes to it, exclude it, or accept that with allow_changing=True",
        )

    def unreadable(self, row: int, error: OSError) -> CheckpointError:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE):
            return self.changed(row)
        return unreadable(self.name(row), error)


def unreadable(name: str, error: OSError) -> CheckpointError:
    """The error for an unreadable file; nothing was stored."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(f"there is no {name}", hint="check the path")
    if error.errno in (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.EISDIR):
        return Validation(
            f"cannot read {name}: {os.strerror(error.errno)}", hint="change its mode, or exclude it from the save"
        )
    return storage_error("read", name, error)


def scan_file(path: str | os.PathLike[str], options: Options) -> Scan:
    """Scan one file; a symlink is followed, because the caller named it."""
    absolute = _absolute(path)
    started_ns = time.time_ns()
    try:
        root = os.path.realpath(absolute)
        status = os.lstat(root)
    except (OSError, ValueError) as error:
        raise _bad_path(absolute, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise Validation(f"{shown(absolute)} is not a regular file", hint="use kedge.Tree for a directory")
    table = Table()
    scan = Scan(root, table, options)
    table.add(os.path.basename(absolute), 0, FILE)
    table.fill([status])
    table.unsettled = _unsettled(table, started_ns)
    _mark_apart(scan, 0, status, lambda: os.open(root, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
    return scan


def scan_tree(path: str | os.PathLike[str], options: Options) -> Scan:
    """Scan a directory and everything below it, sorted by name, directories after the entries beside them."""
    absolute = _absolute(path)
    started_ns = time.time_ns()
    try:
        root = os.path.realpath(absolute)
        fd = os.open(root, OPEN_DIRECTORY)
    except NotADirectoryError as error:
        raise Validation(f"{shown(absolute)} is not a directory", hint="use kedge.File for a single file") from error
    except (OSError, ValueError) as error:
        raise _bad_path(absolute, error) from error
    scan = Scan(root, Table(), options)
    with Directories(scan.table, fd) as directories:
        scan.table.add(b"", 0, DIRECTORY)
        scan.table.fill(_Walk(scan, directories).run(os.fstat(fd)))
        if options.exact:
            _read_attributes(scan, directories)
    if options.cuts:
        _stand_apart(scan.table, options.cuts)
    scan.table.unsettled = _unsettled(scan.table, started_ns)
    return scan


def _unsettled(table: Table, started_ns: int) -> set[int]:
    """Return files written so shortly before the scan that a later write might give them the same times."""
    return {
        row
        for row, latest_ns in enumerate(map(max, table.mtime_ns, table.ctime_ns))
        if latest_ns > started_ns - _COARSE_TICK_NS
        and table.kind[row] != DIRECTORY
        and not all(_settled_ns(time_ns) < started_ns for time_ns in (table.mtime_ns[row], table.ctime_ns[row]))
    }


def _settled_ns(time_ns: int) -> int:
    """Return from when a write would give a file another time than this."""
    return time_ns + (_TICK_NS if time_ns % _SECOND_NS else _COARSE_TICK_NS)


def _absolute(path: str | os.PathLike[str]) -> bytes:
    text = os.fsencode(path)
    if not text:
        raise Validation("an empty path", hint="name a file or directory")
    return os.path.abspath(text)


def _bad_path(path: bytes, error: OSError | ValueError) -> CheckpointError:
    if isinstance(error, OSError):
        return unreadable(shown(path), error)
    return Validation(f"{shown(path)!r} is not a path: {error}", hint="name a file or directory")


class _Walk:
    """One scan of a tree in progress."""

    def __init__(self, scan: Scan, directories: Directories) -> None:
        self._scan = scan
        self._table = scan.table
        self._directories = directories
        self._excluded = _matcher(scan.options.exclude, scan.table)
        self._statuses: list[os.stat_result] = []  # the status of each row
        self._first_names: dict[tuple[int, int], int] = {}
        self._depth = {0: 0}

    def run(self, root: os.stat_result) -> list[os.stat_result]:
        """Add all rows to the table; return their statuses, which the table still lacks."""
        self._statuses.append(root)
        waiting = [0]
        while waiting:
            row = waiting.pop()
            depth = self._depth.pop(row)
            below = self._list(row)
            if below and depth >= MAX_DEPTH:
                raise Validation(
                    f"{self._scan.name(row)[:200]}… is more than {MAX_DEPTH:,} levels deep", hint="exclude it"
                )
            self._depth.update(dict.fromkeys(below, depth + 1))
            waiting += reversed(below)
        return self._statuses

    def _list(self, row: int) -> list[int]:
        """Add the entries of directory `row`; return the rows of its directories."""
        try:
            fd = self._directories.fd(row)
            entries = self._entries(fd)
        except OSError as error:
            if self._has_vanished(error):
                return []
            raise self._scan.unreadable(row, error) from error
        below = []
        for name, status in entries:
            if self._excluded is not None and self._excluded(name, row):
                continue
            mode = status.st_mode
            if stat.S_ISREG(mode):
                if status.st_nlink == 1 and status.st_size < _SPARSE_FROM_BYTES:
                    self._table.add(name, row, FILE)
                else:
                    self._add_file(name, row, status, fd)
            elif stat.S_ISDIR(mode):
                if not self._scan.options.exact and _is_store(fd, name):
                    self._skip(name, row, "a Kedge store")
                    continue
                below.append(self._table.add(name, row, DIRECTORY))
            elif not self._add_other(name, row, status, fd):
                continue
            self._statuses.append(status)
        return below

    def _entries(self, fd: int) -> list[tuple[bytes, os.stat_result]]:
        entries = []
        with os.scandir(fd) as listing:
            for item in listing:
                try:
                    entries.append((item.name.encode(_ENCODING, _ERRORS), item.stat(follow_symlinks=False)))
                except OSError as error:
                    if not self._has_vanished(error):
                        raise
        entries.sort(key=itemgetter(0))
        return entries

    def _has_vanished(self, error: OSError) -> bool:
        return error.errno == errno.ENOENT and self._scan.options.allow_changing

    def _add_file(self, name: bytes, parent: int, status: os.stat_result, fd: int) -> None:
        if status.st_nlink > 1:
            key = (status.st_dev, status.st_ino)
            first = self._first_names.get(key)
            if first is not None:
                self._table.links[self._table.add(name, parent, HARD_LINK)] = first
                return
            self._first_names[key] = len(self._table)
        row = self._table.add(name, parent, FILE)
        if status.st_size >= _SPARSE_FROM_BYTES:
            _mark_apart(self._scan, row, status, lambda: os.open(name, READ_FILE, dir_fd=fd))

    def _add_other(self, name: bytes, parent: int, status: os.stat_result, fd: int) -> bool:
        """Add any other entry; return whether it has a row now."""
        if stat.S_ISLNK(status.st_mode):
            row = self._table.add(name, parent, SYMLINK)
            try:
                self._table.targets[row] = os.readlink(name, dir_fd=fd)
            except OSError as error:
                raise self._scan.unreadable(row, error) from error
            return True
        exact = self._scan.options.exact
        if exact and (kind := _KEPT_IN_EXACT_TREES.get(stat.S_IFMT(status.st_mode))) is not None:
            row = self._table.add(name, parent, kind)
            if kind != FIFO:
                self._table.devices[row] = (os.major(status.st_rdev), os.minor(status.st_rdev))
            return True
        type_name = _SPECIAL.get(stat.S_IFMT(status.st_mode), "a special file")
        if not self._scan.options.skip_special and not exact:
            raise Validation(
                f"{shown(os.path.join(self._scan.root, self._table.path(parent), name))} is {type_name}",
                hint="exclude it, or leave out all such files with skip_special=True",
            )
        self._skip(name, parent, type_name)
        return False

    def _skip(self, name: bytes, parent: int, why: str) -> None:
        self._table.skipped.append((os.path.join(self._table.path(parent), name), why))


def _read_attributes(scan: Scan, directories: Directories) -> None:
    """Read every row's extended attributes, without following links: user's own, ACLs, capabilities, trusted."""
    table, unwanted = scan.table, scan.options.without_attributes
    for row in range(len(table)):
        if table.kind[row] == HARD_LINK:
            continue
        try:
            place = f"/proc/self/fd/{directories.fd(table.parent[row])}".encode()
            path = os.path.join(place, table.names[row] or b".")
            names = [name for name in os.listxattr(path, follow_symlinks=False) if name not in unwanted]
            if names:
                attributes = {os.fsencode(name): os.getxattr(path, name, follow_symlinks=False) for name in names}
                table.attributes[row] = attributes
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                continue
            raise scan.unreadable(row, error) from error


def _stand_apart(table: Table, cuts: Mapping[bytes, Sequence[int]]) -> None:
    """Mark files that are cut where the caller says; each must end where its last chunk does."""
    for row, path in enumerate(table.paths()):
        borders = cuts.get(path)
        if borders is None or table.kind[row] & ~APART or not table.size[row] or row in table.sparse:
            continue
        if list(borders) != sorted({*borders}) or borders[0] <= 0 or borders[-1] != table.size[row]:
            raise Validation(f"the cuts of {shown(path)} do not fit its size", hint="give ascending ends of chunks")
        table.kind[row] |= APART


def _is_store(fd: int, name: bytes) -> bool:
    """Return whether a directory is a store, which could otherwise be saved into itself, endlessly."""
    try:
        return stat.S_ISREG(os.stat(os.path.join(name, STORE_MARKER), dir_fd=fd, follow_symlinks=False).st_mode)
    except OSError:
        return False


READ_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a fifo that replaced it must not block


def _mark_apart(scan: Scan, row: int, status: os.stat_result, open_file: Callable[[], int]) -> None:
    """Decide whether a file's content is stored apart: if it is large, or has holes."""
    table = scan.table
    if status.st_size >= _SPARSE_FROM_BYTES and status.st_blocks * 512 < status.st_size:
        try:
            fd = open_file()
            try:
                ranges = _data_ranges(fd, status.st_size)
            finally:
                os.close(fd)
        except OSError as error:
            raise scan.unreadable(row, error) from error
        if ranges is not None:
            table.sparse[row] = ranges
    if status.st_size >= BUNDLE_BYTES or row in table.sparse:
        table.kind[row] |= APART


def _data_ranges(fd: int, size: int) -> Ranges | None:
    """Return where the file has data; None if it has no holes, too many, or the file system does not report them."""
    ranges: Ranges = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole follows
                break
            if error.errno == errno.EINVAL:
                return None
            raise
        if end > start:
            ranges.append((start, end - start))
        if len(ranges) > _MAX_RANGES:
            return None
    return None if ranges == [(0, size)] else ranges


def _matcher(patterns: Sequence[str], table: Table) -> Callable[[bytes, int], bool] | None:
    """Return a function that tells whether (name, row of its directory) is excluded.

    A glob without "/" matches a name at any depth, one with "/" the path from the root.
    """
    if not patterns:
        return None
    of_name = _one_of([pattern.rstrip("/") for pattern in patterns if "/" not in pattern.rstrip("/")])
    of_path = _one_of([pattern.strip("/") for pattern in patterns if "/" in pattern.rstrip("/")])

    def is_excluded(name: bytes, parent: int) -> bool:
        if of_name is not None and of_name(os.fsdecode(name)):
            return True
        return of_path is not None and bool(of_path(os.fsdecode(os.path.join(table.path(parent), name))))

    return is_excluded


def _one_of(patterns: Sequence[str]) -> Callable[[str], object] | None:
    return re.compile("|".join(map(fnmatch.translate, patterns))).match if patterns else None
