"""Short questions to the store that wait at the same time, answered together by one thread.

Handing each request to a thread of its own costs more than a look into the index. Here a hand-over serves all who
came meanwhile; and saves that are taken together are made durable together.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_MOST = 64  # in one batch: the first is not to wait for ever longer ones

Waiting: TypeAlias = "tuple[T, asyncio.Future[R]]"


class Batches(Generic[T, R]):
    """`serve` answers for each item its result or its error, in order; it is called by the thread of this object alone.

    Where a batch costs much and one more in it little, it waits up to `gather_s` for as many as were served last: they
    come back one after the other. Who is alone waits for nobody.
    """

    def __init__(
        self, name: str, serve: Callable[[Sequence[T]], Sequence[R | BaseException]], *, gather_s: float = 0.0
    ) -> None:
        self._name = name
        self._serve = serve
        self._gather_s = gather_s
        self._asked: dict[asyncio.AbstractEventLoop, list[Waiting[T, R]]] = {}  # in the present round of a loop
        self._queue: SimpleQueue[list[Waiting[T, R]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def ask(self, item: T) -> R:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        asked = self._asked.get(loop)
        if asked is None:
            asked = self._asked[loop] = []
            loop.call_soon(self._hand_over, loop)  # behind all whose requests are there already
        asked.append((item, answer))
        return await answer

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(self._asked.pop(loop))

    def close(self) -> None:
        """Finish what has been asked; somebody may ask again later."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        served = 0
        while (batch := self._queue.get()) is not None:
            is_last = self._gather(batch, served)
            served = len(batch)
            self._answer(batch)
            if is_last:
                return

    def _gather(self, batch: list[Waiting[T, R]], served: int) -> bool:
        """Add to the batch whoever waits too; True when somebody closes meanwhile."""
        until = time.monotonic() + self._gather_s
        while len(batch) < _MOST:
            left_s = until - time.monotonic() if len(batch) < served else 0.0
            try:
                more = self._queue.get(timeout=left_s) if left_s > 0 else self._queue.get_nowait()
            except Empty:
                return False
            if more is None:
                return True
            batch += more
        return False

    def _answer(self, batch: Sequence[Waiting[T, R]]) -> None:
        try:
            results = self._serve([item for item, _ in batch])
        except Exception as error:  # noqa: BLE001 - theirs who asked: this thread goes on
            results = [error] * len(batch)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[R], R | BaseException]]] = {}
        for (_, answer), result in zip(batch, results, strict=True):
            by_loop.setdefault(answer.get_loop(), []).append((answer, result))
        for loop, answers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, answers)
            except RuntimeError:
                continue  # that loop has ended, and whoever asked with it


def _deliver(answers: Sequence[tuple[asyncio.Future[R], R | BaseException]]) -> None:
    for answer, result in answers:
        if answer.done():  # the caller has gone away
            continue
        if isinstance(result, BaseException):
            answer.set_exception(result)
        else:
            answer.set_result(result)
