"""Workers that are killed and frozen: each run is carried out, each step of it is durable once, no result is lost."""

import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.pipeline.consumer import Worker
from tests.servers.postgres import postgres_cluster
from tests.torture.queues import storm
from tests.unit.pipeline.test_queues import POSTGRES
from tests.waiting import wait_for

pytestmark = pytest.mark.faults

PROGRAM = """
    import os, time, kedge

    def note(line):
        with open("log", "a") as log:
            log.write(line + "\\n")

    @kedge.pipeline
    def freezes():
        run = kedge.current_run()
        run.step("wait", hold)
        return run.step("charge", note, "charge") or "done"

    def hold():
        note(f"holds {os.getpid()}")
        while not os.path.exists("go"):
            time.sleep(0.02)  # sleep: between two looks
"""


@pytest.fixture(params=["directory", POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "store")
    return str(request.getfixturevalue("postgres").empty_database())


class Workers:
    """Worker processes of a program."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.processes: list[subprocess.Popen[str]] = []
        (folder / "program.py").write_text(textwrap.dedent(PROGRAM))

    def start(self) -> subprocess.Popen[str]:
        words = ["kedge", "worker", "program.py", "--queue", "q", "--concurrency", "2", "--lease", "1"]
        process = subprocess.Popen(
            [sys.executable, "-m", *words, "--store", self.url], cwd=self.folder, stderr=subprocess.PIPE, text=True
        )
        self.processes.append(process)
        return process

    def lines(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def submit(self, call: str) -> None:
        code = f"import sys, kedge, program; queue = kedge.queue('q', store=sys.argv[1]); {call}"
        subprocess.run([sys.executable, "-c", code, self.url], cwd=self.folder, check=True, timeout=120)

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()


@pytest.fixture
def workers(tmp_path: Path, url: str) -> Iterator[Workers]:
    started = Workers(tmp_path, url)
    yield started
    started.end()


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_frozen_and_stopped_at_any_moment(tmp_path: Path, seed: int) -> None:
    """The short form of `./dev torture queues`."""
    numbers = storm(tmp_path, str(tmp_path / "store"), runs=60, blows=4, seed=seed)
    assert numbers["runs"] == 60


@pytest.mark.requires("postgres")
@pytest.mark.xdist_group("postgres")
def test_killed_frozen_and_stopped_while_the_database_restarts(tmp_path: Path) -> None:
    with postgres_cluster() as cluster:
        numbers = storm(tmp_path, cluster.empty_database(), runs=60, blows=5, seed=3, cluster=cluster)
    assert numbers["runs"] == 60


def test_a_frozen_worker_that_wakes_up_is_refused(workers: Workers, url: str) -> None:
    workers.submit("queue.submit(program.freezes)")
    frozen = workers.start()
    wait_for(lambda: f"holds {frozen.pid}" in workers.lines(), "the run does not begin")
    frozen.send_signal(signal.SIGSTOP)
    other = workers.start()
    wait_for(lambda: f"holds {other.pid}" in workers.lines(), "nobody takes the run over")
    (workers.folder / "go").touch()
    with kedge.open(url) as store:
        handle = kedge.queue("q", store=store).handle("freezes")
        assert handle.result(60) == "done"
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(_lines(frozen)))
        reader.start()
        frozen.send_signal(signal.SIGCONT)
        wait_for(lambda: any("was taken over" in line for line in said), "the worker that wakes up is not refused")
        frozen.send_signal(signal.SIGTERM)
        reader.join()
        steps = [record.step for record in store.list("freezes") if record.metadata["kind"] == "step"]
    assert steps == ["wait", "charge"]
    assert workers.lines().count("charge") == 1


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stderr is not None
    yield from process.stderr


@pytest.mark.mutant
def test_an_entry_that_is_deleted_too_early_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that gives the entry up before the end of the run is durable loses the run when it dies."""

    @kedge.pipeline
    def work() -> int:
        return 1

    def deletes_first(worker: Any, job: str, entry: Any, *_: Any) -> None:
        store.delete(job, entry.id)
        raise kedge.StorageError("killed here")

    with kedge.open(tmp_path / "store") as store:
        handle = kedge.queue("q", store=store).submit(work)
        monkeypatch.setattr(Worker, "_run", deletes_first)
        Worker(store, ["q"], {"work": work}).serve(until_empty=True)
        with pytest.raises(kedge.NotFound):
            handle.result(0)
