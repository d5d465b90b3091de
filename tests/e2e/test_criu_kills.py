"""CRIU killed in the middle of a restore: what it was making waits for its word, and must not be waited for."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_processes import Job
from tests.lab import KEDGE, Lab, lab
from tests.runtime_engine import KEPT, Engine
from tests.waiting import wait_for

pytestmark = [pytest.mark.requires("criu"), pytest.mark.xdist_group("containers")]

# In the place of CRIU: if there is a file beside it, it is killed once its log has that line.
DOOMED = """#!/bin/sh
if [ -e {folder}/doomed ]; then
  (
    while kill -0 $$; do
      grep -qs '{line}' {state}/attempts/*/restore.log && rm {folder}/doomed && kill -9 $$ && break
    done
  ) >/dev/null 2>&1 &
fi
exec {program} "$@"
"""
BEFORE_THE_FORKS, BETWEEN_THEM = "Forking task with", "Move the root to"


class Fronts:
    """What is before CRIU on the PATH."""

    def __init__(self, made: Lab, line: str) -> None:
        self._folder = made.root / "fronts"
        self._folder.mkdir()
        front = self._folder / "criu"
        front.write_text(DOOMED.format(folder=self._folder, state=made.state, line=line, program=shutil.which("criu")))
        front.chmod(0o755)
        self._state = made.state
        self.path = f"{self._folder}:{os.environ['PATH']}"

    def doom(self) -> None:
        for log in self._state.glob("attempts/*/restore.log"):
            log.unlink()
        (self._folder / "doomed").touch()

    @property
    def are_passed(self) -> bool:
        return not (self._folder / "doomed").exists()


@pytest.fixture(name="lab")
def _lab(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


@pytest.mark.parametrize("line", [BEFORE_THE_FORKS, BETWEEN_THEM])
def test_below_an_engine(lab: Lab, line: str) -> None:
    """The create fails and says why, whatever is restored that could have waited; the next one goes on."""
    engine, fronts = Engine(lab), Fronts(lab, line)
    engine.environment["PATH"] = fronts.path
    engine.bundle("one", *KEPT)
    engine.start("one")
    reached = lab.wait_beyond("one", 5)
    engine.call("kill", "one", "TERM")
    engine.call("delete", "one")
    fronts.doom()
    assert engine.create("one", check=False, timeout=240) == 1
    assert fronts.are_passed
    assert "could not be restored: CRIU was killed" in engine.logged()
    engine.start("one")
    lab.wait_beyond("one", reached)


def test_of_a_container_by_itself(lab: Lab) -> None:
    fronts = Fronts(lab, BEFORE_THE_FORKS)
    lab.counter("one")
    reached = lab.wait_beyond("one", 5)
    lab.kedge("container", "checkpoint", "one", "--root", lab.runtime_root, "--key", "k")
    fronts.doom()
    done = lab.kedge("container", "restore", "k", check=False, env=lab.environment(PATH=fronts.path))
    assert done.returncode
    assert fronts.are_passed
    assert "CRIU was killed" in done.stderr
    subprocess.run(lab.enter([*KEDGE, "container", "restore", "k"]), env=lab.environment(), check=True, timeout=240)
    lab.wait_beyond("one", reached)


def test_of_processes(lab: Lab) -> None:
    """They have their numbers from the beginning, and would keep them from the next restore."""
    job, fronts = Job(lab), Fronts(lab, BEFORE_THE_FORKS)
    process = job.start()
    job.wait_beyond(5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    fronts.doom()
    done = subprocess.run(
        job.command, env=lab.environment(PATH=fronts.path), capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode
    assert fronts.are_passed
    assert "CRIU was killed" in done.stderr
    process = job.start()
    job.end()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    job.check()
    wait_for(lambda: not list(lab.state.glob("attempts/*/images")), "images are left")
