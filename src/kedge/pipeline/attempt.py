"""One attempt at a step, and what a time limit can do about it.

coroutine        cancelled at its next await (asyncio)
process          the step runs in a process of its own, which is killed: the work really stops. The function and
                 its arguments must be picklable, and steps inside it are ordinary calls
thread           the run goes on without it; a thread cannot be stopped and works until it ends by itself
"""

from __future__ import annotations

import contextvars
import inspect
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from kedge.errors import StepTimeout, Validation, WorkerDied

from . import interruption
from .failure import Failure
from .place import Carried

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from pebble import ProcessPool

T = TypeVar("T")

TIMEOUT_IN = ("process", "thread")
_LOOK_EVERY_S = 1.0  # whether the run was cancelled: Python interrupts no wait of a thread


def timed_out(what: str, timeout_s: float) -> StepTimeout:
    return StepTimeout(f"{what} took longer than {timeout_s:g} s", hint="give it more with timeout_s=, or retries=")


def check_picklable(function: object, what: str, why: str) -> None:
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.dumps(function)
    except Exception as error:
        raise Validation(
            f"{what}: {why}, and what it needs cannot be sent to one: {error}",
            hint='use a function defined at the top of a module, or "thread" instead of "process"',
        ) from error


def check_main_guard() -> None:
    """Raise if the program's file starts processes outside `if __name__ == "__main__":`.

    Each process imports that file, and so would start the program again.
    """
    import ast

    main, frame = sys.modules.get("__main__"), inspect.currentframe()
    file = getattr(main, "__file__", None)
    while frame is not None and (frame.f_globals is not vars(main) or frame.f_code.co_name != "<module>"):
        frame = frame.f_back
    spec = getattr(main, "__spec__", None)
    if frame is None or file is None or (spec is not None and spec.name.endswith("__main__")):
        return  # not at work in a file, or a package's __main__, which processes do not import
    try:
        with open(file, encoding="utf-8") as source:
            statements = ast.parse(source.read()).body
    except (OSError, ValueError, SyntaxError):
        return
    for statement in statements:
        if statement.lineno <= frame.f_lineno <= (statement.end_lineno or 0):
            if isinstance(statement, ast.If) and "__name__" in ast.dump(statement.test):
                return
            raise Validation(
                f'{file}, line {frame.f_lineno}: steps with timeout_s=, and maps with executor="process", run in '
                "processes, and each of those imports this file",
                hint='put what the program does below `if __name__ == "__main__":`, or use timeout_in="thread"',
            )


def new_pool(workers: int) -> tuple[ProcessPool, Event]:
    """Processes that are started clean (no fork beside threads), ignore Ctrl-C, and end with their parent.

    Once the event is set they begin no items: those that wait in their pipe cannot be taken back.
    """
    from multiprocessing import get_context

    from .pool import Pool

    check_main_guard()
    context = get_context("forkserver")
    context.set_forkserver_preload(["kedge.pipeline.worker"])
    from .worker import prepare

    halt = context.Event()
    return Pool(workers, context, prepare, halt), halt


class Isolation:
    """The processes of a run, for steps with a time limit and for maps: started when first needed, then kept."""

    def __init__(self) -> None:
        self._pools: dict[int, tuple[ProcessPool, Event]] = {}
        self._lock = threading.Lock()
        self._ending = threading.RLock()

    def pool(self, workers: int) -> ProcessPool:
        with self._lock:
            if workers not in self._pools:
                self._pools[workers] = new_pool(workers)
            return self._pools[workers][0]

    def halt(self, workers: int) -> None:
        """The processes of one pool end the items they are at and begin no others."""
        with self._lock:
            if workers in self._pools:
                self._pools[workers][1].set()

    def drop(self, workers: int) -> None:
        """Kill the processes of one pool, whatever they are at; what another thread kills just now is waited for."""
        with self._ending:
            with self._lock:
                pool, _ = self._pools.pop(workers, (None, None))
            if pool is not None:
                pool.stop()  # type: ignore[no-untyped-call]
                pool.join()

    def close(self) -> None:
        with self._ending:
            for workers in list(self._pools):
                self.drop(workers)

    def call(
        self,
        function: Callable[..., T],
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        timeout_s: float,
        what: str,
        carried: Carried = Carried(),  # noqa: B008 - it is frozen
    ) -> T:
        """The result of a function in a process of its own; `carried` says for whom it works."""
        from concurrent.futures.process import BrokenProcessPool

        from pebble import ProcessExpired

        check_picklable((function, args, kwargs), what, "a step with timeout_s runs in a process of its own")
        from .worker import call_for

        future = self.pool(1).schedule(call_for, args=(carried, function, args, kwargs), timeout=timeout_s)
        try:
            outcome = future.result()
        except TimeoutError as error:
            raise timed_out(what, timeout_s) from error
        except ProcessExpired as error:
            raise worker_died(what, error.exitcode) from error
        except BrokenProcessPool as error:
            self.drop(1)
            raise no_workers(what) from error
        finally:
            future.cancel()  # type: ignore[no-untyped-call]  # kills it when we leave early
        if isinstance(outcome, Failure):
            raise outcome.rebuild()
        result: T = outcome[0]
        return result


def worker_died(what: str, exit_code: int | None) -> WorkerDied:
    how = f"signal {-exit_code}" if exit_code and exit_code < 0 else f"exit code {exit_code}"
    return WorkerDied(f"{what}: its process died ({how})", hint="signal 9 often means that memory ran out")


def no_workers(what: str) -> WorkerDied:
    return WorkerDied(
        f"{what}: its processes cannot start",
        hint='a program that uses processes needs `if __name__ == "__main__":` around what it does, as each of them '
        "imports it; what went wrong is above",
    )


def call_in_thread(
    function: Callable[..., T], args: tuple[object, ...], kwargs: Mapping[str, object], timeout_s: float, what: str
) -> T:
    outcome: Future[T] = Future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.set_result(context.run(function, *args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            outcome.set_exception(error)

    threading.Thread(target=work, name="kedge-step", daemon=True).start()
    until = time.monotonic() + timeout_s
    while True:
        try:  # as the code of a step: a cancellation ends the wait
            return interruption.call(outcome.result, (min(_LOOK_EVERY_S, until - time.monotonic()),), {})
        except TimeoutError as error:
            if outcome.done():
                return outcome.result()  # or its own error
            if time.monotonic() >= until:
                raise timed_out(what, timeout_s) from error


async def await_within(work: Awaitable[T], timeout_s: float | None, what: str) -> T:
    import asyncio

    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            return await work
    except TimeoutError as error:
        if timeout_s is None or not scope.expired():
            raise  # the function's own
        raise timed_out(what, timeout_s) from error
