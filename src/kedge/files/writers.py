"""Whether the times of a file will show that it was changed.

A write through a shared mapping changes them only when it first touches a page, and not again until that page has been
written back. So a file that somebody has open for writing may change unnoticed, even if the mapping's descriptor is
closed. The kernel knows: it grants a lease for reading only if nobody has the file open for writing. Later openers
touch its pages anew, which the file systems below stamp at once. Others do so late, or never, or serve several
machines.
"""

from __future__ import annotations

import fcntl
import signal

_STAMPING = frozenset(
    (
        0xEF53,  # ext2, ext3, ext4
        0x58465342,  # XFS
        0x9123683E,  # Btrfs
        0xF2F52010,  # F2FS
        0xCA451A4E,  # bcachefs
    )
)


class Writers:
    """Checks the files of one save."""

    def __init__(self) -> None:
        self._stamps: dict[int, bool] = {}  # device → whether its file system stamps a mapped write at once

    def may_change_unseen(self, fd: int, device: int) -> bool:
        """Return whether a later write may leave the times of this file, which is open for reading, unchanged."""
        if device not in self._stamps:
            from kedge.blobs.libc import file_system_of  # start time

            self._stamps[device] = file_system_of(fd) in _STAMPING
        if not self._stamps[device]:
            return True
        try:
            # Whoever opens it for writing meanwhile waits for the unlock, and we get a signal that does nothing.
            fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:  # there is a writer, or the file is another user's and we cannot know
            return True
        return False
