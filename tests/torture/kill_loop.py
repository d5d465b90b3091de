"""kill -9 at random times, again and again, on one store that is never repaired by hand (I1, I3)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import kedge

from . import children
from .children import Child
from .ledger import Ledger, Violation
from .states import KINDS


def kill_loop(
    place: str,
    *,
    rounds: int,
    seconds: float = 1e9,
    seed: int = 1,
    savers: int = 2,
    threads: int = 4,
    kinds: Sequence[str] = KINDS,
) -> dict[str, float]:
    """Each round: some processes save and delete in several threads, another runs gc, all die by SIGKILL.

    Sometimes one dies first and the others go on beside what it left. After each round a fresh open must find
    all that was ever acknowledged. Answers numbers.
    """
    draw = random.Random(f"kill loop {seed}")
    ledger = Ledger()
    kills = loaded = done = 0
    end = time.monotonic() + seconds
    while done < rounds and time.monotonic() < end:
        done += 1
        everyone = [
            Child(children.save_and_delete, place, draw.random(), threads, kinds, 3, ledger=ledger)
            for _ in range(savers)
        ]
        everyone.append(Child(children.collect, place, ledger=ledger))
        if draw.random() < 0.85:  # the others are killed while they open
            for child in everyone:
                child.wait_for("ready")
        if done == 1:
            everyone[0].wait_for("saved")  # there is something to lose
        children.pump(everyone, draw.random() ** 2 * 0.6)
        if draw.random() < 0.4:
            first = everyone.pop(draw.randrange(len(everyone)))
            first.kill()
            kills += 1
            children.pump(everyone, draw.random() * 0.2)
        for child in everyone:
            child.process.kill()
        for child in everyone:
            child.drain()
            kills += 1
        if ledger.failures:
            raise Violation(f"round {done}, seed {seed}: errors without a fault: {ledger.failures}")
        with kedge.open(place) as store:
            try:
                loaded += ledger.check(store)
                store.gc()
                loaded += ledger.check(store, deep=False)
            except Violation as violation:
                raise Violation(f"round {done}, seed {seed}: {violation}") from None
    return {
        "rounds": done,
        "kills": kills,
        "acknowledged": len(ledger.saved),
        "deleted": len(ledger.deleted),
        "gc runs": ledger.counts.get("gc", 0),
        "states compared": loaded,
        "lost": 0,
    }


def torture(minutes: float, folder: Path) -> dict[str, float]:
    return kill_loop(str(folder / "store"), rounds=10**9, seconds=minutes * 60, seed=time.time_ns())
