"""How tests wait: for a condition, never for a time that ought to be enough.

`tests/unit/test_test_rules.py` refuses every other sleep in the tests that does not say why it is one.
"""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
import time
from collections.abc import Callable, Sized
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard, TypeVar

import pytest

_T = TypeVar("_T")

_PAUSE_S = 0.005

LIMITS_S = (0.5, 4, 32)
"""Limits to try one after the other, until what is quick keeps to one: a busy machine may need the last."""


def _is_answer(value: _T | None) -> TypeGuard[_T]:
    return value is not None and value is not False and not (isinstance(value, Sized) and len(value) == 0)


def bytes_below(folder: Path, pattern: str = "*") -> int:
    """What the files of a folder take that are still there when they are looked at: something may be removing them."""
    total = 0
    for path in folder.rglob(pattern):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def wait_for(probe: Callable[[], _T | None], why: str, timeout_s: float = 60) -> _T:
    """The first answer of `probe`, which None, False and something empty are not; `why` says what is wrong without.

    The limit is only for what would never come: it is so long that no busy machine reaches it.
    """
    deadline = time.monotonic() + timeout_s
    while not _is_answer(value := probe()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {why}"
        time.sleep(_PAUSE_S)
    return value


async def wait_for_async(probe: Callable[[], _T | None], why: str, timeout_s: float = 60) -> _T:
    """`wait_for` that lets the other tasks of its loop run."""
    deadline = time.monotonic() + timeout_s
    while not _is_answer(value := probe()):
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {why}"
        await asyncio.sleep(_PAUSE_S)
    return value


def removed(folder: Path) -> bool:
    """Whether a directory could be removed: a process that is about to end may still write into it."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return not folder.exists()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EBUSY):
            raise
        return False
    return True


class Clock:
    """The wall clock of a test that waits for nothing: who sleeps in its thread moves it on and is back at once.

    `slept_s` is what was slept so. Other threads, and monotonic clocks, stay real.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slept_s = 0.0
        self._now_s = time.time()
        self._thread = threading.current_thread()
        self._real_sleep = time.sleep
        monkeypatch.setattr(time, "time", lambda: self._now_s)
        monkeypatch.setattr(time, "sleep", self._sleep)

    def advance(self, seconds: float) -> None:
        self._now_s += seconds

    def _sleep(self, seconds: float) -> None:
        if threading.current_thread() is not self._thread:
            self._real_sleep(seconds)
            return
        self.slept_s += seconds
        self.advance(seconds)
