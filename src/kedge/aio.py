"""A manager for asyncio: the same methods, which never block the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from .blobs.workers import Workers
from .model import Checkpoint, Lease

if TYPE_CHECKING:
    from .care.policies import RetentionPolicy
    from .care.review import Verdict
    from .manager import CheckpointManager

_AT_ONCE = 500  # items of an iterator per turn of a worker thread
_THREADS = 32  # concurrent calls of one process, as in asyncio's own pool
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Threads:
    """Our own threads, because asyncio's accept no work after the main thread has ended."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Replace the threads, as in a forked child, which has none of its parent's."""
        self._workers = Workers(_THREADS, "kedge-aio", keep=4)

    async def run(self, method: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        call = functools.partial(contextvars.copy_context().run, method, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._workers, call)


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.renew)


class AsyncView:
    """Every method of a manager as a coroutine that runs in a worker thread.

    Also `async with view.lease(job)` and `async for checkpoint in view.walk(job)`.
    """

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager

    @asynccontextmanager
    async def lease(self, job_id: str, ttl_s: float = 30.0) -> AsyncIterator[Lease]:
        holding = self._manager.lease(job_id, ttl_s)
        held = await _threads.run(holding.__enter__)
        try:
            yield held
        finally:
            await _threads.run(holding.__exit__, None, None, None)

    def walk(self, job_id: str, **wanted: Any) -> AsyncIterator[Checkpoint]:
        return _async(self._manager.walk(job_id, **wanted))

    def review(self, policy: RetentionPolicy, **wanted: Any) -> AsyncIterator[Verdict]:
        return _async(self._manager.review(policy, **wanted))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._manager, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await _threads.run(method, *args, **kwargs)

        return call


async def _async(items: Iterator[_T]) -> AsyncIterator[_T]:
    while batch := await _threads.run(lambda: list(islice(items, _AT_ONCE))):
        for item in batch:
            yield item
