"""Kills in a cluster: pods are deleted while somebody on their node, or the node, is killed at a random moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import Any

import kedge
from tests.waiting import wait_for

from .cluster import Cluster
from .pods import VICTIMS

KILLED: dict[str, Callable[[list[bytes]], bool]] = {
    **VICTIMS,
    "containerd": lambda words: words[0] == b"containerd",
    "kubelet": lambda words: words[0].endswith(b"/kubelet"),
}
_MORTAL = "node2"  # the other one has the control plane


def lines_of(work: Path) -> int:
    """How far the counter in that folder is; AssertionError when memory and files did not agree."""
    assert not (work / "broken").exists(), (work / "broken").read_text()
    text = (work / "log").read_text() if (work / "log").exists() else ""
    lines = text[: text.rfind("\n") + 1].split()
    assert lines == [str(number) for number in range(1, len(lines) + 1)], lines[-3:]
    return len(lines)


class Kills:
    """Deployments of one pod each, which go on after every kill: never before their last checkpoint."""

    def __init__(self, cluster: Cluster, store: str, names: list[str], seed: int) -> None:
        self._cluster = cluster
        self._seed = seed
        self._victims = [_Workload(cluster, store, name) for name in names]
        self._lock = Lock()
        self._cuts = 0  # how often the power of a node failed or came back
        self._is_over = Event()
        self.numbers = {**dict.fromkeys([*KILLED, "node"], 0.0), "pods": 0.0}

    def until(self, deadline: float) -> dict[str, float]:
        with ThreadPoolExecutor(len(self._victims) + 1) as pool:
            list(pool.map(_Workload.begin, self._victims))
            cuts = pool.submit(self._cut_all_along)
            workloads = [pool.submit(self._rounds, one, deadline) for one in self._victims]
            try:
                for done in as_completed(workloads):
                    done.result()
            finally:
                self._is_over.set()  # for the others
            cuts.result()
        return self.numbers

    def _rounds(self, workload: _Workload, deadline: float) -> None:
        draw = random.Random(f"{self._seed} {workload.name}")
        while time.monotonic() < deadline and not self._is_over.is_set():
            self._round(workload, draw)
            with self._lock:
                self.numbers["pods"] += 1
                print(f"  {self.numbers}", flush=True)

    def _round(self, workload: _Workload, draw: random.Random) -> None:
        """Somebody is killed while a pod stops, and while the next one starts; also nobody, one time in eight."""
        at_stop = draw.choice([*KILLED, ""])
        at_start = draw.choice([victim for victim in (*KILLED, "") if victim != "shim"])

        def strike(victim: str, nodes: list[str], going: Callable[[], bool]) -> None:
            is_done = not victim
            while not is_done and going():
                if found := next(self._found(nodes, victim, workload), None):
                    time.sleep(0.5 * draw.random() ** 2)  # sleep: a random moment; most victims do not live long
                    is_done = self._kill(found, victim)
                time.sleep(0.01)  # sleep: between two looks

        cuts = self._cuts
        here, anywhere = [workload.node], list(self._cluster.nodes)
        workload.delete(partial(strike, at_stop, here))
        names = " and ".join(filter(None, (at_stop, at_start))) or "nobody"
        workload.wait(names, partial(strike, at_start, anywhere))
        if at_stop != "shim" and cuts == self._cuts and not cuts % 2:
            workload.note_saved()

    def _kill(self, pid: int, victim: str) -> bool:
        """Whether it was still there."""
        with self._lock, suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.numbers[victim] += 1
            return True
        return False

    def _cut_all_along(self) -> None:
        """The power of a node fails at random moments; and it is started again."""
        draw = random.Random(self._seed)
        while not self._is_over.wait(draw.uniform(30, 90)):  # sleep: a random moment
            with self._lock:
                self._cuts += 1
                self._cluster.nodes[_MORTAL].crash()
                self.numbers["node"] += 1
                self._cluster.boot(_MORTAL)
                self._cuts += 1

    def _found(self, nodes: list[str], victim: str, workload: _Workload) -> Iterator[int]:
        """Processes of the nodes: containers have PID namespaces of their own. Of the shims only that of the pod: its
        end is the container's."""
        spaces = {}
        for name in nodes:
            with suppress(OSError):
                spaces[os.readlink(f"/proc/{self._cluster.nodes[name].init}/ns/pid")] = name
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if not words[0] or not KILLED[victim](words):
                    continue
                node = spaces.get(os.readlink(process / "ns/pid"))
                if node and (victim != "shim" or workload.is_below(process)):
                    yield int(process.name)


class _Workload:
    """One Deployment, and how far it must be."""

    def __init__(self, cluster: Cluster, store: str, name: str) -> None:
        self.name = name
        self._cluster, self._store = cluster, store
        self._pod: Mapping[str, Any] = {}
        self._began = ""
        self._saved = 0  # how far its last checkpoint is, at least
        self._reached = 0
        self._is_saved = False

    @property
    def node(self) -> str:
        return str(self._pod["spec"]["nodeName"])

    def is_below(self, shim: Path) -> bool:
        container = self._pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        children = (shim / f"task/{shim.name}/children").read_text().split()
        return any(container in Path(f"/proc/{child}/cgroup").read_text() for child in children)

    def begin(self) -> None:
        """With a first checkpoint."""
        self._pod = self._next("", "nobody")
        self._began = (self._cluster.work(self._pod) / "began").read_text()
        self.delete(lambda going: None)
        self.wait("nobody", lambda going: None)
        self.note_saved()
        assert self._saved, f"{self.name} was not checkpointed"

    def delete(self, meanwhile: Callable[[Callable[[], bool]], None]) -> None:
        """Until it is gone."""
        self._reached, before = self._saved, self._generations()
        with suppress(OSError):  # its node may be cut off just now
            self._reached = max(self._saved, lines_of(self._cluster.work(self._pod)))
        pods = "/api/v1/namespaces/team/pods"
        name, uid = self._pod["metadata"]["name"], self._pod["metadata"]["uid"]

        def is_there() -> bool:
            time.sleep(0.05)  # sleep: between two looks
            items = self._cluster.ask(f"{pods}?fieldSelector=metadata.name={name}").get("items")
            return items is None or any(pod["metadata"]["uid"] == uid for pod in items)

        self._cluster.ask(f"{pods}/{name}", "DELETE")
        meanwhile(is_there)
        wait_for(lambda: not is_there(), f"{self.name} does not go", 600)
        self._is_saved = self._generations() > before

    def wait(self, victims: str, meanwhile: Callable[[Callable[[], bool]], None]) -> None:
        before = self._pod["metadata"]["uid"]
        meanwhile(lambda: self._going_on(before) is None)
        self._pod = self._next(before, victims)
        with suppress(OSError):  # its node may be cut off just now
            work = self._cluster.work(self._pod)
            began, lines = (work / "began").read_text(), lines_of(work)
            assert began == self._began, f"{self.name} began anew, killed: {victims}"
            assert lines >= self._saved, f"{self.name} went back to {lines} from {self._saved}, killed: {victims}"

    def note_saved(self) -> None:
        """It was checkpointed when it was deleted, and did not go back before that: with its shim killed or the power
        cut, it may have been started again, from an earlier checkpoint."""
        if self._is_saved:
            self._saved = self._reached

    def _next(self, before: str, victims: str) -> Mapping[str, Any]:
        return wait_for(lambda: self._going_on(before), f"{self.name} does not return, killed: {victims}", 600)

    def _going_on(self, besides: str) -> dict[str, Any] | None:
        """The next pod, if it counts."""
        pod = self._cluster.running(f"app={self.name}", besides)
        if pod is None:
            time.sleep(0.05)  # sleep: between two looks
            return None
        with suppress(OSError):  # it ended while it was looked at
            lines = lines_of(self._cluster.work(pod))
            time.sleep(0.2)  # sleep: at least some steps of the counter
            return pod if lines_of(self._cluster.work(pod)) > lines else None
        return None

    def _generations(self) -> int:
        with kedge.open(self._store, namespace="containers") as store:
            found = store.list(f"container:team+deployment:{self.name}+main")
            return max((checkpoint.seq for checkpoint in found), default=0)
