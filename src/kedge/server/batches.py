"""Short work for the store, done in turns by one thread: whatever waits when it comes round is taken at once.

Handing each request to a thread of its own costs more than a look into the index. Here a hand-over serves all who
came meanwhile; and saves that were taken together are made durable together.
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

_MOST = 64  # in one turn: the first is not to wait for ever longer ones

Waiting: TypeAlias = "tuple[T, asyncio.Future[R]]"


class Turns(Generic[T, R]):
    """`serve` answers for each item its result or its error, in order; from the thread of this object alone.

    Where a turn costs much and one more in it little, it waits up to `gather_s` for as many as were served last: they
    come back one after the other. Who is alone waits for nobody.
    """

    def __init__(
        self, name: str, serve: Callable[[Sequence[T]], Sequence[R | BaseException]], *, gather_s: float = 0.0
    ) -> None:
        self._name = name
        self._serve = serve
        self._gather_s = gather_s
        self._asked: dict[asyncio.AbstractEventLoop, list[Waiting[T, R]]] = {}  # in the present round of a loop
        self._waiting: SimpleQueue[list[Waiting[T, R]] | None] = SimpleQueue()
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
        self._waiting.put(self._asked.pop(loop))

    def close(self) -> None:
        """Finish what has been asked; somebody may ask again later."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        served = 0
        while (turn := self._waiting.get()) is not None:
            until = time.monotonic() + self._gather_s
            is_last = False
            while len(turn) < _MOST and not is_last:
                left_s = until - time.monotonic() if len(turn) < served else 0.0
                try:
                    more = self._waiting.get(timeout=left_s) if left_s > 0 else self._waiting.get_nowait()
                except Empty:
                    break
                is_last = more is None
                turn += more or []
            served = len(turn)
            self._take(turn)
            if is_last:
                return

    def _take(self, turn: Sequence[Waiting[T, R]]) -> None:
        try:
            results = self._serve([item for item, _ in turn])
        except Exception as error:  # noqa: BLE001 - theirs who asked: this thread goes on
            results = [error] * len(turn)
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[R], R | BaseException]]] = {}
        for (_, answer), result in zip(turn, results, strict=True):
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
