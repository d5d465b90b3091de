"""Calls of the C library that Python has no function for.

Imported only where they are called: ctypes takes 5 ms, which a program without large states should not pay.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CACHESTAT = 451  # the same number on all architectures that have it


@functools.cache
def library() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64,
    ]  # fmt: skip
    return library


def _checked(result: int) -> None:
    if result != 0:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def address_of(target: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(target))


def sync_file_range(fd: int, offset: int, size: int, flags: int) -> None:
    _checked(library().sync_file_range(fd, offset, size, flags))


def sync_file_system(fd: int) -> None:
    """Make everything written to the file system of `fd` durable, including other processes' writes."""
    if not hasattr(library(), "syncfs"):
        os.sync()
    else:
        _checked(library().syncfs(fd))


def exchange(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> None:
    """Exchange two names atomically. Raises OSError (EINVAL) on file systems that cannot."""
    if not hasattr(library(), "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _checked(library().renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE))


def return_memory_from(size_bytes: int) -> None:
    """Make freed memory of this size or more return to the system at once.

    Otherwise glibc stops doing so after the first large piece, and each thread keeps the gaps between the next ones.
    """
    if hasattr(library(), "mallopt"):  # other libraries do so, or have no such call
        library().mallopt(_MMAP_THRESHOLD, size_bytes)


def file_system_of(fd: int) -> int:
    """Return the file system type of a file, as in statfs(2)."""
    answer = (ctypes.c_long * 64)()  # f_type is its first field
    _checked(library().fstatfs(fd, answer))
    return answer[0] & 0xFFFFFFFF


def protect(address: int, size: int, protection: int) -> None:
    """mprotect(2): set what the processor allows in this memory."""
    _checked(library().mprotect(address, size, protection))


def map_file(address: int | None, size: int, flags: int, fd: int, offset: int) -> int:
    """mmap(2), read-only, also over mapped memory, which Python's own mmap cannot do."""
    result = library().mmap(address, size, mmap.PROT_READ, flags, fd, offset)
    if result == ctypes.c_void_p(-1).value:
        raise _last_error()
    return int(result)


def is_cached(fd: int, offset: int, size: int) -> bool:
    """Return whether most of these bytes are in the page cache, where an ordinary read is faster."""
    span, counters = (ctypes.c_uint64 * 2)(offset, size), (ctypes.c_uint64 * 5)()
    if library().syscall(_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(counters), 0) == 0:
        return counters[0] * mmap.PAGESIZE * 2 > size
    return is_resident(fd, offset - offset % mmap.PAGESIZE, min(size, 16 * mmap.PAGESIZE))


def is_resident(fd: int, offset: int, size: int) -> bool:
    """The same for Linux before 6.5, at a higher cost: map the bytes and query their pages."""
    try:
        address = map_file(None, size, mmap.MAP_SHARED, fd, offset)
    except OSError:
        return False
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    try:
        return library().mincore(address, size, pages) == 0 and pages.raw.count(b"\0") * 2 < len(pages)
    finally:
        library().munmap(address, size)
