"""Interleavings made by hand: one thread or process stops at a named point while others go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


class Gate:
    """A point that stops the first caller who reaches it until it is opened."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._opened = threading.Event()
        self._first = threading.Lock()
        self.passed = 0

    def stop_here(self) -> None:
        self.passed += 1
        if self._first.acquire(blocking=False):
            self._reached.set()
            assert self._opened.wait(60), "nobody opened the gate"

    def wait_until_reached(self) -> None:
        assert self._reached.wait(60), "nobody came to the gate"

    def open(self) -> None:
        self._opened.set()


def _unguarded(owner: object) -> object:
    """The port itself, which some have at hand without what shelters the main thread."""
    return owner.__dict__.get("_port", owner)


@contextmanager
def gate_before(owner: object, method: str) -> Iterator[Gate]:
    """Stop the first call of `owner.method`, before it does anything."""
    gate, owner = Gate(), _unguarded(owner)
    real: Callable[..., Any] = getattr(owner, method)

    def stopped(*args: object, **kwargs: object) -> object:
        gate.stop_here()
        return real(*args, **kwargs)

    with mock.patch.object(owner, method, stopped):
        try:
            yield gate
        finally:
            gate.open()


@contextmanager
def gate_after(owner: object, method: str) -> Iterator[Gate]:
    """Stop the first call of `owner.method` when its work is done, before anyone hears of it."""
    gate, owner = Gate(), _unguarded(owner)
    real: Callable[..., Any] = getattr(owner, method)

    def stopped(*args: object, **kwargs: object) -> object:
        answer = real(*args, **kwargs)
        gate.stop_here()
        return answer

    with mock.patch.object(owner, method, stopped):
        try:
            yield gate
        finally:
            gate.open()


class Background:
    """A call that runs in a thread; `result()` is its answer or its error."""

    def __init__(self, call: Callable[..., Any], *args: object, **kwargs: object) -> None:
        self._answer: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            try:
                self._answer = call(*args, **kwargs)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it has ended, whatever came of it."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "still running"

    def result(self) -> Any:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._answer

    def is_running(self) -> bool:
        return self._thread.is_alive()
