"""Processes that die: whoever waits for them is told so, however slow the process that started them is."""

import threading
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.pipeline import pool
from kedge.pipeline.attempt import Isolation
from tests.pipeline_work import die, double, hang
from tests.waiting import wait_for


def test_one_that_dies_before_anybody_has_read_what_it_is_at(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = pool._Manager.process_next_message

    def read_late(manager: Any, timeout: float) -> None:
        assert go_on.wait(60)
        real(manager, timeout)

    monkeypatch.setattr(pool._Manager, "process_next_message", read_late)
    processes = Isolation()
    try:
        with pytest.raises(kedge.WorkerDied, match=r"first: its process died \(exit code 3\)"):
            processes.call(die, (), {}, 600, "first")
        go_on.set()
        assert processes.call(double, (3,), {}, 600, "second") == 6
    finally:
        go_on.set()
        processes.close()


def test_a_pool_that_is_stopped_leaves_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even if the thread that reads what processes say ends before their pipe is closed, and so tells nobody."""
    real = pool._Manager.process_next_message

    def read(manager: Any, timeout: float) -> None:
        with suppress(BrokenProcessPool):
            real(manager, timeout)

    monkeypatch.setattr(pool._Manager, "process_next_message", read)
    processes, file = Isolation(), tmp_path / "begun"
    errors: list[Exception] = []

    def call(what: str) -> None:
        try:
            processes.call(hang, (str(file),), {}, 600, what)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(what,), daemon=True) for what in ("first", "second", "third")]
    for thread in threads:
        thread.start()
    wait_for(file.exists, "no process begins")
    processes.close()
    for thread in threads:
        thread.join(60)
    assert [type(error) for error in errors] == [kedge.WorkerDied] * 3
