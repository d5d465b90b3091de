"""What a CRIU that is killed in a restore leaves: processes that are half made, and wait for its word for ever.

They have its socket, and the locks of the attempt. So its runtime never learns that nobody answers any more, and who
waits for the locks waits as long. They are ended as soon as that is seen; the runtime then fails by itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress

from kedge.containers.pids import children_of, list_names, pids_below, read_link, stat_of

LOOK_S = 1.0  # between two looks at a restore
_START, _EXIT_CODE = 19, 49  # where `stat_of` has when it began, and its exit status


def end_if_criu_was_killed(runtime: int, held: Sequence[int]) -> None:
    """Of a restore under way: `runtime` has started CRIU, and shares the locks `held` with it.

    CRIU is its oldest child, besides those that ended by themselves, and stays a zombie as long as the runtime waits
    for its answer. The restored processes are children of the runtime too.
    """
    children = [(pid, fields) for pid in children_of(runtime) if (fields := stat_of(pid)) and not _has_exited(fields)]
    children.sort(key=lambda child: (int(child[1][_START]), child[0]))
    if children and children[0][1][0] == "Z":
        end([pid for pid, _ in children], held, besides=(runtime, int(stat_of(runtime)[1])))


def first_of(held: Sequence[int]) -> list[int]:
    """Of those who have the first of these locks, but for ourselves, those whose parents have not."""
    ours = {read_link(f"/proc/self/fd/{fd}") for fd in held[:1]}
    holders = {int(name) for name in list_names("/proc") if name.isdigit() and _has_open(name, ours)} - {os.getpid()}
    return [pid for pid in holders if (fields := stat_of(pid)) and int(fields[1]) not in holders]


def end(roots: Sequence[int], held: Sequence[int], besides: Collection[int] = ()) -> None:
    """End these with all below them, and whoever else has one of our locks, but for ourselves and `besides`."""
    ours = {read_link(f"/proc/self/fd/{fd}") for fd in held}
    waiting = {pid for root in roots for pid in pids_below(root)}
    waiting |= {int(name) for name in list_names("/proc") if name.isdigit() and _has_open(name, ours)}
    for pid in waiting - {os.getpid(), *besides}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _has_exited(fields: Sequence[str]) -> bool:
    """By itself: was not killed."""
    return fields[0] == "Z" and not os.WIFSIGNALED(int(fields[_EXIT_CODE]))


def _has_open(pid: str, files: Collection[str]) -> bool:
    return any(read_link(f"/proc/{pid}/fd/{name}") in files for name in list_names(f"/proc/{pid}/fd"))
