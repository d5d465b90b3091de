"""A Kubernetes for tests: a control plane, and nodes with kubelet and containerd, each in namespaces of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.test_deploy import DEPLOY, INSTALLER
from tests.node import Node
from tests.waiting import wait_for

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
_HOME = "/etc/kubernetes"
_API = "https://10.99.0.1:6443"
_USERS = {  # name, UID and groups, of whom has a token
    "admin": 'admin,1,"system:masters"',
    "controller": "system:kube-controller-manager,2",
    "scheduler": "system:kube-scheduler,3",
    "node1": 'system:node:node1,4,"system:nodes"',
    "node2": 'system:node:node2,5,"system:nodes"',
}
# What a kubelet sets for the whole kernel is not the machine's.
_SETUP = f"""
set -e
mount --make-rshared /
mkdir -p {_HOME} /var/lib/kubelet /var/lib/etcd /var/log/pods /run/fake
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
  kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
  [ -e "/proc/sys/${{setting%=*}}" ] || continue
  fake=/run/fake/$(echo "${{setting%=*}}" | tr / _)
  echo "${{setting#*=}}" >"$fake"
  mount --bind "$fake" "/proc/sys/${{setting%=*}}"
done
"""
_KEYS = f"""
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


class Cluster:
    """Its nodes are node1, which has the control plane too, node2, …"""

    def __init__(self, nodes: Sequence[Node], binaries: Path, store: str) -> None:
        self.nodes = {f"node{number}": node for number, node in enumerate(nodes, 1)}
        self._binaries = binaries
        self.store = store
        self._places: dict[str, str] = {}  # what the installer is told
        self._kubelets: dict[str, subprocess.Popen[bytes]] = {}
        self._environment = {"PATH": f"{binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                             "KUBECONFIG": f"{_HOME}/admin.conf", "HOME": "/"}  # fmt: skip

    # Setting up

    def start(self) -> None:
        self._connect()
        for name, node in self.nodes.items():
            node.below("/etc/machine-id").write_text(f"{name.removeprefix('node'):0>32}\n")  # two machines
            node.lab.run("sh", "-c", _SETUP, env=self._environment)
            for user in _USERS:
                (node.below(_HOME) / f"{user}.conf").write_text(json.dumps(_kubeconfig(f"token-{user}")))
            (node.below(_HOME) / "kubelet.yaml").write_text(json.dumps(_KUBELET))
        self._start_control_plane()
        for name in self.nodes:
            self.start_kubelet(name)
        wait_for(lambda: all(map(self._is_ready, self.nodes)), "the nodes are not ready", 180)
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})

    def _connect(self) -> None:
        """A bridge in the first node, to which each of the others has a cable."""
        init = [node.init for node in self.nodes.values()]
        enter = ["nsenter", f"--target={init[0]}", "--net", "--"]

        def ip(words: str, of: Sequence[str] = enter) -> None:
            subprocess.run([*of, "ip", *words.split()], check=True)

        ip("link add nodes type bridge")
        ip("addr add 10.99.0.1/24 dev nodes")
        ip("link set nodes up")
        ip("route add default via 10.99.0.254")
        for number, pid in enumerate(init[1:], 2):
            ip(f"link add cable{number} type veth peer name nodes netns {pid}")
            ip(f"link set cable{number} master nodes up")
            there = ["nsenter", f"--target={pid}", "--net", "--"]
            ip(f"addr add 10.99.0.{number}/24 dev nodes", there)
            ip("link set nodes up", there)
            ip("route add default via 10.99.0.254", there)

    def _start_control_plane(self) -> None:
        first = self.nodes["node1"]
        first.lab.run("sh", "-c", _KEYS, env=self._environment)
        tokens = [f"token-{name},{user}" for name, user in _USERS.items()]
        (first.below(_HOME) / "tokens.csv").write_text("\n".join(tokens) + "\n")
        self._run("etcd", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync")
        self._run(
            "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0",
            "--advertise-address=10.99.0.1", f"--cert-dir={_HOME}/api", f"--token-auth-file={_HOME}/tokens.csv",
            "--authorization-mode=Node,RBAC", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={_HOME}/sa.pub", f"--service-account-signing-key-file={_HOME}/sa.key",
            "--service-cluster-ip-range=10.96.0.0/24", "--allow-privileged=true",
        )  # fmt: skip
        wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok", "no API server", 180)
        key = f"--service-account-private-key-file={_HOME}/sa.key"
        controller = ("--use-service-account-credentials", key, f"--kubeconfig={_HOME}/controller.conf")
        self._run("kube-controller-manager", "--leader-elect=false", *controller)
        self._run("kube-scheduler", f"--kubeconfig={_HOME}/scheduler.conf", "--leader-elect=false")

    def start_kubelet(self, name: str) -> None:
        """Also again, when it was killed."""
        if name in self._kubelets:
            self._kubelets[name].wait()
        address = f"--node-ip=10.99.0.{name.removeprefix('node')}"
        files = (f"--config={_HOME}/kubelet.yaml", f"--kubeconfig={_HOME}/{name}.conf")
        self._kubelets[name] = self._run("kubelet", *files, f"--hostname-override={name}", address, on=name)

    def _run(self, program: str, *words: str, on: str = "node1") -> subprocess.Popen[bytes]:
        """Until the node is gone. Its log is in the node's folder."""
        node = self.nodes[on]
        with (node.home / f"{program}.log").open("ab") as log:
            command = node.lab.enter([self._binaries / program, *words])
            return subprocess.Popen(command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _is_ready(self, name: str) -> bool:
        asked = ("get", "node", name, "--output=jsonpath={.status.conditions[?(@.type=='Ready')].status}")
        return self.kubectl(*asked, check=False).stdout == "True"

    def install(self, payload: Path) -> None:
        self._places = {"HOST": "", "PAYLOAD": str(payload), "CONTAINERD": "containerd", "ASK": "",
                        "RESTART": "systemctl restart containerd", "KEDGE_STORE": self.store}  # fmt: skip
        for name, node in self.nodes.items():
            node.lab.run(INSTALLER, "install", env={**self._environment, **self._places})
            self.kubectl("label", "node", name, "kedge.dev/runtime=true")
        self.kubectl("apply", f"--filename={DEPLOY}/runtimeclass.yaml")

    def uninstall(self) -> None:
        for node in self.nodes.values():
            node.lab.run(INSTALLER, "uninstall", env={**self._environment, **self._places})

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A failure also says what the nodes know about it."""
        try:
            yield
        except AssertionError as error:
            kedge = ["/opt/kedge/bin/kedge", "container", "logs"]
            calls = [(node, words) for node in self.nodes.values() for words in (kedge, [*kedge, "latest"])]
            told = [node.lab.run(*words, check=False, env=self._environment) for node, words in calls]
            told += [self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)]
            tails = [(one.stdout + one.stderr)[-3000:] for one in told]
            raise AssertionError("\n".join([str(error), *tails])) from error

    # Asking

    def kubectl(self, *words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.nodes["node1"].lab.run(
            self._binaries / "kubectl", "--namespace=team", *words, check=check, env=self._environment, **options
        )

    def apply(self, document: Mapping[str, Any], *how: str) -> None:
        path = self.nodes["node1"].home / "document.json"  # with the same path inside and outside
        path.write_text(json.dumps(document))
        self.kubectl(*(how or ("apply",)), f"--filename={path}")

    def running(self, selector: str, besides: str = "") -> dict[str, Any] | None:
        """The pod that runs, if it is not that one."""
        told = self.kubectl("get", "pods", f"--selector={selector}", "--output=json")
        for pod in json.loads(told.stdout)["items"]:
            states = [one["state"] for one in pod["status"].get("containerStatuses", ())]
            is_leaving = "deletionTimestamp" in pod["metadata"]
            if states and "running" in states[0] and not is_leaving and pod["metadata"]["uid"] != besides:
                return dict(pod)
        return None

    def work(self, pod: Mapping[str, Any]) -> Path:
        """The folder /work of its container."""
        node = self.nodes[pod["spec"]["nodeName"]]
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        return node.below(f"/proc/{node.pid(container)}/root/work")


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
