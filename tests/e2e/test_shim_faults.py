"""Whoever is killed below containerd, and whenever: calls are answered, no container is lost, nothing stays behind."""

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.e2e.test_shim import ROUNDS, generations, kept_as, left_by, stop
from tests.engine import SHIM, VERSION, Containerd, containerd, programs_of
from tests.lab import lab
from tests.waiting import wait_for

pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.requires("criu", "containerd")]
ANSWER_S = 50  # ten seconds are promised; machines that test are busy, and what hangs does so for a minute

# Stands in the place of runc, or of CRIU. When the file beside it names the command of a call, it kills somebody before
# it does that or after: the nearest of those above it whose command line has that text, or a process by its number.
FRONT = """#!/bin/sh
if read -r stage moment victim 2>/dev/null < {folder}/fault; then
  for word; do
    case $word in create | restore | start | resume | checkpoint | kill | delete | pause | swrk) break ;; esac
  done
  if [ "$word" = "$stage" ]; then
    rm {folder}/fault
    parent=$victim
    if [ ! -e /proc/$victim ]; then
      parent=$PPID
      until [ $parent = 1 ] || tr '\\0' ' ' < /proc/$parent/cmdline | grep -q "$victim"; do
        parent=$(sed 's/.*) . //; s/ .*//' /proc/$parent/stat)
      done
    fi
    [ "$moment" != after ] || {program} "$@"
    status=$?
    echo "$stage $parent" > {folder}/done # before: whom the shim started itself dies with it
    [ $parent = 1 ] || kill -9 $parent
    case $moment in
      after) exit $status ;;
      long-before) sleep 1 ;;
    esac
  fi
fi
exec {program} "$@"
"""


@dataclass(frozen=True)
class Fault:
    """Who is killed, during what, and when: before or after that program has that command to do."""

    victim: str  # of VICTIMS, or containerd
    during: str  # create, start, checkpoint, stop, kill, delete
    command: str  # of runc; swrk: of CRIU
    moment: str

    def __str__(self) -> str:
        return f"{self.victim}-{self.during}-{self.moment}-{self.command}"


VICTIMS = {
    "kedge-runc": "kedge[.]containers",
    "shim": "containerd-shim",
    "runc": f"^{shutil.which('runc')} ",
    "relay": "containers/relay",
}
FAULTS = [  # test_runtime_kills.py has more of kedge-runc, without containerd
    Fault("kedge-runc", "create", "restore", "long-before"),
    Fault("shim", "stop", "swrk", "before"),
    Fault("containerd", "stop", "checkpoint", "before"),
]
if ROUNDS > 1:
    PLACES = [("create", "restore"), ("create", "swrk"), ("create", "pause"), ("start", "resume"), ("kill", "kill"),
              ("checkpoint", "checkpoint"), ("checkpoint", "swrk"), ("stop", "checkpoint"), ("stop", "swrk"),
              ("delete", "delete")]  # fmt: skip
    FAULTS = [
        Fault(victim, during, command, moment)
        for victim in (*VICTIMS, "containerd")
        for during, command in PLACES
        for moment in ("before", "long-before", "after")
        if (victim, command) != ("kedge-runc", "kill")  # runc is all that is left of it by then
        and (command == "swrk" or victim not in ("runc", "relay"))  # CRIU's parents
        and (during, victim) != ("create", "relay")
    ]


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    """Below it, everything passes through the fronts; and there is a generation of a workload to begin with."""
    root = tmp_path_factory.mktemp("faults")
    fronts = root / "fronts"
    fronts.mkdir()
    for name in ("runc", "criu"):
        (fronts / name).write_text(FRONT.format(folder=fronts, program=shutil.which(name)))
        (fronts / name).chmod(0o755)
    path = f"{SHIM.parent}:{programs_of(VERSION)}:{fronts}:{os.environ['PATH']}"
    with lab(root) as made, containerd(made, PATH=path, KEDGE_RUNC=str(fronts / "runc")) as engine:
        engine.run("zero", *kept_as("counting"))
        engine.wait_beyond("zero", 5)
        stop(engine, "zero")
        engine.remove("zero")
        yield engine


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_somebody_is_killed(engine: Containerd, fault: Fault) -> None:
    """Every call is answered, the container can be removed, and the next one goes on from the last generation.

    Its only end without a checkpoint is that of its shim, as with containerd's own.
    """
    engine.wait_shimless()  # of those before
    before = left_by(engine)
    kept = generations(engine, "counting")
    name = str(fault)
    if fault.during in ("create", "start"):
        reached = 0
        arm(engine, fault)
        call(engine, "run", name)
    else:
        engine.run(name, *kept_as("counting"))
        reached = engine.wait_beyond(name, 5)
        if fault.during == "delete":
            engine.kill(name)
            engine.wait_stopped(name)
        arm(engine, fault)
        call(engine, fault.during, name)
    assert (engine.lab.root / "fronts/done").exists(), "nobody was killed"
    if fault.victim == "containerd":
        engine.stop(how=None)
        engine.start()
    new = generations(engine, "counting")[len(kept) :]
    if fault.victim == "containerd":
        # Its shim takes a call back whose caller is gone: of a container that was being made nobody knows, and it must
        # not run. One that has ended is removed by a containerd from 1.7 on when it starts.
        has_ended = fault.during in ("kill", "delete") or (fault.during == "stop" and new)
        assert engine.status(name) != "" or fault.during == "create" or has_ended
    if fault.victim != "shim" and fault.during in ("checkpoint", "stop"):
        assert new or engine.status(name) in ("RUNNING", "PAUSED")
    remove(engine, name)
    if fault.victim == "containerd" and fault.during == "create":  # 1.6 forgets a shim without a task, its own too
        for shim in engine.shims():
            os.kill(shim, signal.SIGKILL)
        wait_for(lambda: True if not engine.shims() else None, "the shim does not end")

    try:
        engine.run("next", *kept_as("counting"))
        found = engine.wait_beyond("next", 0)
        assert found > 5
        if new:
            assert found > reached
    finally:
        engine.remove("next")
    engine.wait_shimless()
    assert left_by(engine) == before
    assert [one.tags for one in generations(engine, "counting") if one.tags] == []  # none speaks against a generation


def arm(engine: Containerd, fault: Fault) -> None:
    fronts = engine.lab.root / "fronts"
    (fronts / "done").unlink(missing_ok=True)
    victim = VICTIMS.get(fault.victim) or str(engine.daemon_pid)
    (fronts / "fault").write_text(f"{fault.command} {fault.moment} {victim}\n")


def call(engine: Containerd, action: str, name: str) -> None:
    """What somebody is killed in. It fails or it does not: it is answered."""
    if action == "run":
        engine.run(name, *kept_as("counting"), check=False)
        return
    words = {
        "checkpoint": ("checkpoint",),
        "stop": ("kill", "--signal", "SIGTERM"),
        "kill": ("kill", "--signal", "SIGKILL"),
        "delete": ("delete",),
    }[action]
    engine.ctr("task", *words, name, check=False, timeout_s=ANSWER_S)


def remove(engine: Containerd, name: str) -> None:
    if engine.status(name) not in ("", "STOPPED"):
        engine.ctr("task", "kill", "--signal", "SIGKILL", name, check=False, timeout_s=ANSWER_S)
        engine.wait_stopped(name)
    engine.ctr("task", "delete", "--force", name, check=False, timeout_s=ANSWER_S)
    engine.ctr("container", "delete", name)
