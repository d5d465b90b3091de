"""Calls of the C library that Python has no function for.

Imported where they are made: ctypes takes 5 ms, which a program that never moves a large state should not pay.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CACHESTAT = 451  # the number of that system call on all architectures that have it under one


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
    """Make everything written to the file system of `fd` durable, also what others wrote."""
    if not hasattr(library(), "syncfs"):
        os.sync()
    else:
        _checked(library().syncfs(fd))


def exchange(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> None:
    """Let two names change places, at once; not every file system can (EINVAL)."""
    if not hasattr(library(), "renameat2"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    _checked(library().renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE))


def return_memory_from(size_bytes: int) -> None:
    """Let memory of this size and more go back to the system as soon as it is freed.

    By itself glibc stops doing so after the first large piece, and keeps the gaps between the next ones: by thread.
    """
    if hasattr(library(), "mallopt"):  # others than glibc do it, or have no such call
        library().mallopt(_MMAP_THRESHOLD, size_bytes)


def file_system_of(fd: int) -> int:
    """The number of the kind of file system that a file is on, as in statfs(2)."""
    answer = (ctypes.c_long * 64)()  # f_type is its first field
    _checked(library().fstatfs(fd, answer))
    return answer[0] & 0xFFFFFFFF


def protect(address: int, size: int, protection: int) -> None:
    """mprotect(2): what the processor allows in this memory from now on."""
    _checked(library().mprotect(address, size, protection))


def map_file(address: int | None, size: int, flags: int, fd: int, offset: int) -> int:
    """mmap(2), read-only, also over memory that is mapped already, which Python's own mmap cannot do."""
    result = library().mmap(address, size, mmap.PROT_READ, flags, fd, offset)
    if result == ctypes.c_void_p(-1).value:
        raise _last_error()
    return int(result)


def is_cached(fd: int, offset: int, size: int) -> bool:
    """Whether most of these bytes are in the page cache, where an ordinary read is the faster one."""
    span, counters = (ctypes.c_uint64 * 2)(offset, size), (ctypes.c_uint64 * 5)()
    if library().syscall(_CACHESTAT, fd, ctypes.byref(span), ctypes.byref(counters), 0) == 0:
        return counters[0] * mmap.PAGESIZE * 2 > size
    return is_resident(fd, offset - offset % mmap.PAGESIZE, min(size, 16 * mmap.PAGESIZE))


def is_resident(fd: int, offset: int, size: int) -> bool:
    """The same for Linux before 6.5, dearer: map the bytes and ask for their pages."""
    try:
        address = map_file(None, size, mmap.MAP_SHARED, fd, offset)
    except OSError:
        return False
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    try:
        return library().mincore(address, size, pages) == 0 and pages.raw.count(b"\0") * 2 < len(pages)
    finally:
        library().munmap(address, size)
