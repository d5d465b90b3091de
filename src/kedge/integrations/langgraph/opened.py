"""What the checkpointer and the memory have in common: a store, given or opened by themselves, and asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kedge.manager import CheckpointManager

P = ParamSpec("P")
T = TypeVar("T")


class Opened:
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
        await asyncio.to_thread(self.close)


def in_thread(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The same method as a coroutine, which runs it in a thread."""

    @wraps(method)
    async def run(self: Any, /, *arguments: P.args, **options: P.kwargs) -> T:
        own: Callable[P, T] = getattr(self, method.__name__)  # which a subclass may have overridden
        return await asyncio.to_thread(own, *arguments, **options)

    return run
