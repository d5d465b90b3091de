"""What one process does to a store while its system calls are traced: everything the store can do, drawn by a seed."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import kedge
import kedge.store.local
from kedge.blobs.reserve import Reserve
from kedge.care.repair import repair
from kedge.care.repair_files import refile
from kedge.crypto import parse_master
from kedge.store.local import LocalStore

from .children import Report, describe
from .ledger import about
from .states import make

PLACE = "deep/store"  # its parent is new too
JOBS = ("job", "other")
_KINDS = ("small", "small", "inline", "shared", "packed")


def key_of(number: int) -> bytes:
    """The master keys of an encrypted life, in the order of their use."""
    return bytes([number + 1]) * 32


@dataclass(frozen=True)
class Life:
    form: str  # dir or files; +key: encrypted
    steps: tuple[str, ...]
    key: int = -1  # which master key it begins with
    seed: int = 0

    def url(self, root: Path) -> str:
        return f"{self.form.partition('+')[0].replace('dir', 'file')}:{root / PLACE}"


def draw_life(seed: int) -> Life:
    """Another one for each seed."""
    draw = random.Random(f"life {seed}")
    form = draw.choices(("dir", "dir+key", "files", "files+key"), (6, 2, 2, 1))[0]
    return Life(form, draw_steps(draw, form), 0 if "+key" in form else -1, seed)


def draw_steps(draw: random.Random, form: str) -> tuple[str, ...]:
    names = [name for name in _WEIGHTS if _is_possible(name, form)]
    weights = [_WEIGHTS[name] for name in names]
    first = draw.choice(("save small", "save packed", "burst"))
    return (first, *draw.choices(names, weights, k=draw.randint(3, 9)))


def _is_possible(name: str, form: str) -> bool:
    return not (name in ("rekey", "rewrite") and "+key" not in form)


def live(report: Report, connection: Connection, root: str, life: Life) -> None:
    """A child that does these steps on one store below `root`."""
    kedge.store.local.WORKERS = 2
    report("ready")
    connection.recv()
    living = _Living(report, life, Path(root))
    living.run()
    report("done")
    connection.recv()


class _Living:
    def __init__(self, report: Report, life: Life, root: Path) -> None:
        self.report, self.life, self.root = report, life, root
        self.draw = random.Random(f"steps {life.seed}")
        self.key = life.key
        self.seed = life.seed % 10**6 * 1000
        self._store: kedge.CheckpointManager | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            for step in self.life.steps:
                what, _, kind = step.partition(" ")
                _ACTIONS[what](self, kind)
            self.close()
        except Exception as error:
            self.report("failed", describe(error))

    @property
    def store(self) -> kedge.CheckpointManager:
        if self._store is None:
            key = key_of(self.key) if self.key >= 0 else None
            self._store = kedge.open(self.life.url(self.root), key=key)
            self.report("created")
            if key is not None:
                self.report("rekeyed", self.key)
        return self._store

    def create(self, _: str) -> None:
        self.store.stats()

    def close(self, _: str = "") -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def next(self, kind: str = "") -> tuple[str, int]:
        with self._lock:
            self.seed += 1
            return kind or self.draw.choice(_KINDS), self.seed

    def job(self) -> str:
        return self.draw.choice(JOBS)

    def save(self, kind: str, job: str = "", lease: kedge.Lease | None = None) -> None:
        store, job = self.store, job or ("job" if kind else self.job())
        kind, seed = self.next(kind)
        saved = store.save(job, "traced", make(kind, seed), metadata=about(kind, seed), lease=lease)
        self.report("saved", saved, job, kind, seed)

    def burst(self, _: str) -> None:
        """Several threads at once, which share commits."""
        store, errors = self.store, list[BaseException]()

        def work(job: str) -> None:
            try:
                self.save("", job)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(self.job(),)) for _ in range(self.draw.randint(2, 4))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert self._store is store
        for error in errors:
            raise error

    def later(self, _: str) -> None:
        """In the background."""
        pending = []
        for _ in range(2):
            job, (kind, seed) = self.job(), self.next()
            pending.append(
                (self.store.save_async(job, "later", make(kind, seed), metadata=about(kind, seed)), job, kind, seed)
            )
        for save, *about_it in pending:
            self.report("saved", save.result(), *about_it)

    def many(self, _: str) -> None:
        """A copy of a job under another name: many checkpoints, whose chunks are shared."""
        job = self.job()
        if not self.store.list(job, limit=1):
            return
        for copy in self.store.copy(job, f"copy-{self.next()[1]}"):
            self._copied(copy)

    def branch(self, _: str) -> None:
        if chosen := self.one():
            made, _state = self.store.resume_from(chosen.id)
            self._copied(made)

    def _copied(self, copy: kedge.Checkpoint) -> None:
        self.report("saved", copy.id, copy.job, str(copy.metadata["kind"]), int(str(copy.metadata["seed"])))

    def one(self, kind: str = "") -> kedge.Checkpoint | None:
        jobs = ["job"] if kind else [job.name for job in self.store.jobs()]
        found = [c for job in jobs for c in self.store.list(job) if kind in ("", c.metadata["kind"])]
        return self.draw.choice(found) if found and not kind else found[0] if found else None

    def delete(self, kind: str) -> None:
        if victim := self.one(kind):
            self._gone([victim], lambda: self.store.delete(victim.job, victim.id))

    def _gone(self, victims: list[kedge.Checkpoint], action: Callable[[], object]) -> None:
        for victim in victims:
            self.report("deleting", victim.id)
        action()
        for victim in victims:
            self.report("deleted", victim.id)

    def drop(self, _: str) -> None:
        job = self.job()
        self._gone(list(self.store.list(job)), lambda: self.store.delete_job(job))

    def retain(self, _: str) -> None:
        job, keep = self.job(), self.draw.randint(1, 3)
        self._gone(list(self.store.list(job))[:-keep], lambda: self.store.cleanup(job, keep_last=keep))

    def tag(self, _: str) -> None:
        if chosen := self.one():
            self.report("tagging", chosen.id)
            value = f"t{self.next()[1]}"
            self.store.tag(chosen.id, note=value)
            self.report("tagged", chosen.id, value)

    def lease(self, _: str) -> None:
        with self.store.lease("leased", ttl_s=600) as lease:
            self.save("", "leased", lease)

    def gc(self, _: str) -> None:
        done = self.store.gc()
        self.report("gc", done.packs_removed, done.packs_rewritten)

    def record(self, _: str) -> None:
        """Small states to packs."""
        assert isinstance(self.store.store, LocalStore)
        if self.store.store.backlog is not None:
            self.store.store.backlog.copy()

    def rebuild(self, _: str) -> None:
        """What is deleted may come back from the packs where no event tells of it: not here."""
        self.record("")
        self.store.rebuild()

    def repair(self, _: str) -> None:
        """A new index in the place of a sound one."""
        if not (self.root / PLACE).exists():
            return
        self.record("")
        self.close()
        master = parse_master(key_of(self.key)) if self.key >= 0 else None
        again = refile if self.life.form.startswith("files") else repair
        again(self.root / PLACE, actor="life", master=master)

    def rekey(self, _: str) -> None:
        store = self.store  # opened by the old key, and said to be
        self.report("rekeying", self.key + 1)
        store.rekey(key_of(self.key + 1))
        self.key += 1
        self.report("rekeyed", self.key)

    def rewrite(self, _: str) -> None:
        self.store.rekey(rewrite=True)

    def reserve(self, _: str) -> None:
        """As on a full disk: what was kept for it is used, and filled up again."""
        if self.life.form.startswith("dir") and self._store is not None:
            Reserve(self.root / PLACE).release()
            self.save("small")


_ACTIONS: dict[str, Callable[[_Living, str], None]] = {
    "create": _Living.create,
    "save": _Living.save,
    "burst": _Living.burst,
    "later": _Living.later,
    "many": _Living.many,
    "branch": _Living.branch,
    "delete": _Living.delete,
    "drop": _Living.drop,
    "retain": _Living.retain,
    "tag": _Living.tag,
    "lease": _Living.lease,
    "gc": _Living.gc,
    "record": _Living.record,
    "rebuild": _Living.rebuild,
    "repair": _Living.repair,
    "rekey": _Living.rekey,
    "rewrite": _Living.rewrite,
    "reserve": _Living.reserve,
    "close": _Living.close,
}

_WEIGHTS: dict[str, float] = {
    "save small": 3,
    "save inline": 1.5,
    "save shared": 2.5,
    "save packed": 2,
    "save arrays": 0.2,
    "burst": 2,
    "later": 1.5,
    "many": 0.6,
    "branch": 0.7,
    "delete": 3,
    "drop": 0.5,
    "retain": 1,
    "tag": 1,
    "lease": 0.7,
    "gc": 2.5,
    "record": 1,
    "rebuild": 0.4,
    "repair": 0.7,
    "rekey": 1.5,
    "rewrite": 1,
    "reserve": 0.4,
    "close": 2,
}
