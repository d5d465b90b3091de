"""One history from beginning to end: workers, what is done to them, and the checks."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import kedge
from tests.torture.children import Child, pump
from tests.torture.ledger import Violation

from .checks import Examiner, raise_problems
from .history import History, Listener
from .operations import LEASE_S
from .places import KINDS, Place, Servers, place
from .reading import RETAINED, RETAINED_KEEP
from .worker import work

_WORKERS = 3


class Controller:
    """Workers on one store; killed, stopped and started again by chance."""

    def __init__(self, place_: Place, seed: str, *, mutant: str = "", without: frozenset[str] = frozenset()) -> None:
        self.place = place_
        self.history = History(is_deferred=place_.kind == "memory")
        self.examiner = Examiner(place_, self.history)
        self.numbers: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._seed = seed
        self._mutant = mutant
        self._without = without
        self._names = itertools.count(1)
        self._workers: dict[int, Child] = {}

    def run(self, operations: int, rounds: int) -> None:
        self._prepare()
        for round_ in range(rounds):
            self._round(operations // rounds)
            self._examine(f"after round {round_ + 1}")

    def finish(self, *, with_repair: bool) -> None:
        """What only a quiet store is asked."""
        time.sleep(LEASE_S)  # sleep: until the leases of killed workers have run out
        self.examiner.rebuild()
        if with_repair:
            self.examiner.repair()
        self._examine("after rebuild")
        if "copy_to" not in self._without:
            self.examiner.mirror()
        self.examiner.empty()
        raise_problems(self.history, "at the end")
        self.numbers["operations"] += len(self.history.operations)
        self.numbers["states compared"] += self.examiner.loaded

    def _prepare(self) -> None:
        with self.place.direct.open() as store:
            if not self.place.direct.owns_jobs:
                store.save(RETAINED, "first", {}, metadata={"mark": ""}, pin=False)
                store.delete(RETAINED, store.list(RETAINED)[0].id)
                store.set_retention(RETAINED, kedge.RetentionPolicy(keep_last=RETAINED_KEEP))

    def _round(self, operations: int) -> None:
        for slot in range(_WORKERS):
            self._start(slot)
        enough = len(self.history.operations) + operations
        try:
            while len(self.history.operations) < enough:
                pump(self._workers.values(), self._draw.random() * 0.4)
                self._notice_deaths()
                self._disturb()
            self._end_all()
        finally:
            for child in self._workers.values():
                child.process.kill()
            self._workers.clear()

    def _start(self, slot: int) -> None:
        name = f"w{next(self._names)}"
        access = replace(self.place.access(slot), without=self._without)
        self._workers[slot] = Child(
            work, access, name, slot, self._seed,
            mutant=self._mutant, ledger=Listener(self.history, name),
        )  # fmt: skip

    def _disturb(self) -> None:
        slot = self._draw.randrange(_WORKERS)
        what = self._draw.choices(("nothing", "kill", "stop", "restart"), (4, 4, 2, 1))[0]
        if what == "kill":
            self._workers[slot].kill()
            self.numbers["kills"] += 1
            self._start(slot)
        elif what == "stop":
            pid = self._workers[slot].pid
            os.kill(pid, signal.SIGSTOP)
            try:
                pump(self._workers.values(), self._draw.choice((0.05, 0.2, 1.5 * LEASE_S)))
            finally:
                os.kill(pid, signal.SIGCONT)
            self.numbers["stops"] += 1
        elif what == "restart" and self.place.restarts:
            self._restart(self._draw.choice(sorted(self.place.restarts)))

    def _restart(self, server: str) -> None:
        start = time.monotonic()
        self.history.outages.append((start, float("inf")))
        self.place.restarts[server]()
        self.history.outages[-1] = (start, time.monotonic())
        self.numbers["restarts"] += 1

    def _notice_deaths(self) -> None:
        for child in self._workers.values():
            if child.is_ended:
                self.history.failures.append(f"a worker ended by itself with {child.exit_code()}")
                raise_problems(self.history, "while working")

    def _end_all(self) -> None:
        """Tell all to end, and take in what they say until they have."""
        for child in self._workers.values():
            child.tell("end")
        deadline = time.monotonic() + 120
        while any(not child.is_ended for child in self._workers.values()):
            pump(self._workers.values(), 1)
            if time.monotonic() > deadline:
                self.history.failures.append("a worker does not come to an end")
                raise_problems(self.history, "at the end of a round")
        for child in self._workers.values():
            if child.drain():
                self.history.failures.append(f"a worker ended with {child.exit_code()}")

    def _examine(self, label: str) -> None:
        raise_problems(self.history, f"{label}, before it was looked at")
        try:
            self.examiner.examine()
        except kedge.CheckpointError as error:
            self.history.failures.append(f"examiner: {type(error).__name__}: {error}")
        raise_problems(self.history, label)


def run_history(
    kind: str, seed: int, folder: Path, servers: Servers, *, is_encrypted: bool, operations: int = 400, rounds: int = 2,
    mutant: str = "", with_repair: bool = True, without: frozenset[str] = frozenset(),
) -> Counter[str]:  # fmt: skip
    """One history; numbers of what was done. Raises Violation with the seed and how to do it again."""
    label = f"{kind}{'+key' if is_encrypted else ''}"
    with place(kind, folder, servers, is_encrypted=is_encrypted) as made:
        controller = Controller(made, f"{label} {seed}", mutant=mutant, without=without)
        try:
            controller.run(operations, rounds)
            controller.finish(with_repair=with_repair)
        except (Violation, kedge.CheckpointError) as error:
            (folder / "history.txt").write_text("\n".join(controller.history.outline()))
            lines = [
                f"seed {seed}, {label}: {error}",
                f"again: ./dev torture histories --kind {label} --seed {seed} --seeds 1",
                f"store: {made.direct.url}; all operations: {folder / 'history.txt'}",
            ]
            raise Violation("\n".join(lines)) from error
    controller.numbers["histories"] += 1
    return controller.numbers


def torture(
    minutes: float,
    folder: Path,
    *,
    seed: int | None = None,
    seeds: int | None = None,
    kind: str | None = None,
    without: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """Histories of one kind, or of all in turn, plain and encrypted, until the time or the seeds are used up.

    `without` names operations to leave out, to see which of them a failure needs.
    """
    labels = [kind] if kind else [f"{name}{key}" for name in KINDS for key in ("", "+key")]
    first = time.time_ns() // 1_000_000 % 1_000_000 if seed is None else seed
    end = time.monotonic() + minutes * 60
    numbers: Counter[str] = Counter()
    with ExitStack() as stack:
        servers = Servers(folder, stack)
        for n in range(seeds if seeds is not None else sys.maxsize):
            if time.monotonic() > end:
                break
            for label in labels:
                where = folder / f"{label}-{first + n}"
                name = label.removesuffix("+key")
                numbers += run_history(name, first + n, where, servers, is_encrypted=name != label, without=without)
                shutil.rmtree(where)
    return {"histories": 0, **numbers, "lost": 0}
