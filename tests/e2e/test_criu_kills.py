"""CRIU killed in the middle of a restore: what it was making waits for its word, and must not be waited for."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.containers.pids import read_link
from tests.e2e.test_processes import Job
from tests.lab import COUNTER, KEDGE, PYTHON, Lab, lab
from tests.runtime_engine import KEPT, Engine

pytestmark = [pytest.mark.requires("criu"), pytest.mark.xdist_group("containers")]

# A hook of runc, while CRIU waits for it with the first process made: CRIU is runc's oldest child.
HOOK = "rm {doomed} && pkill -KILL --oldest --parent $PPID"
# The same, with the call of `kedge-runc` killed first: it is the parent of the shell that is runc's.
ALONE = (
    "rm {doomed} && read -r _ _ _ shell _ </proc/$PPID/stat && read -r _ _ _ call _ </proc/$shell/stat && "
    "kill -9 $call && pkill -KILL --oldest --parent $PPID"
)
# An action of CRIU, when all processes are made and wait.
ACTION = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" != post-restore ] || ! rm {doomed} || kill -9 $PPID
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


def test_of_processes(lab: Lab) -> None:
    """They have their numbers from the beginning, and would keep them from the next restore."""
    job, doomed, action, config = Job(lab), *(lab.root / name for name in ("doomed", "action", "criu.conf"))
    process = job.start()
    job.wait_beyond(5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    action.write_text(ACTION.format(doomed=doomed))
    action.chmod(0o755)
    config.write_text(f"action-script {action}\n")
    doomed.touch()
    done = subprocess.run(
        job.command, env=lab.environment(CRIU_CONFIG_FILE=str(config)), capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert done.returncode
    assert not doomed.exists()
    assert "CRIU was killed" in done.stderr
    process = job.start()
    job.end()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    job.check()
