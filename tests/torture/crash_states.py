"""A store's life, traced, and every disk that a power cut in it may leave (I1): see crash.py for the model."""

from __future__ import annotations

import ctypes
import gc
import random
import shutil
import time
from multiprocessing.connection import Connection
from pathlib import Path

import kedge
import kedge.store.local

from .children import Child, Report, describe
from .crash import STRACE_OPTIONS, CrashState, Trace, crash_states, read_trace, snapshot
from .ledger import Ledger, Violation, about
from .states import make
from .tracing import attached

PLACE = "deep/store"  # its parent is new too


def live(report: Report, connection: Connection, place: str, steps: tuple[str, ...]) -> None:
    """A child that does these steps on one store: create, save <kind>, delete, gc, close."""
    kedge.store.local.WORKERS = 2
    report("ready")
    connection.recv()
    store: kedge.CheckpointManager | None = None
    try:
        for seed, step in enumerate(steps):
            if store is None:
                store = kedge.open(place)
                report("created")
            what, _, kind = step.partition(" ")
            if what == "save":
                saved = store.save("job", "traced", make(kind, seed), metadata=about(kind, seed))
                report("saved", saved, "job", kind, seed)
            elif what == "delete":
                victim = next(c.id for c in store.list("job") if c.metadata["kind"] == kind)
                report("deleting", victim)
                store.delete("job", victim)
                report("deleted", victim)
            elif what == "gc":
                done = store.gc()
                report("gc", done.packs_removed, done.packs_rewritten)
            elif what == "close":
                store.close()
                store = None
    except Exception as error:
        report("failed", describe(error))
    report("done")
    connection.recv()


STEPS = {
    "create": ("create", "save small", "close"),
    "save": ("save small", "save arrays", "save packed", "save inline", "save tree", "close", "save small"),
    "gc": (
        "save packed", "save packed", "save arrays", "delete packed", "delete arrays", "gc",
        "save arrays", "delete arrays", "save packed", "gc", "save small",
    ),
}  # fmt: skip


def record(folder: Path, steps: tuple[str, ...], *, mutant: str = "") -> Trace:
    """What these steps do to the disk."""
    disk = folder / "disk"
    disk.mkdir(parents=True)
    trace = snapshot(disk)
    child = Child(live, str(disk / PLACE), steps, mutant=mutant)
    child.wait_for("ready")
    with attached(child.pid, folder / "log", *STRACE_OPTIONS):
        child.tell("go")
        child.wait_for("done")
    child.tell("end")
    child.drain()
    if child.ledger.failures:
        raise AssertionError(child.ledger.failures)
    read_trace(trace, folder / "log", str(disk))
    (folder / "log").unlink()
    return trace


def check_state(trace: Trace, state: CrashState, folder: Path) -> None:
    """Raise Violation unless a store on this disk keeps every promise made before the cut, and goes on working."""
    state.write(folder)
    ledger = Ledger()
    for at, message in trace.messages:
        if at <= state.moment:
            ledger.note(message)
    place = folder / PLACE
    try:
        with kedge.open(place, create="created" not in ledger.counts) as store:
            ledger.check(store)
            saved = store.save("after", "cut", make("packed", 5), metadata=about("packed", 5))
            ledger.note(("saved", saved, "after", "packed", 5))
            store.gc()
            ledger.check(store, deep=False)
    except (kedge.CheckpointError, Violation) as error:
        what = f"{type(error).__name__}: {error}"
        raise Violation(f"power cut at moment {state.moment}, {state.why}: {what}") from error
    finally:
        shutil.rmtree(folder)


def explore(
    folder: Path, name: str, *, mutant: str = "", limit: int | None = None, seed: int = 1, extra: int = 4
) -> dict[str, float]:
    """Trace a life, then check the disks that cuts may leave: all that the model draws, or `limit` of them.

    The latest cuts come first: most was promised by then, so a safeguard that is missing shows soonest.
    """
    trace = record(folder, STEPS[name], mutant=mutant)
    states = list(crash_states(trace, seed=seed, extra=extra))
    try:
        if limit is not None and len(states) > limit:
            states = random.Random(f"{name} {seed}").sample(states, limit)
        for n, state in enumerate(sorted(states, key=lambda state: -state.moment)):
            check_state(trace, state, folder / f"state-{n}")
        return {"traces": 1, "changes": len(trace.ops), "syncs": len(trace.syncs), "disks": len(states)}
    finally:
        states.clear()
        _give_memory_back()


def _give_memory_back() -> None:
    """Disks are large, and the allocator would keep their memory for the rest of the tests."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def torture(minutes: float, folder: Path) -> dict[str, float]:
    total: dict[str, float] = {}
    end = time.monotonic() + minutes * 60
    seed = time.time_ns()
    while not total or time.monotonic() < end:
        for name in STEPS:
            seed += 1
            place = folder / f"{seed}"
            for key, value in explore(place, name, seed=seed, extra=24).items():
                total[key] = total.get(key, 0) + value
            shutil.rmtree(place)
    return total
