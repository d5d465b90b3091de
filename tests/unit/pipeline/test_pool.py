"""Processes that die: whoever waits for them is told so, however slow the process that started them is."""

import threading
from typing import Any

import pytest

import kedge
from kedge.pipeline import pool
from kedge.pipeline.attempt import Isolation
from tests.pipeline_work import die, double


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
