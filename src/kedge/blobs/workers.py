"""Threads that work until the very end of the program.

Python closes its own pools before it waits for other threads and calls exit handlers: a later save would get "cannot
schedule new futures after shutdown". These are daemons that only their owner closes.

Submitting work takes no lock and starts no thread except the first. So a signal handler may interrupt it anywhere, and
may submit work itself: a thread that takes work while no other is idle starts the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

from kedge.errors import StorageError

P = ParamSpec("P")
T = TypeVar("T")


class Workers(Executor):
    """At most `limit` threads. Not for use after a fork: create new ones there."""

    def __init__(self, limit: int, name: str, *, keep: int) -> None:
        """Start no threads yet. `keep` is the number of threads that stay when idle."""
        self._limit = limit
        self._name = name
        self._keep = keep
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._count = self._idle = 0
        self._has_begun = False

    def start(self, task: Callable[[], None]) -> None:
        """Run `task`, which must not raise, as soon as a thread is free."""
        self._tasks.put(task)
        if not self._has_begun:
            self._begin()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = fn(*args, **kwargs)
                except BaseException as error:  # noqa: BLE001 - belongs to the future's owner
                    future.set_exception(error)
                else:
                    future.set_result(result)

        self.start(task)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the threads end when all submitted work is done."""
        with self._lock:
            threads = set(self._threads)
            self._limit = 0  # no new ones
        self._tasks.put(None)  # each passes it on to the next
        for thread in threads if wait else ():
            thread.join()

    def _begin(self) -> None:
        """Start the first thread. Repeated after an interrupt in between: a surplus one is harmless."""
        start(threading.Thread(target=self._run_first, name=self._name, daemon=True))
        self._has_begun = True

    def _run_first(self) -> None:
        with self._lock:
            self._count += 1
            self._idle += 1
        self._run()

    def _run(self) -> None:
        me = threading.current_thread()
        with self._lock:
            self._threads.add(me)
        while (task := self._tasks.get()) is not None:
            self._see_to_others()
            task()
            del task  # frees what it refers to before the next one comes
            with self._lock:
                self._idle += 1
                if self._idle > self._keep:
                    self._forget(me)
                    return
        self._tasks.put(None)
        with self._lock:
            self._forget(me)

    def _see_to_others(self) -> None:
        """Make sure that another thread waits for the next task."""
        with self._lock:
            self._idle -= 1
            if self._idle or self._count >= self._limit:
                return
            self._idle += 1
            self._count += 1
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:  # no threads left in the system: work waits for the existing ones
            with self._lock:
                self._idle -= 1
                self._count -= 1

    def _forget(self, thread: threading.Thread) -> None:
        self._threads.discard(thread)
        self._idle -= 1
        self._count -= 1


@contextmanager
def repeating(work: Callable[[], object], every_s: float, name: str) -> Iterator[None]:
    """Call `work`, which must not raise, every so many seconds in a thread of its own while the block runs."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.wait(every_s):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises StorageError."""
    try:
        thread.start()
    except RuntimeError as error:
        raise StorageError(
            f"no thread to work with: {error}",
            hint="the limit of threads is reached (ulimit -u, pids of the container)",
        ) from error
