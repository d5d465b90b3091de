"""A node of its own for tests: own root, processes, network and init, with a containerd that is configured in /etc.

What a pod of the node changes, on a mounted root or as PID 1's own, it changes here and nowhere else. /usr is the
machine's. When its init is killed, everything in it is gone.
"""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kedge.errors import CheckpointError
from tests.cri import Cri, Failed
from tests.engine import IMAGE, VERSION, Containerd
from tests.lab import Lab
from tests.waiting import wait_for

# PID 1 keeps containerd running; `systemctl restart containerd` ends it and waits for the next one.
_INIT = """
set -e
ip link set lo up
mount -t tmpfs node {root}
cd {root}
mkdir -p etc opt usr proc sys dev run tmp old var/lib
for name in bin sbin lib lib64; do ln -s usr/$name $name; done
for name in passwd group hosts resolv.conf nsswitch.conf ld.so.cache machine-id alternatives; do
  [ ! -e /etc/$name ] || cp -a /etc/$name etc/
done
for name in /dev /sys; do mount --rbind $name .$name; done
for name in /usr {shared}; do mkdir -p .$name; mount --bind $name .$name; done
mount -t tmpfs local usr/local/sbin
ln -s {containerd} {ctr} usr/local/sbin/
cat >usr/local/sbin/systemctl <<'END'
#!/bin/sh
[ "$*" = "restart containerd" ] || exit 1
before=$(cat /run/containerd.pid)
kill $before
until [ "$(cat /run/containerd.pid)" != $before ] && ctr --address {socket} version >/dev/null 2>&1; do sleep 0.05; done
echo restarted >>/run/restarts
END
chmod 755 usr/local/sbin/systemctl
mount -t proc proc proc
pivot_root . old
umount -l /old
rmdir /old
mkdir /etc/containerd /run/containerd
ln -s {socket} /run/containerd/containerd.sock
ln -s {config} /etc/containerd/config.toml
echo ready
while :; do
  containerd --config /etc/containerd/config.toml >>{log} 2>&1 &
  echo $! >/run/containerd.pid.new
  mv /run/containerd.pid.new /run/containerd.pid
  wait $! || :
done
"""


class _Machine(Lab):
    """Commands run among the processes of the node."""

    init = 0

    def enter(self, command: Sequence[str | Path]) -> list[str]:
        return ["nsenter", f"--target={self.init}", "--net", "--mount", "--pid", "--", *map(str, command)]


class Node(Containerd):
    """Its containerd. What it keeps on disk, and its socket, have the same paths inside and outside."""

    def __init__(self, made: _Machine, init: subprocess.Popen[bytes], shared: Sequence[Path]) -> None:
        super().__init__(made, version=VERSION, pods=True)
        self._init = init
        self._config = self.home / "config.toml"
        plain = self._config.read_text().partition('[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kedge]')
        imports = 'imports = ["/etc/containerd/conf.d/*.toml"]\n' if VERSION == "2" else ""
        self._config.write_text(imports + plain[0].replace(f"{self.home}/state", "/run/containerd"))
        self._config.chmod(0o640)
        self.root = made.root / "node"
        self.root.mkdir()
        self.cri = Cri(self.home / "socket", IMAGE)
        self._shared = [made.root, *shared]
        self._made = made

    @property
    def init(self) -> int:
        """The PID of its init, from here."""
        return self._made.init

    def boot(self) -> None:
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        script = _INIT.format(
            root=self.root, shared=" ".join(map(str, self._shared)), config=self._config, log=self.log,
            containerd=self.programs / "containerd", ctr=self.programs / "ctr", socket=self.home / "socket",
        )  # fmt: skip
        self._init.stdin.write(script.encode())
        self._init.stdin.close()
        assert self._init.stdout.readline() == b"ready\n", self.log
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        self._made.init = int(children.read_text())
        self.wait_up()
        self.load_image()

    def wait_up(self) -> None:
        wait_for(lambda: self.ctr("version", check=False).returncode == 0 or None, "containerd does not start")

    def below(self, path: str) -> Path:
        """A path of the node, from here."""
        return Path(f"/proc/{self._made.init}/root{path}")

    def files(self) -> dict[str, tuple[int, int, bytes | str]]:
        """All that could be installed on it: mode, owner, and what is in it."""
        found = {}
        for folder in ("/etc", "/opt", "/usr/local/sbin"):
            for path in self.below(folder).rglob("*"):
                stat, is_link = path.lstat(), path.is_symlink()
                content = os.readlink(path) if is_link else path.read_bytes() if path.is_file() else b""
                found[str(path).removeprefix(str(self.below("")))] = stat.st_mode, stat.st_uid, content
        found["config"] = self._config.stat().st_mode, self._config.stat().st_uid, self._config.read_bytes()
        return found

    def run_daemons(
        self,
        daemons: Mapping[str, Any],
        environment: Mapping[str, str],
        mounts: Sequence[tuple[str, str, bool]],
        image: str,
    ) -> tuple[str, list[str]]:
        """The pod of a DaemonSet, as a kubelet runs it: its ID, and its containers; AssertionError if an init container
        fails. `mounts`: besides those that it asks for."""
        spec = daemons["spec"]["template"]["spec"]
        paths = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"]}
        pod = self.cri.run_pod(
            f"{daemons['metadata']['name']}-x2k8q", handler="", host_pid=spec["hostPID"], host_network=False,
            privileged=True, logs=self.home,
        )  # fmt: skip

        def start(one: Mapping[str, Any]) -> str:
            asked = [(paths[mount["name"]], mount["mountPath"], False) for mount in one.get("volumeMounts", ())]
            known = environment if "envFrom" in one else {}
            privileged = one.get("securityContext", {}).get("privileged", False)
            return self.cri.start(
                pod, one["name"], one["command"], known, mounts=[*asked, *mounts], privileged=privileged, image=image,
                log=f"{one['name']}.log",
            )  # fmt: skip

        for one in spec["initContainers"]:
            identity = start(one)
            ended = partial(self._ended, identity)
            state, status = wait_for(ended, f"{one['name']} does not end", timeout_s=90)
            if status:
                self.cri.remove_pod(pod)
            assert (state, status) == ("exited", 0), (self.home / f"{one['name']}.log").read_text()
        return pod, [start(one) for one in spec["containers"]]

    def _ended(self, container: str) -> tuple[str, int] | None:
        """None while it runs, also while its engine is just being started again."""
        with suppress(CheckpointError, Failed):
            state = self.cri.state(container)
            return state if state[0] == "exited" else None
        return None

    def restarts(self) -> int:
        told = self.below("/run/restarts")
        return len(told.read_text().split()) if told.exists() else 0


@contextmanager
def node(root: Path, *shared: Path, environment: Mapping[str, str] | None = None) -> Iterator[Node]:
    """A running one, which also has these paths of the machine."""
    plain = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **(environment or {})}
    init = subprocess.Popen(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private", "sh"],
        env=plain, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    made = Node(_Machine(root, init), init, shared)
    try:
        made.boot()
        yield made
    finally:
        init.send_signal(signal.SIGKILL)
        init.wait()
        assert init.stdout is not None
        init.stdout.close()
