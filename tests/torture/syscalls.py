"""Every mutating system call of an operation: the process killed at it, and the call failed, once each (I1, I9)."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import kedge
import kedge.store.local
from kedge.care.repair import repair
from kedge.store.local import LocalStore

from .children import Child, Report, describe
from .ledger import Ledger, Violation, about
from .states import make
from .tracing import MUTATING, Call, attached, detach, mutating_calls

FAULTS = ("KILL", "EIO", "ENOSPC")


# --- operations: each answers its acknowledgement; called again after a failure ---


def _create(place: str, _: Report) -> None:
    kedge.open(place).close()


def _save(kind: str) -> Callable[[str, Report], None]:
    def save(place: str, report: Report) -> None:
        store = _opened(place)
        saved = store.save("job", "traced", make(kind, 77), metadata=about(kind, 77))
        report("saved", saved, "job", kind, 77)

    return save


def _delete(place: str, report: Report) -> None:
    store = _opened(place)
    victim = next(c.id for c in store.list("job") if c.metadata["kind"] == "arrays")
    report("deleting", victim)
    store.delete("job", victim)
    report("deleted", victim)


def _gc(place: str, report: Report) -> None:
    report("gc", _opened(place).gc().packs_removed)


def _record(place: str, report: Report) -> None:
    backlog = _local(_opened(place)).backlog
    assert backlog is not None
    report("recorded", backlog.copy())


OPERATIONS: dict[str, Callable[[str, Report], None]] = {
    "create": _create,
    "save small": _save("small"),
    "save inline": _save("inline"),
    "save packed": _save("packed"),
    "save arrays": _save("arrays"),
    "save tree": _save("tree"),
    "delete": _delete,
    "gc": _gc,
    "record": _record,
}

_open: dict[str, kedge.CheckpointManager] = {}


def _local(store: kedge.CheckpointManager) -> LocalStore:
    assert isinstance(store.store, LocalStore)
    return store.store


def _opened(place: str) -> kedge.CheckpointManager:
    if place not in _open:
        _open[place] = kedge.open(place)
    return _open[place]


def _reporter(connection: Connection) -> Report:
    """As the one that is given, but without write(2), which is what may fail in any thread."""
    lock = threading.Lock()
    handle = socket.socket(fileno=os.dup(connection.fileno()))

    def report(*message: object) -> None:
        content = pickle.dumps((time.monotonic(), message))
        with lock:
            handle.sendall(struct.pack("!i", len(content)) + content)

    return report


def operate(_: Report, connection: Connection, name: str, place: str) -> None:
    """A child that does one operation under the eyes of strace, and again, unobserved, if it failed."""
    report = _reporter(connection)
    kedge.store.local.WORKERS = 1  # every thread's calls come in the same order each time
    if name != "create":
        _opened(place).stats()
    for _ in range(2):
        report("ready")
        connection.recv()
        try:
            OPERATIONS[name](place, report)
        except BaseException as error:
            report("failed", describe(error))
        else:
            report("done")
            connection.recv()
            break
    for store in _open.values():
        store.close()
    report("closed")


# --- injecting ---


class Target:
    """One operation on copies of one store."""

    def __init__(self, folder: Path, name: str, mutant: str = "") -> None:
        self.name = name
        self.mutant = mutant
        self.folder = folder
        self.template = folder / "template"
        self.ledger = Ledger()
        self.count = 0
        folder.mkdir(parents=True)
        if name != "create":
            self._fill()

    def _fill(self) -> None:
        """A store with a history: packs that gc will remove, rewrite and keep."""
        with kedge.open(self.template) as store:
            for seed, kind in enumerate(["small", "packed", "arrays", "inline", "arrays", "packed", "tree", "packed"]):
                saved = store.save("job", "before", make(kind, seed), metadata=about(kind, seed))
                self.ledger.note(("saved", saved, "job", kind, seed))
            if self.name == "gc":
                for checkpoint in [c for c in store.list("job") if c.seq % 2 == 0]:
                    store.delete("job", checkpoint.id)
                    self.ledger.note(("deleting", checkpoint.id))
                    self.ledger.note(("deleted", checkpoint.id))
            if self.name == "record":
                _local(store).backlog = None  # what was saved is in the index alone

    def _copy(self) -> tuple[str, Ledger]:
        self.count += 1
        place = self.folder / f"{self.count}"
        if self.template.exists():
            shutil.copytree(self.template, place)
        before = self.ledger
        return str(place), Ledger(dict(before.saved), set(before.deleting), set(before.deleted))

    def calls(self) -> list[Call]:
        """What the operation does to the store's files when nothing goes wrong."""
        place, ledger = self._copy()
        log = self.folder / "log"
        child = Child(operate, self.name, place, ledger=ledger, mutant=self.mutant)
        child.wait_for("ready")
        with attached(child.pid, log, "-y", "-s", "0", "-e", f"trace={','.join(MUTATING)}"):
            child.tell("go")
            child.wait_for("done")
        child.tell("end")
        if child.drain() != 0 or ledger.failures:
            raise Violation(f"{self.name} failed without a fault: {ledger.failures}")
        self._check(place, ledger)
        return mutating_calls(log, place)

    def inject(self, call: Call, fault: str) -> str:
        """Run once with this fault; answers how it ended: killed, refused, or overcome."""
        place, ledger = self._copy()
        how = "signal=KILL" if fault == "KILL" else f"error={fault}"
        child = Child(operate, self.name, place, ledger=ledger, mutant=self.mutant)
        child.wait_for("ready")
        ended = "killed"
        try:
            option = f"inject={call.name}:{how}:when={call.number}"
            with attached(child.pid, self.folder / "log", "-e", f"trace={call.name}", "-e", option) as tracer:
                child.tell("go")
                while (message := child.receive()) is not None:
                    if message[0] == "failed":
                        ended = "refused"
                        detach(tracer)
                        child.wait_for("ready")
                        child.tell("again")
                    elif message[0] == "done":
                        ended = ended if ended == "refused" else "overcome"
                        detach(tracer)
                        child.tell("end")
                tracer.kill()  # the child is gone
            raw = [text for text in ledger.failures if "UNTYPED" in text or "WITHOUT HINT" in text]
            if raw or len(ledger.failures) > 1:
                raise Violation(f"errors: {ledger.failures}")
            if (code := child.drain()) != (-9 if ended == "killed" else 0):
                raise Violation(f"the child ended with {code}")
            self._check(place, ledger)
        except (Violation, AssertionError, kedge.CheckpointError) as error:
            raise Violation(f"{self.name}, {fault} at {call}: {type(error).__name__} {error}\n  {call.text}") from error
        finally:
            if not child.is_ended:
                child.kill()
        shutil.rmtree(place, ignore_errors=True)
        return ended

    def _check(self, place: str, ledger: Ledger) -> None:
        """The store opens, has all it acknowledged, and goes on working."""
        with kedge.open(place) as store:
            ledger.check(store)
            saved = store.save("after", "fault", make("packed", 5), metadata=about("packed", 5))
            ledger.note(("saved", saved, "after", "packed", 5))
            store.gc()
            ledger.check(store)
        if self.name == "record":
            self._check_packs(place, ledger)

    def _check_packs(self, place: str, ledger: Ledger) -> None:
        """Without its index the store has all it acknowledged, under the same numbers."""
        with kedge.open(place) as store:
            before = [(c.id, c.seq) for job in store.jobs() for c in store.list(job.name)]
        for file in Path(place).glob("index.sqlite*"):
            file.unlink()
        repair(Path(place), actor="test")
        with kedge.open(place) as store:
            ledger.check(store)
            if (after := [(c.id, c.seq) for job in store.jobs() for c in store.list(job.name)]) != before:
                raise Violation(f"the packs tell of {after}, not of {before}")


def inject_all(
    folder: Path,
    name: str,
    *,
    faults: tuple[str, ...] = FAULTS,
    sample: int | None = None,
    seed: int = 1,
    mutant: str = "",
) -> dict[str, float]:
    """Every fault at every call of one operation, or at a sample; raises Violation at the first broken promise."""
    target = Target(folder, name, mutant)
    calls = target.calls()
    todo = [(call, fault) for call in calls for fault in faults]
    if sample is not None and sample < len(todo):
        # Spread over the operation: its last calls (syncs, commits) matter as much as its many first ones.
        draw = random.Random(f"{name} {seed}")
        width = len(calls) / sample
        places = [int((n + draw.random()) * width) for n in range(sample)]
        todo = [(calls[place], faults[n % len(faults)]) for n, place in enumerate(places)]
    numbers = {"calls": float(len(calls)), "injected": float(len(todo)), "killed": 0.0, "refused": 0.0, "overcome": 0.0}
    for call, fault in todo:
        numbers[target.inject(call, fault)] += 1
    return numbers


def torture(minutes: float, folder: Path) -> dict[str, float]:
    total: dict[str, float] = {}
    end = time.monotonic() + minutes * 60
    for turn in range(10**6):
        for name in OPERATIONS:
            if turn and time.monotonic() > end:
                return total  # every call once, however long that takes
            for key, value in inject_all(folder / f"{turn} {name}", name).items():
                total[key] = total.get(key, 0) + value
            shutil.rmtree(folder / f"{turn} {name}")
    return total
