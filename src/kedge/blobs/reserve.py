"""Space that a store reserves for a full disk: enough to open it and to delete from it.

    <folder>/reserve/0 … 3      allocated, never read: 5 MiB in all, less on a disk below 80 MiB

SQLite needs two files to open a database, a log before it deletes anything, and as much space again, up to 4 MiB, to
apply that log. On a disk without a free block or inode nothing could ever be freed. Saves never use the reserve: they
are refused until it is complete again.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from .group_files import OWN_FILE, make_folder, share

NAME = "reserve"
_FILES = 4
_MOST_BYTES = 1280 << 10  # of each file
_LEAST_BYTES = 64 << 10
_PART_OF_DISK = 64
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    """The reserve in `folder`. Shared by processes: one may refill what another has released."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / NAME
        self.is_whole = True  # as far as this process knows

    def refill(self) -> bool:
        """Refill as far as possible; return whether the reserve is complete. Never fails because a disk is full."""
        disk = os.statvfs(self._folder.parent)
        size = min(max(disk.f_blocks * disk.f_frsize // _PART_OF_DISK, _LEAST_BYTES), _MOST_BYTES)
        are_filled = [self._is_taken(self._folder / str(number), size) for number in range(_FILES)]  # as many as fit
        self.is_whole = all(are_filled)
        return self.is_whole

    def release(self) -> bool:
        """Free the reserve; return whether there was any."""
        self.is_whole = False
        is_freed = False
        for number in range(_FILES):
            try:
                os.unlink(self._folder / str(number))
            except FileNotFoundError:
                continue
            is_freed = True
        return is_freed

    def _is_taken(self, path: Path, size: int) -> bool:
        try:
            if _size(path) >= size:
                return True
            make_folder(self._folder)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, OWN_FILE)
            try:
                _allocate(handle, size)
            finally:
                os.close(handle)
            share(path)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            path.unlink(missing_ok=True)
            return False
        return True


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _allocate(handle: int, size: int) -> None:
    """Allocate blocks: a hole would reserve nothing."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(handle, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
                raise
    os.pwrite(handle, bytes(size), 0)
