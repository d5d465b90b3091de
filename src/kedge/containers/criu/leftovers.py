"""What a CRIU that is killed in a restore leaves: processes that are half made, and wait for its word for ever.

They have its socket, and the locks of the attempt. So its runtime never learns that nobody answers any more, and who
waits for the locks waits as long. They are ended as soon as that is seen; the runtime then fails by itself.

If the runtime was killed too, nobody is left that had started CRIU. What is half made is then known by its beginning:
it was forked, while CRIU, runtimes, shells and calls of ours are programs that somebody started. When more of it is
made it has no lock any more. So it is noted before a restore what that will make (`to_be_made`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from kedge.containers.pids import children_of, is_alive, list_names, pids_below, read_link, read_text, stat_of

LOOK_S = 1.0  # between two looks at a restore
_FLAGS, _START, _EXIT_CODE = 6, 19, 49  # where `stat_of` has them; `_START`: when it began
_IS_FORKED = 0x40  # of the flags: PF_FORKNOEXEC
_PAUSE_S = 0.05
_BOOT = "/proc/sys/kernel/random/boot_id"


def end_if_criu_was_killed(runtime: int, held: Sequence[int]) -> None:
    """Of a restore under way: `runtime` has started CRIU, and shares the locks `held` with it.

    CRIU is its oldest child, besides those that ended by themselves, and stays a zombie as long as the runtime waits
    for its answer. The restored processes are children of the runtime too.
    """
    if half_made := _half_made(runtime):
        end(half_made, held, besides=_with_parent(runtime))


def end_if_nobody_asks(lock: Path) -> None:
    """Of a restore under way by that lock, whose call of ours was killed: if CRIU was killed too, nobody else looks."""
    takers = {int(name): taker for name in list_names("/proc") if name.isdigit() and (taker := _taker(name, lock))}
    if any(taker in takers for taker in map(int, takers.values())):
        return
    if _are_forked(takers):
        _kill({pid for taker in takers for pid in pids_below(taker)})
        return
    roots = [pid for pid in takers if (fields := stat_of(pid)) and int(fields[1]) not in takers]
    for runtime in [pid for root in roots for pid in (root, *children_of(root))]:  # the guard's shell is above it
        if half_made := _half_made(runtime):
            waiting = {pid for root in half_made for pid in pids_below(root)} | takers.keys()
            _kill(waiting - _with_parent(runtime))


def _half_made(runtime: int) -> list[int]:
    """The children of a runtime whose CRIU was killed."""
    children = [(pid, fields) for pid in children_of(runtime) if (fields := stat_of(pid)) and not _has_exited(fields)]
    children.sort(key=lambda child: (int(child[1][_START]), child[0]))
    return [pid for pid, _ in children] if children and children[0][1][0] == "Z" else []


def _with_parent(runtime: int) -> set[int]:
    """Which may be gone by now."""
    return {runtime, *map(int, stat_of(runtime)[1:2])}


def wait_for_others(held: Sequence[int]) -> None:
    """Until nobody but us has the first of these locks: what was started under them is done. Those who would wait for
    ever are ended."""
    while holders := _holders(held[:1]):
        if _are_forked(holders):
            end([], held)
        for runtime in [pid for pid in holders if (fields := stat_of(pid)) and int(fields[1]) not in holders]:
            end_if_criu_was_killed(runtime, held)
        time.sleep(_PAUSE_S)


class Made(TypedDict):
    """What a restore makes: processes with these numbers, or of that cgroup, in that boot and not before that tick."""

    boot: str
    since: int
    pids: list[int]
    cgroup: str


def to_be_made(pids: Iterable[int] = (), cgroup: str = "") -> Made:
    """By a restore that begins now."""
    return {"boot": read_text(_BOOT), "since": int(stat_of(os.getpid())[_START]), "pids": [*pids], "cgroup": cgroup}


def end_unfinished(boot: str, since: int, pids: Sequence[int], cgroup: str) -> None:
    """End what a restore has made that did not finish, and whose CRIU is gone. Whoever has taken its numbers, or its
    cgroup, since then is a program that somebody started, with all below it: that stays."""
    if boot != read_text(_BOOT):
        return
    made = [int(name) for name in list_names("/proc") if name.isdigit() and cgroup and _is_in(name, cgroup)]
    alive = {pid: fields for pid in (*pids, *made) if (fields := stat_of(pid)) and int(fields[_START]) >= since}
    roots = [pid for pid, fields in alive.items() if int(fields[1]) not in alive]
    if _are_forked(roots):
        _kill({pid for root in roots for pid in pids_below(root)})


def _is_in(pid: str, cgroup: str) -> bool:
    return any(line.endswith(cgroup) for line in read_text(f"/proc/{pid}/cgroup").splitlines())


def _are_forked(pids: Collection[int]) -> bool:
    """Whether none of these is a program that somebody started."""
    facts = [fields for pid in pids if (fields := stat_of(pid))]
    return bool(facts) and all(int(fields[_FLAGS]) & _IS_FORKED for fields in facts)


def end(roots: Sequence[int], held: Sequence[int], besides: Collection[int] = ()) -> None:
    """End these with all below them, and whoever else has one of our locks, but for ourselves and `besides`."""
    waiting = {pid for root in roots for pid in pids_below(root)}
    _kill((waiting | _holders(held)) - {os.getpid(), *besides})


def _holders(held: Sequence[int]) -> set[int]:
    """Who has one of these locks, but for ourselves."""
    ours = {read_link(f"/proc/self/fd/{fd}") for fd in held}
    return {int(name) for name in list_names("/proc") if name.isdigit() and _has_open(name, ours)} - {os.getpid()}


def _kill(pids: Collection[int]) -> None:
    """Their locks are free afterwards."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + LOOK_S  # they are looked for again
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.005)


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
