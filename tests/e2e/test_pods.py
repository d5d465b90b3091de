"""Pods, as a kubelet runs them: what one pod was when it was stopped, another one goes on from."""

import subprocess
from collections.abc import Iterator

import pytest

import holdfast
from tests.cri import Cri, Failed
from tests.engine import COUNT, IMAGE, Containerd, containerd
from tests.lab import lab

pytestmark = [pytest.mark.xdist_group("containers"), pytest.mark.requires("criu", "containerd", "cc")]
PAUSE = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    root = tmp_path_factory.mktemp("pods")
    (root / "pause.c").write_text(PAUSE)
    subprocess.run(["cc", "-static", "-Os", "-o", root / "pause", root / "pause.c"], check=True)
    with lab(root) as made, containerd(made, pause=(root / "pause").read_bytes()) as engine:
        yield engine


@pytest.fixture(name="cri")
def _cri(engine: Containerd) -> Cri:
    return Cri(engine.home / "socket", IMAGE)


def test_a_pod_goes_on_in_another(engine: Containerd, cri: Cri) -> None:
    """By environment in the one, by annotation in the other; the sandbox and a second container are left alone."""
    first = cri.run_pod("first", {"holdfast.dev/checkpoint": "1"})
    counter = cri.start(first, "counter", COUNT, {"HOLDFAST_CHECKPOINT": "1", "HOLDFAST_WORKLOAD": "train"})
    beside = cri.start(first, "beside", COUNT)
    engine.wait_beyond(counter, 5)
    engine.wait_beyond(beside, 5)
    cri.stop(counter)
    reached = engine.count(counter)
    assert engine.status(beside) == "RUNNING"
    assert engine.status(first) == "RUNNING"
    cri.remove_pod(first)
    with holdfast.open(engine.lab.store) as store:
        assert [job.name for job in store.jobs()] == ["container:default+train"]

    second = cri.run_pod("second")
    notes = {"holdfast.dev/restore": "latest", "holdfast.dev/key": "train"}
    counter = cri.start(second, "counter", COUNT, annotations=notes)
    engine.wait_beyond(counter, reached)
    cri.remove_pod(second)
    assert engine.shims() == []


def test_a_pod_that_cannot_go_on(engine: Containerd, cri: Cri) -> None:
    """StartContainer answers that it failed; the pod can be stopped and removed, and nothing is left."""
    pod = cri.run_pod("lost")
    with pytest.raises(Failed, match="StartContainer"):
        cri.start(pod, "counter", COUNT, {"HOLDFAST_RESTORE": "nothing-of-that-name", "HOLDFAST_WORKLOAD": "lost"})
    assert "nothing-of-that-name" in engine.log.read_text()
    cri.remove_pod(pod)
    assert engine.shims() == []


@pytest.mark.requires("cni")
def test_a_pod_with_a_network_of_its_own(engine: Containerd, cri: Cri) -> None:
    """CRIU locks the pod's network while it dumps; the container beside it must not stay cut off."""
    wishes = {"HOLDFAST_CHECKPOINT": "1", "HOLDFAST_WORKLOAD": "networked"}
    first = cri.run_pod("networked-1", host_network=False)
    counter = cri.start(first, "counter", COUNT, wishes)
    engine.wait_beyond(counter, 5)
    namespace = f"--net=/proc/{engine.pid(first)}/ns/net"
    cri.stop(counter)
    for tool in ("iptables", "ip6tables"):
        assert "CRIU" not in engine.lab.run("nsenter", namespace, tool, "-S").stdout
    reached = engine.count(counter)
    cri.remove_pod(first)
    second = cri.run_pod("networked-2", host_network=False)
    counter = cri.start(second, "counter", COUNT, wishes)
    engine.wait_beyond(counter, reached)
    cri.remove_pod(second)
    assert engine.shims() == []
