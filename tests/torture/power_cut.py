"""Real power cuts: a loop-mounted file system is shut down under savers, mounted again and checked (I1)."""

from __future__ import annotations

import math
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import kedge
from kedge.care.repair import repair
from kedge.index.sqlite.closed_mark import lacks_log
from kedge.store.directory import read_marker

from . import children
from .children import Child
from .disks import Disk
from .ledger import Ledger, Seen, Violation, look
from .states import KINDS


def power_cuts(
    folder: Path,
    *,
    cuts: int,
    seconds: float = 1e9,
    kind: str = "ext4",
    seed: int = 1,
    mutant: str = "",
    kinds: tuple[str, ...] = KINDS,
) -> dict[str, float]:
    """Cut the power `cuts` times under two saving processes and gc; raises Violation when something is missing.

    A new store is made at every fourth cut, so that its creation is cut too.
    """
    draw = random.Random(f"power cut {seed}")
    disk = Disk(folder, kind, 300 if kind == "xfs" else 160)
    ledger = Ledger()
    acknowledged = loaded = done = 0
    end = time.monotonic() + seconds
    try:
        while done < cuts and time.monotonic() < end:
            if done % 4 == 0:
                if done:
                    disk.remove()
                    disk.path.rmdir()
                    disk = Disk(folder, kind, 300 if kind == "xfs" else 160)
                acknowledged += len(ledger.saved)
                ledger = Ledger()
            disk.mount()
            place = str(disk.path / "deep" / "store")
            done += 1
            work = children.save_and_delete, place
            savers = [Child(*work, draw.random(), 3, kinds, 3, mutant=mutant, ledger=ledger) for _ in range(2)]
            everyone = [*savers, Child(children.collect, place, mutant=mutant, ledger=ledger)]
            moment = draw.random()
            if moment < 0.7:
                for child in everyone:
                    child.wait_for("ready")
            if moment < 0.4:
                for child in savers:
                    child.wait_for("saved")  # there is something to lose, however slow they are
            children.pump(everyone, 0.02 + draw.random() * 0.4)
            # The switch takes a moment, in which the kernel may still tell a sync good news about an aborted journal.
            # With real power nobody would hear of it: acknowledgements count until the switch is touched.
            ledger.until = time.monotonic()
            disk.cut()
            for child in everyone:
                child.process.kill()
            for child in everyone:
                child.drain()
            raw = [text for text in ledger.failures if "UNTYPED" in text]
            if raw:
                raise Violation(f"cut {done}, seed {seed}: {raw}")
            ledger.until = math.inf
            ledger.failures.clear()  # a disk that goes away fails, with typed errors
            disk.unmount()
            disk.mount()
            if ledger.saved or Path(place, "kedge-store").exists():
                seen = _seen(place)
                ledger.compare(seen)
                loaded += len(seen.present)
            disk.unmount()
    except Violation as violation:
        raise Violation(f"cut {done}, seed {seed}, {kind}: {violation}") from None
    finally:
        disk.remove()
    return {"cuts": done, "acknowledged": acknowledged + len(ledger.saved), "states compared": loaded, "lost": 0}


def _seen(place: str) -> Seen:
    """What a process that has just started finds; one that fails would keep files of a damaged store open."""
    child = Child(_look, place)
    _, seen = child.wait_for("seen", 300)
    child.drain()
    assert isinstance(seen, Seen)
    return seen


def _look(report: children.Report, _: Connection, place: str) -> None:
    _repair_without_log(place)
    with kedge.open(place, create=False) as store:
        report("seen", look(store))


def _repair_without_log(place: str) -> None:
    """What a user is told to do. In the moment that the switch takes, the mark of an open index may reach the disk
    although the log, whose sync was told good news, does not. What was acknowledged before must be there all the same.
    """
    if lacks_log(str(Path(place, read_marker(Path(place)).index))):
        repair(Path(place), actor="power cut")


def torture(minutes: float, folder: Path) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for kind in ("ext4", "xfs"):
        found = power_cuts(folder / kind, cuts=10**9, seconds=minutes * 30, kind=kind, seed=time.time_ns())
        numbers |= {f"{kind} {name}": value for name, value in found.items()}
    return numbers
