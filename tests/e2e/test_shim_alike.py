"""What did not opt in behaves as with containerd's own shim, in the calls of a kubelet; and options for runc arrive."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.containers.wire import encode
from tests.cri import Cri, Failed
from tests.e2e.test_pods import jobs
from tests.engine import COUNT, IMAGE, Containerd, containerd
from tests.lab import PYTHON, lab, wait_for

pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.requires("criu", "containerd", "cc")]
TALKING = """
import signal, sys
signal.signal(15, lambda *_: sys.exit(7))
print("said", flush=True)
print("complained", file=sys.stderr, flush=True)
signal.pause()
"""


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with lab(tmp_path_factory.mktemp("alike")) as made, containerd(made, pods=True) as engine:
        yield engine


def test_every_call_is_answered_alike(engine: Containerd) -> None:
    """A program's output, its logs, limits, statistics, its end and its exit status."""
    cri = Cri(engine.home / "socket", IMAGE)
    plain, ours = (_life(cri, handler, engine.home / f"logs-{handler}") for handler in ("runc", "holdfast"))
    assert ours == plain
    assert (ours[0], ours[1], ours[-1]) == (("out\n", "err\n", 3), ["stderr F complained", "stdout F said"], 7)
    assert engine.shims() == []


def _life(cri: Cri, handler: str, logs: Path) -> list[object]:
    pod = cri.run_pod(f"alike-{handler}", handler=handler, logs=logs)
    container = cri.start(pod, "main", (PYTHON, "-c", TALKING), log="main.log")
    lines = wait_for(lambda: found if len(found := _logged(logs / "main.log")) == 2 else None, "no log")
    out, err, status = cri.execute(container, "/usr/bin/sh", "-c", "echo out; echo err >&2; exit 3")
    found: list[object] = [(out.decode(), err.decode(), status), sorted(lines)]
    cri.call("UpdateContainerResources", encode([(1, container), (2, encode([(3, 512)]))]))  # shares of the processor
    statistics = cri.call("ContainerStats", encode([(1, container)])).message(1)
    found.append([part in statistics for part in (1, 2, 3)])  # whose, processor, memory
    cri.call("ReopenContainerLog", encode([(1, container)]))
    cri.stop(container)
    status = cri.call("ContainerStatus", encode([(1, container)])).message(1).number(7)
    cri.remove_pod(pod)
    return [*found, status]


def _logged(path: Path) -> list[str]:
    return [line.partition(" ")[2] for line in path.read_text().splitlines()] if path.exists() else []


def test_options_that_a_runtime_by_our_name_cannot_have(engine: Containerd) -> None:
    """containerd gives them another type than runc's, which the shim refuses: nothing is started without them."""
    with pytest.raises(Failed):
        Cri(engine.home / "socket", IMAGE).run_pod("misled", handler="misled")
    assert engine.shims() == []


def options_for_runc(engine: Containerd) -> None:
    """They have runc's type where the runtime's is runc's: runtime_path, from containerd 1.7 on, names our shim."""
    cri = Cri(engine.home / "socket", IMAGE)
    pod = cri.run_pod("with-options", handler="by-path")
    counter = cri.start(pod, "counter", COUNT, {"HOLDFAST_CHECKPOINT": "1", "HOLDFAST_WORKLOAD": "options"})
    engine.wait_beyond(counter, 5)
    cri.stop(counter)
    cri.remove_pod(pod)
    assert "container:default+options" in jobs(engine)
    assert engine.shims() == []
