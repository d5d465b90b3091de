"""Every mutating system call of an operation: the process killed at it, and the call failed, once each (I1, I9)."""

from __future__ import annotations

import importlib
import os
import pickle
import random
import shutil
import socket
import struct
import subprocess
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import kedge
import kedge.store.local

from .built_operations import OPERATIONS
from .children import Child, Report, describe, preload
from .ledger import Ledger, Violation
from .operations import carry_out, close_all, fill, open_place, opened, put, url_of
from .tracing import MUTATING, Call, attached, detach, mutating_calls

FAULTS = ("KILL", "EIO", "ENOSPC")


def _reporter(connection: Connection) -> Report:
    """As the one that is given, but without write(2), which is what may fail in any thread."""
    lock = threading.Lock()
    handle = socket.socket(fileno=os.dup(connection.fileno()))

    def report(*message: object) -> None:
        content = pickle.dumps((time.monotonic(), message))
        with lock:
            handle.sendall(struct.pack("!i", len(content)) + content)

    return report


def operate(_: Report, connection: Connection, name: str, place: Path) -> None:
    """A child that does one operation under the eyes of strace, and again, unobserved, if it failed."""
    report = _reporter(connection)
    kedge.store.local.WORKERS = 1  # every thread's calls come in the same order each time
    operation = OPERATIONS[name]
    for module in operation.modules:
        importlib.import_module(module)
    url_of(place)
    if operation.is_open:
        opened(place).stats()
    for _attempt in range(2):
        report("ready")
        connection.recv()
        try:
            carry_out(operation, place, report)
        except BaseException as error:
            report("failed", describe(error))
        else:
            report("done")
            connection.recv()
            break
    close_all()
    report("closed")


# --- injecting ---


class Target:
    """One operation on copies of one place."""

    def __init__(self, folder: Path, name: str, mutant: str = "") -> None:
        self.name = name
        self.operation = OPERATIONS[name]
        self.mutant = mutant
        self.folder = folder
        self.template = folder / "template"
        self.ledger = Ledger()
        self.count = 0
        folder.mkdir(parents=True)
        fill(self.operation, self.template, self.ledger)

    def _copy(self) -> tuple[Path, Ledger]:
        self.count += 1
        place = self.folder / f"{self.count}"
        subprocess.run(["cp", "-a", self.template, place], check=True)  # fifos and all
        before = self.ledger
        return place, Ledger(dict(before.saved), set(before.deleting), set(before.deleted))

    def calls(self) -> list[Call]:
        """What the operation does to the place's files when nothing goes wrong."""
        place, ledger = self._copy()
        log = self.folder / "log"
        child = Child(operate, self.name, place, ledger=ledger, mutant=self.mutant)
        child.wait_for("ready")
        with attached(child.pid, log, "-y", "-s", "0", "-e", f"trace={','.join(MUTATING)}"):
            child.tell("go")
            while (message := child.receive()) is not None and message[0] not in ("done", "failed"):
                pass
        child.tell("end")
        if ledger.failures or child.drain() != 0:
            raise Violation(f"{self.name} failed without a fault: {ledger.failures}")
        self.operation.finish(place)
        self._check(place, ledger)
        return mutating_calls(log, str(place))

    def inject(self, call: Call, fault: str) -> str:
        """Run once with this fault; answers how it ended: killed, refused, or overcome."""
        place, ledger = self._copy()
        child = Child(operate, self.name, place, ledger=ledger, mutant=self.mutant)
        child.wait_for("ready")
        try:
            ended = self._strike(child, call, fault)
            raw = [text for text in ledger.failures if "UNTYPED" in text or "WITHOUT HINT" in text]
            if raw or len(ledger.failures) > 1:
                raise Violation(f"errors: {ledger.failures}")
            if (code := child.drain()) != (-9 if ended == "killed" else 0):
                raise Violation(f"the child ended with {code}")
            if ended == "killed":
                self._do_again(place, ledger)
            self.operation.finish(place)
            self._check(place, ledger)
        except (Violation, AssertionError, OSError, kedge.CheckpointError) as error:
            raise Violation(f"{self.name}, {fault} at {call}: {type(error).__name__} {error}\n  {call.text}") from error
        finally:
            if not child.is_ended:
                child.kill()
        shutil.rmtree(place, ignore_errors=True)
        return ended

    def _strike(self, child: Child, call: Call, fault: str) -> str:
        ended = "killed"
        how = "signal=KILL" if fault == "KILL" else f"error={fault}"
        option = f"inject={call.name}:{how}:when={call.number}"
        with attached(child.pid, self.folder / "log", "-e", f"trace={call.name}", "-e", option) as tracer:
            child.tell("go")
            while (message := child.receive()) is not None:
                if message[0] == "failed" and ended == "refused":
                    raise Violation(f"refused again, without a fault: {message[1]}")
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
        return ended

    def _do_again(self, place: Path, ledger: Ledger) -> None:
        """What a user does after a kill. Before it, the store has all it acknowledged, and nothing is half there."""
        if self.operation.opens:
            with open_place(place) as store:
                self._judge(store, ledger)
            self.operation.check(place)
        try:
            carry_out(self.operation, place, lambda *message: ledger.note(message))
        finally:
            close_all()

    def _check(self, place: Path, ledger: Ledger) -> None:
        """The store opens, has all it acknowledged, and goes on working."""
        with open_place(place) as store:
            put(store, lambda *message: ledger.note(message), "after", "packed", 5)
            store.gc()
            self._judge(store, ledger)
        self.operation.check(place)

    def _judge(self, store: kedge.CheckpointManager, ledger: Ledger) -> None:
        if self.operation.is_judged:
            ledger.check(store)


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
        ended = target.inject(call, fault)
        if (fault, ended) == ("KILL", "overcome"):  # on a busy machine it is not always made: nobody overcomes a kill
            ended = target.inject(call, fault)
        numbers[ended] += 1
    return numbers


def torture(minutes: float, folder: Path) -> dict[str, float]:
    preload("kedge.integrations.langgraph", "langgraph.checkpoint.base")
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
