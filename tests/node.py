"""A node of its own for tests: own root, processes, network and init, with a containerd that is configured in /etc.

What a pod of the node changes, on a mounted root or as PID 1's own, it changes here and nowhere else. /usr is the
machine's. When its init is killed, everything in it is gone but what it has on disk, and it can be booted again.
"""

import glob
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from kedge.containers.pids import pids_below, read_text
from kedge.errors import CheckpointError
from tests.cri import Cri, Failed
from tests.engine import IMAGE, VERSION, Containerd
from tests.lab import Lab
from tests.waiting import wait_for

# Its disk: mounts of one process that nothing kills, from which each boot has its own.
_DISK = """
set -e
mount -t tmpfs node {root}
cd {root}
mkdir -p etc/containerd opt usr proc sys dev run tmp var/lib
for name in bin sbin lib lib64; do ln -s usr/$name $name; done
for name in passwd group hosts resolv.conf nsswitch.conf ld.so.cache machine-id alternatives ssl; do
  [ ! -e /etc/$name ] || cp -a /etc/$name etc/
done
ln -s {config} etc/containerd/config.toml
for name in /dev /sys; do mount --rbind $name .$name; done
for name in /usr {shared}; do mkdir -p .$name; mount --bind $name .$name; done
mount -t tmpfs local usr/local/sbin
ln -s {containerd} {ctr} {shim} usr/local/sbin/ # a containerd takes the first shim on its PATH, of whatever version
cat >usr/local/sbin/systemctl <<'END'
#!/bin/sh
[ "$*" = "restart containerd" ] || exit 1
before=$(cat /run/containerd.pid)
kill $before
until [ "$(cat /run/containerd.pid)" != $before ] && ctr --address {socket} version >/dev/null 2>&1; do sleep 0.05; done
echo restarted >>/run/restarts
END
chmod 755 usr/local/sbin/systemctl
echo ready
exec sleep 1000000
"""
# PID 1 keeps containerd running; `systemctl restart containerd` ends it and waits for the next one.
_INIT = """
set -e
ip link set lo up
cd {root}
mount -t tmpfs run run
mount -t proc proc proc
cat proc/sys/kernel/random/uuid >run/boot_id
mount --bind run/boot_id proc/sys/kernel/random/boot_id
mkdir -p old run/containerd
pivot_root . old
umount -l /old
rmdir /old
ln -s {socket} /run/containerd/containerd.sock
echo ready
while :; do
  containerd --config /etc/containerd/config.toml >>{log} 2>&1 &
  echo $! >/run/containerd.pid.new
  mv /run/containerd.pid.new /run/containerd.pid
  wait $! || :
done
"""


_CGROUPS = ["/sys/fs/cgroup", *glob.glob("/sys/fs/cgroup/*")]  # of version 2, and of each controller of version 1


class _Machine(Lab):
    """Commands run among the processes of the node."""

    init = 0

    def enter(self, command: Sequence[str | Path]) -> list[str]:
        return ["nsenter", f"--target={self.init}", "--net", "--mount", "--pid", "--", *map(str, command)]


class Node(Containerd):
    """Its containerd. What it keeps on disk, and its socket, have the same paths inside and outside."""

    def __init__(
        self, made: _Machine, disk: subprocess.Popen[bytes], shared: Sequence[Path], environment: Mapping[str, str]
    ) -> None:
        super().__init__(made, version=VERSION, pods=True)
        self._config = self.home / "config.toml"
        plain = self._config.read_text().partition('[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kedge]')
        imports = 'imports = ["/etc/containerd/conf.d/*.toml"]\n' if VERSION == "2" else ""
        self._config.write_text(imports + plain[0].replace(f"{self.home}/state", "/run/containerd"))
        self._config.chmod(0o640)
        self.root = made.root / "node"
        self.root.mkdir()
        self.cri = Cri(self.home / "socket", IMAGE)
        self._made = made
        self._plain = environment
        self._disk = disk
        self._init: subprocess.Popen[bytes] | None = None
        self._places = {
            "root": self.root, "shared": " ".join(map(str, [made.root, *shared])), "config": self._config,
            "containerd": self.programs / "containerd", "ctr": self.programs / "ctr",
            "shim": self.programs / "containerd-shim-runc-v2", "socket": self.home / "socket",
            "log": self.log,
        }  # fmt: skip

    @property
    def init(self) -> int:
        """The PID of its init, from here."""
        return self._made.init

    def assemble(self) -> None:
        self._tell(self._disk, _DISK)

    def boot(self) -> None:
        """Also again, after it crashed."""
        enter = ["nsenter", f"--target={self._disk.pid}", "--mount", "--"]
        own = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--propagation=private"]
        self._init = _shell([*enter, *own], self._plain)
        self._tell(self._init, _INIT)
        self._made.init = int(Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text())
        self.wait_up()

    def _tell(self, shell: subprocess.Popen[bytes], script: str) -> None:
        assert shell.stdin is not None
        assert shell.stdout is not None
        with shell.stdout, shell.stdin:
            shell.stdin.write(script.format(**self._places).encode())
            shell.stdin.close()
            assert shell.stdout.readline() == b"ready\n", self.log

    def crash(self) -> None:
        """All that runs on it is gone at once, as when its power is cut; its disk stays."""
        if self._init is not None:
            init = self._made.init or self._init.pid
            os.kill(init, signal.SIGKILL)
            cgroups: set[str] = set()
            wait_for(partial(self._is_gone, init, cgroups), "its processes do not end")
            for folder in (Path(f"{found}{path}") for found in _CGROUPS for path in cgroups):
                with suppress(OSError):  # not of that kind
                    folder.rmdir()
            self._init, self._made.init = None, 0

    def _is_gone(self, init: int, cgroups: set[str]) -> bool:
        """With all of its processes, whose cgroups are noted, because these stay. Version 1 of cgroups lets none die
        that is frozen, for a checkpoint or a start."""
        for pid in pids_below(init):
            for line in read_text(f"/proc/{pid}/cgroup").splitlines():
                path = line.split(":", 2)[2]
                if path.startswith(f"/{self.namespace}/"):
                    cgroups.add(path)
                    with suppress(OSError):
                        Path(f"/sys/fs/cgroup/freezer{path}/freezer.state").write_text("THAWED")
        return self._init is None or self._init.poll() is not None

    def configure(self, more: str) -> None:
        """Add to what its containerd is told, and start that again."""
        self._config.write_text(self._config.read_text() + more)
        self.lab.run("/usr/local/sbin/systemctl", "restart", "containerd", env=self._plain)

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


def _shell(front: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*front, "sh"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@contextmanager
def node(root: Path, *shared: Path, environment: Mapping[str, str] | None = None) -> Iterator[Node]:
    """A running one, which also has these paths of the machine."""
    plain = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **(environment or {})}
    disk = _shell(["unshare", "--mount", "--propagation=private"], plain)
    made = Node(_Machine(root, disk), disk, shared, plain)
    try:
        made.assemble()
        made.boot()
        made.load_image()
        yield made
    finally:
        made.crash()
        disk.kill()
        disk.wait()
