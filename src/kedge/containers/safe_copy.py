"""A copy of files that others may change meanwhile, on purpose too: containers of a pod that share a volume.

Everything is opened from its directory's descriptor, and no link is followed. So whoever exchanges a directory for a
link while we copy gets an error, not a file of the machine in his volume, or a file of his in the machine.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kedge.errors import storage_errors

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = _READ | os.O_DIRECTORY
_NAME = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 1 << 20


def copy_tree(source: Path, target: Path) -> None:
    """Copy a directory, with everything that makes its files what they are, into one that is empty or not there yet."""
    with storage_errors("copy", source):
        target.mkdir(mode=0o700, exist_ok=True)
        with _opened(str(source), _FOLDER) as old, _opened(str(target), _FOLDER) as new:
            _Copy(new).folder(old, new, ())


class _Copy:
    """One copy under way. `root` is the descriptor of its target."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._first: dict[tuple[int, int], tuple[str, ...]] = {}  # of files with several names: the first one's path

    def folder(self, old: int, new: int, path: tuple[str, ...]) -> None:
        for name in os.listdir(old):
            with suppress(FileNotFoundError), _opened(name, _NAME, old) as entry:  # gone since it was listed
                self._entry(entry, old, new, (*path, name))
        _copy_attributes(old, new)

    def _entry(self, entry: int, old: int, new: int, path: tuple[str, ...]) -> None:
        status, name = os.fstat(entry), path[-1]
        if stat.S_ISDIR(status.st_mode):
            os.mkdir(name, 0o700, dir_fd=new)
            with _opened(name, _FOLDER, old) as below, _opened(name, _FOLDER, new) as copy:
                self.folder(below, copy, path)
            return
        if status.st_nlink > 1:
            first = self._first.setdefault((status.st_dev, status.st_ino), path)
            if first != path:
                self._link(first, name, new)
                return
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink("", dir_fd=entry), name, dir_fd=new)
            os.chown(name, status.st_uid, status.st_gid, dir_fd=new, follow_symlinks=False)
            os.utime(name, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=new, follow_symlinks=False)
            return
        if stat.S_ISREG(status.st_mode):
            _copy_content(name, old, new)
        else:
            os.mknod(name, status.st_mode, status.st_rdev, dir_fd=new)
        with _opened(name, _NAME, new) as copy:
            _copy_attributes(entry, copy)

    def _link(self, first: tuple[str, ...], name: str, new: int) -> None:
        """A second name for what was copied before."""
        with _below(self._root, first[:-1]) as folder:
            os.link(first[-1], name, src_dir_fd=folder, dst_dir_fd=new, follow_symlinks=False)


def _copy_content(name: str, old: int, new: int) -> None:
    """With its holes."""
    with _opened(name, _READ, old) as source, _opened(name, _WRITE, new) as target:
        size, end = os.fstat(source).st_size, 0
        while end < size:
            try:
                at = os.lseek(source, end, os.SEEK_DATA)
            except OSError:  # only a hole is left
                break
            end = os.lseek(source, at, os.SEEK_HOLE)
            os.lseek(source, at, os.SEEK_SET)
            os.lseek(target, at, os.SEEK_SET)
            while at < end and (sent := os.sendfile(target, source, None, min(_PIECE_BYTES, end - at))):
                at += sent
        os.ftruncate(target, size)


def _copy_attributes(old: int, new: int) -> None:
    """Owner, mode, extended attributes, times: by descriptors, which may be of names (O_PATH)."""
    source, target, status = f"/proc/self/fd/{old}", f"/proc/self/fd/{new}", os.fstat(old)
    os.chown(target, status.st_uid, status.st_gid)
    os.chmod(target, stat.S_IMODE(status.st_mode))
    for attribute in os.listxattr(source):
        with suppress(OSError):  # the other file system may not know it
            os.setxattr(target, attribute, os.getxattr(source, attribute))
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


@contextmanager
def _below(root: int, path: tuple[str, ...]) -> Iterator[int]:
    folder = os.dup(root)
    try:
        for name in path:
            above, folder = folder, os.open(name, _FOLDER, dir_fd=folder)
            os.close(above)
        yield folder
    finally:
        os.close(folder)


@contextmanager
def _opened(name: str, flags: int, folder: int | None = None) -> Iterator[int]:
    fd = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)
