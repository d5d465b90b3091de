"""Small files in which Linux reports facts, such as the current boot of the machine.

They are read again each time: a process that was dumped continues in another boot, perhaps on another machine.
"""

from __future__ import annotations

import os

_MOST_BYTES = 4096


def read_kernel_file(path: str) -> str:
    """Return the beginning of a file in /proc, in a third of the time of `open`. Raises OSError if there is none."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _MOST_BYTES).decode(errors="replace")
    finally:
        os.close(fd)


def boot_id() -> str:
    """Return the ID of the machine's current boot; "" if the kernel does not report it."""
    try:
        return read_kernel_file("/proc/sys/kernel/random/boot_id").strip()
    except OSError:
        return ""
