"""Processes of this machine, by their numbers, and what /proc says of them: nothing, once they are gone."""

from __future__ import annotations

import os
import resource


def read_text(path: str) -> str:
    """The content of a file of the kernel; "" where it cannot be read."""
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read_link(path: str) -> str:
    """Where a link leads; "" where that cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def list_names(path: str) -> list[str]:
    """The names in a directory; none where it cannot be read."""
    try:
        return os.listdir(path)
    except OSError:
        return []


def stat_of(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent, …; none where there is no such process."""
    return read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def hides_limits(pid: int) -> bool:
    """Whether its limits cannot be read, which a dump must: it is another user's, and CAP_SYS_RESOURCE is missing."""
    try:
        resource.prlimit(pid, resource.RLIMIT_CPU)
    except PermissionError:
        return True
    except OSError:  # it is gone
        pass
    return False


def is_alive(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    fields = stat_of(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def children_of(pid: int) -> list[int]:
    """The children of all its threads."""
    threads = list_names(f"/proc/{pid}/task")
    return [int(child) for thread in threads for child in read_text(f"/proc/{pid}/task/{thread}/children").split()]


def pids_below(pid: int) -> list[int]:
    """A process and its descendants, as this machine numbers them."""
    pids = [pid]
    for process in pids:
        pids += children_of(process)
    return pids
