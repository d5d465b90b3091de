"""An engine for tests of `kedge-runc`: it calls a runtime as engines do, and may have it killed on the way."""

import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kedge.containers.runtime import calls as runtime
from tests.lab import COUNTER, PYTHON, Lab
from tests.waiting import wait_for

RUNTIME = Path(runtime.__file__).with_name("kedge-runc")
KEPT = ("KEDGE_CHECKPOINT=1", "KEDGE_WORKLOAD=counter")
COUNT = (PYTHON, "-c", COUNTER, "0.002", "0")


class Engine:
    """What an engine does with a runtime: create, start, kill, delete, each a call of its own."""

    def __init__(self, made: Lab) -> None:
        self.lab = made
        self.log = made.root / "log.json"
        self.environment = made.environment(KEDGE_RUNC_STATE=str(made.root / "marks"), KEDGE_PYTHON=sys.executable)

    def call(self, *words: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        options = ("--root", self.lab.runtime_root, "--log", self.log, "--log-format", "json")
        return self.lab.run(RUNTIME, *options, *words, check=check, env=self.environment)

    def bundle(
        self, name: str, *environment: str, lower: Path | None = None, program: Sequence[str] = COUNT, **options: Any
    ) -> Path:
        bundle = self.lab.bundle(name, *program, lower=lower, **options)
        spec = json.loads((bundle / "config.json").read_text())
        spec["process"]["env"] += environment
        (bundle / "config.json").write_text(json.dumps(spec))
        return bundle

    def create(self, name: str, check: bool = True, **streams: Any) -> int:
        """With streams of its own: what runs on must not hold the caller's pipes."""
        words = [
            "create",
            "--bundle",
            str(self.lab.root / name),
            "--pid-file",
            str(self.lab.root / f"{name}.pid"),
            name,
        ]
        command = [str(RUNTIME), "--root", str(self.lab.runtime_root), "--log", str(self.log), "--log-format", "json"]
        streams = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL), **streams}
        done = subprocess.run(self.lab.enter([*command, *words]), env=self.environment, check=check, **streams)
        return done.returncode

    def start(self, name: str) -> None:
        self.create(name)
        self.call("start", name)

    def status(self, name: str) -> str:
        return str(json.loads(self.call("state", name).stdout)["status"])

    def wait_stopped(self, name: str) -> None:
        wait_for(lambda: True if self.status(name) == "stopped" else None, f"{name} does not end")

    def logged(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def die_at(self, stage: str, mutant: str = "") -> None:
        """From now on `kedge-runc` is killed at that stage; "" for never. `mutant`: a safeguard taken out."""
        front = self.lab.root / "python"
        patches = f"STAGE, MUTANT = {stage!r}, {mutant!r}\n{DYING}"
        front.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} -c {shlex.quote(patches)} "$@"\n')
        front.chmod(0o755)
        self.environment["KEDGE_PYTHON"] = str(front) if stage or mutant else sys.executable


# Where a call can be killed. Each is a place in our code at which the process kills itself.
CREATING = ("written", "unmounted", "exchanged", "mounted", "held", "restoring", "restored", "paused")
ENDING = ("dumping", "frozen", "storing", "stored", "answered", "unmarked")
DELETING = ("deleting", "deleted")
DYING = """
import os, signal, sys, threading
from pathlib import Path
from kedge import CheckpointManager
from kedge.containers import attempts, checkpoint, guard, page_writer, rootfs
from kedge.containers.criu import command as criu
from kedge.containers.runtime import calls, create, delete
from kedge.containers.runtime.container import CalledContainer

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def dies_after(function):
    return lambda *words, **options: (function(*words, **options), die())

real_unlink = Path.unlink
def unlink(path, **options):
    if path.parent.name == "runc":
        die()
    real_unlink(path, **options)

def write_and_die(write):
    def written(self, mark):
        if mark.restored if STAGE == "paused" else mark.ended:
            die()
        write(self, mark)
    return written

if STAGE == "written":
    rootfs._unmounted = die
elif STAGE == "unmounted":
    rootfs.exchange = die
elif STAGE == "exchanged":
    rootfs.exchange = dies_after(rootfs.exchange)
elif STAGE == "mounted":
    create.RuncTarget.run = die
elif STAGE == "held":
    page_writer._LEAST_BYTES = 0
    is_begun, real_wait = threading.Event(), guard.Guard.wait
    guard.Guard.wait = lambda self, held: (is_begun.set(), real_wait(self, held))[1]
    page_writer.PageWriter._go_on = lambda *_: (is_begun.wait(), die())
elif STAGE == "restoring":
    guard.Guard.wait = die
elif STAGE == "restored":
    create.RuncTarget.run = dies_after(create.RuncTarget.run)
elif STAGE in ("paused", "unmarked"):
    CalledContainer.write = write_and_die(CalledContainer.write)
elif STAGE == "dumping":
    criu.Seam.wait = die
elif STAGE == "frozen":
    checkpoint.validate_images = die
elif STAGE == "storing":
    CheckpointManager.save = die
elif STAGE == "stored":
    CheckpointManager.save = dies_after(CheckpointManager.save)
elif STAGE == "answered":
    criu.Seam.let_go = dies_after(criu.Seam.let_go)
elif STAGE == "deleting":
    real_runc = CalledContainer.runc
    CalledContainer.runc = lambda self, *words: die() if "delete" in words else real_runc(self, *words)
elif STAGE == "deleted":
    Path.unlink = unlink
if MUTANT == "nothing put right":
    attempts._is_put_right = lambda killed: True
elif MUTANT == "images stay":
    attempts.put_right = delete.put_right = lambda: None
elif MUTANT == "ends unannounced":
    CalledContainer.settled_mark = CalledContainer.mark
elif MUTANT == "runs unknown":
    guard._SCRIPT = guard._SCRIPT.replace("{delete}", ":")
elif MUTANT == "two at once":
    create._alone = lambda *_: None
elif MUTANT == "mark must be known to runc":
    CalledContainer.status = lambda self: "stopped"
sys.exit(calls.main(sys.argv[1:]))
"""
