"""A Kubernetes for tests: a control plane, and nodes with kubelet and containerd, each in namespaces of its own."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from kedge.containers.pids import pids_below, read_text
from tests.e2e.test_deploy import DEPLOY, INSTALLER
from tests.node import Node
from tests.servers import s3
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
KUBELET = {
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

    def __init__(self, nodes: Sequence[Node], binaries: Path) -> None:
        self.nodes = {f"node{number}": node for number, node in enumerate(nodes, 1)}
        self._binaries = binaries
        self._places: dict[str, str] = {}  # what the installer is told
        self._environment = {"PATH": f"{binaries}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                             "KUBECONFIG": f"{_HOME}/admin.conf", "HOME": "/"}  # fmt: skip

    # Setting up

    def start(self) -> None:
        for name, node in self.nodes.items():
            self.prepare(name)
            node.below("/etc/machine-id").write_text(f"{name.removeprefix('node'):0>32}\n")  # two machines
            for user in _USERS:
                (node.below(_HOME) / f"{user}.conf").write_text(json.dumps(_kubeconfig(f"token-{user}")))
            (node.below(_HOME) / "kubelet.yaml").write_text(json.dumps(KUBELET))
        self._start_control_plane()
        for name in self.nodes:
            self._start_kubelet(name)
        self.wait_ready()
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})

    def boot(self, name: str) -> None:
        """A node that crashed, but the first one, which has the control plane."""
        self.nodes[name].boot()
        self.prepare(name)
        self._start_kubelet(name)
        self._start_guard(name)
        self.wait_ready()

    def wait_ready(self) -> None:
        wait_for(lambda: all(map(self.is_ready, self.nodes)), "the nodes are not ready", 180)

    def prepare(self, name: str) -> None:
        """What a node loses when it crashes: the kernel's settings, and its network. That is a bridge in the first
        node, to which each of the others has a cable."""
        node = self.nodes[name]
        node.lab.run("sh", "-c", _SETUP, env=self._environment)
        number = name.removeprefix("node")
        if name == "node1":
            node.lab.run("ip", "link", "add", "nodes", "type", "bridge")
        else:
            ends = f"ip link add cable{number} type veth peer name nodes netns {node.init}"
            first = ["nsenter", f"--target={self.nodes['node1'].init}", "--net", "--", "sh", "-ec"]
            subprocess.run([*first, f"{ends}; ip link set cable{number} master nodes up"], check=True)
        connected = (
            f"ip addr add 10.99.0.{number}/24 dev nodes; ip link set nodes up; ip route add default via 10.99.0.254"
        )
        node.lab.run("sh", "-ec", connected)

    def _start_control_plane(self) -> None:
        first = self.nodes["node1"]
        first.lab.run("sh", "-c", _KEYS, env=self._environment)
        tokens = [f"token-{name},{user}" for name, user in _USERS.items()]
        (first.below(_HOME) / "tokens.csv").write_text("\n".join(tokens) + "\n")
        self.run("etcd", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync")
        self.run(
            "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", "--bind-address=0.0.0.0",
            "--advertise-address=10.99.0.1", f"--cert-dir={_HOME}/api", f"--token-auth-file={_HOME}/tokens.csv",
            "--authorization-mode=Node,RBAC", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={_HOME}/sa.pub", f"--service-account-signing-key-file={_HOME}/sa.key",
            "--service-cluster-ip-range=10.96.0.0/24", "--allow-privileged=true",
        )  # fmt: skip
        wait_for(lambda: self.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok", "no API server", 180)
        self.run("kubectl", "proxy", f"--unix-socket={self._socket}")
        wait_for(self._socket.exists, "no way to the API server")
        key = f"--service-account-private-key-file={_HOME}/sa.key"
        controller = ("--use-service-account-credentials", key, f"--kubeconfig={_HOME}/controller.conf")
        self.run("kube-controller-manager", "--leader-elect=false", *controller)
        self.run("kube-scheduler", f"--kubeconfig={_HOME}/scheduler.conf", "--leader-elect=false")

    def _start_kubelet(self, name: str) -> None:
        """As systemd does it: again and again, whether it was killed or found no containerd."""
        again = ("sh", "-c", 'while :; do "$@"; sleep 1; done', "again")
        address = f"--node-ip=10.99.0.{name.removeprefix('node')}"
        files = (f"--config={_HOME}/kubelet.yaml", f"--kubeconfig={_HOME}/{name}.conf")
        words = [*again, self._binaries / "kubelet", *files, f"--hostname-override={name}", address]
        self._spawn(name, "kubelet", words)

    def run(self, program: str, *words: str, on: str = "node1") -> subprocess.Popen[bytes]:
        return self._spawn(on, program, [self._binaries / program, *words])

    def _spawn(
        self, on: str, name: str, command: Sequence[str | Path], environment: Mapping[str, str] = {}
    ) -> subprocess.Popen[bytes]:
        """Until the node is gone. Its log is in the node's folder."""
        node = self.nodes[on]
        known = {**self._environment, **environment}
        with (node.home / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                node.lab.enter(command), env=known, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def is_ready(self, name: str) -> bool:
        conditions = self.ask(f"/api/v1/nodes/{name}").get("status", {}).get("conditions", ())
        return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)

    def start_s3(self) -> dict[str, str]:
        """An object store that all nodes reach; what tells its clients about it."""
        first, address = self.nodes["node1"], "http://10.99.0.1:8333"
        (first.home / "s3").mkdir()
        told = s3.environment(address)
        place = (f"-dir={first.home}/s3", "-ip=10.99.0.1", "-ip.bind=10.99.0.1")
        self._spawn("node1", "s3", [str(s3.weed()), "mini", *place, *s3.QUIET], told)
        inside = ["nsenter", f"--target={first.init}", "--net", "--", sys.executable, "-c"]
        code = f"from tests.servers import s3; s3.make_bucket({address!r})"
        checkout = Path(__file__).parents[2]

        def has_bucket() -> bool:
            return subprocess.run([*inside, code], cwd=checkout, capture_output=True, check=False).returncode == 0

        wait_for(has_bucket, "no object store", 180)
        return told

    def install(self, payload: Path, settings: Mapping[str, str]) -> None:
        for name in self.nodes:
            self.install_on(name, payload, settings)
            self.kubectl("label", "node", name, "kedge.dev/runtime=true")
            self._start_guard(name)
        self.kubectl("apply", f"--filename={DEPLOY}/runtimeclass.yaml")

    def install_on(self, name: str, payload: Path, settings: Mapping[str, str]) -> None:
        self._places = {"HOST": "", "PAYLOAD": str(payload), "CONTAINERD": "containerd", "ASK": "",
                        "RESTART": "systemctl restart containerd", **settings}  # fmt: skip
        self.nodes[name].lab.run(INSTALLER, "install", env={**self._environment, **self._places})

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

    def _start_guard(self, name: str) -> None:
        """As the DaemonSet does."""
        self._spawn(name, "guard", ["/opt/kedge/bin/kedge", "pod", "guard", "--every", "10"])

    def checkpoint(self, node: str, pod: str) -> None:
        """It runs on."""
        self.nodes[node].lab.run("/opt/kedge/bin/kedge", "pod", "checkpoint", f"team/{pod}", env=self._environment)

    # Asking

    def kubectl(self, *words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.nodes["node1"].lab.run(
            self._binaries / "kubectl", "--namespace=team", *words, check=check, env=self._environment, **options
        )

    def apply(self, document: Mapping[str, Any], *how: str) -> None:
        path = self.nodes["node1"].home / "document.json"  # with the same path inside and outside
        path.write_text(json.dumps(document))
        self.kubectl(*(how or ("apply",)), f"--filename={path}")

    @property
    def _socket(self) -> Path:
        return self.nodes["node1"].home / "api"

    def ask(self, path: str, method: str = "GET") -> dict[str, Any]:
        """What the API server answers, {} if it has none; without a program for it, as it is asked all the time."""
        with closing(_Proxy(self._socket)) as connection:
            connection.request(method, path)
            answer = connection.getresponse()
            told: dict[str, Any] = json.load(answer)
            return told if answer.status == http.HTTPStatus.OK else {}

    def pods(self, selector: str, besides: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Those that run, without those that leave, and those that have these UIDs."""
        query = urllib.parse.urlencode({"labelSelector": selector})
        found = []
        for pod in self.ask(f"/api/v1/namespaces/team/pods?{query}").get("items", ()):
            states = [one["state"] for one in pod["status"].get("containerStatuses", ())]
            is_leaving = "deletionTimestamp" in pod["metadata"]
            if states and "running" in states[0] and not is_leaving and pod["metadata"]["uid"] not in besides:
                found.append(dict(pod))
        return found

    def running(self, selector: str, besides: str = "") -> dict[str, Any] | None:
        """The pod that runs, if it is not that one."""
        return next(iter(self.pods(selector, [besides])), None)

    def wait_empty(self) -> None:
        """Until no container runs; AssertionError that says which are left."""
        with suppress(AssertionError):
            wait_for(lambda: not self._contained(), "", 120)
        left = self._contained()
        assert not left, f"processes of containers are left: {left}"

    def _contained(self) -> list[str]:
        """The cgroups and command lines of all that runs in containers, but for sandboxes of pods."""
        found = []
        for name, node in self.nodes.items():
            own = os.readlink(f"/proc/{node.init}/ns/pid")
            for pid in pids_below(node.init):
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes()
                    if os.readlink(f"/proc/{pid}/ns/pid") != own and words not in (b"", b"/pause\0"):
                        cgroup = read_text(f"/proc/{pid}/cgroup").splitlines()[0]
                        found.append(f"{name}: {cgroup} {words[:200]!r}")
        return found

    def work(self, pod: Mapping[str, Any]) -> Path:
        """The folder /work of its container; OSError while it does not run."""
        node = self.nodes[pod["spec"]["nodeName"]]
        container = pod["status"]["containerStatuses"][0]["containerID"].rpartition("/")[2]
        state = json.loads(node.below(f"/run/containerd/runc/k8s.io/{container}/state.json").read_text())
        return node.below(f"/proc/{state['init_process_pid']}/root/work")


class _Proxy(http.client.HTTPConnection):
    """To `kubectl proxy`."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost")
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


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
