"""A containerd of its own for tests, in a lab: its own root, state, socket and image, driven with `ctr`."""

import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kedge.containers.runtime import calls
from tests.lab import COUNTER, PYTHON, Lab
from tests.waiting import wait_for

SHIM = Path(calls.__file__).with_name("containerd-shim-kedge-v1")
OURS = "io.containerd.kedge.v1"
PLAIN = "io.containerd.runc.v2"
IMAGE = "kedge.test/scratch:1"
COUNT = (PYTHON, "-c", COUNTER, "0.002", "0")
# "system", or one that `./dev lab` unpacked: 1.7 or 2
VERSION = os.environ.get("KEDGE_CONTAINERD") or "system"

_CONFIG = """
version = 2
root = "{0}/root"
state = "{0}/state"
disabled_plugins = [{1}]
[grpc]
address = "{0}/socket"
[ttrpc]
address = "{0}/socket.ttrpc"
[timeouts] # its own are two and five seconds, which a busy machine needs for less
"io.containerd.timeout.shim.cleanup" = "60s"
"io.containerd.timeout.shim.load" = "60s"
"io.containerd.timeout.task.state" = "60s"
"""
_PODS = """
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{1}"
restrict_oom_score_adj = true
disable_apparmor = true
disable_tcp_service = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
conf_dir = "{0}/cni"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.kedge]
runtime_type = "{2}"
pod_annotations = ["kedge.dev/*"]
container_annotations = ["kedge.dev/*"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.by-path]
runtime_type = "io.containerd.runc.v2"
runtime_path = "{3}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.by-path.options]
BinaryName = ""
NoNewKeyring = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.misled]
runtime_type = "{2}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.misled.options]
NoNewKeyring = true
"""


def programs_of(version: str) -> Path:
    """Where that containerd has its programs."""
    if version == "system":
        return Path(shutil.which("containerd") or "/usr/bin/containerd").parent
    return Path(__file__).parents[1] / f".dev/lab/containerd-{version}/usr/bin"


class Containerd:
    """One containerd. Containers share the machine's /usr; what they change is in their snapshot's upper directory."""

    def __init__(self, made: Lab, *, version: str = VERSION, pods: bool = False, **environment: str) -> None:
        self.lab = made
        self.version = version
        self.programs = programs_of(version)
        self.home = made.root / "containerd"
        self.home.mkdir()
        # runc's root is shared by all containerds of a machine
        self.namespace = "k8s.io" if pods else f"kd-{made.root.name}-{id(self):x}"
        self.log = self.home / "log"
        config = _CONFIG.format(self.home, "" if pods else '"io.containerd.grpc.v1.cri"')
        (self.home / "config.toml").write_text(config + (_PODS.format(self.home, IMAGE, OURS, SHIM) if pods else ""))
        if pods:
            addresses = {"type": "host-local", "subnet": "10.88.77.0/24", "dataDir": str(self.home / "addresses")}
            network = {"cniVersion": "0.4.0", "name": "lab", "plugins": [{"type": "ptp", "ipam": addresses}]}
            (self.home / "cni").mkdir()
            (self.home / "cni/lab.conflist").write_text(json.dumps(network))
        places = {
            "PATH": f"{SHIM.parent}:{self.programs}:{os.environ['PATH']}",
            "KEDGE_RUNC_STATE": str(made.root / "marks"),
            "KEDGE_SHIM_LINKS": str(made.root / "links"),
            "KEDGE_PYTHON": sys.executable,
        }
        self.environment = made.environment(**{**places, **environment})
        self._pods = pods
        self._daemon: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = self.lab.enter([self.programs / "containerd", "--config", self.home / "config.toml"])
        with self.log.open("ab") as log:
            self._daemon = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
        wait_for(lambda: self.ctr("version", check=False).returncode == 0 or None, "containerd does not start")

    def stop(self, how: int | None = signal.SIGTERM) -> None:
        """By that signal; None: it was killed by somebody else."""
        if self._daemon is not None:
            if how is not None:
                self._daemon.send_signal(how)
            self._daemon.wait(timeout=120)
            self._daemon = None

    def restart(self, **environment: str) -> None:
        """With these in its environment."""
        self.stop()
        self.environment |= environment
        self.start()

    @property
    def daemon_pid(self) -> int:
        """nsenter becomes the program that it starts."""
        assert self._daemon is not None
        return self._daemon.pid

    @property
    def is_up(self) -> bool:
        return self._daemon is not None

    def ctr(self, *words: str | Path, check: bool = True, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        return self.lab.run(*self.command(*words), check=check, timeout=timeout_s)

    def command(self, *words: str | Path) -> list[str | Path]:
        """A call of `ctr`."""
        return [self.programs / "ctr", "--address", self.home / "socket", "--namespace", self.namespace, *words]

    def load_image(self) -> None:
        archive = self.home / "image.tar"
        archive.write_bytes(_image(self._pause_program() if self._pods else b""))
        self.ctr("image", "import", archive)

    def _pause_program(self) -> bytes:
        """What the sandbox of a pod runs: it waits."""
        source = self.home / "pause.c"
        source.write_text("#include <unistd.h>\nint main(void) { for (;;) pause(); }\n")
        subprocess.run(["cc", "-static", "-Os", "-o", self.home / "pause", source], check=True)
        return (self.home / "pause").read_bytes()

    def run(
        self,
        name: str,
        *wishes: str,
        shim: str = OURS,
        program: Sequence[str] = COUNT,
        annotations: Sequence[str] = (),
        more: Sequence[str] = (),
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """`ctr run --detach`, with these in its environment."""
        options = [word for note in annotations for word in ("--annotation", note)]
        words = self.to_run(name, "--null-io", *options, *more, wishes=wishes, shim=shim, program=program)
        return self.ctr(*words, check=check)

    @staticmethod
    def to_run(
        name: str, *options: str, wishes: Sequence[str], shim: str = OURS, program: Sequence[str] = COUNT
    ) -> list[str]:
        """What `ctr` is told for that."""
        environment = [word for wish in wishes for word in ("--env", wish)]
        mount = "type=bind,src=/usr,dst=/usr,options=rbind:ro"
        place = ("--runtime", shim, "--snapshotter", "overlayfs", "--mount", mount)
        return ["run", "--detach", *place, *environment, *options, IMAGE, name, *program]

    def status(self, name: str) -> str:
        for line in self.ctr("task", "list").stdout.splitlines():
            if line.split()[0] == name:
                return line.split()[2]
        return ""

    def pid(self, name: str) -> int:
        return next(
            int(line.split()[1]) for line in self.ctr("task", "list").stdout.splitlines() if line.split()[0] == name
        )

    def kill(self, name: str, signal_name: str = "SIGKILL") -> None:
        self.ctr("task", "kill", "--signal", signal_name, name)

    def wait_stopped(self, name: str) -> None:
        wait_for(lambda: True if self.status(name) in ("STOPPED", "") else None, f"{name} does not end")

    def remove(self, name: str) -> None:
        """End it, and leave nothing of it."""
        if self.status(name) == "RUNNING":
            self.kill(name)
            self.wait_stopped(name)
        self.ctr("task", "delete", name, check=False)  # its exit status is the task's: 137 after a kill
        self.ctr("container", "delete", name)

    def upper(self, name: str) -> Path:
        found = re.search(r"upperdir=([^,\s]+)", self.ctr("snapshot", "mounts", "/x", name).stdout)
        assert found is not None
        return Path(found[1])

    def count(self, name: str, upper: Path | None = None) -> int:
        """How far its counter is; fails if memory and files did not agree at some step."""
        work = (upper or self.upper(name)) / "work"
        assert not (work / "broken").exists(), (work / "broken").read_text()
        text = (work / "log").read_text() if (work / "log").exists() else ""
        lines = text[: text.rfind("\n") + 1].split()
        assert lines == [str(n) for n in range(1, len(lines) + 1)], lines[-5:]
        return len(lines)

    def wait_beyond(self, name: str, number: int) -> int:
        upper = self.upper(name)
        return wait_for(lambda: n if (n := self.count(name, upper)) > number else None, f"{name} stands still")

    def wait_shimless(self) -> None:
        """Every container and pod of this containerd is removed: the last shim ends a moment after its answer."""
        wait_for(lambda: not self.shims(), "a shim does not end")

    def shims(self) -> list[int]:
        """The shims of this containerd: at least one for each container or pod that it runs."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                program, *words = (entry / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if "containerd-shim" in program and str(self.home / "socket") in words:
                found.append(int(entry.name))
        return found


@contextmanager
def containerd(made: Lab, *, version: str = VERSION, pods: bool = False, **environment: str) -> Iterator[Containerd]:
    """A running one, with the shim on its PATH; its tasks are gone afterwards."""
    engine = Containerd(made, version=version, pods=pods, **environment)
    engine.start()
    try:
        engine.load_image()
        yield engine
    finally:
        if not engine.is_up:
            engine.start()
        for line in engine.ctr("container", "list", "--quiet", check=False).stdout.split():
            engine.remove(line)
        engine.stop()
        with suppress(OSError):  # of pods: others may have some too
            Path("/run/containerd/runc", engine.namespace).rmdir()


def _image(pause: bytes) -> bytes:
    """An image with nothing but empty directories and that program, as an archive of an OCI layout."""
    folders: dict[str, bytes | None] = dict.fromkeys(("proc", "dev", "sys", "run", "usr", "work", "tmp", "etc"))
    layer = _tar({**folders, "pause": pause}, links=True)
    digest = _digest(layer)
    paths = {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Entrypoint": ["/pause"]}
    layers = {"type": "layers", "diff_ids": [digest]}
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": paths, "rootfs": layers}).encode()
    manifest = json.dumps({
        "schemaVersion": 2,
        "config": _described("application/vnd.oci.image.config.v1+json", config),
        "layers": [_described("application/vnd.oci.image.layer.v1.tar", layer)],
    }).encode()  # fmt: skip
    top = _described("application/vnd.oci.image.manifest.v1+json", manifest)
    index = {"schemaVersion": 2, "manifests": [{**top, "annotations": {"io.containerd.image.name": IMAGE}}]}
    blobs = {f"blobs/sha256/{_digest(blob)[7:]}": blob for blob in (layer, config, manifest)}
    return _tar({"oci-layout": b'{"imageLayoutVersion": "1.0.0"}', "index.json": json.dumps(index).encode(), **blobs})


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _described(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _tar(members: dict[str, bytes | None], *, links: bool = False) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.type, member.mode = (tarfile.DIRTYPE, 0o755) if data is None else (tarfile.REGTYPE, 0o755)
            member.size = len(data or b"")
            tar.addfile(member, io.BytesIO(data or b""))
        for name in ("bin", "lib", "lib64", "sbin") if links else ():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            tar.addfile(link)
    return out.getvalue()
