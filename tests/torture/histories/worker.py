"""A process that does random operations on a store until it is told to end, or killed."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import kedge
from tests.torture.children import Report

from . import values
from .history import Seen

_PAUSE_S = 0.05  # before the next operation, when a server is down
_CLOSINGS = 20  # a store whose server is down just now is closed again


@dataclass(frozen=True, slots=True)
class Access:
    """How a store is reached."""

    url: str
    target: str  # where copies go
    scratch: str
    keys: str = ""  # a file with every master key the store ever had or was to get, newest last; "" for a plain store
    environment: tuple[tuple[str, str], ...] = ()
    is_remote: bool = False
    owns_jobs: bool = False  # no job is shared between workers: memory:DIR
    changes_master: bool = False
    keeps_files: bool = True
    without: frozenset[str] = frozenset()  # operations to leave out

    def open(self) -> kedge.CheckpointManager:
        """Open with the key the store has now: whoever changes it writes the new one down first."""
        if not self.keys or self.is_remote:
            return kedge.open(self.url)
        for attempt in range(20):
            for key in reversed(read_keys(self.keys)):
                try:
                    return kedge.open(self.url, key=key)
                except kedge.Validation:
                    if attempt == 19:
                        raise
        raise AssertionError("unreachable")

    def open_target(self) -> kedge.CheckpointManager:
        return kedge.open(self.target)


def read_keys(path: str) -> list[bytes]:
    return [bytes.fromhex(line) for line in Path(path).read_text().split()]


def add_key(path: str, key: bytes) -> None:
    with open(path, "a") as file:
        file.write(key.hex() + "\n")
        file.flush()
        os.fsync(file.fileno())


class Worker:
    """What operations need: the open store, chance, and somebody to tell."""

    def __init__(self, report: Report, access: Access, name: str, slot: int, seed: str, scratch: Path) -> None:
        self._theme = seed
        self.access = access
        self.name = name
        self.slot = slot
        self.draw = random.Random(f"{seed} {name}")
        self.scratch = scratch
        self.store: kedge.CheckpointManager
        self.is_open = False
        self.is_stale = False  # the store has another master key now
        self._report = report
        self._count = 0

    def emphasis(self, name: str) -> float:
        """The workers of a history do some things often and others never: what is rare meets itself that way."""
        return random.Random(f"{self._theme} {name}").choice((0.0, 1.0, 1.0, 6.0) if name != "save_any" else (1.0, 2.0))

    def begin(self, name: str, **args: Any) -> int:
        self._count += 1
        self._report("begin", self._count, name, args)
        return self._count

    def end(self, number: int, **result: Any) -> None:
        self._report("end", number, result)

    def refused(self, number: int, error: Exception) -> None:
        if isinstance(error, kedge.StorageError):
            time.sleep(_PAUSE_S)  # sleep: between two looks at what the controller says
        self.is_stale |= isinstance(error, kedge.Validation)
        if isinstance(error, kedge.CheckpointError):
            self._report("error", number, type(error).__name__, str(error))
        else:
            text = "".join(traceback.format_exception(error)[-6:])
            self._report("error", number, f"UNTYPED {type(error).__name__}", text)

    def do(self, name: str, call: Callable[[], dict[str, Any]], **args: Any) -> dict[str, Any] | None:
        """Say what is about to be asked, ask it, say what was answered; None when it was refused."""
        number = self.begin(name, **args)
        try:
            result = call()
        except Exception as error:
            self.refused(number, error)
            return None
        self.end(number, **result)
        return result

    def failed(self, text: str) -> None:
        self._report("failed", text)

    def seen(self, checkpoint: kedge.Checkpoint) -> Seen:
        return values.seen(checkpoint, is_encrypted=bool(self.access.keys))

    def open(self) -> None:
        def call() -> dict[str, Any]:
            self.store = self.access.open()
            return {}

        self.is_open, self.is_stale = self.do("open", call) is not None, False

    def close(self) -> None:
        """One that fails may be tried again."""

        def call() -> dict[str, Any]:
            self.store.close()
            return {}

        self.is_open = self.do("close", call) is None


def work(
    report: Report, connection: Connection, access: Access, name: str, slot: int, seed: str, limit: int | None = None
) -> None:
    """Operations until something is said to us, or `limit` of them; the store is closed and opened now and then."""
    from .operations import choose

    os.environ.update(dict(access.environment))
    scratch = Path(tempfile.mkdtemp(dir=access.scratch))
    worker = Worker(report, access, name, slot, seed, scratch)

    def warned(message: Warning | str, *_: object, **__: object) -> None:
        if "retention of job" not in str(message):  # that one is tried again with the next save
            worker.failed(f"warning: {message}")

    warnings.simplefilter("always")
    warnings.showwarning = warned
    try:
        count = 0
        while not connection.poll(0) and (limit is None or count < limit):
            if not worker.is_open:
                worker.open()
                continue
            choose(worker)
            count += 1
            if worker.is_stale or worker.draw.random() < (0.1 if access.owns_jobs else 0.02):
                worker.close()
        for _ in range(_CLOSINGS):
            if worker.is_open:
                worker.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
