"""A run for coroutines: what would block the event loop, awaited instead."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, overload

from .approval import Approval
from .attempt import await_within
from .wait import WaitCall, parse_question, run_call, signal_call, sleep_call, wait_for_approval

if TYPE_CHECKING:
    from .keywords import MapKeywords
    from .queues import Handle
    from .run import Run


T = TypeVar("T")
R = TypeVar("R")


class AsyncRun:
    """What `run.aio` gives. The methods are those of `Run`, with the same arguments."""

    def __init__(self, run: Run) -> None:
        self._run = run

    async def signal(self, name: str, *, wait_s: float | None = None) -> Any:
        """As `Run.signal`."""
        answer = await self._run.wait_async(signal_call(self._run.claim(name), name, wait_s))
        return answer["value"]

    async def approval(
        self,
        name: str,
        *,
        prompt: str = "",
        expires_s: float | None = None,
        wait_s: float | None = None,
        on_denied: str = "raise",
    ) -> Approval:
        """As `Run.approval`."""
        question = parse_question(prompt, expires_s, on_denied)
        call = WaitCall(name, lambda session, path: wait_for_approval(session, path, question, wait_s))
        return question.answer(self._run.key, name, await self._run.wait_async(call))

    async def sleep(self, seconds: float, *, name: str | None = None, wait_s: float | None = None) -> None:
        """As `Run.sleep`."""
        await self._run.wait_async(sleep_call(seconds, name, wait_s))

    async def result(self, handle: Handle[R], *, wait_s: float | None = None) -> R:
        """As `Run.result`."""
        return await self._run.wait_async(run_call(handle, wait_s))

    @overload
    async def map(
        self,
        function: Callable[[T], Coroutine[object, object, R]],
        items: Iterable[T],
        **options: Unpack[MapKeywords[T]],
    ) -> list[R]: ...
    @overload
    async def map(
        self, function: Callable[[T], R], items: Iterable[T], **options: Unpack[MapKeywords[T]]
    ) -> list[R]: ...
    @overload
    async def map(
        self, function: Callable[[T], object], items: Iterable[T], *, on_error: str | float = "stop",
        collect: bool = True, **options: Unpack[MapKeywords[T]],
    ) -> Any: ...  # fmt: skip
    async def map(
        self,
        function: Callable[[T], object],
        items: Iterable[T],
        *,
        on_error: str | float = "stop",
        collect: bool = True,
        **options: Unpack[MapKeywords[T]],
    ) -> Any:
        """As `Run.map`. A coroutine function runs on this event loop, for `workers` items at a time.

        Its `timeout_s` cancels the coroutine of an item.
        """
        calls = _Calls(function, options.pop("timeout_s", None)) if inspect.iscoroutinefunction(function) else None
        if calls is not None:
            options.setdefault("name", getattr(function, "__name__", "map"))
        map_all = partial(self._run.map, calls or function, items, on_error=on_error, collect=collect, **options)
        try:
            return await _in_thread(map_all)
        finally:
            if calls is not None:
                calls.cancel()


class _Calls(Generic[T, R]):
    """A coroutine function as a function for worker threads: each waits for its coroutine on the loop."""

    def __init__(self, function: Callable[[T], Coroutine[object, object, R]], timeout_s: float | None) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()

    def __call__(self, item: T) -> R:
        return asyncio.run_coroutine_threadsafe(self._call(item), self._loop).result()

    async def _call(self, item: T) -> R:
        task = asyncio.current_task()
        assert task is not None  # nosec B101 # a coroutine runs in a task
        self._tasks.add(task)
        try:
            return await await_within(self._function(item), self._timeout_s, "an item")
        finally:
            self._tasks.discard(task)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _in_thread(call: Callable[[], T]) -> T:
    """A call that may take long in a thread of its own: asyncio's are few, and others wait for them."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    outcome: asyncio.Future[T] = loop.create_future()

    def tell(end: Callable[[], None]) -> None:
        if not outcome.done():
            end()

    def work() -> None:
        try:
            end = partial(outcome.set_result, context.run(call))
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            end = partial(outcome.set_exception, error)
        loop.call_soon_threadsafe(tell, end)

    threading.Thread(target=work, name="kedge-aio-map", daemon=True).start()
    return await outcome
