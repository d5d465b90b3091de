"""`kedge-runc` killed with SIGKILL on the way: the container runs, or is kept whole, and the next call works."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from tests.lab import lab
from tests.runtime_engine import CREATING, DELETING, ENDING, KEPT, Engine
from tests.waiting import wait_for

pytestmark = [pytest.mark.requires("criu"), pytest.mark.xdist_group("containers")]


@pytest.fixture(name="engine")
def _engine(tmp_path: Path) -> Iterator[Engine]:
    with lab(tmp_path) as made:
        yield Engine(made)


def generations(engine: Engine) -> list[str]:
    with kedge.open(engine.lab.store, namespace="containers") as store:
        return [one.id for one in store.list("container:counter")]


class Workload:
    """A container of a workload that is kept, in a network that outlives it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        namespace = engine.lab.root / "namespace"
        namespace.touch()
        engine.lab.run("unshare", f"--net={namespace}", "ip", "link", "set", "lo", "up")
        self.rules = ("nsenter", f"--net={namespace}", "iptables", "-S")
        self.bundle = engine.bundle("one", *KEPT, network=str(namespace))
        engine.start("one")
        engine.lab.wait_beyond("one", 5)

    def assert_unlocked(self) -> None:
        assert "CRIU" not in self.engine.lab.run(*self.rules).stdout

    def stop(self) -> int:
        """Frozen into the store and gone; how far it was."""
        self.engine.call("kill", "one", "TERM")
        self.engine.call("delete", "one")
        return self.engine.lab.count("one")

    def end(self) -> None:
        self.engine.call("delete", "--force", "one")


def killed_in_create(engine: Engine, workload: Workload, stages: tuple[str, ...], mutant: str = "") -> None:
    """Each time, engines delete what is left, and the next create brings it back: files, network and all."""
    reached = workload.stop()
    for stage in stages:
        engine.die_at(stage, mutant)
        assert engine.create("one", check=False) == -9, stage
        engine.die_at("", mutant)
        if stage in ("restored", "paused"):  # nobody was told of it, so nobody would stop it
            gone = lambda: None if engine.lab.runc("state", "one", check=False).returncode == 0 else True  # noqa: E731
            wait_for(gone, f"{stage}: it runs, and nobody knows of it", 5 if mutant else 60)
        engine.call("delete", "--force", "one")
        engine.start("one")
        engine.lab.run("mountpoint", "--quiet", workload.bundle / "rootfs")
        reached = engine.lab.wait_beyond("one", reached)
        workload.assert_unlocked()
        left = [path for path in workload.bundle.iterdir() if path.name.startswith(".kedge-")]
        assert left == [], stage
        workload.end()


def has_orphans(engine: Engine) -> bool:
    """Whether something that a killed call had started is still at it."""
    return engine.lab.run("pgrep", "-f", "--", f"-work-path[ =]{engine.lab.state}", check=False).returncode == 0


def killed_in_kill(engine: Engine, workload: Workload, stages: tuple[str, ...], mutant: str = "") -> None:
    """Either it runs on, and stopping it again works; or it has ended, and its checkpoint is whole."""
    for stage in stages:
        known = len(generations(engine))
        engine.die_at(stage, mutant)
        assert engine.call("kill", "one", "TERM", check=False).returncode == -9
        engine.die_at("", mutant)
        wait_for(lambda: None if has_orphans(engine) else True, f"{stage}: what it had started does not end")
        if stage in ("answered", "unmarked"):
            assert engine.status("one") == "stopped", stage
        else:
            assert engine.status("one") == "running", stage
            engine.lab.wait_beyond("one", engine.lab.count("one"))
            workload.assert_unlocked()
            engine.call("kill", "one", "TERM")
        engine.call("kill", "one", "KILL")
        engine.call("delete", "one")
        workload.assert_unlocked()
        assert len(generations(engine)) > known, stage
        reached = engine.lab.count("one")
        engine.start("one")
        engine.lab.wait_beyond("one", reached)


def killed_and_removed(engine: Engine, mutant: str = "") -> None:
    """Nothing but its removal follows: what it was about to keep goes then."""
    engine.die_at("frozen", mutant)
    assert engine.call("kill", "one", "TERM", check=False).returncode == -9
    engine.die_at("", mutant)
    engine.call("kill", "one", "KILL")
    engine.call("delete", "--force", "one")
    assert [path for path in engine.lab.state.glob("attempts/*/*") if path.is_dir()] == []


def killed_in_delete(engine: Engine, workload: Workload, mutant: str = "") -> None:
    for stage in DELETING:
        engine.call("kill", "one", "KILL")
        engine.wait_stopped("one")
        engine.die_at(stage, mutant)
        assert engine.call("delete", "one", check=False).returncode == -9
        engine.die_at("", mutant)
        engine.call("delete", "one")
        assert not any((engine.lab.root / "marks").rglob("one"))
        engine.start("one")
        engine.lab.wait_beyond("one", 0)


def test_killed_in_create(engine: Engine) -> None:
    killed_in_create(engine, Workload(engine), CREATING)


def test_killed_in_kill_and_delete(engine: Engine) -> None:
    workload = Workload(engine)
    killed_in_kill(engine, workload, ENDING)
    killed_in_delete(engine, workload)
    killed_and_removed(engine)


# In the place of a program: it is killed when it has that command to do, as often as the file beside it has lines.
DOOMED = """#!/bin/sh
for word; do [ "$word" != {command} ] || break; done
if [ "$word" = {command} ] && [ -s {folder}/doomed ]; then
  sed -i 1d {folder}/doomed
  kill -9 $$
fi
exec {program} "$@"
"""


@pytest.mark.parametrize(("name", "command"), [("runc", "restore"), ("criu", "swrk")])
def test_a_restore_whose_programs_are_killed_speaks_against_no_checkpoint(
    engine: Engine, name: str, command: str
) -> None:
    """Nothing older is restored, which would undo work: the container does not start, and the next one goes on."""
    fronts = engine.lab.root / "fronts"
    fronts.mkdir()
    (fronts / "doomed").touch()
    (fronts / name).write_text(DOOMED.format(command=command, folder=fronts, program=shutil.which(name)))
    (fronts / name).chmod(0o755)
    engine.environment["PATH"] = f"{fronts}:{engine.environment['PATH']}"
    engine.environment["KEDGE_RUNC"] = str(shutil.which("runc", path=engine.environment["PATH"]))
    workload = Workload(engine)
    workload.stop()
    engine.start("one")
    engine.lab.wait_beyond("one", engine.lab.count("one") + 5)
    reached = workload.stop()
    (fronts / "doomed").write_text("once\n")
    assert engine.create("one", check=False) > 0
    assert not (fronts / "doomed").read_text()
    workload.assert_unlocked()
    engine.start("one")
    assert engine.lab.count("one") >= reached
    assert len(generations(engine)) == 2
    workload.end()


@pytest.mark.mutant
@pytest.mark.parametrize(
    "mutant", ["nothing put right", "ends unannounced", "mark must be known to runc", "runs unknown", "images stay"]
)
def test_these_tests_can_fail(engine: Engine, mutant: str) -> None:
    workload = Workload(engine)
    with pytest.raises(AssertionError):
        if mutant == "nothing put right":
            killed_in_create(engine, workload, ("unmounted",), mutant)
        elif mutant == "runs unknown":
            killed_in_create(engine, workload, ("paused",), mutant)
        elif mutant == "images stay":
            killed_and_removed(engine, mutant)
        elif mutant == "ends unannounced":
            killed_in_kill(engine, workload, ("answered",), mutant)
        else:
            killed_in_delete(engine, workload, mutant)
