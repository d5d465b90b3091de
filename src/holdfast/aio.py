"""A manager for asyncio: the same methods, none of which blocks the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .model import Lease

if TYPE_CHECKING:
    from .manager import CheckpointManager


class AsyncView:
    """Every method of a manager as a coroutine that runs in a worker thread; `async with view.lease(job)`."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager

    @asynccontextmanager
    async def lease(self, job_id: str, ttl_s: float = 30.0) -> AsyncIterator[Lease]:
        holding = self._manager.lease(job_id, ttl_s)
        held = await asyncio.to_thread(holding.__enter__)
        try:
            yield held
        finally:
            await asyncio.to_thread(holding.__exit__, None, None, None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._manager, name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        return call
