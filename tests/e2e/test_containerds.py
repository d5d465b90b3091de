"""The essential tests of the shim and of pods again, below containerd 1.7; `./dev torture shim` runs all, and 2 too.
And what 2 does with a pod while its shim, the runc that restores it, or its kubelet is killed."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.containers.pids import is_alive
from tests.cri import Cri, Failed
from tests.e2e.test_pods import test_a_pod_with_a_network_of_its_own as pod_goes_on
from tests.e2e.test_shim import test_containerd_is_killed as containerd_is_killed
from tests.e2e.test_shim import test_stopped_in_one_container_and_going_on_in_another as container_goes_on
from tests.e2e.test_shim import test_who_did_not_opt_in as who_did_not_opt_in
from tests.e2e.test_shim_alike import options_for_runc
from tests.e2e.test_shim_faults import FRONT, VICTIMS
from tests.engine import IMAGE, SHIM, Containerd, containerd, programs_of
from tests.engine import VERSION as CHOSEN
from tests.lab import PYTHON, lab
from tests.waiting import wait_for

VERSION = "1.7"
# Counts on when its files are gone with its container.
LASTING = """
import time
log = open("/work/log", "a", buffering=1)
n = 0
while True:
    n += 1
    log.write(f"{n}\\n")
    time.sleep(0.002)  # sleep: the pace of the counter
"""
WISHES = {"KEDGE_CHECKPOINT": "1", "KEDGE_WORKLOAD": "train"}
# A kubelet that starts a pod, when it is told to.
KUBELET = """
import sys
from pathlib import Path
from tests.cri import Cri
from tests.e2e.test_containerds import LASTING, PYTHON, WISHES
address, image = sys.argv[1:]
cri = Cri(Path(address), image)
pod = cri.run_pod("killed")
input()
cri.start(pod, "counter", (PYTHON, "-c", LASTING), WISHES)
"""
pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.requires("criu", f"containerd-{VERSION}")]


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with lab(tmp_path_factory.mktemp("newer")) as made, containerd(made, version=VERSION) as engine:
        yield engine


def test_containers(engine: Containerd) -> None:
    container_goes_on(engine)
    containerd_is_killed(engine)
    who_did_not_opt_in(engine)


@pytest.mark.requires("cc", "cni")
def test_pods(tmp_path: Path) -> None:
    with lab(tmp_path) as made, containerd(made, version=VERSION, pods=True) as engine:
        pod_goes_on(engine, Cri(engine.home / "socket", IMAGE))
        options_for_runc(engine)


@pytest.mark.requires("cc")
def test_a_pod_goes_on_when_its_shim_was_killed(tmp_path: Path) -> None:
    """containerd 2 calls its container exited and forgets it, while its processes run on."""
    if CHOSEN != "2":
        pytest.skip("only containerd 2 forgets its containers")  # skip: ./dev torture shim runs it
    wishes = {**WISHES, "KEDGE_POLICY": "fail"}
    with lab(tmp_path) as made, containerd(made, version="2", pods=True) as engine:
        cri = Cri(engine.home / "socket", IMAGE)
        first = cri.run_pod("first")
        counter = cri.start(first, "counter", (PYTHON, "-c", LASTING), wishes)
        engine.wait_beyond(counter, 5)
        cri.stop(counter)
        reached = engine.count(counter)
        cri.remove_pod(first)

        second = cri.run_pod("second")
        counter = cri.start(second, "counter", (PYTHON, "-c", LASTING), wishes)
        engine.wait_beyond(counter, reached)
        pid = engine.pid(counter)
        (shim,) = engine.shims()
        os.kill(shim, signal.SIGKILL)
        wait_for(lambda: cri.state(counter)[0] == "exited", "its end is not noticed")
        cri.remove_pod(second)
        assert is_alive(pid)  # else containerd ends it by now, and this test is not needed

        third = cri.run_pod("third")
        counter = cri.start(third, "counter", (PYTHON, "-c", LASTING), wishes)
        assert not is_alive(pid)
        engine.wait_beyond(counter, reached)
        cri.remove_pod(third)
        engine.wait_shimless()


class Faulty:
    """A containerd 2 below which somebody is killed, and a workload that has a checkpoint; no policy is asked for."""

    def __init__(self, engine: Containerd) -> None:
        self.engine, self.cri = engine, Cri(engine.home / "socket", IMAGE)
        self.fronts = engine.lab.root / "fronts"
        pod = self.cri.run_pod("first")
        counter = self.cri.start(pod, "counter", (PYTHON, "-c", LASTING), WISHES)
        engine.wait_beyond(counter, 5)
        self.cri.stop(counter)
        self.reached = engine.count(counter)
        self.cri.remove_pod(pod)

    def arm(self, command: str, moment: str, victim: str) -> None:
        (self.fronts / "fault").write_text(f"{command} {moment} {victim}\n")

    def check_next(self, pod: str, attempt: int = 0) -> None:
        """The workload goes on in that pod, and the pod can be removed."""
        assert (self.fronts / "done").exists(), "nobody was killed"
        counter = self.cri.start(pod, "counter", (PYTHON, "-c", LASTING), WISHES, attempt=attempt)
        assert self.engine.wait_beyond(counter, 0) > self.reached
        self.cri.remove_pod(pod)


@pytest.fixture(name="faulty")
def _faulty(tmp_path: Path) -> Iterator[Faulty]:
    if CHOSEN != "2":
        pytest.skip("what containerd 2 does is not what 1 does")  # skip: ./dev torture shim runs it
    fronts = tmp_path / "fronts"
    fronts.mkdir()
    for name in ("runc", "criu"):
        (fronts / name).write_text(FRONT.format(folder=fronts, program=shutil.which(name)))
        (fronts / name).chmod(0o755)
    path = f"{SHIM.parent}:{programs_of('2')}:{fronts}:{os.environ['PATH']}"
    environment = {"PATH": path, "KEDGE_RUNC": str(fronts / "runc")}
    with lab(tmp_path) as made, containerd(made, version="2", pods=True, **environment) as engine:
        yield Faulty(engine)


@pytest.mark.requires("cc")
def test_a_pod_goes_on_when_the_runc_that_restored_it_was_killed(faulty: Faulty) -> None:
    """Its start fails, and the next one continues from the same checkpoint: not from an older one, nor anew."""
    pod = faulty.cri.run_pod("second")
    faulty.arm("swrk", "before", VICTIMS["runc"])
    with pytest.raises(Failed):
        faulty.cri.start(pod, "counter", (PYTHON, "-c", LASTING), WISHES)
    faulty.check_next(pod, attempt=1)
    faulty.engine.wait_shimless()


@pytest.mark.requires("cc")
@pytest.mark.parametrize(("command", "moment"), [("restore", "long-before"), ("resume", "before")])
def test_a_pod_goes_on_when_its_kubelet_was_killed(faulty: Faulty, command: str, moment: str) -> None:
    """containerd takes back a start whose caller is gone, and its shim goes on with it: the container stays paused, and
    nobody knows of it."""
    words = [sys.executable, "-c", KUBELET, str(faulty.engine.home / "socket"), IMAGE]
    kubelet = subprocess.Popen(words, stdin=subprocess.PIPE, cwd=Path(__file__).parents[2])
    faulty.arm(command, moment, str(kubelet.pid))
    kubelet.communicate(b"\n", timeout=240)
    assert kubelet.returncode == -signal.SIGKILL
    faulty.check_next(faulty.cri.run_pod("second"))
