"""kill -9 while one store is copied to another: the target is always a whole beginning of the source."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import kedge

from .children import Child, Report
from .ledger import Violation, unrefused


def fill(place: str, checkpoints: int = 24) -> None:
    """A source with small states, large ones that share most of their chunks, and branches."""
    draw = np.random.default_rng(1)
    weights = draw.integers(0, 256, 4 << 20, dtype="u1")
    with kedge.open(place) as store:
        parent = None
        for n in range(checkpoints):
            weights[(n % 4) << 20 :][:100] = n
            state: object = {"n": n, "w": weights} if n % 3 else {"n": n}
            parent = store.save(f"job-{n % 2}", f"step {n}", state, parent=parent, idempotency_key=f"key {n}")


def copy(report: Report, connection: Any, source: str, target: str, deaths: tuple[str, int] = ("", 0)) -> None:
    """With `deaths`, the process kills itself right before or after so many commits of the index or of packs."""
    with kedge.open(source) as here, kedge.open(target) as there:
        if deaths[0]:
            _die_at(there, *deaths)
        report("ready")
        here.copy_to(there)
    report("copied")


def _die_at(store: kedge.CheckpointManager, moment: str, count: int) -> None:
    real = store.store.index.commit
    calls = [0]

    def commit(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == count and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*args, **options)
        if calls[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    store.store.index.commit = commit  # type: ignore[method-assign]


def follow(report: Report, connection: Any, source: str, target: str, deaths: tuple[str, int] = ("", 0)) -> None:
    """Follow until nothing is left to do, noting the place after every round; `deaths` as for `copy`."""
    stop = threading.Event()
    with kedge.open(source) as here, kedge.open(target) as there, mock.patch(_NOTE_EVERY, 0.0):
        if deaths[0]:
            _die_at(there, *deaths)
        wait = here.store.index.wait_for_event

        def until_done(after: int, timeout_s: float) -> bool:
            stop.set()
            return wait(after, 0)

        here.store.index.wait_for_event = until_done  # type: ignore[method-assign]
        report("ready")
        here.follow_to(there, stop=stop)
    report("copied")


_NOTE_EVERY = "kedge.care.follow.NOTE_EVERY_S"


def die_following(folder: Path, *, rounds: int = 8, mutant: str = "") -> dict[str, int]:
    """One follower after another, each killed at a commit of its own, while the source goes on.

    Each begins where the one before was; the last one is let live, and then nothing may be missing.
    """
    source, target = str(folder / "source"), str(folder / "target")
    fill(source, 6)
    Child(follow, source, target, mutant=mutant).drain()
    killed = 0
    for round_ in range(rounds):
        with kedge.open(source) as here:
            for n in range(3):
                here.save(f"job-{n % 2}", f"round {round_}", {"n": n, "w": bytes([round_]) * (n % 2) * 200_000})
        child = Child(follow, source, target, ("before" if round_ % 2 else "after", 1 + round_ % 3), mutant=mutant)
        killed += child.drain() != 0
        check(source, target, is_whole=False)
    child = Child(follow, source, target)
    if child.drain():
        raise Violation("a follower that nobody killed has failed")
    return {"killed": killed, "checked": check(source, target, is_whole=True)}


def die_everywhere(folder: Path, *, mutant: str = "") -> int:
    """One copy after another into one target, each killed at its own commit, until one gets through."""
    source, target = str(folder / "source"), str(folder / "target")
    fill(source, 12)
    for round_ in range(100):
        child = Child(copy, source, target, ("before" if round_ % 2 else "after", 2), mutant=mutant)
        code = child.drain()
        check(source, target, is_whole=code == 0)
        if code == 0:
            return round_
    raise Violation("copies that are killed never come to an end")


def check(source: str, target: str, *, is_whole: bool) -> int:
    """That the target holds a beginning of every job of the source, and can load it."""
    if not Path(target, "kedge-store").exists():
        return 0
    with unrefused("a copy"), kedge.open(source) as here, kedge.open(target) as there:
        count = 0
        for job in here.jobs():
            wanted, found = here.list(job.name), there.list(job.name)
            if [(c.id, c.seq, c.parent) for c in found] != [(c.id, c.seq, c.parent) for c in wanted[: len(found)]]:
                raise Violation(f"{job.name}: {[c.id for c in found]} is no beginning of {[c.id for c in wanted]}")
            if is_whole and len(found) != len(wanted):
                raise Violation(f"{job.name}: {len(wanted) - len(found)} are missing")
            count += len(found)
        report = there.verify()
        if not report.is_ok:
            raise Violation(f"the copy is damaged: {report.problems}")
    return count


def kill_copies(folder: Path, *, rounds: int, seconds: float = 1e9, seed: int = 1) -> dict[str, float]:
    """Kill one copy after another; each goes on where the one before was."""
    draw = random.Random(f"copies {seed}")
    source = str(folder / "source")
    fill(source)
    kills = copies = checked = 0
    target = str(folder / "target-0")
    end = time.monotonic() + seconds
    while kills < rounds and time.monotonic() < end:
        child = Child(copy, source, target)
        child.wait_for("ready")
        child.pump(draw.random() ** 2 * 0.5)
        if is_whole := child.is_ended:
            copies += 1
        else:
            child.kill()
            kills += 1
        checked += check(source, target, is_whole=is_whole)
        if is_whole:
            target = str(folder / f"target-{copies}")
    with kedge.open(source) as here, kedge.open(target) as there:
        here.copy_to(there)
    check(source, target, is_whole=True)
    return {"kills": kills, "copies finished": copies + 1, "checkpoints checked": checked, "lost": 0}


def torture(minutes: float, folder: Path) -> dict[str, float]:
    end = time.monotonic() + minutes * 60
    numbers = kill_copies(folder / "copies", rounds=10**9, seconds=minutes * 30, seed=time.time_ns())
    numbers |= {"followers killed": 0, "checkpoints followed": 0}
    for n in itertools.count():
        if time.monotonic() > end:
            return numbers
        done = die_following(folder / f"followers-{n}", rounds=40)
        shutil.rmtree(folder / f"followers-{n}")
        numbers["followers killed"] += done["killed"]
        numbers["checkpoints followed"] += done["checked"]
    raise AssertionError("counting never ends")
