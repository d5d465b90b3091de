"""Writing to and reading from the disk: in whole blocks, around the page cache where the file system allows it.

Writing 1 GiB through the page cache costs a CPU-second and stalls in the sync; O_DIRECT from a few threads reaches the
disk's own rate with a tenth of that. If O_DIRECT is refused, one buffered writer at a time pushes dirty pages out as it
goes, which is the next best thing. Nothing here knows what a pack is.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

BLOCK_BYTES = 4096  # every write starts and ends on such a boundary; no device today needs more
BUFFER_BYTES = 1 << 20  # per thread: the largest single direct transfer
DIRECT_READ_BYTES = 256 << 10  # smaller reads are not worth the trouble
KICK_BYTES = 16 << 20  # buffered fallback: limit of dirty bytes before they are pushed out

O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # 0 if not supported
_MAX_STALLS = 4


def round_up(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def aligned_memory(size_bytes: int) -> mmap.mmap:
    """Return page-aligned memory. Private, because a forked child would also write to Python's own shared maps (I2)."""
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _Buffers(threading.local):
    """One block-aligned buffer per thread, reused: new memory costs more than the copy into it."""

    def __init__(self) -> None:
        self.view = memoryview(aligned_memory(BUFFER_BYTES))


_buffers = _Buffers()


# --- fork ---


class _Forked(Protocol):
    def after_fork(self) -> None: ...


_forked: weakref.WeakSet[_Forked] = weakref.WeakSet()


def forget_after_fork(thing: _Forked) -> None:
    """Call `thing.after_fork()` in every child, where a lock held by another thread is never released."""
    _forked.add(thing)


def _after_fork() -> None:
    for thing in list(_forked):
        thing.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- writing ---


def pwrite_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of `data`: os.pwrite continues after signals, and this continues after short writes."""
    done = stalls = 0
    while done < len(data):
        written = os.pwrite(fd, data[done:], offset + done)
        if done + written < len(data):
            # O_DIRECT accepts only whole blocks: rewrite a partly written block.
            written -= written % BLOCK_BYTES
        stalls = 0 if written else stalls + 1
        if stalls == _MAX_STALLS:
            raise OSError(errno.EIO, "the device accepts no more bytes")
        done += written


class Output:
    """A file that several threads fill with whole blocks at distinct offsets below its size."""

    def __init__(self, fd: int, *, direct: bool) -> None:
        self.fd = fd
        self.is_direct = direct and _set_direct(fd, True)
        self.sync_error: OSError | None = None  # from writing; then the file must not be synced any more (I9)
        self._turn = threading.Lock()
        self._fresh = (0, 0, 0)  # buffered only: bytes, lowest and highest offset written since the last kick
        self._kicked = (0, 0)  # offset and length passed to the disk, not yet waited for

    def write_first(self, block: bytes) -> None:
        """Write the first block, which shows whether direct writes work: some file systems refuse only here."""
        try:
            self.write(memoryview(block), 0)
        except OSError as error:
            if not self.is_direct or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            _set_direct(self.fd, False)
            self.is_direct = False
            self.write(memoryview(block), 0)

    def write(self, data: memoryview, offset: int) -> None:
        """Write `data` at `offset`, a block boundary. The rest of its last block reads as zeros."""
        if not self.is_direct:
            with self._turn:  # parallel buffered writes to one file contend for its pages: five times slower
                pwrite_all(self.fd, data, offset)
                self._push_out(offset, len(data))
            return
        if isinstance(data.obj, mmap.mmap) and len(data) % BLOCK_BYTES == 0 and _is_aligned(data):
            pwrite_all(self.fd, data, offset)  # from its place; other arrays may be in memory that a disk cannot read
            return
        buffer = _buffers.view
        for start in range(0, len(data), BUFFER_BYTES):
            part = data[start : start + BUFFER_BYTES]
            size = len(part)
            buffer[:size] = part
            if padding := -size % BLOCK_BYTES:
                buffer[size : size + padding] = bytes(padding)
            pwrite_all(self.fd, buffer[: size + padding], offset + start)

    def allocate(self, start: int, size: int) -> None:
        """Extend the file over [start, start + size), with space reserved if possible.

        The size grows, too: ext4 runs direct writes in parallel only below the end of a file.
        """
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.fd, start, size)
                return
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
                    raise
        os.ftruncate(self.fd, start + size)

    def _push_out(self, offset: int, size: int) -> None:
        """Every 16 MiB, start writing dirty pages, wait for the previous 16 MiB, and drop those from the cache."""
        fresh, low, high = self._fresh
        low, high = (min(low, offset), max(high, offset + size)) if fresh else (offset, offset + size)
        self._fresh = (fresh + size, low, high)
        if fresh + size < KICK_BYTES or not hasattr(os, "posix_fadvise"):
            return
        start_writing, and_wait = 2, 1 | 2 | 4  # SYNC_FILE_RANGE_WRITE; WAIT_BEFORE | WRITE | WAIT_AFTER
        self._sync_range(low, high - low, start_writing)
        if self._kicked[1]:
            self._sync_range(*self._kicked, and_wait)
            os.posix_fadvise(self.fd, *self._kicked, os.POSIX_FADV_DONTNEED)
        self._kicked = (low, high - low)
        self._fresh = (0, 0, 0)

    def _sync_range(self, offset: int, size: int, how: int) -> None:
        from . import libc  # start time

        try:
            libc.sync_file_range(self.fd, offset, size, how)
        except OSError as error:
            if error.errno in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE):
                return  # only a hint is lost
            # The kernel reports a failed write-back once: after this call, fdatasync would claim success.
            self.sync_error = error
            raise


def _set_direct(fd: int, is_direct: bool) -> bool:
    if not O_DIRECT:
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if is_direct else flags & ~O_DIRECT)
    except OSError:
        return False
    return is_direct


def sync_data(fd: int) -> None:
    """fdatasync: make the bytes durable, and what is needed to read them again.

    That includes the file's size and the conversion of preallocated extents into written ones, but not its times. POSIX
    requires it ("synchronized I/O data integrity completion"). ext4 and btrfs commit the transaction in which size or
    extents last changed; xfs forces its log unless only times changed. A direct write has passed the page cache but not
    the drive's own cache; fdatasync flushes that, too.
    """
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_directories(path: str | bytes, mode: int = 0o777, made: Callable[[str], None] = lambda _: None) -> None:
    """Create a directory and missing ones above it, each with a durable name; `made` is called with each.

    The default mode is for the user's own files: the umask decides.
    """
    if os.path.isdir(path):
        return
    parent = os.path.dirname(os.path.abspath(path))
    make_directories(parent, mode, made)
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        if not os.path.isdir(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None
    else:
        made(os.fsdecode(path))
    sync_directory(os.fsdecode(parent))


# --- reading ---


class Input:
    """A file open for reading, by any number of threads. Closed when the last of them drops it."""

    def __init__(self, path: str) -> None:
        self._fds = [os.open(path, os.O_RDONLY)]
        self.fd = self._fds[0]
        self._direct_fd: int | None = None
        if O_DIRECT:
            try:
                self._direct_fd = os.open(path, os.O_RDONLY | O_DIRECT)
                self._fds.append(self._direct_fd)
            except OSError:
                pass  # not supported by this file system

    def __del__(self) -> None:
        for fd in getattr(self, "_fds", ()):
            os.close(fd)

    def is_linked(self) -> bool:
        """Return whether the file still has a name; without one, keeping it open only occupies its space."""
        return os.fstat(self.fd).st_nlink > 0

    def read(self, target: memoryview, offset: int) -> int:
        """Fill `target`; return how many bytes there were before the end of the file.

        Large reads of uncached bytes go around the page cache, which leaves the CPU to verification (measured cold, 1
        GiB, 6 threads: 3.1 against 1.9 GB/s at a third of the CPU time).
        """
        done = 0
        fd = self._direct_fd
        is_large = len(target) >= DIRECT_READ_BYTES and offset % BLOCK_BYTES == 0
        if fd is not None and is_large and not _is_cached(self.fd, offset, len(target)):
            try:
                done = _read_direct(fd, target, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct_fd = None  # some file systems refuse only here
        while done < len(target):
            count = os.preadv(self.fd, [target[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done


def _is_cached(fd: int, offset: int, size: int) -> bool:
    from . import libc  # start time

    return libc.is_cached(fd, offset, size)


def _is_aligned(data: memoryview) -> bool:
    from . import libc  # start time

    return libc.address_of(data) % BLOCK_BYTES == 0


def _read_direct(fd: int, target: memoryview, offset: int) -> int:
    """Fill `target` as far as direct reads can; return how far. `offset` is a block boundary."""
    is_aligned = _is_aligned(target)
    done = 0
    while done < len(target):
        left = len(target) - done
        if is_aligned and left >= BLOCK_BYTES:
            count = os.preadv(fd, [target[done : done + left - left % BLOCK_BYTES]], offset + done)
        else:
            buffer = _buffers.view[: min(round_up(left), BUFFER_BYTES)]
            count = os.preadv(fd, [buffer], offset + done)
            target[done : done + min(count, left)] = buffer[: min(count, left)]
        done += min(count, left)
        if count == 0 or count % BLOCK_BYTES:
            break  # probably the end of the file
    return done


class OpenFiles:
    """Recently read files, kept open. Drops the oldest, and those that were deleted meanwhile."""

    def __init__(self, limit: int, on_open: Callable[[Input], None]) -> None:
        self._limit = limit
        self._on_open = on_open
        self._files: OrderedDict[str, Input] = OrderedDict()
        self._lock = threading.Lock()
        forget_after_fork(self)

    def get(self, path: str) -> Input:
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
        if file is not None and file.is_linked():
            return file
        file = Input(path)
        self._on_open(file)
        with self._lock:
            self._files[path] = file
            deleted = [name for name, other in self._files.items() if not other.is_linked()]
            for name in deleted:
                del self._files[name]
            while len(self._files) > self._limit:
                self._files.popitem(last=False)
        return file

    def drop(self, path: str) -> None:
        with self._lock:
            self._files.pop(path, None)

    def clear(self) -> None:
        with self._lock:
            self._files.clear()

    def after_fork(self) -> None:
        """Replace the lock; the descriptors are valid in the child, because no read uses their position."""
        self._lock = threading.Lock()
