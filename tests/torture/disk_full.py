"""A full disk: saves are refused with NoSpace, nothing acknowledged is lost, and space given back is used again."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import kedge

from .disks import mounted, tmpfs
from .ledger import Ledger, Violation, about
from .states import MIB, make

MIXED = ("packed", "small", "inline", "packed", "tree", "packed")


def fill_up(store: kedge.CheckpointManager, ledger: Ledger, kinds: tuple[str, ...], *, seed: int = 0) -> int:
    """Save until three kinds in a row are refused; every refusal must be a NoSpace that says what to do."""
    refused = 0
    for number, kind in zip(itertools.count(seed), itertools.cycle(kinds), strict=False):
        try:
            saved = store.save("job", "fill", make(kind, number), metadata=about(kind, number))
        except kedge.NoSpace as error:
            if "gc" not in error.hint:
                raise Violation(f"no way out named: {error}") from error
            refused += 1
            if refused == 3 * len(kinds):
                return number
        except Exception as error:
            raise Violation(f"not NoSpace but {type(error).__name__}: {error}") from error
        else:
            refused = 0
            ledger.note(("saved", saved, "job", kind, number))
    raise AssertionError


def empty_again(store: kedge.CheckpointManager, ledger: Ledger, *, keep: int) -> int:
    """Delete all but the last `keep` and collect, on the full disk; answers how many went."""
    doomed = [c.id for c in store.list("job")[:-keep]]
    for checkpoint in doomed:
        ledger.note(("deleting", checkpoint))
        store.delete("job", checkpoint)
        ledger.note(("deleted", checkpoint))
    store.gc()
    return len(doomed)


class Ballast:
    """A file beside the store that can be let go of, as people do who find their disk full."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self.take()

    def take(self) -> None:
        try:
            self._path.write_bytes(bytes(self._size))
        except OSError:
            self.drop()

    def drop(self) -> None:
        self._path.unlink(missing_ok=True)


def cycle(place: Path, kinds: tuple[str, ...], *, rounds: int = 2) -> dict[str, float]:
    """Fill, check, delete, gc, fill again. SQLite writes a log before it deletes: to a disk without a single free
    block not even that fits, so a little is freed from outside where the store says NoSpace. Counted as "helped".
    """
    ledger = Ledger()
    deleted = helped = again = seed = 0
    ballast = Ballast(place.parent / "ballast", 4 * MIB)
    for turn in range(rounds):
        ballast.take()
        before = len(ledger.saved)
        with kedge.open(place) as store:
            seed = fill_up(store, ledger, kinds, seed=seed) + 1
            again += len(ledger.saved) - before if turn else 0
            ledger.check(store, deep=False)
        try:
            kedge.open(place).close()  # a full store opens, if a few blocks are left for SQLite's shared memory
        except kedge.NoSpace:
            helped += 1
            ballast.drop()
        with kedge.open(place) as store:
            ledger.check(store, deep=False)
            try:
                deleted += empty_again(store, ledger, keep=2)
            except kedge.NoSpace:
                helped += 1
                ballast.drop()
                deleted += empty_again(store, ledger, keep=2)
            ledger.check(store)
    if rounds > 1 and not again:
        raise Violation("nothing fits after delete and gc")
    return {"rounds": rounds, "acknowledged": len(ledger.saved), "deleted": deleted, "helped": helped, "lost": 0}


def helped(place: Path, kinds: tuple[str, ...]) -> dict[str, float]:
    """The disk is filled by somebody else's file; once that is gone, all goes on by itself, in the same process."""
    ledger = Ledger()
    with kedge.open(place) as store:
        for number, kind in enumerate(kinds):
            saved = store.save("job", "before", make(kind, number), metadata=about(kind, number))
            ledger.note(("saved", saved, "job", kind, number))
        ballast = place.parent / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass
        fill_up(store, ledger, kinds, seed=100)
        ledger.check(store, deep=False)
        ballast.unlink()
        for number, kind in enumerate(kinds, 1000):
            saved = store.save("job", "after", make(kind, number), metadata=about(kind, number))
            ledger.note(("saved", saved, "job", kind, number))
        ledger.check(store)
    return {"acknowledged": len(ledger.saved)}


def torture(minutes: float, folder: Path) -> dict[str, float]:
    total: dict[str, float] = {}
    end = time.monotonic() + minutes * 60
    turn = 0
    while not total or time.monotonic() < end:
        turn += 1
        for kind in ("ext4", "tmpfs"):
            for kinds in (MIXED, ("small",), ("inline",), ("packed",), ("tree",), ("arrays", "small")):
                here = folder / f"{turn}-{kind}-{kinds[0]}-{len(kinds)}"
                size = 32 if "arrays" in kinds else 12
                if kind == "ext4":
                    with mounted(here, size_mib=size, make=("-m", "0", "-b", "4096")) as disk:
                        numbers = cycle(disk.path / "store", kinds, rounds=4)
                else:
                    with tmpfs(here, f"size={size}m") as path:
                        numbers = cycle(path / "store", kinds, rounds=4)
                for key, value in numbers.items():
                    total[key] = total.get(key, 0) + value
    return total
