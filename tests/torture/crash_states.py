"""Stores' lives, traced, and every disk that a power cut in them may leave (I1): crash.py and crash_disks.py say what
is modelled, crash_lives.py what is done, crash_judge.py what must be true.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

from .children import Child
from .crash import STRACE_OPTIONS, Trace, read_trace, snapshot
from .crash_disks import CrashState, crash_states
from .crash_judge import Judge
from .crash_lives import Life, draw_life, draw_steps, live
from .ledger import Ledger
from .tracing import attached

T = TypeVar("T")

STEPS = {
    "create": ("create", "save small", "close"),
    "save": ("save small", "save arrays", "save packed", "save inline", "save tree", "close", "save small"),
    "gc": (
        "save packed", "save packed", "save arrays", "delete packed", "delete arrays", "gc",
        "save arrays", "delete arrays", "save packed", "gc", "save small",
    ),
}  # fmt: skip
_EXTRA = 8  # random disks for each unsynced change at each moment
_PATIENCE_S = 900  # with a life under strace on a machine that has other things to do
_DRAWN = 2_000  # so many of each life of STEPS
_CHAINED = 2  # so many lives go on from a disk of the one before


def record(
    folder: Path, life: Life, *, mutant: str = "", before: CrashState | None = None, heard: Trace | None = None
) -> Trace:
    """What this life does to the disk, which is empty or what a cut in another life left."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    if before is not None:
        left = before.disk
        for directory in left.directories:
            (disk / directory).mkdir()
        for path, content in left.files:
            (disk / path).write_bytes(content.data)
    trace = snapshot(disk)
    if before is not None and heard is not None:
        trace.messages += [(0, message) for _, message in heard.messages[: before.heard]]
    child = Child(live, str(disk), life, mutant=mutant)
    child.wait_for("ready", _PATIENCE_S)
    with attached(child.pid, folder / "log", *STRACE_OPTIONS):
        child.tell("go")
        child.wait_for("done", _PATIENCE_S)
    child.tell("end")
    child.drain()
    assert isinstance(child.ledger, Ledger)
    if child.ledger.failures:
        raise AssertionError(f"{life}: {child.ledger.failures}")
    read_trace(trace, folder / "log", str(disk))
    shutil.rmtree(folder)
    return trace


def explore(
    folder: Path, name: str, *, mutant: str = "", limit: int | None = None, seed: int = 1, extra: int = 4
) -> Counter[str]:
    """Trace a life of STEPS, then check the disks that cuts may leave: all that are drawn, or `limit` of them."""
    life = Life("dir", STEPS[name])
    with _memory(folder) as memory:
        trace = record(folder, life, mutant=mutant)
        numbers, _ = _apart(lambda: _judge(trace, life, memory, seed=seed, extra=extra, limit=limit))
        return numbers


def _apart(work: Callable[[], T]) -> T:
    """In a thread: the main thread pays for being interruptible."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def _judge(
    trace: Trace, life: Life, memory: Path, *, seed: int, extra: int, limit: int | None = None, keep: int = 0
) -> tuple[Counter[str], list[tuple[CrashState, int]]]:
    """The numbers, and some states that have a store, with its key."""
    judge = Judge(trace, life, memory / "judge")
    states = crash_states(trace, seed=seed, extra=extra)
    draw = random.Random(f"{seed}")
    if limit is not None:
        drawn = list(states)
        chosen = sorted(draw.sample(range(len(drawn)), min(limit, len(drawn))))
        states = iter([drawn[n] for n in chosen])
    numbers = Counter(lives=1, changes=len(trace.ops), syncs=len(trace.syncs))
    left: list[tuple[CrashState, int]] = []
    for state in states:
        numbers["states"] += 1
        answer = judge.judge(state)
        if keep and not answer.is_absent and draw.random() < 0.01:
            left = [*left[-keep:], (state, answer.key)]
    numbers.update(disks=judge.disks, opened=judge.opened, continued=judge.continued, proved=judge.proved)
    judge.end()
    return numbers, left


@contextmanager
def _memory(folder: Path) -> Iterator[Path]:
    """A folder in memory where there is one: disks are written there by the thousand."""
    shared = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(dir=shared if os.access(shared, os.W_OK) else folder.parent))
    try:
        yield place
    finally:
        shutil.rmtree(place)
        # Disks are large, and the allocator would keep their memory for the rest of the tests.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)


def explore_seed(folder: Path, seed: int, *, extra: int) -> Counter[str]:
    """A drawn life, and lives that go on from disks which cuts in it left."""
    total: Counter[str] = Counter()
    life, state, trace = draw_life(seed), None, None
    for turn in range(_CHAINED + 1):
        with _memory(folder) as memory:
            trace = record(folder / f"{turn}", life, before=state, heard=trace)
            numbers, left = _judge(trace, life, memory, seed=seed, extra=extra, keep=4)
        total.update(numbers)
        if not left:
            break
        draw = random.Random(f"next {seed} {turn}")
        state, key = draw.choice(left)
        life = Life(life.form, draw_steps(draw, life.form), key, seed + (turn + 1) * 10**6)
    return total


def torture(minutes: float, folder: Path, seed: int | None = None) -> dict[str, float]:
    """Every drawn disk of STEPS, then drawn lives, each with its own seed."""
    end = time.monotonic() + minutes * 60
    first = time.time_ns() % 10**6 if seed is None else seed
    total: Counter[str] = Counter()
    told = time.monotonic()
    for name in STEPS:
        total.update(explore(folder / name, name, seed=first, limit=_DRAWN))
    for number in range(first, first + 10**6):
        if time.monotonic() > end:
            break
        total.update(_apart(partial(explore_seed, folder / f"{number}", number, extra=_EXTRA)))
        if time.monotonic() > told + 30:
            told = time.monotonic()
            cpu_s = time.process_time()  # clock: for people to read
            print(f"  to seed {number}: {dict(total)}, {cpu_s:.0f} s of CPU", flush=True)
    return {**total, "seeds": number - first}
