"""Small files in which Linux tells something, such as which boot of the machine this is.

They are read anew each time: a process that was dumped goes on in another boot, perhaps on another machine.
"""

from __future__ import annotations

import os

_MOST_BYTES = 4096


def read_kernel_file(path: str) -> str:
    """The first line or so of a file in /proc; OSError where there is none. A third of the time of `open`."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _MOST_BYTES).decode(errors="replace")
    finally:
        os.close(fd)


def boot_id() -> str:
    """Which boot of which machine this is; "" where the kernel does not say."""
    try:
        return read_kernel_file("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        return ""
