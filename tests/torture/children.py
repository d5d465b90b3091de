"""Processes that use a store until they are stopped, and tell what was acknowledged to them.

They are forked from a server that has imported everything, so that one starts in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import kedge

from . import mutants
from .ledger import Ledger, Violation, about
from .states import make

_context = multiprocessing.get_context("forkserver")
_PRELOAD = "tests.torture.preload"
_context.set_forkserver_preload([_PRELOAD])

Report = Callable[..., None]


def preload(*modules: str) -> None:
    """What else the server imports, if it has not started yet."""
    _context.set_forkserver_preload([_PRELOAD, *modules])


class Notes(Protocol):
    """Takes in what a child says, and when."""

    def note(self, message: tuple[Any, ...], moment: float = 0) -> None: ...


class Child:
    """A process that runs `work(report, connection, *args)`. What it reports goes to the ledger."""

    def __init__(self, work: Callable[..., None], *args: object, mutant: str = "", ledger: Notes | None = None):
        self.ledger: Notes = Ledger() if ledger is None else ledger
        self.connection, theirs = _context.Pipe()
        self.process = _context.Process(target=_run, args=(theirs, mutant, work, args), daemon=True)
        self.process.start()
        theirs.close()
        self.is_ended = False

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def pump(self, seconds: float) -> None:
        """Take in what the child says for this long, or until it has ended."""
        until = time.monotonic() + seconds
        while not self.is_ended:
            left = until - time.monotonic()
            if not self.connection.poll(max(left, 0)):
                return
            self.receive()
            if left <= 0:
                return

    def receive(self) -> tuple[Any, ...] | None:
        """One message, noted; None when the child has ended."""
        try:
            moment, message = self.connection.recv()
        except (EOFError, OSError):  # a message that a kill cut off was not said
            self.is_ended = True
            return None
        self.ledger.note(message, moment)
        return message

    def wait_for(self, what: str, seconds: float = 60) -> tuple[Any, ...]:
        """Go on taking in messages until one of this kind comes; raises Violation if the child says that it failed."""
        until = time.monotonic() + seconds
        failed = ""
        while self.connection.poll(max(until - time.monotonic(), 0)):
            message = self.receive()
            if message is None and failed:
                raise Violation(f"the child failed before {what!r}: {failed}")
            if message is None:
                raise AssertionError(f"the child ended (exit code {self.exit_code()}) without {what!r}")
            if message[0] == what:
                return message
            if message[0] == "failed":
                failed = str(message[1])
        raise AssertionError(f"no {what!r} within {seconds} s")

    def tell(self, *message: object) -> None:
        """Say something to the child; one that has ended already has said why, and `drain` tells."""
        with suppress(BrokenPipeError):
            self.connection.send(message)

    def kill(self) -> None:
        """SIGKILL, then everything it still had said."""
        self.process.kill()
        self.drain()

    def drain(self) -> int | None:
        """Take in the rest, until the process is gone; answers its exit code."""
        while not self.is_ended:
            self.receive()
        code = self.exit_code()
        self.connection.close()
        return code

    def exit_code(self) -> int | None:
        self.process.join(60)
        return self.process.exitcode


def pump(children: Iterable[Child], seconds: float) -> None:
    """Take in what several children say."""
    from multiprocessing.connection import wait

    until = time.monotonic() + seconds
    alive = {child.connection: child for child in children if not child.is_ended}
    while alive and (left := until - time.monotonic()) > 0:
        for ready in wait(list(alive), left):
            child = alive[ready]  # type: ignore[index]
            child.receive()
            if child.is_ended:
                del alive[ready]  # type: ignore[arg-type]


def _run(connection: Connection, mutant: str, work: Callable[..., None], args: tuple[object, ...]) -> None:
    lock = threading.Lock()

    def report(*message: object) -> None:
        moment = time.monotonic()  # one clock for all processes
        with lock:  # one write(2) of less than a pipe takes at once: a kill leaves all of it or nothing
            connection.send((moment, message))

    warnings.simplefilter("ignore")  # what a dying disk does to retention is not what we look for
    with mutants.applied(mutant):
        try:
            work(report, connection, *args)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(3)  # the test has ended before us
        except Exception as error:
            report("failed", describe(error))
            os._exit(4)


def describe(error: BaseException) -> str:
    """An error as a line of a report; one that is not ours says so, and where it comes from."""
    if not isinstance(error, kedge.CheckpointError):
        way = " > ".join(f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-6:])
        return f"UNTYPED {type(error).__name__}: {error} ({way})"
    return f"{type(error).__name__}: {error}" + ("" if error.hint else " (WITHOUT HINT)")


# --- what children do ---


def save_and_delete(
    report: Report,
    _: Connection,
    place: str,
    seed: int,
    threads: int,
    kinds: tuple[str, ...],
    keep: int,
    limit: int | None = None,
) -> None:
    """Several threads save states of all kinds, at once and in the background, and delete their older ones.

    Each owns a job and all write to a common one. Ends after `limit` saves of each thread, or never.
    """
    store = kedge.open(place)
    report("ready")

    def run(thread: int) -> None:
        draw = random.Random(f"{seed} {thread}")
        mine = f"job-{thread}"
        history: list[str] | None = None
        count = 0
        while limit is None or count < limit:
            count += 1
            kind, number = draw.choice(kinds), draw.randrange(10**9)
            job = mine if draw.random() < 0.8 else "common"
            try:
                if history is None:
                    history = [c.id for c in store.list(mine)]
                state = make(kind, number)
                if draw.random() < 0.2:
                    saved = store.save_async(job, "later", state, metadata=about(kind, number)).result()
                else:
                    saved = store.save(job, "now", state, metadata=about(kind, number))
                report("saved", saved, job, kind, number)
                if job == mine:
                    history.append(saved)
                    while len(history) > keep:
                        victim = history.pop(draw.randrange(len(history)))
                        report("deleting", victim)
                        store.delete(mine, victim)
                        report("deleted", victim)
                elif draw.random() < 0.2:
                    for old in store.list("common")[: -2 * keep]:
                        report("deleting", old.id)
                        store.delete("common", old.id)
            except Exception as error:
                report("failed", describe(error))
                return

    workers = [threading.Thread(target=run, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    store.close()


def collect(report: Report, connection: Connection, place: str, limit: int | None = None) -> None:
    """gc again and again, until told to end or `limit` times."""
    store = kedge.open(place)
    report("ready")
    count = 0
    while (limit is None or count < limit) and not connection.poll(0):
        count += 1
        try:
            done = store.gc()
            report("gc", done.packs_removed, done.packs_rewritten, done.chunks_removed)
            if done.damaged:
                report("failed", f"gc found damaged packs {done.damaged}")
        except Exception as error:
            report("failed", describe(error))
            return
    store.close()
