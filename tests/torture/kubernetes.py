"""A whole Kubernetes with two nodes: pods that are deleted, evicted, drained, preempted, rolled out and scaled go on.
So do twenty at once, those of a node whose power is cut, and those of a kubelet that is alone.

`./dev torture kubernetes --binaries DIR`. The programs are given, and never part of the project: DIR has etcd,
kube-apiserver, kube-controller-manager, kube-scheduler, kubelet (1.31 or newer) and kubectl, built from their public
sources by whoever runs this. containerd is that of $KEDGE_CONTAINERD, as in the other tests. The nodes share nothing
but a store: PostgreSQL, and an object store if there is one for tests. Each kind of pod and each way of replacing it
comes once; then pods are deleted while somebody on their node, or the node, is killed at a random moment, as long as
there is time. `--kills` leaves out everything but these.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from tests.e2e.test_deploy import DEPLOY, criu_folder, make_payload
from tests.engine import IMAGE
from tests.lab import COUNTER, PYTHON
from tests.node import node
from tests.parts import missing
from tests.servers.postgres import postgres_cluster
from tests.servers.s3 import BUCKET
from tests.waiting import wait_for

from . import kubelet_alone
from .cluster import PROGRAMS, Cluster
from .cluster_kills import Kills, lines_of

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
_COUNT_SLOWLY = [*_COUNT[:3], "0.1", "0"]
_MANY = 20
_EMPTY: dict[str, Any] = {"volumes": [{"name": "work", "emptyDir": {}}]}
_IN_MEMORY: dict[str, Any] = {"volumes": [{"name": "work", "emptyDir": {"medium": "Memory"}}]}
_MOUNTED = {"volumeMounts": [{"name": "work", "mountPath": "/work"}]}
_BOTH_WAYS = {"volumeMounts": [{"name": "work", "mountPath": "/work", "mountPropagation": "Bidirectional"}]}
_SETTINGS: dict[str, Any] = {"volumes": [{"name": "settings", "configMap": {"name": "settings"}}]}
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
    "terminal": ({}, {"tty": True, "stdin": True}),
    "configmap": (_SETTINGS, {"volumeMounts": [{"name": "settings", "mountPath": "/settings"}]}),
    "bothways": (_EMPTY, {**_BOTH_WAYS, "securityContext": {"privileged": True}}),
}
_PATIENCE = {"KEDGE_DEADLINE_S": "60", "KEDGE_CLAIM_S": "60"}  # of the nodes; a busy machine needs time


def torture(
    minutes: float, folder: Path, binaries: Path | None = None, seed: int | None = None, *, only_kills: bool = False
) -> dict[str, float]:
    """Every case once, then every way in which a pod is replaced, then kills until the time is over."""
    for part in ("criu", "containerd", "cc", "cni", "postgres"):
        if reason := missing(part):
            raise RuntimeError(reason)
    absent = [name for name in PROGRAMS if binaries is None or not os.access(binaries / name, os.X_OK)]
    if binaries is None or absent:
        raise RuntimeError(f"--binaries DIR lacks {', '.join(absent)}: build them from their public sources")
    deadline = time.monotonic() + 60 * minutes
    seed = random.randrange(1 << 32) if seed is None else seed
    print(f"  seed {seed}", flush=True)
    binaries = binaries.resolve()
    payload = make_payload(folder)
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    with postgres_cluster() as database:
        index = database.url("postgres")
        shared = (DEPLOY.parents[1], Path(sys.base_prefix), binaries, criu_folder(), payload, database.folder)
        if not only_kills:
            alone = {"apiVersion": "v1", "kind": "Pod", **_pod("alone", {"runtimeClassName": None}, {})}
            alone["metadata"]["name"] = "alone"
            kubelet_alone.go_on(folder / "alone", shared, binaries, payload, alone, {"KEDGE_STORE": index, **_PATIENCE})
        with node(one, *shared) as first, node(two, *shared) as second:
            cluster = Cluster([first, second], binaries)
            cluster.start()
            before = [made.files() for made in (first, second)]
            objects = {} if missing("s3") else cluster.start_s3()
            store = f"{index}&blobs=s3://{BUCKET}/pods" if objects else index
            cluster.install(payload, {"KEDGE_STORE": store, **objects, **_PATIENCE})
            with cluster.explained():
                pods = _Pods(cluster, index)
                numbers = {} if only_kills else pods.live()
                numbers |= pods.survive_kills(deadline, seed)
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
    spec = {"runtimeClassName": "kedge", "terminationGracePeriodSeconds": 120, **pod, "volumes": volumes,
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

    def __init__(self, cluster: Cluster, store: str) -> None:
        self._cluster, self._store = cluster, store
        self.kubectl = cluster.kubectl

    def live(self) -> dict[str, float]:
        data = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a": "1"}}
        self._cluster.apply(data)
        cases = [name for name in CASES if name != "nonroot" or _may_read_limits()]
        for case in cases:
            pod, container = CASES[case]
            template = _pod(case, pod, container)
            self._goes_on(_workload("StatefulSet", case, template, replicas=1, serviceName=case), self.delete)
        self._kinds()
        self._all_at_once()
        self._node_returns()
        self._node_is_lost()
        ways = (self.delete, self.evict, self.drain, self.drain, self.roll_out, self.scale, self.preempt)
        hungry = {"resources": {"requests": {"cpu": f"{600 * (os.cpu_count() or 1)}m"}}}
        self._cluster.apply(_deployment("train", {}, hungry))
        for way in ways:
            self._is_replaced("app=train", way)
        self.kubectl("delete", "deployment", "train", "--cascade=foreground", timeout=300)
        return {"cases": len(cases), "kinds": 4, "ways": len(ways), "at once": _MANY}

    def survive_kills(self, deadline: float, seed: int) -> dict[str, float]:
        names = ["first", "second", "third", "fourth", "fifth", "sixth"]
        for name in names:  # the counter, PID 1 of its container, does not end by a signal that is passed on
            self._cluster.apply(_deployment(name, {"terminationGracePeriodSeconds": 30}, {}))
        kills = Kills(self._cluster, self._store, names, seed).until(deadline)
        self.kubectl("delete", "deployment", *names, "--cascade=foreground", timeout=300)
        self._cluster.wait_empty()
        return kills

    def _kinds(self) -> None:
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

    def _all_at_once(self) -> None:
        template = _pod("many", {}, {"command": _COUNT_SLOWLY})
        parallel = {"replicas": _MANY, "serviceName": "many", "podManagementPolicy": "Parallel"}
        self._cluster.apply(_workload("StatefulSet", "many", template, **parallel))
        before = self._wait_for_all([])
        self.kubectl("delete", "pods", "--selector=app=many", timeout=600)
        after = self._wait_for_all([uid for uid, _, _ in before.values()])
        for name, (_, began, lines) in before.items():
            assert after[name][1] == began, f"{name} began anew after {lines}"
            assert after[name][2] >= lines, f"{name} went back: {after[name][2]} after {lines}"
        self.kubectl("delete", "statefulset", "many", "--cascade=foreground", timeout=600)
        print(f"  {_MANY} at once: go on", flush=True)

    def _wait_for_all(self, besides: Sequence[str]) -> dict[str, tuple[str, str, int]]:
        """By name: the UID, which start it is, and how far."""

        def found() -> dict[str, tuple[str, str, int]] | None:
            told = {}
            for pod in self._cluster.pods("app=many", besides):
                with suppress(OSError):
                    work = self._cluster.work(pod)
                    facts = pod["metadata"]["uid"], (work / "began").read_text(), lines_of(work)
                    told[str(pod["metadata"]["name"])] = facts
            return told if len(told) == _MANY and all(lines > 5 for _, _, lines in told.values()) else None

        return wait_for(found, "not all of them run", 600)

    # A node whose power is cut

    def _node_returns(self) -> None:
        """Its pods go on from their last checkpoint, as the same pods, with the files of that moment."""
        pod, saved, began = self._saved_on_node2("stays", _EMPTY, _MOUNTED)
        self._cluster.nodes["node2"].crash()
        self._cluster.boot("node2")
        restarted = partial(self._restarted, "app=stays", pod["status"]["containerStatuses"][0]["containerID"])
        after = wait_for(restarted, "a pod of the node does not return", 300)
        assert after["metadata"]["uid"] == pod["metadata"]["uid"]
        self._went_on(after, saved, began)
        self.kubectl("delete", "deployment", "stays", "--cascade=foreground", timeout=300)
        print("  node2: returned with its pod", flush=True)

    def _node_is_lost(self) -> None:
        """Somebody says that its pods are gone: they go on elsewhere, once their claims have ended, and when the node
        is there again, it has none of them."""
        pod, saved, began = self._saved_on_node2("moves", {}, {})
        self._cluster.nodes["node2"].crash()
        self.kubectl("cordon", "node2")
        self._cluster.apply(_deployment("moves", {}, {}))  # anywhere
        self.kubectl("delete", "pod", pod["metadata"]["name"], "--force", "--grace-period=0", timeout=300)
        elsewhere = partial(self._cluster.running, "app=moves", pod["metadata"]["uid"])
        after = wait_for(elsewhere, "a pod of the lost node does not return", 600)
        assert after["spec"]["nodeName"] == "node1"
        self._went_on(after, saved, began)
        self._cluster.boot("node2")
        self.kubectl("uncordon", "node2")
        self._went_on(after, saved, began)
        self.kubectl("delete", "deployment", "moves", "--cascade=foreground", timeout=300)
        print("  node2: its pod went on at node1", flush=True)

    def _saved_on_node2(
        self, name: str, of_pod: Mapping[str, Any], of_container: Mapping[str, Any]
    ) -> tuple[dict[str, Any], int, str]:
        """A pod with a checkpoint, which runs on; how far that is, and which start of the program."""
        here = {**of_pod, "nodeSelector": {"kubernetes.io/hostname": "node2"}}
        self._cluster.apply(_deployment(name, here, of_container))
        pod = wait_for(lambda: self._cluster.running(f"app={name}"), f"{name} does not start", 120)
        wait_for(lambda: self._lines(pod) > 20, f"{name} does not count")
        saved = self._lines(pod)
        self._cluster.checkpoint("node2", pod["metadata"]["name"])
        wait_for(lambda: self._lines(pod) > saved + 20, f"{name} does not go on")
        return pod, saved, (self._cluster.work(pod) / "began").read_text()

    def _restarted(self, selector: str, before: str) -> dict[str, Any] | None:
        pod = self._cluster.running(selector)
        return pod if pod and pod["status"]["containerStatuses"][0]["containerID"] != before else None

    def _went_on(self, pod: Mapping[str, Any], saved: int, began: str) -> None:
        reached = self._lines(pod)
        assert (self._cluster.work(pod) / "began").read_text() == began, "it began anew"
        assert reached >= saved, f"it went back: {reached} after {saved}"
        wait_for(lambda: self._lines(pod) > reached + 20, "it does not go on")

    def _goes_on(self, workload: Mapping[str, Any], replace: Callable[[str], None], selector: str = "") -> None:
        name = workload["metadata"]["name"]
        self._cluster.apply(workload)
        self._is_replaced(",".join(filter(None, (f"app={name}", selector))), replace)
        self.kubectl("delete", workload["kind"], name, "--cascade=foreground", timeout=300)
        print(f"  {name}: goes on", flush=True)

    def _is_replaced(self, selector: str, replace: Callable[[str], None]) -> None:
        before = wait_for(lambda: self._cluster.running(selector), f"{selector} does not start", 180)
        wait_for(lambda: self._lines(before) > 20, f"{selector} does not count")
        reached, began = self._lines(before), (self._cluster.work(before) / "began").read_text()
        replace(before["metadata"]["name"])
        uid = before["metadata"]["uid"]
        after = wait_for(lambda: self._cluster.running(selector, uid), f"{selector} does not return", 300)
        assert (self._cluster.work(after) / "began").read_text() == began, f"{selector} began anew after {reached}"
        assert self._lines(after) >= reached, f"{selector} went back: {self._lines(after)} after {reached}"
        reached = self._lines(after)
        wait_for(lambda: self._lines(after) > reached + 20, f"{selector} does not go on")
        nodes = [pod["spec"]["nodeName"] for pod in (before, after)]
        assert replace != self.drain or nodes[0] != nodes[1], "a drained pod came back to its node"
        print(f"  {selector}: {replace.__name__}, {' → '.join(nodes)}", flush=True)

    def _lines(self, pod: Mapping[str, Any]) -> int:
        return lines_of(self._cluster.work(pod))

    # Ways in which a pod goes

    def delete(self, pod: str) -> None:
        self.kubectl("delete", "pod", pod, timeout=300)

    def evict(self, pod: str) -> None:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "team"}}
        self._cluster.apply(eviction, "create", "--raw", f"/api/v1/namespaces/team/pods/{pod}/eviction")

    def drain(self, pod: str) -> None:
        """To the other node."""
        node = self.kubectl("get", "pod", pod, "--output=jsonpath={.spec.nodeName}").stdout
        self.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", timeout=300)
        wait_for(lambda: self._cluster.running("app=train"), "it does not return", 300)
        self.kubectl("uncordon", node)

    def roll_out(self, pod: str) -> None:
        self.kubectl("rollout", "restart", "deployment/train")

    def scale(self, pod: str) -> None:
        self.kubectl("scale", "deployment/train", "--replicas=0")
        self.kubectl("wait", "--for=delete", f"pod/{pod}", "--timeout=120s", timeout=300)
        self.kubectl("scale", "deployment/train", "--replicas=1")

    def preempt(self, pod: str) -> None:
        """More important pods want the room on both nodes, until they are gone again."""
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "first"}}
        self._cluster.apply({**kind, "value": 1000})
        room = {"resources": {"requests": {"cpu": f"{600 * (os.cpu_count() or 1)}m"}}}
        template = _pod("important", {"priorityClassName": "first"}, room, KEDGE_CHECKPOINT="")
        self._cluster.apply(_workload("Deployment", "important", template, replicas=2))
        self.kubectl("wait", "--for=delete", f"pod/{pod}", "--timeout=120s", timeout=300)
        self.kubectl("delete", "deployment", "important", "--cascade=foreground", timeout=300)
