"""A whole Kubernetes with two nodes: pods that are deleted, evicted, drained, preempted, rolled out and scaled go on.

`./dev torture kubernetes --binaries DIR`. The programs are given, and never part of the project: DIR has etcd,
kube-apiserver, kube-controller-manager, kube-scheduler, kubelet (1.31 or newer) and kubectl, built from their public
sources by whoever runs this. containerd is that of $KEDGE_CONTAINERD, as in the other tests. The nodes share nothing
but a PostgreSQL store. Each kind of pod and each way of replacing it comes once; then pods are deleted while somebody
on their node is killed at a random moment, for as long as there is time.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import kedge
from tests.e2e.test_deploy import DEPLOY, make_payload
from tests.engine import IMAGE
from tests.lab import COUNTER, PYTHON
from tests.node import node
from tests.parts import missing
from tests.servers.postgres import postgres_cluster
from tests.waiting import wait_for

from .cluster import PROGRAMS, Cluster
from .pods import VICTIMS

# Counts with a lock, a watch and a connection to itself; the connection is made again when it was closed.
_TIED = """
import ctypes, fcntl, os, socket, time
libc = ctypes.CDLL(None)
os.makedirs("/work/watched", exist_ok=True)
lock = open("/work/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
watch = libc.inotify_init1(0o4000)
assert libc.inotify_add_watch(watch, b"/work/watched", 0x100) > 0
server = socket.create_server(("127.0.0.1", 7777))
def connect():
    near = socket.create_connection(("127.0.0.1", 7777))
    return near, server.accept()[0]
near, far = connect()
n = 0
while True:
    open("/work/watched/file", "w").close()
    os.unlink("/work/watched/file")
    try:
        near.send(b"x")
        is_open = far.recv(1) == b"x"
    except OSError:
        is_open = False
    if not is_open:
        near, far = connect()
    with open("/work/lock") as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            open("/work/broken", "w").write("the lock is lost")
        except BlockingIOError:
            pass
    os.read(watch, 4096)
    n += 1
    with open("/work/log", "a") as log:
        log.write(f"{n}\\n")
    time.sleep(0.01)  # sleep: the pace of the program
"""
# Which start of the program this is: one that went on is still the same.
_BEGAN = 'import os\nopen("/work/began", "w").write(os.urandom(8).hex())\n'
_COUNT = [PYTHON, "-c", _BEGAN + COUNTER, "0.002", "0"]
_EMPTY: dict[str, Any] = {"volumes": [{"name": "work", "emptyDir": {}}]}
_IN_MEMORY: dict[str, Any] = {"volumes": [{"name": "work", "emptyDir": {"medium": "Memory"}}]}
_MOUNTED = {"volumeMounts": [{"name": "work", "mountPath": "/work"}]}
_USR = {"name": "usr", "mountPath": "/usr", "readOnly": True}
_SIDECAR = {
    "name": "helper", "image": IMAGE, "imagePullPolicy": "Never", "restartPolicy": "Always", "volumeMounts": [_USR],
    "command": [PYTHON, "-c", "import signal, sys; signal.signal(15, lambda *_: sys.exit()); signal.pause()"],
}  # fmt: skip
_PROBE = {"exec": {"command": ["/usr/bin/test", "-e", "/work/log"]}, "periodSeconds": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the pod, of its container
    "plain": ({}, {}),
    "tied": ({}, {"command": [PYTHON, "-c", _BEGAN + _TIED]}),
    "emptydir": (_EMPTY, _MOUNTED),
    "memory": (_IN_MEMORY, _MOUNTED),
    "readonly": (_EMPTY, {**_MOUNTED, "securityContext": {"readOnlyRootFilesystem": True}}),
    "nonroot": ({**_EMPTY, "securityContext": {"runAsUser": 1000, "fsGroup": 1000}}, _MOUNTED),
    "confined": (
        {"securityContext": {"seccompProfile": {"type": "RuntimeDefault"}}},
        {"securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["NET_RAW"]}}},
    ),
    "limits": ({}, {"resources": {"limits": {"memory": "256Mi", "cpu": "500m"}}}),
    "hostnetwork": ({"hostNetwork": True}, {}),
    "sharedpid": ({"shareProcessNamespace": True}, {}),
    "probes": ({}, {"readinessProbe": _PROBE, "livenessProbe": _PROBE}),
    "sidecar": ({"initContainers": [_SIDECAR]}, {}),
}


_KILLED: dict[str, Callable[[list[bytes]], bool]] = {
    **VICTIMS,
    "containerd": lambda words: words[0] == b"containerd",
    "kubelet": lambda words: words[0].endswith(b"/kubelet"),
}


def torture(minutes: float, folder: Path, binaries: Path | None = None) -> dict[str, float]:
    """Every case once, then every way in which a pod is replaced, then kills until the time is over."""
    for part in ("criu", "containerd", "cc", "cni", "postgres"):
        if reason := missing(part):
            raise RuntimeError(reason)
    absent = [name for name in PROGRAMS if binaries is None or not os.access(binaries / name, os.X_OK)]
    if binaries is None or absent:
        raise RuntimeError(f"--binaries DIR lacks {', '.join(absent)}: build them from their public sources")
    deadline = time.monotonic() + 60 * minutes
    binaries = binaries.resolve()
    criu = Path(shutil.which("criu") or "").resolve().parents[1]  # with its libraries
    payload = make_payload(folder)
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    with postgres_cluster() as database:
        shared = (DEPLOY.parents[1], Path(sys.base_prefix), binaries, criu, payload, database.folder)
        with node(one, *shared) as first, node(two, *shared) as second:
            cluster = Cluster([first, second], binaries, database.url("postgres"))
            cluster.start()
            before = [made.files() for made in (first, second)]
            cluster.install(payload)
            with cluster.explained():
                numbers = _Pods(cluster).live(deadline)
                cluster.uninstall()
                for made, files in zip((first, second), before, strict=True):
                    changed = {path for path, _ in made.files().items() ^ files.items()}
                    assert not changed, f"a node is not as it was: {sorted(changed)}"
            return numbers


def _may_read_limits() -> bool:
    """Whether root has CAP_SYS_RESOURCE: without it CRIU cannot save processes of other users."""
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> 24 & 1)


def _pod(name: str, pod: Mapping[str, Any], container: Mapping[str, Any], **wishes: str) -> dict[str, Any]:
    """A template: the counter, from /usr of the node."""
    wishes = {"KEDGE_CHECKPOINT": "1", "KEDGE_POLICY": "fail", **wishes}
    environment = [{"name": name, "value": value} for name, value in wishes.items()]
    mounts = [_USR, *container.get("volumeMounts", ())]
    usual = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": _COUNT, "env": environment}
    volumes = [{"name": "usr", "hostPath": {"path": "/usr"}}, *pod.get("volumes", ())]
    spec = {"runtimeClassName": "kedge", "terminationGracePeriodSeconds": 30, **pod, "volumes": volumes,
            "containers": [{**usual, **container, "volumeMounts": mounts}]}  # fmt: skip
    return {"metadata": {"labels": {"app": name}}, "spec": spec}


def _workload(kind: str, name: str, template: Mapping[str, Any], **more: object) -> dict[str, Any]:
    group = "batch/v1" if kind == "Job" else "apps/v1"
    selector = {} if kind == "Job" else {"selector": {"matchLabels": {"app": name}}}
    return {"apiVersion": group, "kind": kind, "metadata": {"name": name, "namespace": "team"},
            "spec": {**selector, "template": template, **more}}  # fmt: skip


def _deployment(name: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    return _workload("Deployment", name, _pod(name, pod, container), replicas=1, strategy={"type": "Recreate"})


class _Pods:
    """What must go on."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.kubectl = cluster.kubectl
        self._saved = 0  # how far the last checkpoint of the pod that is killed around is, at least

    def live(self, deadline: float) -> dict[str, float]:
        cases = [name for name in CASES if name != "nonroot" or _may_read_limits()]
        for case in cases:
            pod, container = CASES[case]
            template = _pod(case, pod, container)
            self._goes_on(_workload("StatefulSet", case, template, replicas=1, serviceName=case), self.delete)
        never = {"restartPolicy": "Never"}
        several = {"completions": 2, "parallelism": 2}
        self._goes_on(_workload("Job", "job", _pod("job", never, {})), self.delete)
        self._goes_on(
            _workload("Job", "indexed", _pod("indexed", never, {}), **several, completionMode="Indexed"),
            self.delete, "batch.kubernetes.io/job-completion-index=1",
        )  # fmt: skip
        here = {"nodeSelector": {"kubernetes.io/hostname": "node1"}}
        self._goes_on(_workload("DaemonSet", "daemons", _pod("daemons", here, {}, KEDGE_WORKLOAD="agent")), self.delete)
        slow = {"lifecycle": {"preStop": {"sleep": {"seconds": 4}}}}
        self._goes_on(_deployment("slow", {}, slow), self.evict)  # another pod is there before it is told to stop
        ways = (self.delete, self.evict, self.drain, self.drain, self.roll_out, self.scale, self.preempt)
        hungry = {"resources": {"requests": {"cpu": f"{600 * (os.cpu_count() or 1)}m"}}}
        self._cluster.apply(_deployment("train", {}, hungry))
        for way in ways:
            self._is_replaced("app=train", way)
        kills = self._kill_around("app=train", deadline)
        self.kubectl("delete", "deployment", "train", "--cascade=foreground", timeout=180)
        return {"cases": len(cases), "kinds": 4, "ways": len(ways), **kills}

    def _goes_on(self, workload: Mapping[str, Any], replace: Callable[[str], None], selector: str = "") -> None:
        name = workload["metadata"]["name"]
        self._cluster.apply(workload)
        self._is_replaced(",".join(filter(None, (f"app={name}", selector))), replace)
        self.kubectl("delete", workload["kind"], name, "--cascade=foreground", timeout=180)
        print(f"  {name}: goes on", flush=True)

    def _is_replaced(self, selector: str, replace: Callable[[str], None]) -> None:
        before = wait_for(lambda: self._cluster.running(selector), f"{selector} does not start", 120)
        wait_for(lambda: self._lines(before) > 20, f"{selector} does not count")
        reached, began = self._lines(before), (self._cluster.work(before) / "began").read_text()
        replace(before["metadata"]["name"])
        uid = before["metadata"]["uid"]
        after = wait_for(lambda: self._cluster.running(selector, uid), f"{selector} does not return", 180)
        assert (self._cluster.work(after) / "began").read_text() == began, f"{selector} began anew after {reached}"
        assert self._lines(after) >= reached, f"{selector} went back: {self._lines(after)} after {reached}"
        reached = self._lines(after)
        wait_for(lambda: self._lines(after) > reached + 20, f"{selector} does not go on")
        nodes = [pod["spec"]["nodeName"] for pod in (before, after)]
        assert replace != self.drain or nodes[0] != nodes[1], "a drained pod came back to its node"
        print(f"  {selector}: {replace.__name__}, {' → '.join(nodes)}", flush=True)

    def _lines(self, pod: Mapping[str, Any]) -> int:
        """How far its counter is; AssertionError when memory and files did not agree."""
        work = self._cluster.work(pod)
        assert not (work / "broken").exists(), (work / "broken").read_text()
        text = (work / "log").read_text() if (work / "log").exists() else ""
        lines = text[: text.rfind("\n") + 1].split()
        assert lines == [str(number) for number in range(1, len(lines) + 1)], lines[-3:]
        return len(lines)

    # Ways in which a pod goes

    def delete(self, pod: str) -> None:
        self.kubectl("delete", "pod", pod, timeout=180)

    def evict(self, pod: str) -> None:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "team"}}
        self._cluster.apply(eviction, "create", "--raw", f"/api/v1/namespaces/team/pods/{pod}/eviction")

    def drain(self, pod: str) -> None:
        """To the other node."""
        node = self.kubectl("get", "pod", pod, "--output=jsonpath={.spec.nodeName}").stdout
        self.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", timeout=180)
        wait_for(lambda: self._cluster.running("app=train"), "it does not return", 180)
        self.kubectl("uncordon", node)

    def roll_out(self, pod: str) -> None:
        self.kubectl("rollout", "restart", "deployment/train")

    def scale(self, pod: str) -> None:
        self.kubectl("scale", "deployment/train", "--replicas=0")
        self.kubectl("wait", "--for=delete", f"pod/{pod}", "--timeout=120s", timeout=180)
        self.kubectl("scale", "deployment/train", "--replicas=1")

    def preempt(self, pod: str) -> None:
        """More important pods want the room on both nodes, until they are gone again."""
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "first"}}
        self._cluster.apply({**kind, "value": 1000})
        room = {"resources": {"requests": {"cpu": f"{600 * (os.cpu_count() or 1)}m"}}}
        template = _pod("important", {"priorityClassName": "first"}, room, KEDGE_CHECKPOINT="")
        self._cluster.apply(_workload("Deployment", "important", template, replicas=2))
        self.kubectl("wait", "--for=delete", f"pod/{pod}", "--timeout=120s", timeout=180)
        self.kubectl("delete", "deployment", "important", "--cascade=foreground", timeout=180)

    # Kills

    def _kill_around(self, selector: str, deadline: float) -> dict[str, float]:
        draw = random.Random(19)
        kills = dict.fromkeys(_KILLED, 0.0)
        rounds = 0
        pod = wait_for(lambda: self._cluster.running(selector), f"{selector} does not run", 120)
        began = (self._cluster.work(pod) / "began").read_text()
        self._saved = self._lines(pod)
        while time.monotonic() < deadline:
            victim = draw.choice(list(_KILLED))
            reached, generation = self._lines(pod), self._generation()
            kills[victim] += self._delete_while_killing(pod, victim, draw)
            going_on = partial(self._going_on, selector, pod["metadata"]["uid"])
            pod = wait_for(going_on, f"it does not return, {victim} killed", 300)
            assert (self._cluster.work(pod) / "began").read_text() == began, f"it began anew, {victim} killed"
            lines = self._lines(pod)
            assert lines >= self._saved, f"it went back to {lines} from {self._saved}, {victim} killed"
            if self._generation() > generation:
                self._saved = reached
            rounds += 1
        return {"pods": rounds, **kills}

    def _generation(self) -> int:
        with kedge.open(self._cluster.store, namespace="containers") as store:
            return max(checkpoint.seq for checkpoint in store.list("container:team+deployment:train+main"))

    def _going_on(self, selector: str, besides: str) -> dict[str, Any] | None:
        """The next pod, if it counts."""
        pod = self._cluster.running(selector, besides)
        with suppress(OSError, StopIteration, TypeError):  # no pod yet, or it ended while it was looked at
            lines = self._lines(pod or {"spec": None})
            time.sleep(0.2)  # sleep: at least some steps of the counter
            return pod if self._lines(pod or {}) > lines else None
        return None

    def _delete_while_killing(self, pod: Mapping[str, Any], victim: str, draw: random.Random) -> int:
        """The number of kills: 0, if the victim was not there."""
        name = pod["spec"]["nodeName"]
        killed = 0
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(self.kubectl, "delete", "pod", pod["metadata"]["name"], timeout=300)
            while not done.done() and not killed:
                if pids := list(self._pids(name, victim)):
                    time.sleep(draw.uniform(0, 0.5))  # sleep: a random moment
                    with suppress(ProcessLookupError):
                        os.kill(pids[0], signal.SIGKILL)
                        killed = 1
                time.sleep(0.005)  # sleep: between two looks
            if killed and victim == "kubelet":
                self._cluster.start_kubelet(name)
            done.result()
        return killed

    def _pids(self, name: str, victim: str) -> Iterator[int]:
        """Processes of that node: containers have PID namespaces of their own."""
        ours = os.readlink(f"/proc/{self._cluster.nodes[name].init}/ns/pid")
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if words[0] and _KILLED[victim](words) and os.readlink(process / "ns/pid") == ours:
                    yield int(process.name)
