"""Containers frozen and thawed for as long as wanted, with Kedge killed at random moments."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

from tests.lab import KEDGE, Lab, lab
from tests.parts import missing

ROUNDS = 20


def torture(minutes: float, folder: Path) -> dict[str, float]:
    """Every round: freeze (ended, or left running and then killed), thaw; every third time the freeze is killed.

    The counter checks at every step that memory, an appended file, a mapped file and hard links agree.
    """
    if reason := missing("criu"):
        raise RuntimeError(reason)
    numbers = {"rounds": 0.0, "kills": 0.0, "kept_running": 0.0, "steps": 0.0}
    draw = random.Random(11)
    deadline = time.monotonic() + 60 * minutes
    with lab(folder) as made:
        made.counter("one", ballast=8 << 20)
        made.wait_beyond("one", 0)
        while numbers["rounds"] < ROUNDS or time.monotonic() < deadline:
            numbers["rounds"] += 1
            if numbers["rounds"] % 3 == 0:
                _kill_a_freeze(made, draw.uniform(0.2, 2.5))
                numbers["kills"] += 1
                if made.is_running("one"):
                    numbers["kept_running"] += 1
            else:
                _freeze(made, leave_running=draw.random() < 0.5)
                made.remove("one")
            if not made.is_running("one"):
                made.kedge("container", "restore", "k")
            made.wait_beyond("one", made.count("one"))
        numbers["steps"] = float(made.count("one"))
    return numbers


def _freeze(made: Lab, *, leave_running: bool) -> None:
    options = ["--leave-running"] if leave_running else []
    made.kedge("container", "checkpoint", "one", "--root", made.runtime_root, "--key", "k", *options)


def _kill_a_freeze(made: Lab, after_s: float) -> None:
    """It is killed at any moment, or done before; CRIU, on its own then, must come to an end."""
    command = [*KEDGE, "container", "checkpoint", "one", "--root", str(made.runtime_root), "--key", "k"]
    process = subprocess.Popen(
        made.enter(command), env=made.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    while made.run("pgrep", "-f", f"checkpoint --image-path {made.state}", check=False).returncode == 0:
        time.sleep(0.02)  # sleep: between two looks
