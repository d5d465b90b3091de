"""A whole Kubernetes on a node of its own: pods that are deleted, evicted, drained, rolled out and scaled go on.

`./dev torture kubernetes --binaries DIR`. The programs are given, and never part of the project: DIR has etcd,
kube-apiserver, kube-controller-manager, kube-scheduler, kubelet (1.31 or newer) and kubectl, built from their public
sources by whoever runs this. containerd is that of $KEDGE_CONTAINERD, as in the other tests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.test_deploy import DEPLOY, INSTALLER, make_payload
from tests.engine import IMAGE
from tests.lab import COUNTER, PYTHON
from tests.node import Node, node
from tests.parts import missing
from tests.waiting import wait_for

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
_HOME = "/etc/kubernetes"
_API = "https://127.0.0.1:6443"
_USERS = {  # name, UID and groups, of whom has a token
    "admin": 'admin,1,"system:masters"',
    "controller": "system:kube-controller-manager,2",
    "scheduler": "system:kube-scheduler,3",
    "kubelet": 'system:node:node1,4,"system:nodes"',
}
# A network for the API server's address; and what a kubelet sets for the whole kernel is not the machine's.
_SETUP = f"""
set -e
mount --make-rshared /
mkdir -p {_HOME} /var/lib/kubelet /var/lib/etcd /var/log/pods /run/fake
ip link add v0 type veth peer name v1
ip addr add 10.99.0.1/24 dev v0
ip link set v0 up
ip link set v1 up
ip route add default via 10.99.0.254
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
  kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  [ -e "/proc/sys/${{setting%=*}}" ] || continue
  fake=/run/fake/$(echo "${{setting%=*}}" | tr / _)
  echo "${{setting#*=}}" >"$fake"
  mount --bind "$fake" "/proc/sys/${{setting%=*}}"
done
openssl genrsa -out {_HOME}/sa.key 2048 2>/dev/null
openssl rsa -in {_HOME}/sa.key -pubout -out {_HOME}/sa.pub 2>/dev/null
"""
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
    "cgroupDriver": "cgroupfs",
    "cgroupsPerQOS": False,
    "enforceNodeAllocatable": [],
    "failCgroupV1": False,
    "failSwapOn": False,
    "oomScoreAdj": 0,
    "makeIPTablesUtilChains": False,
    "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
    "imageGCHighThresholdPercent": 100,
}
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
}


def torture(minutes: float, folder: Path, binaries: Path | None = None) -> dict[str, float]:
    """Every case once, then every way in which a pod is replaced; takes as long as it takes."""
    if reason := missing("criu") or missing("containerd") or missing("cc") or missing("cni"):
        raise RuntimeError(reason)
    absent = [name for name in PROGRAMS if binaries is None or not os.access(binaries / name, os.X_OK)]
    if binaries is None or absent:
        raise RuntimeError(f"--binaries DIR lacks {', '.join(absent)}: build them from their public sources")
    binaries = binaries.resolve()
    payload = make_payload(folder)
    criu = Path(shutil.which("criu") or "").resolve().parents[1]  # with its libraries
    with node(folder, DEPLOY.parents[1], Path(sys.base_prefix), binaries, criu) as made:
        cluster = _Cluster(made, binaries)
        cluster.start()
        cluster.install(payload)
        with cluster.explained():
            return _tortured(cluster)


def _tortured(cluster: _Cluster) -> dict[str, float]:
    for name in CASES:
        cluster.goes_on(name)
    ways = {
        "delete": cluster.delete, "evict": cluster.evict, "drain": cluster.drain, "rollout": cluster.roll_out,
        "scale": cluster.scale,
    }  # fmt: skip
    cluster.apply(_deployment("train"))
    for way in ways.values():
        cluster.is_replaced("app=train", way)
    return {"cases": len(CASES), "ways": len(ways)}


def _pod(name: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    """A template: the counter, from /usr of the node."""
    environment = [{"name": "KEDGE_CHECKPOINT", "value": "1"}, {"name": "KEDGE_POLICY", "value": "fail"}]
    mounts = [{"name": "usr", "mountPath": "/usr", "readOnly": True}, *container.get("volumeMounts", ())]
    usual = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": _COUNT, "env": environment}
    volumes = [{"name": "usr", "hostPath": {"path": "/usr"}}, *pod.get("volumes", ())]
    spec = {"runtimeClassName": "kedge", "terminationGracePeriodSeconds": 30, **pod, "volumes": volumes,
            "containers": [{**usual, **container, "volumeMounts": mounts}]}  # fmt: skip
    return {"metadata": {"labels": {"app": name}}, "spec": spec}


def _workload(kind: str, name: str, template: Mapping[str, Any], **more: object) -> dict[str, Any]:
    selector = {"matchLabels": {"app": name}}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "namespace": "team"},
            "spec": {"replicas": 1, "selector": selector, "template": template, **more}}  # fmt: skip


def _deployment(name: str) -> dict[str, Any]:
    return _workload("Deployment", name, _pod(name, {}, {}), strategy={"type": "Recreate"})


class _Cluster:
    def __init__(self, made: Node, binaries: Path) -> None:
        self._node = made
        self._binaries = binaries
        self._environment = {"PATH": f"{binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                             "KUBECONFIG": f"{_HOME}/admin.conf", "HOME": "/"}  # fmt: skip

    # Setting up

    def start(self) -> None:
        self._node.lab.run("sh", "-c", _SETUP, env=self._environment)
        home = self._node.below(_HOME)
        tokens = [f"token-{name},{user}" for name, user in _USERS.items()]
        (home / "tokens.csv").write_text("\n".join(tokens) + "\n")
        for name in _USERS:
            (home / f"{name}.conf").write_text(json.dumps(_kubeconfig(f"token-{name}")))
        (home / "kubelet.yaml").write_text(json.dumps(_KUBELET))
        self._run("etcd", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync")
        self._run(
            "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--bind-address=127.0.0.1",
            "--advertise-address=10.99.0.1", f"--cert-dir={_HOME}/api", f"--token-auth-file={_HOME}/tokens.csv",
            "--authorization-mode=Node,RBAC", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={_HOME}/sa.pub", f"--service-account-signing-key-file={_HOME}/sa.key",
            "--service-cluster-ip-range=10.96.0.0/24", "--allow-privileged=true",
        )  # fmt: skip
        wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok", "no API server", 120)
        key = f"--service-account-private-key-file={_HOME}/sa.key"
        controller = ("--use-service-account-credentials", key, f"--kubeconfig={_HOME}/controller.conf")
        self._run("kube-controller-manager", "--leader-elect=false", *controller)
        self._run("kube-scheduler", f"--kubeconfig={_HOME}/scheduler.conf", "--leader-elect=false")
        self._run("kubelet", f"--config={_HOME}/kubelet.yaml", f"--kubeconfig={_HOME}/kubelet.conf",
                  "--hostname-override=node1", "--node-ip=10.99.0.1")  # fmt: skip
        wait_for(self._is_ready, "the node is not ready", 120)
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})

    def _run(self, program: str, *words: str) -> None:
        """Until the node is gone. Its log is in the node's folder."""
        with (self._node.home / f"{program}.log").open("wb") as log:
            command = self._node.lab.enter([self._binaries / program, *words])
            subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _is_ready(self) -> bool:
        asked = ("get", "node", "node1", "--output=jsonpath={.status.conditions[?(@.type=='Ready')].status}")
        return self.kubectl(*asked, check=False).stdout == "True"

    def install(self, payload: Path) -> None:
        places = {"HOST": "", "PAYLOAD": str(payload), "CONTAINERD": "containerd", "ASK": "",
                  "RESTART": "systemctl restart containerd"}  # fmt: skip
        self._node.lab.run(INSTALLER, "install", env={**self._environment, **places})
        self.kubectl("label", "node", "node1", "kedge.dev/runtime=true")
        self.kubectl("apply", f"--filename={DEPLOY}/runtimeclass.yaml")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A failure also says what the node knows about it."""
        try:
            yield
        except AssertionError as error:
            kedge = ["/opt/kedge/bin/kedge", "container", "logs"]
            told = [self._node.lab.run(*kedge, *more, check=False, env=self._environment) for more in ((), ("latest",))]
            told += [self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)]
            tails = [(one.stdout + one.stderr)[-3000:] for one in told]
            raise AssertionError("\n".join([str(error), *tails])) from error

    # Asking

    def kubectl(self, *words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        return self._node.lab.run(
            self._binaries / "kubectl", "--namespace=team", *words, check=check, env=self._environment, **options
        )

    def apply(self, document: Mapping[str, Any]) -> None:
        path = self._node.home / "document.json"  # with the same path inside and outside
        path.write_text(json.dumps(document))
        self.kubectl("apply", f"--filename={path}")

    def _running(self, selector: str, besides: str = "") -> dict[str, Any] | None:
        """The pod that runs, if it is not that one."""
        told = self.kubectl("get", "pods", f"--selector={selector}", "--output=json")
        for pod in json.loads(told.stdout)["items"]:
            states = [one["state"] for one in pod["status"].get("containerStatuses", ())]
            is_leaving = "deletionTimestamp" in pod["metadata"]
            if states and "running" in states[0] and not is_leaving and pod["metadata"]["uid"] != besides:
                return dict(pod)
        return None

    def _work(self, pod: Mapping[str, Any]) -> Path:
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        return self._node.below(f"/proc/{self._node.pid(container)}/root/work")

    def _lines(self, pod: Mapping[str, Any]) -> int:
        """How far its counter is; AssertionError when memory and files did not agree."""
        work = self._work(pod)
        assert not (work / "broken").exists(), (work / "broken").read_text()
        lines = (work / "log").read_text().split() if (work / "log").exists() else []
        assert lines == [str(number) for number in range(1, len(lines) + 1)], lines[-3:]
        return len(lines)

    # What must go on

    def goes_on(self, case: str) -> None:
        """A StatefulSet of that kind, whose pod is deleted."""
        pod, container = CASES[case]
        self.apply(_workload("StatefulSet", case, _pod(case, pod, container), serviceName=case))
        self.is_replaced(f"app={case}", self.delete)
        self.kubectl("delete", "statefulset", case, "--cascade=foreground", timeout=180)

    def is_replaced(self, selector: str, replace: Callable[[str], None]) -> None:
        before = wait_for(lambda: self._running(selector), f"{selector} does not start", 120)
        wait_for(lambda: self._lines(before) > 20, f"{selector} does not count")
        reached, began = self._lines(before), (self._work(before) / "began").read_text()
        replace(before["metadata"]["name"])
        after = wait_for(lambda: self._running(selector, before["metadata"]["uid"]), f"{selector} does not return", 180)
        assert (self._work(after) / "began").read_text() == began, f"{selector} began anew after {reached}"
        assert self._lines(after) >= reached, f"{selector} went back: {self._lines(after)} after {reached}"
        reached = self._lines(after)
        wait_for(lambda: self._lines(after) > reached + 20, f"{selector} does not go on")

    def delete(self, pod: str) -> None:
        self.kubectl("delete", "pod", pod, timeout=180)

    def evict(self, pod: str) -> None:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": "team"}}
        path = self._node.home / "eviction.json"
        path.write_text(json.dumps(eviction))
        self.kubectl("create", "--raw", f"/api/v1/namespaces/team/pods/{pod}/eviction", f"--filename={path}")

    def drain(self, pod: str) -> None:
        self.kubectl("drain", "node1", "--ignore-daemonsets", "--delete-emptydir-data", timeout=180)
        self.kubectl("uncordon", "node1")

    def roll_out(self, pod: str) -> None:
        self.kubectl("rollout", "restart", "deployment/train")

    def scale(self, pod: str) -> None:
        self.kubectl("scale", "deployment/train", "--replicas=0")
        self.kubectl("wait", "--for=delete", f"pod/{pod}", "--timeout=120s", timeout=180)
        self.kubectl("scale", "deployment/train", "--replicas=1")


def _kubeconfig(token: str) -> dict[str, Any]:
    cluster = {"server": _API, "insecure-skip-tls-verify": True}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
