"""The essential tests of the shim and of pods again, below containerd 1.7; `./dev torture shim` runs all, and 2 too.
And what 2 does with a pod whose shim is killed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.containers.pids import is_alive
from tests.cri import Cri
from tests.e2e.test_pods import test_a_pod_with_a_network_of_its_own as pod_goes_on
from tests.e2e.test_shim import test_containerd_is_killed as containerd_is_killed
from tests.e2e.test_shim import test_stopped_in_one_container_and_going_on_in_another as container_goes_on
from tests.e2e.test_shim import test_who_did_not_opt_in as who_did_not_opt_in
from tests.e2e.test_shim_alike import options_for_runc
from tests.engine import IMAGE, Containerd, containerd
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
    wishes = {"KEDGE_CHECKPOINT": "1", "KEDGE_WORKLOAD": "train", "KEDGE_POLICY": "fail"}
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
