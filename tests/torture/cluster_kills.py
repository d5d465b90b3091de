"""Kills in a cluster: pods are deleted while somebody on their node, or the node, is killed at a random moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
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
        self._draw = random.Random(seed)
        self._victims = [_Workload(cluster, store, name) for name in names]
        self._lock = Lock()
        self.numbers = {**dict.fromkeys([*KILLED, "node"], 0.0), "pods": 0.0}

    def until(self, deadline: float) -> dict[str, float]:
        with ThreadPoolExecutor(len(self._victims)) as pool:
            list(pool.map(_Workload.begin, self._victims))
            while time.monotonic() < deadline:
                draws = [self._drawn() for _ in self._victims]
                is_cut = self._draw.random() < 0.1
                pairs = zip(self._victims, draws, strict=True)
                rounds = [pool.submit(self._round, one, *draw, is_cut) for one, draw in pairs]
                if is_cut:
                    self._cut()
                for done in rounds:
                    done.result()
                print(f"  {self.numbers}", flush=True)
        return self.numbers

    def _drawn(self) -> tuple[str, bool, float]:
        """Whom, whether while the pod starts, and how long after it was seen."""
        victim = self._draw.choice(list(KILLED))
        return victim, victim != "shim" and self._draw.random() < 0.5, self._draw.uniform(0, 0.5)

    def _round(self, workload: _Workload, victim: str, is_at_start: bool, delay_s: float, is_cut: bool) -> None:
        is_done = False

        def strike(nodes: list[str], going: Callable[[], bool]) -> None:
            nonlocal is_done
            while not is_done and going():
                if found := next(self._found(nodes, victim, workload), None):
                    time.sleep(delay_s)  # sleep: a random moment
                    is_done = self._kill(*found, victim)
                time.sleep(0.01)  # sleep: between two looks

        here, anywhere = [workload.node], list(self._cluster.nodes)
        workload.delete(lambda going: None if is_at_start else strike(here, going))
        workload.wait(victim, lambda going: strike(anywhere, going) if victim != "shim" else None, is_cut=is_cut)
        with self._lock:
            self.numbers["pods"] += 1

    def _kill(self, node: str, pid: int, victim: str) -> bool:
        """Whether it was still there."""
        with self._lock, suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.numbers[victim] += 1
            if victim == "kubelet":
                self._cluster.start_kubelet(node)
            return True
        return False

    def _cut(self) -> None:
        """The power of a node, at a random moment of all that; and it is started again."""
        time.sleep(self._draw.uniform(0, 6))  # sleep: a random moment
        with self._lock:
            self._cluster.nodes[_MORTAL].crash()
            self.numbers["node"] += 1
            self._cluster.boot(_MORTAL)

    def _found(self, nodes: list[str], victim: str, workload: _Workload) -> Iterator[tuple[str, int]]:
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
                name = spaces.get(os.readlink(process / "ns/pid"))
                if name and (victim != "shim" or workload.is_below(process)):
                    yield name, int(process.name)


class _Workload:
    """One Deployment, and how far it must be."""

    def __init__(self, cluster: Cluster, store: str, name: str) -> None:
        self._cluster, self._store, self._name = cluster, store, name
        self._pod: Mapping[str, Any] = {}
        self._began = ""
        self._saved = 0  # how far its last checkpoint is, at least
        self._reached = self._generation = 0

    @property
    def node(self) -> str:
        return str(self._pod["spec"]["nodeName"])

    def is_below(self, shim: Path) -> bool:
        container = self._pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        children = (shim / f"task/{shim.name}/children").read_text().split()
        return any(container in Path(f"/proc/{child}/cgroup").read_text() for child in children)

    def begin(self) -> None:
        """With a first checkpoint."""
        self._pod = wait_for(lambda: self._going_on(""), f"{self._name} does not start", 300)
        self._began = (self._cluster.work(self._pod) / "began").read_text()
        self.delete(lambda going: None)
        self.wait("nobody", lambda going: None, is_cut=False)
        assert self._saved, f"{self._name} was not checkpointed"

    def delete(self, meanwhile: Callable[[Callable[[], bool]], None]) -> None:
        self._reached, self._generation = self._saved, self._generations()
        with suppress(OSError):  # its node may be cut off just now
            self._reached = max(self._saved, lines_of(self._cluster.work(self._pod)))
        with ThreadPoolExecutor(1) as pool:
            name = self._pod["metadata"]["name"]
            done = pool.submit(self._cluster.kubectl, "delete", "pod", name, "--ignore-not-found", timeout=600)
            meanwhile(lambda: not done.done())
            done.result()

    def wait(self, victim: str, meanwhile: Callable[[Callable[[], bool]], None], *, is_cut: bool) -> None:
        before = self._pod["metadata"]["uid"]
        meanwhile(lambda: self._going_on(before) is None)
        self._pod = wait_for(lambda: self._going_on(before), f"{self._name} does not return, {victim} killed", 600)
        with suppress(OSError):  # its node may be cut off just now
            work = self._cluster.work(self._pod)
            began, lines = (work / "began").read_text(), lines_of(work)
            assert began == self._began, f"{self._name} began anew, {victim} killed"
            assert lines >= self._saved, f"{self._name} went back to {lines} from {self._saved}, {victim} killed"
        # With its shim killed or the power cut before it was deleted, it may have been started again, and what was
        # checkpointed then began at an earlier checkpoint.
        if self._generations() > self._generation and not is_cut and victim != "shim":
            self._saved = self._reached

    def _going_on(self, besides: str) -> dict[str, Any] | None:
        """The next pod, if it counts."""
        pod = self._cluster.running(f"app={self._name}", besides)
        if pod is None:
            return None
        with suppress(OSError):  # it ended while it was looked at
            lines = lines_of(self._cluster.work(pod))
            time.sleep(0.2)  # sleep: at least some steps of the counter
            return pod if lines_of(self._cluster.work(pod)) > lines else None
        return None

    def _generations(self) -> int:
        with kedge.open(self._store, namespace="containers") as store:
            found = store.list(f"container:team+deployment:{self._name}+main")
            return max((checkpoint.seq for checkpoint in found), default=0)
