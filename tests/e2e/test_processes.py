"""Processes without a container: frozen, killed, and going on where they were."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from tests.lab import KEDGE, Lab, lab
from tests.waiting import wait_for

pytestmark = [pytest.mark.requires("criu"), pytest.mark.xdist_group("containers")]

JOB = """
import itertools, os, sys, time
path = sys.argv[1]
file, size = open(path, "a"), 0
for n in itertools.count():
    size += file.write(f"{n}\\n")
    file.flush()
    assert file.tell() == size, (n, file.tell(), size)
    print(n, flush=True)
    if os.path.exists(path + ".enough"):
        break
    time.sleep(0.01)  # sleep: the pace of the job
"""


@pytest.fixture(name="lab")
def _lab(tmp_path: Path) -> Iterator[Lab]:
    with lab(tmp_path) as made:
        yield made


class Job:
    """`kedge process run` of a job that writes a file and tells its steps, until it is enough."""

    def __init__(self, lab: Lab, *options: str) -> None:
        self.lab = lab
        self.output = lab.root / "output.txt"
        work = [sys.executable, "-c", JOB, str(self.output)]
        self.command = lab.enter([*KEDGE, "process", "run", "--key", "job", *options, "--", *work])

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command, env=self.lab.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def lines(self) -> list[str]:
        return self.output.read_text().split() if self.output.exists() else []

    def wait_beyond(self, number: int) -> None:
        wait_for(lambda: True if len(self.lines()) > number else None, "the job stands still")

    def end(self) -> None:
        """Some steps more, and it is enough"""
        self.wait_beyond(len(self.lines()) + 5)
        Path(f"{self.output}.enough").touch()

    def check(self) -> list[str]:
        """Its steps, each of which it has done once"""
        lines = self.lines()
        assert lines == [str(n) for n in range(len(lines))]
        return lines


def test_stopped_by_a_signal_and_going_on(lab: Lab) -> None:
    """Nothing is lost and nothing done twice, in the file or on stdout; its exit status is the job's."""
    job = Job(lab)
    told = ""
    for _ in range(2):
        process = job.start()
        job.wait_beyond(len(job.lines()) + 5)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 75, errors
        told += output
    process = job.start()
    job.end()
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "restored from" in errors
    assert f": {sys.executable} -c" in errors  # what goes on, whatever command is given with the key
    assert (told + output).split() == job.check()
    with kedge.open(lab.store, namespace="containers") as store:
        assert store.list("process:job") == []  # it ended well: the next run begins anew


def test_killed_with_everything(lab: Lab) -> None:
    """Supervisor and job killed with SIGKILL: it goes on from the last checkpoint, and its file fits its memory."""
    job = Job(lab, "--every", "0.3")
    process = job.start()
    assert process.stderr is not None
    started = process.stderr.readline()
    assert "started as process" in started
    assert "checkpoint" in process.stderr.readline()
    job.wait_beyond(len(job.lines()) + 5)
    process.kill()
    pid = started.split()[-1]
    os.kill(int(pid), signal.SIGKILL)
    process.communicate()
    wait_for(lambda: None if os.path.exists(f"/proc/{pid}") else True, "it cannot be killed")
    process = job.start()
    Path(f"{job.output}.enough").touch()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "restored from" in errors
    job.check()


MAPPING_JOB = """
import itertools, mmap, os, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
log = open(sys.argv[1] + ".log", "a")
for n in itertools.count():
    assert int.from_bytes(memory[:8], "little") == n, (n, memory[:8])
    memory[:8] = (n + 1).to_bytes(8, "little")
    log.write(f"{n}\\n")
    log.flush()
    if os.path.exists(sys.argv[1] + ".enough"):
        break
    time.sleep(0.01)  # sleep: the pace of the job
"""


def test_a_mapped_file_of_a_closed_descriptor_fits_the_memory(lab: Lab) -> None:
    """Killed between two checkpoints, the file is the one of the moment that the process goes on from."""
    mapped, log = lab.root / "mapped", lab.root / "mapped.log"
    work = [sys.executable, "-c", MAPPING_JOB, str(mapped)]
    command = lab.enter([*KEDGE, "process", "run", "--key", "job", "--every", "0.2", "--", *work])

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=lab.environment(), stderr=subprocess.PIPE, text=True)

    process = start()
    assert process.stderr is not None
    pid = int(process.stderr.readline().split()[-1])
    assert "checkpoint" in process.stderr.readline()
    before = len(log.read_text().split())
    wait_for(lambda: len(log.read_text().split()) > before + 5, "the job stands still")
    process.kill()
    os.kill(pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not os.path.exists(f"/proc/{pid}"), "it cannot be killed")
    process = start()
    Path(f"{mapped}.enough").touch()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "restored from" in errors
    steps = int.from_bytes(mapped.read_bytes()[:8], "little")
    assert log.read_text().split() == [str(n) for n in range(steps)]


def test_brought_back_and_left_to_itself(lab: Lab) -> None:
    job = Job(lab)
    process = job.start()
    job.wait_beyond(5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75
    with (lab.root / "streams").open("wb") as streams:
        command = lab.enter([*KEDGE, "process", "restore", "job"])
        subprocess.run(command, env=lab.environment(), stdout=streams, stderr=streams, check=True, timeout=60)
    job.end()
    job.check()
    assert "checkpoint" in (lab.root / "streams").read_text()
    assert lab.kedge("process", "restore", "nobody", check=False).returncode == 4


def test_what_is_refused(lab: Lab) -> None:
    for arguments, code in (
        (("checkpoint", "1", "--key", "a"), 3),
        (("checkpoint", "x", "--key", "a"), 3),
        (("checkpoint", str(os.getpid()), "--key", "a", "--store", "memory:"), 3),
        (("run", "--key", "a", "--store", "memory:", "--", "true"), 3),
        (("run", "--key", "nobody"), 4),
        (("run", "--key", "a", "--", "/no/such/program"), 3),
        (("run", "--key", "a", "--", "sh", "-c", "exit 7"), 7),
    ):
        assert lab.kedge("process", *arguments, check=False).returncode == code, arguments
