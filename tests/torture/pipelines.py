"""Random pipelines × random kill points: every completed step was executed once, and the result is that of no kill.

A case is a tree of stages, steps with substeps, maps, and failures, drawn from its seed. Its sessions are killed at a
durable write, before or after it, until the last one is left in peace. Two ways to die:

    in this process   the port to the index raises at that write and at every later one: nothing of the session can
                      become durable any more, as after a kill. Thousands of cases.
    for real          a process of its own sends itself SIGKILL at that write; maps use processes too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kedge
from kedge import CheckpointManager, Retry
from kedge.index.sqlite.index import SqliteIndex
from kedge.pipeline.history import find_run
from kedge.pipeline.keys import digest_of
from kedge.store.local import LocalStore

AT_ONCE = Retry(times=6, delay_s=0)


class Killed(BaseException):
    """The session is dead."""


class Violation(AssertionError):
    """A promise was broken."""


# --- the pipeline ---


@dataclass(frozen=True)
class Node:
    """A stage, a step (with steps inside it), a map, or a saga: a step that fails once and is compensated."""

    kind: str
    name: str
    inside: tuple[Node, ...] = ()
    items: tuple[int, ...] = ()
    failures: int = 0  # how often it fails before it does not
    is_retried: bool = True  # else the failure ends the session
    workers: int = 1


def draw_nodes(draw: random.Random, depth: int = 0, prefix: str = "n") -> tuple[Node, ...]:
    nodes = []
    for number in range(draw.randint(1, 4 if depth == 0 else 2)):
        name = f"{prefix}{number}"
        kinds = ["step", "step", "map", "saga"] + (["stage"] if depth < 2 and "s" not in prefix else [])
        kind = draw.choice(kinds)
        failures = draw.choice((0, 0, 0, 1, 2))
        is_retried = draw.random() < 0.7
        if kind == "map":
            items = tuple(draw.choices(range(20), k=draw.randint(0, 6)))
            nodes.append(Node(kind, name, (), items, failures, is_retried, draw.randint(1, 2)))
        elif kind == "saga":
            nodes.append(Node(kind, name))
        elif kind == "stage":
            nodes.append(Node(kind, name, draw_nodes(draw, depth + 1, "g")))
        else:
            inside = draw_nodes(draw, depth + 1, "s") if depth < 2 and draw.random() < 0.4 else ()
            nodes.append(Node(kind, name, inside, (), failures, is_retried))
    return tuple(nodes)


def expected(nodes: Sequence[Node], seed: Any) -> Any:
    """What the pipeline gives when nothing happens to it."""
    value = seed
    for node in nodes:
        if node.kind == "stage":
            value = expected(node.inside, value)
        elif node.kind == "saga":
            value = (node.name, value)
        elif node.kind == "map":
            value = (node.name, value, [item * item for item in node.items])
        else:
            value = (node.name, value, expected(node.inside, 0))
    return value


Note = Callable[[str], int]  # an execution begins; answers how many of the same there were before


def perform(run: Any, nodes: Sequence[Node], seed: Any, note: Note, path: str = "", executor: str = "thread") -> Any:
    value = seed
    for node in nodes:
        here = f"{path}/{node.name}".strip("/")
        retries = AT_ONCE if node.is_retried else 0
        if node.kind == "stage":
            with run.stage(node.name):
                value = perform(run, node.inside, value, note, here, executor)
        elif node.kind == "saga":
            _saga(run, node.name, here, note)
            value = (node.name, value)
        elif node.kind == "map":
            work = ItemWork(note, here, node.failures)
            square = run.map(work, node.items, name=node.name, workers=node.workers, retries=retries, executor=executor)
            value = (node.name, value, square)
        else:
            value = run.step(node.name, _work_of(run, node, note, here, executor), value, retries=retries)
    return value


def _saga(run: Any, name: str, path: str, note: Note) -> None:
    """A charge that fails the first time: what follows it is undone, or shipped, never both."""

    def charge() -> None:
        if note(f"{path}:charge") == 0:
            raise OSError(f"{path} fails")

    try:
        run.step(f"{name} charge", charge)
    except OSError:
        run.step(f"{name} undo", lambda: note(f"{path}:undo"))
    else:
        run.step(f"{name} ship", lambda: note(f"{path}:ship"))


def _work_of(run: Any, node: Node, note: Note, path: str, executor: str) -> Callable[[Any], Any]:
    def work(value: Any) -> Any:
        before = note(path)
        inside = perform(run, node.inside, 0, note, path, executor)
        if before < node.failures:
            raise OSError(f"{path} fails")
        return (node.name, value, inside)

    return work


@dataclass(frozen=True)
class ItemWork:
    """The function of a map; picklable when `note` is."""

    note: Note
    path: str
    failures: int

    def __call__(self, item: int) -> int:
        if self.note(f"{self.path}#{item}") < (self.failures if item % 3 == 0 else 0):
            raise OSError(f"{self.path}#{item} fails")
        return item * item


def names_of_items(nodes: Sequence[Node], path: str = "") -> dict[tuple[str, str], str]:
    """(map, digest) → the name its executions are noted under, for items that are there once."""
    names: dict[tuple[str, str], str] = {}
    for node in nodes:
        here = f"{path}/{node.name}".strip("/")
        names |= names_of_items(node.inside, here)
        for item in node.items:
            if node.items.count(item) == 1:
                names[here, digest_of(item, "")[:16].hex()] = f"{here}#{item}"
    return names


# --- dying in this process ---


@dataclass
class World:
    """What survives a kill besides the store: who was executed how often, and what is durable."""

    names: dict[tuple[str, str], str]
    executions: dict[str, int] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def complete(self, metadata: dict[str, Any]) -> None:
        path = "/".join(metadata.get("path", ()))
        if metadata.get("kind") == "step":
            self.completed.add(path)
        elif metadata.get("kind") == "items":
            keys = metadata["keys"]
            for at in range(0, len(keys), 32):
                if name := self.names.get((path, keys[at : at + 32])):
                    self.completed.add(name)


class MortalIndex:
    """A port to the index that dies at its n-th durable write, before or after it, and stays dead."""

    def __init__(self, index: SqliteIndex, world: World, dies_at: int | None, dies_before: bool) -> None:
        self._index = index
        self._world = world
        self._dies_at = dies_at
        self._dies_before = dies_before
        self._writes = 0
        self.is_dead = False
        self.lease: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def commit(self, records: Any, *, actor: str) -> Any:
        return self._write(records, lambda: self._index.commit(records, actor=actor))

    def commit_each(self, records: Any) -> Any:
        return self._write([record for record, _ in records], lambda: self._index.commit_each(records))

    def _write(self, records: Any, write: Callable[[], Any]) -> Any:
        with self._world.lock:
            is_last = self._count()
            if is_last and self._dies_before:
                self._die()
            saved = write()
            for record in records:
                self._world.complete(json.loads(record.metadata_json))
                if record.provided is not None:
                    self.lease = record.provided.takes or self.lease
            if is_last:
                self._die()
            return saved

    def acquire_lease(self, *args: Any) -> Any:
        self._count()
        self.lease = self._index.acquire_lease(*args)
        return self.lease

    def release_lease(self, lease: Any) -> None:
        self._count()
        self._index.release_lease(lease)

    def note(self, name: str) -> int:
        with self._world.lock:
            if self.is_dead:
                raise Killed
            if name in self._world.completed:
                raise Violation(f"{name} is completed and was executed again")
            saga, _, part = name.partition(":")
            if part in ("charge", "ship") and f"{saga}:undo" in self._world.executions:
                raise Violation(f"{saga} was undone, and then: {part}")
            before = self._world.executions.get(name, 0)
            self._world.executions[name] = before + 1
            return before

    def _count(self) -> bool:
        if self.is_dead:
            raise Killed
        self._writes += 1
        return self._writes == self._dies_at

    def _die(self) -> None:
        self.is_dead = True
        raise Killed


def case_in_process(seed: object) -> int:
    """One random pipeline until it is through; answers how often it was killed."""
    draw = random.Random(f"pipeline {seed}")
    nodes = draw_nodes(draw)
    world = World(names_of_items(nodes))
    with kedge.open("memory:") as keeper:
        index, blobs = keeper.store.index, keeper.store.blobs
        kills, to_kill, sessions = 0, draw.randint(1, 6), 0
        while True:
            sessions += 1
            if sessions > 100:
                raise Violation(f"seed {seed}: no end")
            dies_at = draw.randint(1, 10) if kills < to_kill else None
            mortal = MortalIndex(index, world, dies_at, draw.random() < 0.5)  # type: ignore[arg-type]
            manager = CheckpointManager("memory:")
            manager.store = LocalStore(mortal, blobs)  # type: ignore[arg-type]
            try:
                with kedge.run("r", store=manager, signals=False) as run:
                    result = perform(run, nodes, "in", mortal.note)
            except Killed:
                kills += 1
                if mortal.lease is not None:
                    index.release_lease(mortal.lease)  # what the next owner does when it finds this one gone
                continue
            except OSError:
                continue  # it failed and is resumed
            except Violation as violation:
                raise Violation(f"seed {seed}: {violation}") from None
            if result != expected(nodes, "in"):
                raise Violation(f"seed {seed}: {result!r} instead of {expected(nodes, 'in')!r}")
            if find_run(keeper, "r").status != "completed":
                raise Violation(f"seed {seed}: {find_run(keeper, 'r')}")
            return kills


# --- dying for real ---


@dataclass(frozen=True)
class FileNote:
    """Executions as lines of a file, from any process."""

    file: str

    def __call__(self, name: str) -> int:
        with open(self.file, "a+") as log:
            log.seek(0)
            before = log.read().split("\n").count(name)
            log.write(f"{name}\n")
        return before


def session(folder: str, seed: str, dies_at: int) -> None:
    """In a child: one session that kills its own process at a durable write."""
    nodes = draw_nodes(random.Random(f"real {seed}"))
    with kedge.open(f"{folder}/store") as store:
        index = store.store.index
        commit, writes = index.commit, 0

        def deadly(records: Any, *, actor: str) -> Any:
            nonlocal writes
            writes += 1
            if writes == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            saved = commit(records, actor=actor)
            if writes == -dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return saved

        index.commit = deadly  # type: ignore[method-assign]
        with kedge.run("r", store=store) as run:
            result = perform(run, nodes, "in", FileNote(f"{folder}/log"), executor="process")
    if result != expected(nodes, "in"):
        sys.exit(99)


def case_for_real(seed: object, folder: Path) -> int:
    """One random pipeline in processes that die by SIGKILL; what was durable before a session is not executed in it."""
    draw = random.Random(f"kills {seed}")
    nodes = draw_nodes(random.Random(f"real {seed}"))
    world = World(names_of_items(nodes))
    log = folder / "log"
    kills, to_kill = 0, draw.randint(1, 4)
    for _ in range(100):
        before = log.read_text().split("\n") if log.exists() else [""]
        dies_at = draw.choice((-1, 1)) * draw.randint(1, 8) if kills < to_kill else 0
        code = f"from tests.torture.pipelines import session; session({str(folder)!r}, {str(seed)!r}, {dies_at})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
        again = [name for name in log.read_text().split("\n")[len(before) - 1 :] if name] if log.exists() else []
        if bad := world.completed & set(again):
            raise Violation(f"seed {seed}: completed and executed again: {bad}")
        if done.returncode == 0:
            return kills
        if done.returncode == -signal.SIGKILL:
            kills += 1
        elif "fails" not in done.stderr:
            raise Violation(f"seed {seed}: exit {done.returncode}: {done.stderr[-3000:]}")
        with kedge.open(folder / "store") as store:
            for checkpoint in store.list("r"):
                world.complete(dict(checkpoint.metadata))
    raise Violation(f"seed {seed}: no end")


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """At least 2,000 cases in this process, then real ones for the rest of the time."""
    start = time.monotonic()
    numbers = {"cases": 0, "kills": 0, "real cases": 0, "real kills": 0}
    while numbers["cases"] < 2000 or time.monotonic() - start < minutes * 30:
        numbers["kills"] += case_in_process(f"torture {numbers['cases']}")
        numbers["cases"] += 1
    while numbers["real cases"] < 10 or time.monotonic() - start < minutes * 60:
        place = folder / f"real-{numbers['real cases']}"
        place.mkdir()
        numbers["real kills"] += case_for_real(f"torture {numbers['real cases']}", place)
        numbers["real cases"] += 1
    return dict(numbers)
