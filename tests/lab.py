"""Real containers for tests: bundles with an overlay root, runc, and `kedge` beside them.

Everything runs in network and mount namespaces of the lab's own: CRIU's network lock can never reach the machine, and
mounts are gone with the lab.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import wait_for

KEDGE = [sys.executable, "-m", "kedge"]
PYTHON = os.path.realpath(shutil.which("python3", path="/usr/local/bin:/usr/bin") or "/usr/bin/python3")

# Each counts in memory and in files at once, compares both at every step, and says so if they differ.
COUNTER = """
import mmap, os, sys, time
pause, ballast = float(sys.argv[1]), bytearray(os.urandom(int(sys.argv[2])))
log = os.open("/work/log", os.O_RDWR | os.O_CREAT | os.O_APPEND)
cells = os.open("/work/cells", os.O_RDWR | os.O_CREAT)
os.ftruncate(cells, 4096)
mapped = mmap.mmap(cells, 4096)
n = size = 0
while True:
    seen = os.fstat(log).st_size, int.from_bytes(mapped[:8], "little"), int.from_bytes(os.pread(cells, 8, 8), "little")
    links = [name for name in os.listdir("/work") if name.startswith("link-")]
    if seen != (size, n, n) or links != ([f"link-{n}"] if n else []):
        open("/work/broken", "w").write(f"step {n}: {seen} {size} {links}")
        sys.exit(1)
    n += 1
    line = b"%d\\n" % n
    os.write(log, line)
    size += len(line)
    os.link("/work/log", f"/work/link-{n}")
    if n > 1:
        os.unlink(f"/work/link-{n - 1}")
    mapped[:8] = n.to_bytes(8, "little")
    os.pwrite(cells, n.to_bytes(8, "little"), 8)
    if ballast:
        at = n * 4096 % (len(ballast) // 100)  # a hundredth of it changes all the time
        ballast[at : at + 4096] = os.urandom(4096)
    time.sleep(pause)  # sleep: the pace of the counter
"""
SHELL_COUNTER = """
n=0
while :; do
  [ "$n" = 0 ] || [ "$(tail -n 1 /work/log)" = "$n" ] || { echo "step $n" > /work/broken; exit 1; }
  n=$((n + 1)); echo "$n" >> /work/log; sleep 0.01
done
"""
C_COUNTER = """
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(void) {
  char line[32], last[32];
  long n = 0, size = 0;
  int log = open("/work/log", O_RDWR | O_CREAT | O_APPEND, 0644);
  for (;;) {
    long there = lseek(log, 0, SEEK_END), length = n ? snprintf(line, sizeof line, "%ld\\n", n) : 0;
    if (there != size || (n && (pread(log, last, length, size - length) != length || memcmp(line, last, length)))) {
      close(open("/work/broken", O_CREAT | O_WRONLY, 0644));
      return 1;
    }
    length = snprintf(line, sizeof line, "%ld\\n", ++n);
    if (write(log, line, length) != length) return 2;
    size += length;
    usleep(1000);
  }
}
"""


class Lab:
    """One lab. Containers live below `root`, the store and Kedge's own files too."""

    def __init__(self, root: Path, holder: subprocess.Popen[bytes]) -> None:
        self.root = root
        self.runtime_root = root / "runc"
        self.store = root / "store"
        self.state = root / "state"
        self._holder = holder
        self._bundles: list[Path] = []
        self._token = os.urandom(4).hex()
        self.runtime_root.mkdir()

    # Commands

    def enter(self, command: Sequence[str | Path]) -> list[str]:
        return ["nsenter", f"--target={self._holder.pid}", "--net", "--mount", "--", *map(str, command)]

    def environment(self, **more: str) -> dict[str, str]:
        """With time for a dump that no busy machine needs."""
        ours = {"KEDGE_STATE_DIR": str(self.state), "KEDGE_STORE": str(self.store), "KEDGE_DEADLINE_S": "100"}
        return {**os.environ, **ours, **more}

    def run(self, *command: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        options = {"stdin": subprocess.DEVNULL, "env": self.environment(), "timeout": 240, **options}
        done = subprocess.run(self.enter(command), capture_output=True, text=True, check=False, **options)
        assert not check or done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}"
        return done

    def kedge(self, *arguments: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.run(*KEDGE, *arguments, check=check, **options)

    def answer(self, *arguments: str | Path, **options: Any) -> Any:
        return json.loads(self.kedge(*arguments, "--json", **options).stdout)

    def python(self, code: str, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-c", code, *arguments, check=check)

    def runc(self, *arguments: str | Path, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        return self.run("runc", "--root", self.runtime_root, *arguments, check=check, **options)

    # Containers

    def bundle(self, name: str, *args: str, lower: Path | None = None, network: str | None = "") -> Path:
        """A bundle with an overlay root. `network`: a path, "" for one of its own, None: the host's."""
        bundle = self.root / name
        for folder in ("upper", "work", "rootfs"):
            (bundle / folder).mkdir(parents=True)
        if lower is None:
            lower = bundle / "lower"
            for folder in ("proc", "dev", "usr", "work", "tmp", "etc"):
                (lower / folder).mkdir(parents=True)
            for link in ("bin", "lib", "lib64", "sbin"):
                (lower / link).symlink_to(f"usr/{link}")
        layers = f"lowerdir={lower},upperdir={bundle}/upper,workdir={bundle}/work"
        self.run("mount", "-t", "overlay", "overlay", "-o", layers, bundle / "rootfs")
        self._bundles.append(bundle)
        network_namespace = [] if network is None else [{"type": "network", **({"path": network} if network else {})}]
        capabilities = ["CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_KILL", "CAP_MKNOD", "CAP_SETFCAP"]
        spec = {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": list(args),
                "env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
                "cwd": "/",
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
            },
            "root": {"path": "rootfs"},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755", "size=1m"]},
                {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
            ],
            "linux": {
                # runc derives it from the ID alone: containers of two labs would be frozen together
                "cgroupsPath": f"/kedge-{self._token}-{name}",
                "namespaces": [*({"type": kind} for kind in ("pid", "ipc", "mount")), *network_namespace],
            },
        }
        (bundle / "config.json").write_text(json.dumps(spec))
        return bundle

    def copy_of(self, bundle: Path, name: str) -> Path:
        """Another bundle with the same layers and the same configuration."""
        copy = self.bundle(name, "ignored", lower=bundle / "lower")
        spec = json.loads((bundle / "config.json").read_text())
        spec["linux"]["cgroupsPath"] = f"/kedge-{self._token}-{name}"
        (copy / "config.json").write_text(json.dumps(spec))
        return copy

    def counter(self, name: str, *, pause_s: float = 0.002, ballast: int = 0, **options: Any) -> Path:
        """A running container that counts."""
        bundle = self.bundle(name, PYTHON, "-c", COUNTER, str(pause_s), str(ballast), **options)
        self.start(name)
        return bundle

    def start(self, name: str, **streams: Any) -> None:
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **streams}
        command = ["runc", "--root", str(self.runtime_root), "run", "--detach", "--bundle", str(self.root / name), name]
        subprocess.run(self.enter(command), check=True, timeout=60, close_fds=True, **options)

    def is_running(self, name: str) -> bool:
        done = self.runc("state", name, check=False)
        return done.returncode == 0 and json.loads(done.stdout)["status"] == "running"

    def remove(self, name: str) -> None:
        self.runc("delete", "--force", name, check=False)

    # Counters

    def count(self, name: str) -> int:
        """How far a counter is; fails if it found itself broken, or if its log is not 1, 2, 3, …"""
        work = self.root / name / "upper/work"
        assert not (work / "broken").exists(), (work / "broken").read_text()
        text = (work / "log").read_text() if (work / "log").exists() else ""
        lines = text[: text.rfind("\n") + 1].split()
        assert lines == [str(n) for n in range(1, len(lines) + 1)], lines[-5:]
        return len(lines)

    def wait_beyond(self, name: str, number: int) -> int:
        """Wait until a counter is beyond that."""
        return wait_for(lambda: found if (found := self.count(name)) > number else None, f"{name} stands still")

    def close(self) -> None:
        for name in os.listdir(self.runtime_root):
            self.remove(name)
        self._holder.kill()
        self._holder.wait()


@contextmanager
def lab(root: Path) -> Iterator[Lab]:
    holder = subprocess.Popen(
        ["unshare", "--net", "--mount", "--propagation=private", "sh", "-c",
         "ip link set lo up && echo ready && exec sleep 1000000"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"ready\n"
    made = Lab(root, holder)
    try:
        yield made
    finally:
        made.close()
        holder.stdout.close()
