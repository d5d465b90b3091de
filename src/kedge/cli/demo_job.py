"""The demonstration: a job is killed with SIGKILL, twice, goes on where it was, and ends as if nothing had happened.

    python -m kedge.demo      (also: kedge demo, ./dev demo)

The job is a plate heated by two moving flames, computed in a process of its own that saves a checkpoint after every
step. This process starts it, watches it, kills it, starts it again with the same command, and at the end proves
that the result equals that of a run without interruption. It needs nothing beyond Kedge's own dependencies.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from statistics import median
from typing import Any, Protocol

from kedge.manager import CheckpointManager

WIDTH, HEIGHT = 72, 32
SUBSTEPS = 6
Plate = list[list[float]]


# --- the job ---


def cold_plate() -> Plate:
    return [[0.0] * WIDTH for _ in range(HEIGHT)]


def advance(plate: Plate, step: int) -> Plate:
    """The plate one step later. The same step of the same plate gives the same numbers, bit for bit."""
    for part in range(SUBSTEPS):
        at = step + part / SUBSTEPS
        for speed, phase, heat in ((0.19, 0.0, 1.0), (-0.13, 2.1, 0.8)):
            x = round((0.5 + 0.42 * math.cos(speed * at + phase)) * (WIDTH - 1))
            y = round((0.5 + 0.38 * math.sin(1.7 * speed * at + phase)) * (HEIGHT - 1))
            for dx, dy in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
                plate[(y + dy) % HEIGHT][(x + dx) % WIDTH] = heat
        rows = []
        for y, row in enumerate(plate):
            above, below = plate[max(y - 1, 0)], plate[min(y + 1, HEIGHT - 1)]
            left, right = [row[0], *row], [*row[1:], row[-1]]
            cells = zip(row, above, below, left, right, strict=False)
            rows.append([0.997 * (c + 0.2 * (a + b + w + e - 4 * c)) for c, a, b, w, e in cells])
        plate = rows
    return plate


def to_bytes(plate: Plate) -> bytes:
    return array("d", (cell for row in plate for cell in row)).tobytes()


def from_bytes(data: bytes) -> Plate:
    cells = array("d", data)
    return [list(cells[y * WIDTH : (y + 1) * WIDTH]) for y in range(HEIGHT)]


def to_state(plate: Plate, step: int, energies: list[float]) -> dict[str, object]:
    """What is saved: small facts, a growing list, and the plate as an array (bytes where numpy is not installed)."""
    data: object = to_bytes(plate)
    try:
        import numpy
    except ImportError:
        pass
    else:
        data = numpy.frombuffer(to_bytes(plate)).reshape(HEIGHT, WIDTH)
    return {"step": step, "energies": energies, "hottest": max(map(max, plate)), "plate": data}


def work(store: str, job: str, steps: int, pause_s: float) -> None:
    """The job itself: go on after the newest checkpoint, save after every step, say what happens on stdout."""
    with CheckpointManager(store) as manager:
        plate, first, energies = cold_plate(), 1, []
        found = manager.load_latest(job)
        if found is not None:
            state: Any = found[1]
            plate, first, energies = from_bytes(bytes(state["plate"])), state["step"] + 1, state["energies"]
        _say(what="started", step=first - 1, checkpoint=found[0].id if found else None)
        for step in range(first, steps + 1):
            plate = advance(plate, step)
            energies.append(round(sum(map(sum, plate)), 3))
            _say(what="saving", step=step)
            began = time.perf_counter()
            state = to_state(plate, step, energies)
            saved = manager.save(job, f"step {step}", state, metadata={"energy": energies[-1]})
            ms = 1000 * (time.perf_counter() - began)
            _say(what="saved", step=step, checkpoint=saved, ms=ms, picture=_picture(plate))
            time.sleep(pause_s)
        _say(what="finished", step=steps, digest=sha256(to_bytes(plate)).hexdigest())


def _say(**news: object) -> None:
    print(json.dumps(news), flush=True)


def _picture(plate: Plate) -> str:
    return bytes(min(255, int(cell * 255)) for row in plate for cell in row).hex()


# --- the one who kills it ---


@dataclass(slots=True)
class Account:
    """What happened so far; the fields are the keys of `kedge demo --json`."""

    job: str
    steps: int
    runs: int = 0
    kills: list[dict[str, object]] = field(default_factory=list)
    resumed_from: list[str] = field(default_factory=list)
    acknowledged: int = 0
    lost: int = 0
    save_ms: float = 0.0  # the median
    digest: str = ""
    expected_digest: str = ""

    @property
    def is_equal(self) -> bool:
        return self.digest == self.expected_digest and not self.lost


class Stage(Protocol):
    """Where the demonstration is shown."""

    def news(self, account: Account, pid: int, news: Mapping[str, Any]) -> None:
        """The job said something: started, saving, saved, finished."""
        ...

    def killed(self, account: Account) -> None: ...

    def verdict(self, account: Account) -> None: ...


def perform(store: str, stage: Stage, *, steps: int, pause_s: float) -> Account:
    """Run the job in `store`, kill it twice, and compare. RuntimeError if the job fails for another reason."""
    with CheckpointManager(store) as manager:
        taken = {job.name for job in manager.jobs("heat")}
    account = Account(next(name for n in count(1) if (name := f"heat-{n}" if n > 1 else "heat") not in taken), steps)
    acknowledged: list[str] = []
    save_ms: list[float] = []
    # The first time in the middle of a computation, the second time in the middle of a save.
    for moment in (("saved", round(steps * 0.38)), ("saving", round(steps * 0.72)), None):
        for news in _run(store, stage, account, pause_s, kill_at=moment):
            acknowledged.append(news["checkpoint"])
            save_ms.append(news["ms"])
    plate = cold_plate()
    for step in range(1, steps + 1):
        plate = advance(plate, step)
    account.expected_digest = sha256(to_bytes(plate)).hexdigest()
    account.acknowledged = len(acknowledged)
    account.save_ms = round(median(save_ms), 3)
    with CheckpointManager(store) as manager:
        account.lost = sum(not manager.exists(each) for each in acknowledged)
    stage.verdict(account)
    return account


def _run(
    store: str, stage: Stage, account: Account, pause_s: float, kill_at: tuple[str, int] | None
) -> Iterator[dict[str, Any]]:
    """Start the job, show what it says, kill it at the moment given; answers every acknowledged save."""
    account.runs += 1
    words = ["--work", store, account.job, str(account.steps), str(pause_s)]
    last: dict[str, Any] = {}
    with _child([sys.executable, "-m", "kedge.cli.demo_job", *words]) as child:
        for line in child.stdout or ():
            try:
                last = json.loads(line)
            except ValueError:  # the kill cut it short; what it would have said was not acknowledged to anyone
                break
            if last["what"] == "started" and last["checkpoint"]:
                account.resumed_from.append(last["checkpoint"])
            if last["what"] == "finished":
                account.digest = last["digest"]
            stage.news(account, child.pid, last)
            if last["what"] == "saved":
                yield last
            if (last["what"], last["step"]) == kill_at:
                if last["what"] == "saved":
                    time.sleep(pause_s + 0.004)  # until it computes the next step
                os.kill(child.pid, signal.SIGKILL)
                child.wait()  # and hear what it still said before
    if child.returncode == -signal.SIGKILL:
        during, step = ("save", last["step"]) if last["what"] == "saving" else ("computation", last["step"] + 1)
        account.kills.append({"pid": child.pid, "step": step, "during": during, "exit_code": child.returncode})
        stage.killed(account)
    elif child.returncode:
        raise RuntimeError(f"the job of the demonstration failed with exit code {child.returncode}")


@contextmanager
def _child(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive this block, whatever happens in it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
            child.wait()
        finally:
            if child.poll() is None:
                child.kill()


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        store, job, steps, pause_s = sys.argv[2:]
        work(store, job, int(steps), float(pause_s))
        return
    from . import cli

    cli.main(["demo", *sys.argv[1:]])


if __name__ == "__main__":
    main()
