"""How a run answers to the signals of the system and of its user.

SIGTERM, SIGINT   finish the step under way, within the grace period, then pause and exit 75
  … once more     stop at once; what is durable stays durable
SIGUSR1, SIGUSR2  wait before the next step; go on
SIGHUP            record now how far the run is
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any

from kedge.blobs.shelter import is_exposed

from .interruption import Interruptible

EXIT_PAUSED = 75  # EX_TEMPFAIL: run it again
_ARRIVES_WITHIN_S = 5.0  # unless the main thread blocks the signal
_TRIES, _TRY_AGAIN_S = 20, 0.005  # to end a step in another thread; then it is the turn of other runs


class Paused(SystemExit):
    """The run stops here and can be resumed. A SystemExit, so that `except Exception` does not swallow it."""

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_PAUSED)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class _InStep:
    """A class, for the reason that `place.Attempted` is one."""

    __slots__ = ("_signals",)

    def __init__(self, signals: Signals) -> None:
        self._signals = signals

    def __enter__(self) -> None:
        self._signals.steps += 1

    def __exit__(self, *_: object) -> None:
        self._signals.steps -= 1


class Signals:
    """The wishes that signals expressed so far. `install` works only in the main thread; elsewhere nothing happens."""

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.stopping = ""  # the reason. Plain flags: a handler must not take a lock its own thread may hold
        self.is_held = False
        self.is_asked_to_record = False
        self._before: dict[int, Any] = {}
        self._timer: threading.Timer | None = None
        self._is_disarmed = False
        self._sending = threading.Lock()
        self._is_sent = False  # a signal of another thread of ours, which has not arrived yet
        self._interruption: BaseException | None = None  # raised in the main thread at the next signal
        self.steps = 0  # that the main thread is in now, and that can be interrupted
        self._attempts: dict[int, Interruptible] = {}  # at steps, by other threads

    def install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in (
            (signal.SIGTERM, self._on_stop),
            (signal.SIGINT, self._on_stop),
            (signal.SIGUSR1, self._on_hold),
            (signal.SIGUSR2, self._on_go),
            (signal.SIGHUP, self._on_record),
        ):
            self._before[number] = signal.signal(number, handler)

    def disarm(self) -> None:
        """From now on no signal raises: the end of the run is being recorded."""
        with self._sending:
            self._is_disarmed = True
        if self._timer is not None:
            self._timer.cancel()

    def restore(self) -> None:
        """The handlers of before. What we have sent arrives first: it could end the program there."""
        self.disarm()
        until = time.monotonic() + _ARRIVES_WITHIN_S
        while self._is_sent and time.monotonic() < until:
            time.sleep(0.001)
        while self._before:
            number, handler = self._before.popitem()
            if handler is not None:
                signal.signal(number, handler)

    def interrupt(self, reason: BaseException) -> None:
        """From another thread: raise `reason` in the step that the main thread is in, if it answers to signals."""
        if self.steps:
            self._send(signal.SIGTERM, reason)

    def interrupt_threads(self) -> None:
        """End the steps that other threads are in. One that saves something just now is left alone, and asked again."""
        for _ in range(_TRIES):
            attempts = list(self._attempts.values())
            for attempt in attempts:
                attempt.interrupt()
            if all(attempt.is_told for attempt in attempts):
                return
            time.sleep(_TRY_AGAIN_S)

    def _send(self, number: int, reason: BaseException | None = None) -> None:
        """Give the main thread a signal, as long as the run is under way there."""
        with self._sending:
            if self._before and not self._is_disarmed:
                self._interruption, self._is_sent = reason, True
                signal.pthread_kill(threading.main_thread().ident or 0, number)

    def in_step(self) -> _InStep | Interruptible:
        """Around the attempt of a step, in any thread."""
        return _InStep(self) if is_exposed() else Interruptible(self._attempts)

    def must_wait(self) -> bool:
        return self.is_held and not self.stopping

    def _on_stop(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        reason, self._interruption = self._interruption, None
        is_ours, self._is_sent = self._is_sent, False
        if self._is_disarmed:
            return
        if reason is not None:
            if self.steps:
                raise reason
            return
        if self.stopping:
            raise Paused(self.stopping if is_ours else f"{name}, for the second time")
        self.stopping = name
        self._timer = threading.Timer(self.grace_s, self._send, (number,))
        self._timer.name = "kedge-grace"
        self._timer.daemon = True
        self._timer.start()

    def _on_hold(self, _: int, __: FrameType | None) -> None:
        self.is_held = True

    def _on_go(self, _: int, __: FrameType | None) -> None:
        self.is_held = False

    def _on_record(self, _: int, __: FrameType | None) -> None:
        self.is_asked_to_record = True
