"""One pack file, as used by the process that appends to it: reserving, writing, syncing, freeing.

0      magic, format version, name, CRC-32 of these three, zeros
4096   an extent, zeros up to the next block, the next extent, …
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterable

from kedge.errors import NotFound, StorageError, UnsupportedFormat, Validation, storage_error, storage_errors

from .direct import BLOCK_BYTES, Input, Output, forget_after_fork, make_directories, round_up, sync_data, sync_directory
from .group_files import OWN_FILE, OWN_FOLDER, share

MAGIC = b"KDPACK1\n"
FORMAT = 2
SUFFIX = ".pack"
NAME = re.compile(r"[0-9a-f]{32}")

_HEADER = struct.Struct("<8sI32s")
_CRC = struct.Struct("<I")
_LEAST_STEP = 64 << 10  # preallocation grows with the pack, so a tiny store stays tiny
_MOST_STEP = 16 << 20


class Folder:
    """The directory of packs. Its entries, and its own, must be durable before a commit returns."""

    def __init__(self, path: str, *, create: bool = True) -> None:
        self.path = path
        self._is_named = False
        with storage_errors("create", path):
            if create:
                make_directories(path, OWN_FOLDER, share)

    def sync(self) -> None:
        sync_directory(self.path)
        if not self._is_named:
            # Another process may have created the directory and not synced its parent yet.
            sync_directory(os.path.dirname(self.path))
            self._is_named = True


class OpenPack:
    """A pack that this process created and may append to.

    `users` counts the writers that hold it. The pool manages that, locking and closing under its own lock; reserving,
    writing and syncing are safe from any thread of a counted writer.
    """

    def __init__(self, folder: Folder, *, roll_bytes: int, direct: bool) -> None:
        self.name, self._path, self._output = _create(folder.path, direct)
        self.users = 0
        self.owed = 0  # users that were collected without confirming that the index has committed
        self._folder = folder
        self._roll_bytes = roll_bytes
        self._changed = threading.Condition()
        self._end = self._allocated = BLOCK_BYTES
        self._committed = 0  # everything below is durable; 0: not even the name
        self._is_retired = False  # accepts no more, but what others wrote can still be committed
        self._is_short = False  # of space on the disk
        self._sync_error: OSError | None = None
        self._is_syncing = False
        self._syncs_begun = self._syncs_done = 0

    def takes_more(self) -> bool:
        return not self._is_retired and self._sync_error is None and self._end < self._roll_bytes

    def reserve(self, size: int, hint: int) -> int | None:
        """Return the offset of `size` bytes that only the caller writes to; None if the pack is full."""
        with self._changed:
            if not self.takes_more():
                return None
            offset, end = self._end, self._end + round_up(size)
            if end > self._allocated:
                try:
                    self._grow(end, hint)
                except OSError as error:
                    self._is_short = True
                    raise storage_error("extend", self._path, error) from error
            self._end = end
            return offset

    def write(self, data: memoryview, offset: int) -> None:
        try:
            self._output.write(data, offset)
        except OSError as error:
            self._is_retired = True
            if self._output.sync_error is not None:
                self._sync_error = self._output.sync_error
            raise storage_error("write", self._path, error) from error

    def sync(self, end: int) -> None:
        """Make everything durable that was written before this call; the caller's extents are below `end`.

        Concurrent callers share a sync: one in progress may have passed our bytes, but the next one to begin has not.
        """
        with self._changed:
            turn = self._syncs_begun + 1
            while self._is_syncing and self._syncs_done < turn:
                self._changed.wait()
            if self._sync_error is not None:
                raise storage_error("sync", self._path, self._sync_error)
            if self._syncs_done >= turn:
                self._committed = max(self._committed, end)
                return
            self._is_syncing = True
            self._syncs_begun += 1
            is_named = self._committed > 0
        try:
            sync_data(self._output.fd)
            if not is_named:
                self._folder.sync()
        except OSError as error:
            self._sync_error = error  # I9
            raise storage_error("sync", self._path, error) from error
        else:
            with self._changed:
                self._syncs_done = self._syncs_begun
                self._committed = max(self._committed, end)
        finally:
            with self._changed:
                self._is_syncing = False
                self._changed.notify_all()

    def settle(self) -> None:
        """Truncate what was not committed, and excess preallocation. Called when nobody writes."""
        if not self._committed:
            self._is_retired = True
            try:
                os.unlink(self._path)  # nothing in it was ever acknowledged
            except OSError:
                pass  # gc will remove it
        elif self._end > self._committed or self._allocated > self._end + _MOST_STEP or self._is_short:
            self._is_short = False
            self._truncate()

    def lock(self) -> bool:
        try:
            return try_lock(self._output.fd, self._path)
        except StorageError:
            return False

    def unlock(self) -> None:
        try:
            fcntl.flock(self._output.fd, fcntl.LOCK_UN)
        except OSError:
            self._is_retired = True  # it stays locked until it is closed

    def close(self) -> None:
        """Finish the pack: its file ends where its last committed extent does."""
        if self._committed and self._allocated > self._committed:
            self._truncate()
        self.unlock()  # closing alone would not, if a child was forked meanwhile
        self.forget()

    def forget(self) -> None:
        os.close(self._output.fd)

    def _grow(self, end: int, hint: int) -> None:
        """Allocate up to `end`, and ahead for known or likely appends if there is space."""
        step = max(round_up(hint), min(self._end // 4, _MOST_STEP), _LEAST_STEP)
        ample = max(end, min(self._end + step, round_up(self._roll_bytes)))
        try:
            self._output.allocate(self._allocated, ample - self._allocated)
        except OSError as error:
            if ample == end or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            self._output.allocate(self._allocated, end - self._allocated)
            ample = end
        self._allocated = ample

    def _truncate(self) -> None:
        """Truncate to the committed end. Need not be durable: after a crash, nothing names the rest."""
        if self._sync_error is not None:
            return  # do not touch data on a failing disk
        try:
            os.ftruncate(self._output.fd, self._committed)
        except OSError:
            self._is_retired = True  # costs space, but no data
        else:
            self._end = self._allocated = self._committed


class PackPool:
    """The packs this process appends to: the current one, and those that writers still hold.

    Writers share the current pack instead of each having one: fewer files, and one sync serves all of them.
    """

    def __init__(self, folder: Folder, *, roll_bytes: int, direct: bool) -> None:
        self._folder = folder
        self._roll_bytes = roll_bytes
        self._direct = direct
        self._lock = threading.Lock()
        self._current: OpenPack | None = None
        self._packs: set[OpenPack] = set()
        self._dropped: deque[tuple[list[OpenPack], bool]] = deque()  # see drop
        self._is_closed = False
        forget_after_fork(self)

    def acquire(self) -> OpenPack:
        """Return a locked pack that accepts more; the caller must release it."""
        with self._lock:
            self._release_dropped()
            if self._is_closed:
                raise Validation("this store is closed", hint="open it again")
            pack = self._current
            # Locking fails if gc is examining the pack, or has removed it.
            if pack is None or not pack.takes_more() or not (pack.users or pack.lock()):
                self._current = None
                if pack is not None and not pack.users:
                    self._close(pack)
                pack = OpenPack(self._folder, roll_bytes=self._roll_bytes, direct=self._direct)
                self._packs.add(pack)
                self._current = pack
            pack.users += 1
            return pack

    def seal(self) -> None:
        """Make the next writer begin a new pack."""
        with self._lock:
            pack, self._current = self._current, None
            if pack is not None and not pack.users:
                self._close(pack)

    def release(self, packs: Iterable[OpenPack]) -> None:
        with self._lock:
            self._release(packs)
            self._release_dropped()

    def drop(self, packs: list[OpenPack], *, is_committed: bool) -> None:
        """Drop the packs of a garbage-collected writer. May run inside our own lock, so it must not wait.

        What it committed may still be on its way to the index. Nobody will report its arrival, so its packs stay locked
        until the store is closed (I3).
        """
        self._dropped.append((packs, is_committed))
        if self._lock.acquire(blocking=False):
            try:
                self._release_dropped()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Free preallocated space. Packs that writers hold are closed when they are released."""
        with self._lock:
            self._is_closed = True
            self._current = None
            self._release_dropped()
            for pack in list(self._packs):
                pack.users -= pack.owed
                pack.owed = 0
                if not pack.users:
                    self._close(pack)

    def after_fork(self) -> None:
        """Forget the parent's packs and locks in the child. Closing them here unlocks nothing there."""
        for pack in self._packs:
            pack.forget()
        self._packs.clear()
        self._current = None
        self._dropped.clear()
        self._lock = threading.Lock()

    def _release(self, packs: Iterable[OpenPack]) -> None:
        for pack in packs:
            pack.users -= 1
            if pack.users:
                continue
            pack.settle()
            if pack is self._current and pack.takes_more():
                pack.unlock()
            else:
                self._close(pack)

    def _release_dropped(self) -> None:
        while self._dropped:
            packs, is_committed = self._dropped.popleft()
            if is_committed:
                for pack in packs:
                    pack.owed += 1
            else:
                self._release(packs)

    def _close(self, pack: OpenPack) -> None:
        self._packs.discard(pack)
        if pack is self._current:
            self._current = None
        pack.close()


def check_name(pack: str) -> str:
    """Return a pack's name if it is valid. It comes from an index row: a damaged or forged one must not be a path."""
    if NAME.fullmatch(pack) is None:
        raise NotFound(f"{pack[:80]!r} is not the name of a pack", hint="run kedge check")
    return pack


def check_writer(pid: int, *, is_finished: bool) -> None:
    """Raise Validation for a writer of another process, or a finished one."""
    if pid != os.getpid():
        raise Validation("this writer belongs to the parent process", hint="save again after the fork")
    if is_finished:
        raise Validation("this writer is finished", hint="ask for a new one")


def header(name: str, version: int = FORMAT) -> bytes:
    """Return the first block of the pack `name`."""
    fields = _HEADER.pack(MAGIC, version, name.encode())
    return (fields + _CRC.pack(zlib.crc32(fields))).ljust(BLOCK_BYTES, b"\0")


def refuse_newer(file: Input) -> None:
    """Raise UnsupportedFormat for a pack of a newer format (I8)."""
    check_header(os.pread(file.fd, _HEADER.size + _CRC.size, 0))


def check_header(block: bytes) -> None:
    """Raise UnsupportedFormat if `block`, a pack's first, says so.

    A damaged header is accepted: each chunk is verified by its own digest.
    """
    if len(block) < _HEADER.size + _CRC.size:
        return
    magic, version, name = _HEADER.unpack_from(block)
    (crc,) = _CRC.unpack_from(block, _HEADER.size)
    if magic == MAGIC and version > FORMAT and crc == zlib.crc32(block[: _HEADER.size]):
        raise UnsupportedFormat(
            f"pack {name.decode(errors='replace')} has format {version}, newer than the known {FORMAT}",
            hint="update Kedge",
        )


def try_lock(fd: int, path: str) -> bool:
    """Take the lock if it is free. Return False also if the file was removed meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(fd).st_nlink > 0
    except BlockingIOError:
        return False
    except OSError as error:
        raise storage_error("lock", path, error) from error


def _create(directory: str, direct: bool) -> tuple[str, str, Output]:
    """Create a locked pack with its header; return (name, path, file)."""
    while True:
        name = os.urandom(16).hex()
        path = os.path.join(directory, name + SUFFIX)
        with storage_errors("create a pack in", directory):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, OWN_FILE)
        try:
            if not try_lock(fd, path):
                os.close(fd)  # gc saw it before we had the lock: it is, or will be, deleted
                continue
            share(path)
            output = Output(fd, direct=direct)
            output.write_first(header(name))
        except OSError as error:
            os.close(fd)
            try:
                os.unlink(path)
            except OSError:
                pass  # gc will remove it
            if isinstance(error, StorageError):
                raise
            raise storage_error("create a pack in", directory, error) from error
        return name, path, output
