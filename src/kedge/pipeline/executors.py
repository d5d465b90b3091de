"""Where the items of a map are worked on: threads, processes, an Executor of the user's, or other machines.

A worker that ends without an answer is WorkerLost: `map` finds out what was durable and goes on with the rest.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextvars import copy_context
from functools import partial
from typing import Any, Protocol, runtime_checkable

from kedge.errors import CheckpointError, Validation, WorkerDied

from .attempt import Isolation, no_workers, timed_out, worker_died
from .keys import show
from .worker import Item, Outcome, Spec, work, work_unfinished


@runtime_checkable
class RemoteExecutor(Protocol):
    """An Executor whose workers may be on other machines, and whose tasks may be run again when one dies."""

    is_remote: bool

    def parallelism(self) -> int: ...

    def submit(self, fn: Callable[..., Any], /, *args: object, **kwargs: object) -> Future[Any]: ...

    def death(self, error: BaseException) -> str | None: ...


class WorkerLost(Exception):
    """A worker ended without an answer: it died, or was killed because the time of its item was over."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__(str(error))
        self.error = error


class Workers:
    """Any Executor of the user's, who also ends it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def submit(self, spec: Spec, items: list[Item], after: int) -> Future[Outcome]:
        if isinstance(self._executor, ThreadPoolExecutor):
            return self._executor.submit(copy_context().run, work, spec, items)
        return self._executor.submit(work, spec, items)

    def outcome(self, future: Future[Outcome], items: list[Item]) -> Outcome:
        return future.result()

    def close(self) -> None:
        """All work is done."""

    def finish(self, pending: Iterable[Future[Outcome]], timeout_s: float | None) -> None:
        """Wait for what is under way, so that it is kept, for `timeout_s` at most; what was not begun is left."""
        wait([future for future in pending if future.running() or not future.cancel()], timeout_s)

    def stop(self) -> None:
        """End what can be ended; nobody waits for it any more."""


class Remote(Workers):
    """Workers on other machines: they find the store by its URL, and repeat nothing that is durable."""

    def __init__(self, executor: RemoteExecutor, what: str) -> None:
        self._remote = executor
        self._what = what

    def submit(self, spec: Spec, items: list[Item], after: int) -> Future[Outcome]:
        return self._remote.submit(work_unfinished, spec, items, after)

    def finish(self, pending: Iterable[Future[Outcome]], timeout_s: float | None) -> None:
        """They go on by themselves."""

    def outcome(self, future: Future[Outcome], items: list[Item]) -> Outcome:
        try:
            return future.result()
        except Exception as error:
            if (why := self._remote.death(error)) is None:
                raise
            what = _naming(items, self._what)
            raise WorkerLost(WorkerDied(f"{what}: {why}", hint="signal 9 often means that memory ran out")) from error


class Threads(Workers):
    """Threads that do not keep the process from exiting, as those of ThreadPoolExecutor would.

    Each works in a copy of the caller's context, so that context variables have the same values as around `map`.
    """

    def __init__(self, count: int) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Outcome], Callable[[], Outcome]] | None] = queue.SimpleQueue()
        self._is_stopped = False
        self._threads = [threading.Thread(target=self._serve, name=f"kedge-map-{n}", daemon=True) for n in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, spec: Spec, items: list[Item], after: int) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        self._tasks.put((future, partial(copy_context().run, work, spec, items)))
        return future

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None and not self._is_stopped:
            future, call = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised where the outcome is asked for
                future.set_exception(error)

    def close(self) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        self._is_stopped = True
        for _ in self._threads:
            self._tasks.put(None)


class Processes(Workers):
    """Processes of which each may die without the others (pebble)."""

    def __init__(self, isolation: Isolation, count: int, timeout_s: float | None, what: str) -> None:
        self._isolation = isolation
        self._count = count
        self._timeout_s = timeout_s
        self._what = what

    def submit(self, spec: Spec, items: list[Item], after: int) -> Future[Outcome]:
        return self._isolation.pool(self._count).schedule(work, args=(spec, items), timeout=self._timeout_s)

    def outcome(self, future: Future[Outcome], items: list[Item]) -> Outcome:
        from pebble import ProcessExpired

        what = _naming(items, self._what)
        try:
            return future.result()
        except ProcessExpired as error:
            raise WorkerLost(worker_died(what, error.exitcode)) from error
        except BrokenProcessPool as error:
            raise no_workers(what) from error
        except TimeoutError as error:
            if self._timeout_s is None:
                raise
            raise WorkerLost(timed_out(what, self._timeout_s)) from error

    def finish(self, pending: Iterable[Future[Outcome]], timeout_s: float | None) -> None:
        self._isolation.halt(self._count)
        wait(pending, timeout_s)

    def stop(self) -> None:
        self._isolation.drop(self._count)


def workers_for(
    executor: str | Executor, count: int, timeout_s: float | None, spec: Spec, isolation: Isolation
) -> Workers:
    if isinstance(executor, RemoteExecutor):
        _refuse_memory(spec)
        return Remote(executor, show(spec.path))
    if isinstance(executor, Executor):
        return Workers(executor)
    if executor == "thread":
        return Threads(count)
    _refuse_memory(spec)
    return Processes(isolation, count, timeout_s, show(spec.path))


def _refuse_memory(spec: Spec) -> None:
    if spec.store.startswith("memory:"):
        raise Validation(
            f"map {show(spec.path)}: a store in memory cannot be shared with processes",
            hint='use executor="thread", or a store in a directory',
        )


def _naming(items: list[Item], path: str) -> str:
    """The item of a map that something is wrong with; the map, where it may be any of several."""
    return f"item {items[0].label} of map {path}" if len(items) == 1 else f"map {path}"
