"""Damage in every file of a store: a load answers exactly what was saved or a typed error, nothing else (I2)."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import kedge

from .children import Child, Report
from .ledger import Ledger, Violation, about
from .states import make, same

CONTENT = (("small", 1), ("packed", 2), ("inline", 3), ("tree", 4), ("small", 5), ("packed", 6), ("small", 47))


def fill(report: Report, _: Connection, place: str, leave_log: bool) -> None:
    """One half of the content in the database proper, the other in its log if wanted; then wait to be killed."""
    for is_last, part in ((False, CONTENT[:4]), (True, CONTENT[4:])):
        store = kedge.open(place)
        for kind, seed in part:
            tags = {"kind": kind}
            saved = store.save(
                f"job-{seed % 2}", f"step {seed}", make(kind, seed), metadata=about(kind, seed), tags=tags
            )
            report("saved", saved, f"job-{seed % 2}", kind, seed)
        if not (is_last and leave_log):
            store.close()
    report("filled")
    time.sleep(600)  # sleep: until it is killed


@dataclass(frozen=True)
class Damage:
    file: str
    offset: int
    how: str  # "bit N", "zero", "ones", "sector", "cut"

    def apply(self, place: Path) -> None:
        path = place / self.file
        data = bytearray(path.read_bytes())
        if self.how.startswith("bit"):
            data[self.offset] ^= 1 << int(self.how[4:])
        elif self.how == "zero":
            data[self.offset] = 0
        elif self.how == "ones":
            data[self.offset] = 255
        elif self.how == "sector":
            start = self.offset // 512 * 512
            data[start : start + 512] = bytes(len(data[start : start + 512]))
        elif self.how == "cut":
            del data[self.offset :]
        path.write_bytes(data)

    def __str__(self) -> str:
        return f"{self.how} at {self.offset} of {self.file}"


class Subject:
    """One undamaged store, and copies of it with one damage each."""

    def __init__(self, folder: Path, *, leave_log: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.template = folder / "template"
        self.ledger = Ledger()
        child = Child(fill, str(self.template), leave_log, ledger=self.ledger)
        child.wait_for("filled")
        child.kill()
        (self.template / "index.sqlite-shm").unlink(missing_ok=True)  # memory of processes, not of the disk
        self.sizes = {
            str(path.relative_to(self.template)): path.stat().st_size
            for path in sorted(self.template.rglob("*"))
            if path.is_file() and path.stat().st_size
        }
        self.known = {i: make(saved.kind, saved.seed) for i, saved in self.ledger.saved.items()}
        if self.examine(None) != "exact":
            raise AssertionError("the undamaged store is not as it should be")

    def examine(self, damage: Damage | None) -> str:
        """How a store with this damage behaves: exact, refused, or refused while verify finds nothing ("unfound").

        Raises Violation on a wrong value or an error that is not ours.
        """
        place = self.folder / "copy"
        shutil.copytree(self.template, place)
        try:
            if damage:
                damage.apply(place)
            return self._examine(place)
        except kedge.CheckpointError:
            raise
        except Exception as error:
            raise Violation(f"{damage}: {type(error).__name__}: {error}") from error
        finally:
            shutil.rmtree(place)

    def _examine(self, place: Path) -> str:
        try:
            store = kedge.open(place, create=False)
        except kedge.CheckpointError as error:
            _hinted(error)
            return "refused"
        with store:
            refused = False
            for checkpoint, expected in self.known.items():
                try:
                    state = store.load(checkpoint)
                except kedge.CheckpointError as error:
                    _hinted(error)
                    refused = True
                    continue
                if not same(state, expected):
                    raise Violation(f"{checkpoint} loads as something else")
            for job in ("job-0", "job-1"):
                try:
                    found = store.load_latest(job)
                    listed = store.list(job)
                except kedge.CheckpointError as error:
                    _hinted(error)
                    refused = True
                    continue
                if found is not None and not same(found[1], self.known.get(found[0].id)):
                    raise Violation(f"the latest of {job} is something else")
                refused = refused or len(listed) != sum(1 for s in self.ledger.saved.values() if s.job == job)
            try:
                is_ok = store.verify(deep=True).is_ok
            except kedge.CheckpointError as error:
                _hinted(error)
                is_ok = False
        if not refused:
            return "exact" if is_ok else "found early"
        return "unfound" if is_ok else "refused"


def _hinted(error: kedge.CheckpointError) -> None:
    if not error.hint or not error.message:
        raise Violation(f"no hint: {type(error).__name__}: {error}")


def every(sizes: dict[str, int], stride: int, seed: int) -> Iterator[Damage]:
    """A bit in every `stride`-th byte of every file, and in each header; some bytes, sectors and ends on the way."""
    draw = random.Random(f"flips {seed}")
    for file, size in sizes.items():
        start = draw.randrange(stride)
        for offset in sorted({*range(start, size, stride), *range(0, min(size, 100), max(1, stride // 64))}):
            yield Damage(file, offset, f"bit {draw.randrange(8)}")
            if draw.random() < 0.1:
                yield Damage(file, offset, draw.choice(("zero", "ones", "sector", "cut")))


def sampled(sizes: dict[str, int], count: int, seed: int) -> Iterator[Damage]:
    """`count` damages per file, anywhere in it, most of them single bits."""
    draw = random.Random(f"flips {seed}")
    for file, size in sizes.items():
        for _ in range(count):
            how = draw.choice(["bit 0", "bit 3", "bit 7", f"bit {draw.randrange(8)}", "zero", "sector", "cut"])
            yield Damage(file, draw.randrange(size), how)


def flip(folder: Path, damages: Iterator[Damage] | None = None, *, count: int = 25, seed: int = 1) -> Counter[str]:
    """Examine all of these damages; answers how often each behaviour was seen, per kind of file."""
    subject = Subject(folder)
    seen: Counter[str] = Counter()
    for damage in sampled(subject.sizes, count, seed) if damages is None else damages:
        outcome = subject.examine(damage)
        seen[outcome] += 1
        seen["flips"] += 1
        if outcome == "unfound":
            seen[f"unfound in {damage.file.removeprefix('index.')}"] += 1
    return seen


def torture(minutes: float, folder: Path) -> dict[str, float]:
    subject = Subject(folder / "subject")
    seen: Counter[str] = Counter()
    end = time.monotonic() + minutes * 60
    for damage in every(subject.sizes, 512, seed := time.time_ns()):
        seen[subject.examine(damage)] += 1
    while time.monotonic() < end:
        seed += 1
        for damage in sampled(subject.sizes, 20, seed):
            seen[subject.examine(damage)] += 1
    return {"flips": seen.total(), **seen, "wrong values": 0}
