"""CRIU killed in the middle of a restore: what it was making waits for its word, and must not be waited for."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.containers.pids import is_alive, read_link, read_text
from tests.e2e.test_processes import Job
from tests.lab import COUNTER, KEDGE, PYTHON, Lab, lab
from tests.runtime_engine import KEPT, Engine
from tests.waiting import wait_for

pytestmark = [pytest.mark.requires("criu"), pytest.mark.xdist_group("containers")]

# A hook of runc, while CRIU waits for it with the first process made: CRIU is runc's oldest child.
HOOK = "rm {doomed} && pkill -KILL --oldest --parent $PPID"
# The same, with the call of `kedge-runc` killed first: it is the parent of the shell that is runc's.
ALONE = (
    "rm {doomed} && read -r _ _ _ shell _ </proc/$PPID/stat && read -r _ _ _ call _ </proc/$shell/stat && "
    "kill -9 $call && pkill -KILL --oldest --parent $PPID"
)
# CRIU is killed, and the runc that waits for it: nobody is left whose child was killed.
BOTH = "pkill -KILL --oldest --parent $PPID; kill -9 $PPID"
# The same, with those above runc killed first: the shell that guards it, and the call of `kedge-runc`.
_ABOVE = "read -r _ _ _ shell _ </proc/$PPID/stat; read -r _ _ _ call _ </proc/$shell/stat; "
MORE = {
    "": f"rm {{doomed}}; {BOTH}",
    "guard": f"rm {{doomed}}; {_ABOVE} kill -9 $shell; {BOTH}",
    "call": f"rm {{doomed}}; {_ABOVE} kill -9 $call; {BOTH}",
    "guard and call": f"rm {{doomed}}; {_ABOVE} kill -9 $shell $call; {BOTH}",
}
# An action of CRIU, while it waits for that. At post-restore all processes are made and wait.
ACTION = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" != {stage} ] || ! rm {doomed} || kill -9 {parent} $PPID
"""
PARENT = "$(sed 's/.*) . //; s/ .*//' /proc/$PPID/stat)"
# In the place of runc: is killed when it has restored.
KILLED_LATER = """#!/bin/sh
for word; do [ "$word" != restore ] || ! rm {doomed} 2>/dev/null || doomed=yes; done
[ "$doomed" ] || exec {runc} "$@"
{runc} "$@" && kill -9 $$
"""


@pytest.fixture(name="lab")
def _lab(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


def add_hook(bundle: Path, doomed: Path, hook: str = HOOK) -> None:
    config = bundle / "config.json"
    spec = json.loads(config.read_text())
    script = f"[ ! -e {doomed} ] || {{ {hook.format(doomed=doomed)}; }}"
    path = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"
    spec["hooks"] = {"createRuntime": [{"path": "/bin/sh", "args": ["sh", "-c", script], "env": [path]}]}
    config.write_text(json.dumps(spec))


def add_action(folder: Path, doomed: Path, stage: str, parent: str = "") -> Path:
    """A configuration of CRIU with which it is killed at that stage, and its parent before."""
    action, config = folder / "action", folder / "criu.conf"
    action.write_text(ACTION.format(doomed=doomed, stage=stage, parent=parent))
    action.chmod(0o755)
    config.write_text(f"action-script {action}\n")
    return config


def test_below_an_engine(lab: Lab) -> None:
    """The create fails and says why, whatever is restored that could have waited; the next one goes on."""
    engine, doomed = Engine(lab), lab.root / "doomed"
    add_hook(engine.bundle("one", *KEPT), doomed)
    engine.start("one")
    reached = lab.wait_beyond("one", 5)
    engine.call("kill", "one", "TERM")
    engine.call("delete", "one")
    doomed.touch()
    assert engine.create("one", check=False, timeout=240) == 1
    assert not doomed.exists()
    assert "could not be restored: CRIU was killed" in engine.logged()
    engine.start("one")
    lab.wait_beyond("one", reached)


@pytest.mark.parametrize("is_deleted", [True, False])
def test_with_the_call_that_asked_for_it(lab: Lab, is_deleted: bool) -> None:
    """Nobody looks after what is half made but the next call: it is ended before files are put back."""
    engine, doomed = Engine(lab), lab.root / "doomed"
    add_hook(engine.bundle("one", *KEPT), doomed, ALONE)
    engine.start("one")
    reached = lab.wait_beyond("one", 5)
    engine.call("kill", "one", "TERM")
    engine.call("delete", "one")
    doomed.touch()
    assert engine.create("one", check=False, timeout=240) == -9
    assert not doomed.exists()
    if is_deleted:
        engine.call("delete", "--force", "one")
        assert opened(lab) == []
    engine.start("one")
    lab.wait_beyond("one", reached)
    engine.call("kill", "one", "KILL")
    engine.call("delete", "one")
    assert opened(lab) == []


@pytest.mark.parametrize("above", MORE)
def test_with_the_runtime_that_asked_it(lab: Lab, above: str) -> None:
    """Nobody is left that waits for an answer of CRIU: who wants the container next ends what is half made."""
    engine, doomed = Engine(lab), lab.root / "doomed"
    add_hook(engine.bundle("one", *KEPT), doomed, MORE[above])
    engine.start("one")
    reached = lab.wait_beyond("one", 5)
    engine.call("kill", "one", "TERM")
    engine.call("delete", "one")
    doomed.touch()
    assert engine.create("one", check=False, timeout=240) == (-9 if "call" in above else 1)
    assert not doomed.exists()
    engine.call("delete", "--force", "one")
    assert opened(lab) == []
    engine.start("one")
    lab.wait_beyond("one", reached)


@pytest.mark.parametrize("stage", ["post-setup-namespaces", "post-restore"])
def test_with_the_runtime_when_more_is_made(lab: Lab, stage: str) -> None:
    """What is half made has given up the locks by then."""
    engine, doomed = Engine(lab), lab.root / "doomed"
    bundle = engine.bundle("one", *KEPT, "KEDGE_TCP=keep")  # else CRIU gets a configuration of ours
    engine.start("one")
    reached = lab.wait_beyond("one", 5)
    engine.call("kill", "one", "TERM")
    engine.call("delete", "one")
    engine.environment["CRIU_CONFIG_FILE"] = str(add_action(lab.root, doomed, stage, PARENT))
    doomed.touch()
    assert engine.create("one", check=False, timeout=240) == 1
    assert not doomed.exists()
    engine.call("delete", "--force", "one")
    cgroup = json.loads((bundle / "config.json").read_text())["linux"]["cgroupsPath"]
    wait_for(lambda: not in_cgroup(cgroup), "what is half made waits for ever")
    engine.start("one")
    lab.wait_beyond("one", reached)


def in_cgroup(path: str) -> list[Path]:
    files = Path("/proc").glob("[0-9]*/cgroup")
    return [file for file in files if f":{path}\n" in read_text(str(file)) and is_alive(int(file.parent.name))]


def opened(lab: Lab) -> list[str]:
    """Locks of attempts and containers, and their files, that a process has open."""
    links = Path("/proc").glob("[0-9]*/fd/*")
    return [found for link in links if (found := read_link(str(link))).startswith(f"{lab.state}/")]


def test_of_a_container_by_itself(lab: Lab) -> None:
    doomed = lab.root / "doomed"
    add_hook(lab.bundle("one", PYTHON, "-c", COUNTER, "0.002", "0"), doomed)
    lab.start("one")
    reached = lab.wait_beyond("one", 5)
    lab.kedge("container", "checkpoint", "one", "--root", lab.runtime_root, "--key", "k")
    doomed.touch()
    done = lab.kedge("container", "restore", "k", check=False)
    assert done.returncode
    assert not doomed.exists()
    assert "CRIU was killed" in done.stderr
    subprocess.run(lab.enter([*KEDGE, "container", "restore", "k"]), env=lab.environment(), check=True, timeout=240)
    lab.wait_beyond("one", reached)


def stopped(job: Job) -> None:
    """It has begun, and was checkpointed."""
    process = job.start()
    job.wait_beyond(5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_of_processes(lab: Lab) -> None:
    """They have their numbers from the beginning, and would keep them from the next restore."""
    job, doomed = Job(lab), lab.root / "doomed"
    stopped(job)
    environment = lab.environment(CRIU_CONFIG_FILE=str(add_action(lab.root, doomed, "post-restore")))
    doomed.touch()
    done = subprocess.run(job.command, env=environment, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode
    assert not doomed.exists()
    assert "CRIU was killed" in done.stderr
    process = job.start()
    job.end()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    job.check()


@pytest.mark.parametrize("stage", ["pre-resume", "post-restore"])
def test_of_processes_with_the_call(lab: Lab, stage: str) -> None:
    """Nobody is left that looks after what is half made, and has the numbers that the next one needs."""
    job, doomed = Job(lab), lab.root / "doomed"
    stopped(job)
    environment = lab.environment(CRIU_CONFIG_FILE=str(add_action(lab.root, doomed, stage, PARENT)))
    doomed.touch()
    assert subprocess.run(job.command, env=environment, check=False, timeout=240).returncode == -9
    assert not doomed.exists()
    process = job.start()
    job.end()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    job.check()


def test_a_runtime_that_is_killed_when_it_has_restored(lab: Lab) -> None:
    """The restore has failed, so nothing runs; the next one goes on."""
    programs, doomed = lab.root / "programs", lab.root / "doomed"
    programs.mkdir()
    (programs / "runc").write_text(KILLED_LATER.format(doomed=doomed, runc=shutil.which("runc")))
    (programs / "runc").chmod(0o755)
    lab.counter("one")
    reached = lab.wait_beyond("one", 5)
    lab.kedge("container", "checkpoint", "one", "--root", lab.runtime_root, "--key", "k")
    environment = lab.environment(PATH=f"{programs}:{os.environ['PATH']}")
    doomed.touch()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)  # a container would hold pipes of ours
    command = lab.enter([*KEDGE, "container", "restore", "k"])
    assert subprocess.run(command, env=environment, check=False, timeout=240, **streams).returncode
    assert not doomed.exists()
    assert not lab.is_running("one")
    subprocess.run(command, env=environment, check=True, timeout=240, **streams)
    lab.wait_beyond("one", reached)
