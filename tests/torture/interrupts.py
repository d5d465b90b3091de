"""Signals at random instants: handlers that raise, as Ctrl-C does, and handlers that save, as a preemption's do.

A child works on a store in its main thread, other threads of it save beside that, and a timer interrupts it. Nothing
acknowledged may be lost, nothing may be half there, no older save may come behind a newer one, and whoever waits
must go on: a child that makes no progress is a hang.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kedge
from tests.waiting import wait_for

KINDS = ("file:", "memory:", "files:")
HANG_S = 60.0  # without progress
ROOT = Path(__file__).parents[2]


class Interrupted(BaseException):
    """What a handler raises."""


def torture(minutes: float, folder: Path, count: int = 100_000, seed: int = 0) -> dict[str, float]:
    """`count` interrupts, shared by the kinds of stores, and more until a tenth of them ended an operation and a tenth
    saved: on a busy machine many come while one is already on its way. Stops after `minutes` if that comes first.
    """
    totals: Counter[str] = Counter()
    for kind in KINDS:
        place = "memory:" if kind == "memory:" else f"{kind}{folder / kind.rstrip(':')}"
        command = [sys.executable, "-m", "tests.torture.interrupts", place, str(-(-count // len(KINDS)))]
        done = subprocess.run(
            [*command, str(minutes * 60 / len(KINDS)), str(seed)], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise AssertionError(f"{place}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        totals.update(json.loads(done.stdout.splitlines()[-1]))
    return dict(totals)


class Work:
    """What the main thread does, and what the timer does to it."""

    def __init__(self, store: kedge.CheckpointManager, draw: random.Random) -> None:
        self.store = store
        self.draw = draw
        self.counts: Counter[str] = Counter()
        self.acknowledged: dict[str, tuple[str, int]] = {}
        self.deleted: set[str] = set()
        self.numbers = itertools.count(1)
        self.may_raise = False
        self.depth = 0

    def has_met(self, count: int) -> bool:
        tenths = min(self.counts["interrupted"], self.counts["handlers that saved"])
        return self.counts["interrupts"] >= count and 10 * tenths >= count

    def state(self, n: int, size: int) -> object:
        return {"n": n, "text": "x" * (n % 1000), "buffer": bytearray([n % 251]) * size}

    # The main thread

    def step(self) -> None:
        """One operation, which an exception may end anywhere."""
        action = self.draw.choice([self.save] * 4 + [self.save_async, self.load, self.look, self.delete, self.hold])
        other = self.draw.random()
        if other < 0.05:
            action = self.save_aio
        elif other < 0.06:
            action = self.collect
        try:
            self.may_raise = True
            try:
                action()
            finally:
                self.may_raise = False
        except (Interrupted, KeyboardInterrupt):  # the latter where a library has forgotten which it was
            self.counts["interrupted"] += 1
        self.may_raise = False
        self.counts["operations"] += 1

    def save(self, job: str = "main", size: int | None = None) -> None:
        size = self.draw.choice([0, 0, 100, 20_000, 300_000, 3_000_000]) if size is None else size
        n = next(self.numbers)
        saved = self.store.save(job, "step", self.state(n, size))
        self.acknowledged[saved] = job, n

    def save_async(self) -> None:
        n = next(self.numbers)
        pending = self.store.save_async("main", "step", self.state(n, self.draw.choice([0, 300_000])))
        saved = pending.result()
        self.acknowledged[saved] = "main", n

    def save_aio(self) -> None:
        """In a thread of our own: asyncio.run has no way to survive an exception anywhere."""
        n = next(self.numbers)
        self.may_raise = False
        saved = asyncio.run(self.store.aio.save("aio", "step", self.state(n, 1000)))
        self.acknowledged[saved] = "aio", n

    def load(self) -> None:
        for job in ("main", "handler"):
            if (newest := self.store.load_latest(job)) is not None:
                self.check(newest[1])

    def look(self) -> None:
        self.store.list("main", limit=10)
        self.store.jobs()
        self.store.events(limit=5)

    def delete(self) -> None:
        doomed = self.draw.choice(list(self.acknowledged) or [""])
        if doomed:
            self.deleted.add(doomed)
            self.store.delete(self.acknowledged[doomed][0], doomed)

    def collect(self) -> None:
        self.store.gc()
        assert self.store.verify(deep=False).is_ok

    def hold(self) -> None:
        try:
            with self.store.lease("leased", ttl_s=0.3) as lease:  # lease: nobody else wants it before it ends
                n = next(self.numbers)
                saved = self.store.save("leased", "step", self.state(n, 0), lease=lease)
                self.acknowledged[saved] = "leased", n
        except kedge.LeaseHeld:
            self.counts["still leased"] += 1  # an interrupted one, which ends by itself

    @staticmethod
    def check(state: Any) -> None:
        n = state["n"]
        assert state["text"] == "x" * (n % 1000)
        assert not state["buffer"] or set(state["buffer"][:: max(1, len(state["buffer"]) // 50)]) == {n % 251}

    # The handler

    def interrupt(self, *_: object) -> None:
        self.counts["interrupts"] += 1
        self.arm()
        what = self.draw.random()
        if what < 0.2 and self.depth < 2:
            self.counts["handlers that saved"] += 1
            self.depth += 1
            may_raise, self.may_raise = self.may_raise, False
            try:
                self.save("handler", self.draw.choice([0, 1000, 300_000]))
                if what < 0.05:
                    self.look()
            finally:
                self.depth -= 1
                self.may_raise = may_raise
        if what > 0.1 and self.may_raise:
            raise Interrupted

    def arm(self) -> None:
        signal.setitimer(
            signal.ITIMER_REAL, self.draw.choice([0.0001, 0.0005, 0.001, 0.003]) * self.draw.random() + 1e-5
        )


def _work(place: str, count: int, seconds: float, seed: int) -> Counter[str]:
    store = kedge.open(place)
    work = Work(store, random.Random(seed))
    stop, beside = threading.Event(), _Beside(store)
    threads = [threading.Thread(target=beside.run, args=(stop, n), daemon=True) for n in range(2)]
    for thread in threads:
        thread.start()
    signal.signal(signal.SIGALRM, work.interrupt)
    work.arm()
    until = time.monotonic() + seconds
    while not work.has_met(count) and time.monotonic() < until:
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        work.step()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    stop.set()
    for thread in threads:
        thread.join()
    assert not beside.errors, beside.errors
    work.acknowledged |= beside.acknowledged
    _check(store, work)
    store.close()
    if place != "memory:":
        with kedge.open(place) as again:
            _check(again, work)
    faulthandler.cancel_dump_traceback_later()
    work.counts["saves beside"] = len(beside.acknowledged)
    work.counts["acknowledged"] = len(work.acknowledged)
    return work.counts


class _Beside:
    """Threads that share commits with the main one: they must not be left waiting, nor hear of its interrupts."""

    def __init__(self, store: kedge.CheckpointManager) -> None:
        self._store = store
        self.acknowledged: dict[str, tuple[str, int]] = {}
        self.errors: list[BaseException] = []

    def run(self, stop: threading.Event, number: int) -> None:
        job = f"beside-{number}"
        try:
            for n in itertools.count():
                if stop.wait(0.002):  # limit: the pace
                    return
                state = {"n": n, "text": "x" * (n % 1000), "buffer": bytearray()}
                self.acknowledged[self._store.save(job, "step", state)] = job, n
                if n % 200 == 199:
                    self._store.cleanup(job, keep_last=10)
                    kept = {c.id for c in self._store.list(job)}
                    gone = [i for i, (of, _) in list(self.acknowledged.items()) if of == job and i not in kept]
                    for checkpoint in gone:
                        del self.acknowledged[checkpoint]
        except BaseException as error:
            self.errors.append(error)


def _check(store: kedge.CheckpointManager, work: Work) -> None:
    for checkpoint, (_, n) in work.acknowledged.items():
        if checkpoint in work.deleted:
            continue
        state: Any = store.load(checkpoint)
        assert state["n"] == n
        work.check(state)
    for job in store.jobs():
        numbers = []
        for checkpoint in store.list(job.name):
            state = store.load(checkpoint.id)
            work.check(state)
            numbers.append(state["n"])
        if job.name != "handler":  # one that came before the call it met was begun has the larger number
            assert numbers == sorted(numbers), f"{job.name}: an older save came behind a newer one"
    report = store.verify()
    assert report.is_ok, report.problems

    def is_free() -> bool:
        try:
            with store.lease("leased", ttl_s=0.3):  # lease: who was interrupted may have left one that ends
                return True
        except kedge.LeaseHeld:
            return False

    wait_for(is_free, "a lease was left")  # one whose holder was interrupted ends after a third of its time
    store.gc()


if __name__ == "__main__":
    place, count, seconds, seed = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    counts = _work(place, count, seconds, seed)
    sys.stdout.write(json.dumps(counts) + "\n")
    sys.stdout.flush()
    os._exit(0)
