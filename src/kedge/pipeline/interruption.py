"""How a step is ended that runs in a thread other than the main one: an exception is raised in its own code.

Some code is never interrupted so, and who wants to end the step tries again later. Kedge's own may hold a lock or be
about to save. And other runs of the process need what an import, a log record or a lock is about: modules that were
half imported cannot always be imported again (torch), logging loses its locks and catches the exception, and a lock
stays taken. Code that waits outside Python, as `time.sleep` does, is reached when it comes back.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from ctypes import c_ulong, py_object, pythonapi
from types import FrameType
from typing import TypeVar

from kedge.errors import CheckpointError

T = TypeVar("T")

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SHARED = ("<frozen importlib", os.path.dirname(logging.__file__) + os.sep)
_TAKES_OR_GIVES_BACK = frozenset({"__enter__", "__exit__", "acquire", "release"})


class Interrupted(CheckpointError):
    """Raised in a step that was ended; the run says why."""

    def __init__(self) -> None:
        super().__init__("the step was ended from outside")


class Interruptible:
    """Around the attempt of a step in a thread. A class, for the reason that `place.Attempted` is one."""

    __slots__ = ("_attempts", "_outer", "_thread", "is_told")

    def __init__(self, attempts: dict[int, Interruptible]) -> None:
        """`attempts`: those of a run, by thread."""
        self._attempts = attempts
        self._thread = threading.get_ident()
        self._outer: Interruptible | None = None
        self.is_told = False

    def __enter__(self) -> None:
        self._outer = self._attempts.get(self._thread)
        self._attempts[self._thread] = self

    def __exit__(self, *_: object) -> None:
        if self._outer is None:
            self._attempts.pop(self._thread, None)
        else:
            self._attempts[self._thread] = self._outer

    def interrupt(self) -> None:
        """Once, if the step's own code runs now. Python switches threads seldom enough that it still does a moment
        later; if it does not, what was not raised yet is taken back."""
        if not self.is_told and self._is_in_own_code():
            pythonapi.PyThreadState_SetAsyncExc(c_ulong(self._thread), py_object(Interrupted))
            self.is_told = self._is_in_own_code()
            if not self.is_told:
                pythonapi.PyThreadState_SetAsyncExc(c_ulong(self._thread), None)

    def _is_in_own_code(self) -> bool:
        """Whether the thread is in the step, and not in a later one or that of another run, at what may be ended."""
        if self._attempts.get(self._thread) is not self:
            return False
        frame: FrameType | None = sys._current_frames().get(self._thread)
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(_OURS):
                return code is call.__code__
            if code.co_filename.startswith(_SHARED) or code.co_name in _TAKES_OR_GIVES_BACK:
                return False
            frame = frame.f_back
        return False


def call(function: Callable[..., T], args: tuple[object, ...], kwargs: Mapping[str, object]) -> T:
    """The function of a step: what runs in here, and is none of Kedge's code, can be interrupted."""
    return function(*args, **kwargs)
