"""Jobs on a GPU, frozen and brought back: real CRIU under a driver that records calls, fails and kills on demand."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

import kedge
from tests.lab import KEDGE, Lab, lab
from tests.waiting import wait_for

T = TypeVar("T")

pytestmark = [pytest.mark.requires("criu", "cc"), pytest.mark.xdist_group("containers")]

SOURCE = Path(__file__).parents[1] / "servers" / "fake_cuda.c"

# A parent and a child that both use the device: each step is work there, then a line in a file that memory must fit.
JOB = """
import ctypes, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
name = "child" if os.fork() == 0 else "parent"
cuda.fake_begin()
file, size, n = open(f"{sys.argv[1]}/{name}", "a"), 0, 0
while True:
    cuda.fake_work()
    size += file.write(f"{n}\\n")
    file.flush()
    assert file.tell() == size
    n += 1
    time.sleep(0.005)  # sleep: the pace of the job
"""


def chosen(few: list[T], more: Iterable[T]) -> list[T]:
    """Some cases, or with the profile of the long tests all."""
    return few if os.environ.get("KEDGE_HYPOTHESIS_PROFILE") != "torture" else list(dict.fromkeys([*few, *more]))


class Gpu:
    """A lab with the driver, and a job of two processes on its device."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.folder = lab.root / "cuda"
        self.output = lab.root / "output"
        self.folder.mkdir()
        self.output.mkdir()
        self.environment = lab.environment(LD_LIBRARY_PATH=str(lab.root / "lib"), FAKE_CUDA=str(self.folder))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> int:
        # Its streams must be those of the lab: CRIU dumps no files of other mount namespaces.
        quiet = ["sh", "-c", 'exec "$@" </dev/null >/dev/null 2>&1', "job"]
        command = self.lab.enter([*quiet, sys.executable, "-c", JOB, str(self.output)])
        self.process = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self.wait_for_steps()
        return self.process.pid

    def steps(self) -> list[int]:
        files = [self.output / name for name in ("child", "parent")]  # a restore puts drafts beside them
        return [len(path.read_text().split()) for path in files if path.exists()]

    def wait_for_steps(self, running: subprocess.Popen[bytes] | None = None) -> None:
        """Both go on; `running` must not have ended before that."""
        before = self.steps()
        before += [0] * (2 - len(before))  # who has written no step yet

        def went_on() -> bool | None:
            now = self.steps()
            if running is not None and running.poll() is not None:
                raise AssertionError(running.communicate()[1])
            return True if len(now) == 2 and all(n > b for n, b in zip(now, before, strict=True)) else None

        wait_for(went_on, f"the job stands still at {before}; {self.calls()}", 90)

    def states(self) -> list[str]:
        return [path.read_text() for path in self.folder.iterdir() if path.name.isdecimal()]

    def calls(self) -> list[str]:
        log = self.folder / "log"
        return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []

    def kedge(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.lab.kedge(*arguments, check=check, env=self.environment)

    def checkpoint(self, pid: int, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.kedge("process", "checkpoint", str(pid), "--key", "job", *options, check=check)

    def kept(self) -> int:
        with kedge.open(self.lab.store, namespace="containers") as store:
            return len(store.list("process:job"))

    def meant(self, what: str, call: str, number: int) -> None:
        (self.folder / what).write_text(f"{call} {number}")

    def end(self) -> None:
        for path in self.folder.iterdir():
            if path.name.isdecimal():
                try:
                    os.kill(int(path.name), signal.SIGKILL)
                except ProcessLookupError:
                    continue
        if self.process is not None:
            self.process.wait(60)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lib")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", folder / "libcuda.so.1", SOURCE], check=True)
    return folder / "libcuda.so.1"


@pytest.fixture
def gpu(tmp_path: Path, library: Path) -> Iterator[Gpu]:
    with lab(tmp_path) as made:
        (made.root / "lib").mkdir()
        (made.root / "lib" / "libcuda.so.1").write_bytes(library.read_bytes())
        found = Gpu(made)
        yield found
        found.end()


def test_all_are_locked_then_all_are_moved_and_they_run_on(gpu: Gpu) -> None:
    pid = gpu.start()
    gpu.checkpoint(pid, "--leave-running", "--gpu", "require")
    assert gpu.calls()[:4] == ["lock", "lock", "checkpoint", "checkpoint"]
    assert sorted(gpu.calls()[4:]) == ["restore", "restore", "unlock", "unlock"]
    assert gpu.states() == ["0", "0"]
    gpu.wait_for_steps()
    with kedge.open(gpu.lab.store, namespace="containers") as store:
        (kept,) = store.list("process:job")
        assert kept.metadata["gpu"]["processes"] == 2  # type: ignore[index]
        phases = kept.metadata["phases_ms"]
        assert {"gpu lock", "gpu to host", "dump", "gpu back"} <= set(phases)  # type: ignore[call-overload]


def test_frozen_for_good_and_brought_back(gpu: Gpu) -> None:
    pid = gpu.start()
    gpu.checkpoint(pid)
    assert gpu.states() == ["2", "2"]  # it ended as it was dumped
    assert gpu.process is not None
    gpu.process.wait(60)
    before = gpu.steps()
    running = subprocess.Popen(
        gpu.lab.enter([*KEDGE, "process", "run", "--key", "job"]), env=gpu.environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        gpu.wait_for_steps(running)
        assert all(now > then for now, then in zip(gpu.steps(), before, strict=True))
        assert sorted(gpu.calls()[-4:]) == ["restore", "restore", "unlock", "unlock"]
    finally:
        gpu.end()
        running.communicate(timeout=60)
    for path in (gpu.output / "child", gpu.output / "parent"):
        assert path.read_text().split() == [str(n) for n in range(len(path.read_text().split()))]


@pytest.mark.parametrize(("call", "number"), chosen([("lock", 2), ("checkpoint", 2)], [("lock", 1), ("checkpoint", 1)]))
def test_a_refusal_before_the_dump_is_undone(gpu: Gpu, call: str, number: int) -> None:
    pid = gpu.start()
    gpu.meant("fail", call, number)
    done = gpu.checkpoint(pid, "--leave-running", check=False)
    assert done.returncode == 1
    assert "operation not supported" in done.stderr
    assert gpu.states() == ["0", "0"]
    gpu.wait_for_steps()
    assert gpu.kept() == 0


@pytest.mark.parametrize("call", ["restore", "unlock"])
def test_a_refusal_after_the_dump_is_tried_again(gpu: Gpu, call: str) -> None:
    pid = gpu.start()
    gpu.meant("fail", call, 1)
    gpu.checkpoint(pid, "--leave-running")
    assert gpu.states() == ["0", "0"]
    gpu.wait_for_steps()
    assert gpu.kept() == 1


def test_what_cannot_go_on_is_complete_in_the_store(gpu: Gpu) -> None:
    """Never neither: a driver that does not give the memory back leaves a whole checkpoint, and the next call tries."""
    pid = gpu.start()
    gpu.meant("fail", "restore", 0)
    done = gpu.checkpoint(pid, "--leave-running", check=False)
    assert done.returncode == 1
    assert gpu.kept() == 1
    (gpu.folder / "fail").unlink()
    assert "released process" in gpu.kedge("container", "doctor", check=False).stdout
    assert gpu.states() == ["0", "0"]
    gpu.wait_for_steps()


@pytest.mark.parametrize(
    ("moment", "call", "number"),
    chosen(
        [("kill", "lock", 1), ("kill-before", "checkpoint", 2), ("kill", "checkpoint", 2), ("kill", "restore", 1)],
        itertools.product(["kill-before", "kill"], ["lock", "checkpoint", "restore", "unlock"], [1, 2]),
    ),
)
def test_killed_at_any_call_the_next_one_frees_the_job(gpu: Gpu, moment: str, call: str, number: int) -> None:
    pid = gpu.start()
    gpu.meant(moment, call, number)
    done = gpu.checkpoint(pid, "--leave-running", check=False)
    assert done.returncode == -signal.SIGKILL
    (gpu.folder / moment).unlink()
    gpu.checkpoint(pid, "--leave-running")
    assert gpu.states() == ["0", "0"]
    gpu.wait_for_steps()
    assert gpu.kept() == 1


def test_hibernation_gives_the_gpu_back_and_takes_it_again(gpu: Gpu) -> None:
    pid = gpu.start()
    gpu.kedge("process", "hibernate", str(pid))
    assert sorted(gpu.states()) == ["0", "2"]
    refused = gpu.checkpoint(pid, check=False)
    assert (refused.returncode, "wake it first" in refused.stderr) == (5, True)
    assert "hibernates" in gpu.kedge("container", "doctor", check=False).stdout  # and it stays so
    assert sorted(gpu.states()) == ["0", "2"]
    gpu.kedge("process", "wake", str(pid))
    gpu.wait_for_steps()
    again = gpu.kedge("process", "wake", str(pid), check=False)
    assert (again.returncode, "is running" in again.stderr) == (5, True)


def test_killed_on_the_way_into_hibernation(gpu: Gpu) -> None:
    pid = gpu.start()
    gpu.meant("kill", "lock", 1)
    assert gpu.kedge("process", "hibernate", str(pid), check=False).returncode == -signal.SIGKILL
    (gpu.folder / "kill").unlink()
    assert "released process" in gpu.kedge("container", "doctor", check=False).stdout
    assert gpu.states() == ["0", "0"]
    gpu.wait_for_steps()


def test_required_but_missing_or_too_old(gpu: Gpu, tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        none = gpu.checkpoint(sleeper.pid, "--gpu", "require", check=False)
        assert (none.returncode, "none of the processes uses a GPU" in none.stderr) == (3, True)
        (gpu.folder / "old").touch()
        old = gpu.checkpoint(sleeper.pid, "--gpu", "require", check=False)
        assert (old.returncode, "driver 570 or newer" in old.stderr) == (3, True)
        without = gpu.lab.kedge(
            "process", "checkpoint", str(sleeper.pid), "--key", "k", "--gpu", "require", check=False
        )
        assert (without.returncode, "no NVIDIA driver" in without.stderr) == (3, True)
    finally:
        sleeper.kill()
        sleeper.wait()


def test_onto_another_gpu_of_the_kind(gpu: Gpu) -> None:
    gpu.checkpoint(gpu.start())
    assert gpu.process is not None
    gpu.process.wait(60)
    (gpu.folder / "other").touch()
    running = subprocess.Popen(
        gpu.lab.enter([*KEDGE, "process", "run", "--key", "job"]), env=gpu.environment, stderr=subprocess.PIPE
    )
    try:
        gpu.wait_for_steps(running)
        assert "remap" in gpu.calls()
    finally:
        gpu.end()
        running.communicate(timeout=60)
