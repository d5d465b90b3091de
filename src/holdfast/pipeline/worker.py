"""What a worker process does before its first task."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """Leave Ctrl-C to the process that owns the run, and do not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        pass  # not Linux: the worker ends when it next asks for work
