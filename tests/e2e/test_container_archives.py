"""Other engines as judges: podman's export goes through the store and back, and podman's container counts on."""

import json
import subprocess
import tempfile
from pathlib import Path

import pytest

import kedge
from kedge.containers import snapshot
from kedge.containers.archive.export import export
from kedge.containers.archive.importer import import_archive
from kedge.containers.inspection import inspect_archive

_SCRIPT = Path(__file__).with_name("podman_counter.sh")
_COUNTER = r"""
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(void) {
  char line[32];
  int log = open("/data.log", O_CREAT | O_APPEND | O_WRONLY, 0644);
  unlink("/etc/gone");
  for (long n = 1;; n++) {
    int size = snprintf(line, sizeof line, "%ld\n", n);
    if (write(log, line, size) != size) return 1;
    usleep(10000);
  }
}
"""


def _podman(*words: str | Path) -> None:
    done = subprocess.run(
        ["unshare", "-n", "-m", _SCRIPT, *words], capture_output=True, text=True, check=False, timeout=100,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.requires("podman")
@pytest.mark.xdist_group("criu")
def test_podman_to_podman_through_the_store_and_what_ctr_writes() -> None:
    with tempfile.TemporaryDirectory(prefix="kd-") as folder:  # podman takes no long paths
        _round(Path(folder))


def _round(work: Path) -> None:
    (work / "counter.c").write_text(_COUNTER)
    _podman("freeze", work, work / "export.tar.zst")
    frozen_at = int((work / "frozen-at").read_text())
    shown = inspect_archive(work / "export.tar.zst", reveal=True)
    assert shown.engine == "podman"
    assert [(one.pid, one.name) for one in shown.processes] == [(1, "counter")]
    assert shown.commands == {1: ("/counter",)}
    assert shown.environment["TOKEN"] == "secret"
    assert {("data.log", "file"), ("etc/gone", "deleted")} <= set(shown.changes)
    assert shown.statistics is not None
    with kedge.open(work / "store", namespace="containers") as store:
        done = import_archive(store, work / "export.tar.zst")
        kept = snapshot.load(store, done.checkpoint.id)
        for format in ("podman", "cri", "containerd"):
            export(*kept, work / f"{format}.tar", format=format)
    for format, engine in (("podman", "Podman"), ("cri", "CRI-O"), ("containerd", "containerd")):
        judged = subprocess.run(
            ["checkpointctl", "inspect", "--format", "json", "--all", str(work / f"{format}.tar")],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        (found,) = json.loads(judged.stdout)
        assert (found["engine"], found["container_name"]) == (engine, "counter")
        assert found["process_tree"]["command"] == "counter"
        assert found["statistics"]["pages_written"] == shown.statistics["pages_written"]
    _podman("ctr", work, work / "ctr.tar")
    made = inspect_archive(work / "ctr.tar")
    assert made.config.name.startswith("archive-")
    assert made.config.image_name == "localhost/counter:1"
    assert made.commands == {1: ("/counter",)}
    assert {("data.log", "file"), ("etc/gone", "deleted")} <= set(made.changes)
    _podman("thaw", work, work / "podman.tar")
    counted = (work / "data.log").read_text().split()
    assert len(counted) > frozen_at
    assert counted == [str(n) for n in range(1, len(counted) + 1)]  # no step lost, none twice
    assert not (work / "came-back").exists()
