"""What did not opt in behaves as with containerd's own shim, in the calls of a kubelet; and options for runc arrive."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kedge.containers.protobuf import encode
from tests.cri import Cri, Failed
from tests.e2e.test_pods import jobs
from tests.e2e.test_shim import ROUNDS
from tests.engine import COUNT, IMAGE, Containerd, containerd
from tests.lab import PYTHON, lab
from tests.waiting import wait_for

pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.requires("criu", "containerd", "cc")]
TALKING = """
import signal, sys
signal.signal(15, lambda *_: sys.exit(7))
print("said", flush=True)
print("complained", file=sys.stderr, flush=True)
n = 0
while True:
    n += 1
    print(n, input(), flush=True)
"""
# Speaks with the streaming server of CRI, as `kubectl exec` and `kubectl attach` do, each time until it hears something
# or, if there is nothing to wait for, to the end; answers what came through each channel.
STREAMING = """
import json, sys
from websockets.sync.client import connect
answers = []
for url, said, wanted in json.loads(sys.argv[1]):
    heard = {}
    with connect(url.replace("http", "ws", 1), subprotocols=["v4.channel.k8s.io"], proxy=None) as socket:
        if said:
            socket.send(b"\\0" + said.encode())
        for message in socket:
            heard[message[0]] = heard.get(message[0], "") + message[1:].decode()
            if wanted and wanted in heard.get(1, ""):
                break
    answers.append(heard)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module", name="engine")
def _engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containerd]:
    with lab(tmp_path_factory.mktemp("alike")) as made, containerd(made, pods=True) as engine:
        yield engine


def test_every_call_is_answered_alike(engine: Containerd) -> None:
    """A program's output, its logs, limits, statistics, its end and its exit status."""
    cri = Cri(engine.home / "socket", IMAGE)
    plain, ours = (_life(engine, cri, handler) for handler in ("runc", "kedge"))
    assert ours == plain
    assert (ours[0], ours[1], ours[-1]) == (("out\n", "err\n", 3), ["stderr F complained", "stdout F said"], 7)
    engine.wait_shimless()


def _life(engine: Containerd, cri: Cri, handler: str) -> list[object]:
    logs = engine.home / f"logs-{handler}"
    pod = cri.run_pod(f"alike-{handler}", handler=handler, logs=logs)
    container = cri.start(pod, "main", (PYTHON, "-c", TALKING), log="main.log", stdin=True)
    lines = wait_for(lambda: found if len(found := _logged(logs / "main.log")) == 2 else None, "no log")
    out, err, status = cri.execute(container, "/usr/bin/sh", "-c", "echo out; echo err >&2; exit 3")
    found: list[object] = [(out.decode(), err.decode(), status), sorted(lines)]
    shell = cri.exec_url(container, "/usr/bin/sh", "-c", "read line; echo got $line; echo err >&2; exit 3")
    executed, attached = streamed(engine, (shell, "this\n", ""), (cri.attach_url(container), "hello\n", "1 hello\n"))
    assert (executed["1"], executed["2"], attached["1"]) == ("got this\n", "err\n", "1 hello\n")
    found += [executed, attached]
    cri.call("UpdateContainerResources", encode([(1, container), (2, encode([(3, 512)]))]))  # shares of the processor
    statistics = cri.call("ContainerStats", encode([(1, container)])).message(1)
    found.append([part in statistics for part in (1, 2, 3)])  # whose, processor, memory
    cri.call("ReopenContainerLog", encode([(1, container)]))
    cri.stop(container)
    status = cri.call("ContainerStatus", encode([(1, container)])).message(1).number(7)
    cri.remove_pod(pod)
    return [*found, status]


def streamed(engine: Containerd, *asked: tuple[str, str, str]) -> list[dict[str, str]]:
    """What is heard at each address, after saying that, until one hears this; by channel."""
    answers: list[dict[str, str]] = json.loads(engine.lab.python(STREAMING, json.dumps(asked)).stdout)
    return answers


@pytest.mark.skipif(ROUNDS == 1, reason="./dev torture shim runs it")  # skip: a long test
def test_attached_to_one_that_was_brought_back(engine: Containerd) -> None:
    cri = Cri(engine.home / "socket", IMAGE)
    for number, line in enumerate(("hello", "again"), 1):
        pod = cri.run_pod(f"talking-{number}")
        program = (PYTHON, "-c", TALKING)
        wishes = {"KEDGE_CHECKPOINT": "1", "KEDGE_WORKLOAD": "talking"}
        container = cri.start(pod, "main", program, wishes, stdin=True, log="main.log")
        [heard] = streamed(engine, (cri.attach_url(container), f"{line}\n", f"{number} {line}\n"))
        assert heard["1"] == f"{number} {line}\n"
        cri.stop(container)
        cri.remove_pod(pod)
    engine.wait_shimless()


def _logged(path: Path) -> list[str]:
    return [line.partition(" ")[2] for line in path.read_text().splitlines()] if path.exists() else []


def test_options_that_a_runtime_by_our_name_cannot_have(engine: Containerd) -> None:
    """containerd gives them another type than runc's, which the shim refuses: nothing is started without them."""
    with pytest.raises(Failed):
        Cri(engine.home / "socket", IMAGE).run_pod("misled", handler="misled")
    engine.wait_shimless()


def options_for_runc(engine: Containerd) -> None:
    """They have runc's type where the runtime's is runc's: runtime_path, from containerd 1.7 on, names our shim."""
    cri = Cri(engine.home / "socket", IMAGE)
    pod = cri.run_pod("with-options", handler="by-path")
    counter = cri.start(pod, "counter", COUNT, {"KEDGE_CHECKPOINT": "1", "KEDGE_WORKLOAD": "options"})
    engine.wait_beyond(counter, 5)
    cri.stop(counter)
    cri.remove_pod(pod)
    assert "container:default+options" in jobs(engine)
    engine.wait_shimless()
