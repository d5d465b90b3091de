"""Runs that nobody submitted: a worker takes them over when their process dies, and only then."""

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, LeaseHeld
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import RECOVERY
from kedge.pipeline.history import find_run
from tests.waiting import wait_for

PROGRAM = """
    import os, sys, time, kedge

    @kedge.pipeline(recover=True, store=os.environ["KEDGE_STORE"])
    def nightly(day):
        run = kedge.current_run()
        run.step("first", note, f"first {day}")
        if not os.path.exists("go"):
            note("hangs")
            while not os.path.exists("go"):
                time.sleep(0.02)  # sleep: until it is killed
        return run.step("second", note, f"second {day}")

    def note(line):
        with open("log", "a") as log:
            log.write(line + "\\n")

    if __name__ == "__main__":
        nightly("monday")
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def recover(store: CheckpointManager, *pipelines: Any, **options: Any) -> list[str]:
    said: list[str] = []
    by_name = {pipeline.name: pipeline for pipeline in pipelines}
    Worker(store, [RECOVERY], by_name, report=lambda run, text: said.append(f"{run} {text}"), **options).serve(
        until_empty=True
    )
    return said


def test_a_worker_takes_over_a_run_whose_process_was_killed(
    store: CheckpointManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setenv("KEDGE_STORE", str(tmp_path / "store"))
    log = tmp_path / "log"
    worker = [sys.executable, "-m", "kedge", "worker", "program.py", "--until-empty"]
    process = subprocess.Popen([sys.executable, "program.py"], cwd=tmp_path)
    try:
        wait_for(lambda: log.exists() and "hangs" in log.read_text(), "it does not begin")
        subprocess.run(worker, cwd=tmp_path, check=True, timeout=120)  # its process lives: nothing to be done
        assert log.read_text() == "first monday\nhangs\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    (tmp_path / "go").touch()
    subprocess.run(worker, cwd=tmp_path, check=True, timeout=120)
    assert log.read_text() == "first monday\nhangs\nsecond monday\n"
    (run,) = [job.name for job in store.jobs("nightly")]
    assert (find_run(store, run).status, find_run(store, run).sessions) == ("completed", 2)
    assert len(kedge.queue(RECOVERY, store=store)) == 0


def test_only_a_process_that_dies_leaves_something_to_recover(store: CheckpointManager) -> None:
    calls: list[int] = []

    @kedge.pipeline(recover=True, store=store)
    def work(number: int) -> int:
        calls.append(number)
        assert len(kedge.queue(RECOVERY, store=store)) == 1
        if number == 2:
            raise ValueError("its caller learns of this")
        if number == 3:
            raise SystemExit(0)
        return number

    assert work(1) == 1
    with pytest.raises(ValueError, match="its caller"):
        work(2)
    with pytest.raises(SystemExit):
        work(3)
    assert recover(store, work) == []
    assert calls == [1, 2, 3]


def test_a_run_whose_store_failed_is_continued_by_a_worker(store: CheckpointManager) -> None:
    """The end of such a run may not be durable, and nothing is wrong with it."""
    calls: list[int] = []

    @kedge.pipeline(recover=True, store=store)
    def work() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise kedge.NoSpace("the disk is full")

    with pytest.raises(kedge.NoSpace):
        work()
    assert len(kedge.queue(RECOVERY, store=store)) == 1
    recover(store, work)
    assert len(calls) == 2
    assert find_run(store, "work").status == "completed"
    assert len(kedge.queue(RECOVERY, store=store)) == 0


def test_a_run_that_kills_whoever_works_on_it_is_given_up(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    @kedge.pipeline(recover=True, store=store)
    def work() -> None:
        raise KeyboardInterrupt  # stands for a death: nothing is tidied up

    with monkeypatch.context() as patch:
        patch.setattr("kedge.pipeline.recovery.drop_entry", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            work()
    queue = kedge.queue(RECOVERY, store=store)
    (entry,) = queue.entries()
    store.tag(entry.id, takeovers="2")
    assert recover(store, work, max_takeovers=2) == ["work is given up: 3 workers died at it"]
    assert [entry.note for entry in queue.entries("dead")] == ["3 workers died at it"]


def test_who_resumes_a_run_by_hand_is_its_only_owner(store: CheckpointManager) -> None:
    @kedge.pipeline(recover=True, store=store)
    def work() -> str:
        run = kedge.current_run()
        with pytest.raises(LeaseHeld):
            work()
        assert recover(store, work) == []
        return str(run.step("only", str, run.session))

    assert work() == "1"


def test_arguments_that_cannot_be_saved_are_refused_before_anything_happens(store: CheckpointManager) -> None:
    @kedge.pipeline(recover=True, store=store)
    def work(value: object) -> None:
        raise AssertionError("never called")

    with pytest.raises(kedge.UnsupportedType):
        work.at("key")(object())
