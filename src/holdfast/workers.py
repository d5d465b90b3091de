"""Threads that work for a store, on a machine that may have none left to give."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from .errors import StorageError

P = ParamSpec("P")
T = TypeVar("T")


class Workers(ThreadPoolExecutor):
    """A pool whose refusals are ours."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            raise _refused(error) from error


def start(thread: threading.Thread) -> None:
    """Start a thread, or StorageError."""
    try:
        thread.start()
    except RuntimeError as error:
        raise _refused(error) from error


def _refused(error: RuntimeError) -> StorageError:
    return StorageError(
        f"no thread to work with: {error}",
        hint="the store was closed meanwhile, or the limit of threads is reached (ulimit -u, pids of the container)",
    )
