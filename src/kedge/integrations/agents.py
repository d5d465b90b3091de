"""What the integrations for agents have in common: a store, given or opened by themselves, and asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kedge.manager import CheckpointManager

P = ParamSpec("P")
T = TypeVar("T")

_MOST_WAITING = 16  # writes of a cancelled run, one behind the other; a run that goes on is not waited for
_STEPS = 16  # of the event loop, from the end of a write to the call of the one that waits for it


class StoreOwner:
    """`store` is a path, a URL or an open CheckpointManager, which then stays the caller's to close."""

    def __init__(self, store: str | os.PathLike[str] | CheckpointManager | None = None) -> None:
        super().__init__()
        self._is_owner = not isinstance(store, CheckpointManager)
        self.manager = store if isinstance(store, CheckpointManager) else CheckpointManager(store)

    def close(self) -> None:
        if self._is_owner:
            self.manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await finished(self.close)


async def finished(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Run it in a thread. Cancelled, this ends when the thread's work has ended: nothing goes on unseen."""
    return await _finished(asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options)))


async def _finished(work: asyncio.Future[T]) -> T:
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):  # some cancel again and again, until the task has ended
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # asked for, so that asyncio does not report it
        raise


def in_thread(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The same method as a coroutine, which runs it in a thread."""

    @wraps(method)
    async def run(self: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        own: Callable[P, T] = getattr(self, method.__name__)  # which a subclass may have overridden
        return await finished(own, *arguments, **options)

    return run


class JobWrites:
    """Writes of coroutines that are under way, by job: who reads a job next waits for them.

    A caller that is cancelled twice, as anyio does it, is gone before the write it began has ended. And one write may
    wait for another: for some steps of the loop after that has ended, nobody knows of it.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, set[asyncio.Future[Any]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the newest write

    async def run(self, job: str, function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
        if self._loop is not work.get_loop():
            self._loop = work.get_loop()
            self._drop_closed()
        self._under_way.setdefault(job, set()).add(work)
        work.add_done_callback(lambda work: self._end(job, work, _STEPS))
        return await _finished(work)

    def _drop_closed(self) -> None:
        """Forget what was under way in loops that have been closed, which end nothing any more."""
        for job, works in [*self._under_way.items()]:
            if all(work.get_loop().is_closed() for work in [*works]):
                self._under_way.pop(job, None)

    def _end(self, job: str, work: asyncio.Future[Any], steps: int) -> None:
        """A write that has ended is under way until the one behind it may have begun."""
        if steps:
            work.get_loop().call_soon(self._end, job, work, steps - 1)
        elif works := self._under_way.get(job):
            works.discard(work)
            if not works:
                self._under_way.pop(job, None)

    async def settled(self, job: str) -> None:
        """Wait for the writes under way, and for those that wait behind them."""
        loop = asyncio.get_running_loop()
        for _ in range(_MOST_WAITING):
            works = [work for work in [*self._under_way.get(job, ())] if work.get_loop() is loop]
            if not works:
                return
            await asyncio.wait(works)
            for _ in range(_STEPS):  # it is under way for as many still, and what it began by then is found next
                await asyncio.sleep(0)
