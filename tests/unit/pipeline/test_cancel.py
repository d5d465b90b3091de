"""A cancellation, and the time limit of a run, reach steps that are under way."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from kedge import Cancelled, CheckpointManager, StepTimeout
from kedge.pipeline.cancellation import cancel
from kedge.pipeline.history import find_run
from tests.pipeline_work import hang
from tests.waiting import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


async def forever(begun: threading.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


def test_a_coroutine_is_cancelled(store: CheckpointManager) -> None:
    begun = threading.Event()

    def canceller() -> None:
        begun.wait()
        assert not cancel(store, "r")

    async def pipeline() -> None:
        async with kedge.run("r", store=store, grace_s=0) as run:
            await run.step("wait", forever, begun, inputs=None)

    thread = threading.Thread(target=canceller)
    thread.start()
    with pytest.raises(Cancelled, match="was cancelled by"):
        asyncio.run(pipeline())
    thread.join()
    assert find_run(store, "r").status == "cancelled"


def test_a_process_is_killed(store: CheckpointManager, tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def canceller() -> None:
        wait_for(file.exists, "the step does not begin")
        cancel(store, "r")

    thread = threading.Thread(target=canceller)
    thread.start()
    with pytest.raises(Cancelled), kedge.run("r", store=store, grace_s=0) as run:
        run.step("hang", hang, str(file), timeout_s=600)
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
    assert find_run(store, "r").status == "cancelled"


PROGRAM = """
import sys, time, kedge
from pathlib import Path
with kedge.run("r", store=sys.argv[1], grace_s=0) as run:
    run.step("hang", lambda: (Path(sys.argv[2]).touch(), time.sleep(600)))  # sleep: until it is cancelled
"""


def test_the_main_thread_is_interrupted(store: CheckpointManager, tmp_path: Path) -> None:
    file = tmp_path / "begun"
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(file)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as program:
        try:
            wait_for(file.exists, "the step does not begin")
            cancel(store, "r")
            _, said = program.communicate(timeout=60)
        finally:
            program.send_signal(signal.SIGKILL)
    assert "Cancelled: run r was cancelled by" in said
    assert find_run(store, "r").status == "cancelled"


def test_a_run_has_a_time_limit_that_counts_from_its_first_beginning(store: CheckpointManager) -> None:
    async def pipeline(timeout_s: float) -> int:
        async with kedge.run("r", store=store, timeout_s=timeout_s) as run:
            if timeout_s < 1:
                await run.step("wait", forever, threading.Event(), inputs=None)
            return await run.step("last", last)  # type: ignore[no-any-return]

    async def last() -> int:
        return 1

    with pytest.raises(StepTimeout, match=r"run r took longer than 0\.05 s"):
        asyncio.run(pipeline(0.05))
    assert find_run(store, "r").status == "failed"
    with pytest.raises(StepTimeout):
        asyncio.run(pipeline(0.05))  # it began long ago
    assert asyncio.run(pipeline(3600)) == 1
