"""What a CRIU that is killed in a restore leaves: processes that are half made, and wait for its word for ever.

They have its socket, and the locks of the attempt. So its runtime never learns that nobody answers any more, and who
waits for the locks waits as long. They are ended as soon as that is seen; the runtime then fails by itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from kedge.containers.pids import children_of, list_names, pids_below, read_link, read_text, stat_of

LOOK_S = 1.0  # between two looks at a restore
_START, _EXIT_CODE = 19, 49  # where `stat_of` has when it began, and its exit status


def end_if_criu_was_killed(runtime: int, held: Sequence[int]) -> None:
    """Of a restore under way: `runtime` has started CRIU, and shares the locks `held` with it.

    CRIU is its oldest child, besides those that ended by themselves, and stays a zombie as long as the runtime waits
    for its answer. The restored processes are children of the runtime too.
    """
    if half_made := _half_made(runtime):
        end(half_made, held, besides=(runtime, int(stat_of(runtime)[1])))


def end_if_nobody_asks(lock: Path) -> None:
    """Of a restore under way by that lock, whose call of ours was killed: if CRIU was killed too, nobody else looks."""
    takers = {int(name): taker for name in list_names("/proc") if name.isdigit() and (taker := _taker(name, lock))}
    if any(taker in takers for taker in map(int, takers.values())):
        return
    roots = [pid for pid in takers if (fields := stat_of(pid)) and int(fields[1]) not in takers]
    for runtime in [pid for root in roots for pid in (root, *children_of(root))]:  # the guard's shell is above it
        if half_made := _half_made(runtime):
            waiting = {pid for root in half_made for pid in pids_below(root)} | takers.keys()
            _kill(waiting - {runtime, int(stat_of(runtime)[1])})


def _half_made(runtime: int) -> list[int]:
    """The children of a runtime whose CRIU was killed."""
    children = [(pid, fields) for pid in children_of(runtime) if (fields := stat_of(pid)) and not _has_exited(fields)]
    children.sort(key=lambda child: (int(child[1][_START]), child[0]))
    return [pid for pid, _ in children] if children and children[0][1][0] == "Z" else []


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
    _kill(waiting - {os.getpid(), *besides})


def _kill(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _taker(pid: str, lock: Path) -> str:
    """The number of whoever took the lock, "0" if it is gone, as a process says that shares it; "" of others, who may
    only wait for it."""
    for name in list_names(f"/proc/{pid}/fd"):
        if read_link(f"/proc/{pid}/fd/{name}") == str(lock):
            for line in read_text(f"/proc/{pid}/fdinfo/{name}").splitlines():
                if line.startswith("lock:") and "FLOCK" in line:
                    return line.split()[5]
    return ""


def _has_exited(fields: Sequence[str]) -> bool:
    """By itself: was not killed."""
    return fields[0] == "Z" and not os.WIFSIGNALED(int(fields[_EXIT_CODE]))


def _has_open(pid: str, files: Collection[str]) -> bool:
    return any(read_link(f"/proc/{pid}/fd/{name}") in files for name in list_names(f"/proc/{pid}/fd"))
