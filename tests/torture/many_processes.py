"""Many processes with many threads each on one store: everything counted once, nothing lost (I3, I4, I5)."""

from __future__ import annotations

import random
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import kedge

from . import children
from .children import Child, Report, describe
from .ledger import Ledger, Violation, about
from .states import make

JOBS = ("alpha", "beta", "gamma")


def mixed_work(report: Report, _: Connection, place: str, seed: int, threads: int, saves: int, counts: int) -> None:
    """Each thread saves to common jobs, deletes some of its own, and counts under a lease that all want."""
    store = kedge.open(place)
    report("ready")

    def run(thread: int) -> None:
        draw = random.Random(f"{seed} {thread}")
        mine: list[tuple[str, str]] = []
        for _ in range(saves):
            kind = draw.choice(("small", "small", "small", "inline", "packed", "tree"))
            job, number = draw.choice(JOBS), draw.randrange(10**9)
            saved = store.save(job, "shared", make(kind, number), metadata=about(kind, number))
            report("saved", saved, job, kind, number)
            report("numbered", job, store.get(saved).seq)
            mine.append((job, saved))
            if draw.random() < 0.3:
                job, victim = mine.pop(draw.randrange(len(mine)))
                report("deleting", victim)
                if not store.delete(job, victim):
                    report("failed", f"{victim} was deleted by somebody else")
                report("deleted", victim)
        for _ in range(counts):
            count_one()

    def count_one() -> None:
        """Read the counter and save it one higher, as its only writer."""
        while True:
            try:
                with store.lease("counter", ttl_s=20) as lease:
                    found = store.load_latest("counter")
                    number = found[1]["seed"] + 1 if found else 1  # type: ignore[index]
                    saved = store.save(
                        "counter", "n", make("small", number), metadata=about("small", number), lease=lease
                    )
                    report("saved", saved, "counter", "small", number)
                    report("counted", number)
                    return
            except kedge.LeaseHeld:
                time.sleep(0.002 + random.random() * 0.02)  # sleep: before it asks again

    def guarded(thread: int) -> None:
        try:
            run(thread)
        except BaseException as error:
            report("failed", describe(error))

    workers = [threading.Thread(target=guarded, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    store.close()
    report("finished")


class Tally(Ledger):
    """A ledger that also collects sequence numbers and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: dict[str, list[int]] = {}
        self.counted: list[int] = []

    def note(self, message: tuple[object, ...], moment: float = 0) -> None:
        super().note(message, moment)
        if message[0] == "numbered":
            self.numbers.setdefault(str(message[1]), []).append(int(str(message[2])))
        elif message[0] == "counted":
            self.counted.append(int(str(message[1])))


def crowd(place: str, *, processes: int, threads: int, saves: int, counts: int, seed: int = 1) -> dict[str, float]:
    """All of them at once, gc beside them; raises Violation when anything is missing or there twice."""
    tally = Tally()
    start = time.monotonic()
    everyone = [
        Child(mixed_work, place, seed * 1000 + n, threads, saves, counts, ledger=tally) for n in range(processes)
    ]
    collector = Child(children.collect, place, ledger=tally)
    children.pump(everyone, 100)
    took = time.monotonic() - start
    collector.tell("end")
    codes = [child.drain() for child in [*everyone, collector]]
    if any(codes) or tally.counts.get("finished") != processes or tally.failures:
        raise Violation(f"exit codes {codes}, {len(tally.failures)} errors: {tally.failures[:5]}")
    with kedge.open(place) as store:
        for job in JOBS:
            numbers = sorted(tally.numbers[job])
            if numbers != list(range(1, len(numbers) + 1)):
                raise Violation(f"{job}: sequence numbers lost or given twice: {numbers}")
        if sorted(tally.counted) != list(range(1, processes * threads * counts + 1)):
            raise Violation(f"counted under the lease: {sorted(tally.counted)}")
        loaded = tally.check(store)
    return {
        "saves": len(tally.saved),
        "saves/s": round(len(tally.saved) / took),
        "counted under lease": len(tally.counted),
        "gc runs": tally.counts.get("gc", 0),
        "states compared": loaded,
        "lost": 0,
    }


def torture(minutes: float, folder: Path) -> dict[str, float]:
    total: dict[str, float] = {}
    end = time.monotonic() + minutes * 60
    turn = 0
    while not total or time.monotonic() < end:
        turn += 1
        place = str(folder / f"store-{turn}")
        for key, value in crowd(place, processes=8, threads=8, saves=30, counts=3, seed=turn).items():
            total[key] = value if "/s" in key else total.get(key, 0) + value
    return total
