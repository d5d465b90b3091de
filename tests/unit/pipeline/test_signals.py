"""Signals that a run sends itself: they arrive while it is at work, or not at all."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kedge.pipeline.signals import Paused, Signals
from tests.waiting import wait_for


@pytest.fixture
def arrived() -> Iterator[list[int]]:
    """The signals that come when the handlers of a run do not stand."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGTERM, before)


def is_in(function: Any) -> bool:
    """Whether the main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize("sender", ["grace period", "cancellation"])
def test_one_that_is_sent_when_the_run_ends_reaches_nobody_else(
    sender: str, arrived: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then SIGTERM may have its default meaning: the end of the program."""
    is_sending, is_sent, kill = threading.Event(), threading.Event(), signal.pthread_kill
    signals = Signals(0.0 if sender == "grace period" else 600.0)

    def kill_late(thread: int, number: int) -> None:
        is_sending.set()
        wait_for(lambda: is_in(Signals.disarm) or not signals._before, "the run does not end")
        kill(thread, number)
        is_sent.set()

    monkeypatch.setattr(signal, "pthread_kill", kill_late)
    signals.install()
    with signals.in_step():
        if sender == "grace period":
            signal.raise_signal(signal.SIGTERM)
        else:
            threading.Thread(target=signals.interrupt, args=(Paused("cancelled"),)).start()
        assert is_sending.wait(60)
    with suppress(Paused):  # it was still at work
        signals.disarm()
    signals.restore()
    assert is_sent.wait(60)
    assert arrived == []


def test_a_step_that_outlasts_the_grace_period_is_told_why(arrived: list[int]) -> None:
    signals = Signals(0.0)
    signals.install()
    try:
        with pytest.raises(Paused, match=r"^SIGTERM$"):
            signal.raise_signal(signal.SIGTERM)
            wait_for(lambda: False, "the step is not ended")
    finally:
        signals.restore()
    assert arrived == []
