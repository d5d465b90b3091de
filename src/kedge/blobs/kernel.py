"""Small files in which Linux reports facts, such as the current boot of the machine.

They are read again each time: a process that was dumped continues in another boot, perhaps on another machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

_MOST_BYTES = 4096
_NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "9p", "ncpfs", "afs", "ceph", "lustre", "glusterfs", "sshfs", "s3fs")


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


class Mount(NamedTuple):
    """A mount, as the kernel describes it."""

    device: int  # as os.stat has it
    point: str
    kind: str  # of the file system
    options: str  # of the mount, then those of the file system


def mounts(pid: int | str = "self") -> Iterator[Mount]:
    """Yield the mounts that a process sees, in the kernel's order; none if the kernel does not list them."""
    try:
        with open(f"/proc/{pid}/mountinfo", errors="surrogateescape") as file:
            lines = file.read().split("\n")
    except OSError:
        return
    for line in filter(None, lines):
        fields = line.split(" ")
        behind = fields.index("-")
        major, _, minor = fields[2].partition(":")
        kind, _, options = fields[behind + 1 : behind + 4]
        device = os.makedev(int(major), int(minor))
        yield Mount(device, _unescaped(fields[4]), kind, f"{fields[5]},{_unescaped(options)}")


def is_network(kind: str) -> bool:
    """Return whether a file system of this type may be shared with other machines."""
    return kind.removeprefix("fuse.").startswith(_NETWORK_FILE_SYSTEMS)


def _unescaped(text: str) -> str:
    """Spaces and the like stand in octal in these lists."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
