"""Processes of which each may die without the others (pebble).

Imported when first used. What a process says goes through a pipe that one thread reads, while another one looks who has
died. Of a process that dies as soon as it has a task, the first may not have read yet which task that is: pebble would
wait for it for ever, or tell all that no process can start. So here its words are heard before it is missed.

A pool that is stopped tells those who wait for its processes only if that pipe is closed while its thread reads. So
here they are told in any case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing.context import BaseContext
from queue import Empty
from typing import Any

from pebble import ProcessPool
from pebble.pool.process import PoolManager

_PIPE_HOLDS = 1000  # messages at most


class Pool(ProcessPool):
    """As pebble's, but for the manager of its processes."""

    def __init__(
        self, workers: int, context: BaseContext, initializer: Callable[..., None], *arguments: object
    ) -> None:
        super().__init__(workers, initializer=initializer, initargs=arguments, context=context)
        self._pool_manager = _Manager(self._context, context)

    def _stop_pool(self) -> None:
        super()._stop_pool()  # type: ignore[no-untyped-call]
        stopped = BrokenProcessPool("the pool was stopped")
        self._pool_manager.task_manager.tasks_abort(stopped)
        with suppress(Empty):
            while True:  # those that no process was given yet
                if (task := self._context.task_queue.get_nowait()) is not None and not task.future.done():
                    task.future.set_exception(stopped)


class _Manager(PoolManager):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._receiving = threading.Lock()

    def process_next_message(self, timeout: float) -> None:
        try:
            is_there = self._is_message_there(timeout)
        except OSError as error:
            raise BrokenProcessPool from error
        if is_there:
            self._receive()

    def handle_worker_expiration(self, expiration: tuple[object, ...]) -> None:
        with suppress(OSError):  # closed: the pool comes to its end
            for _ in range(_PIPE_HOLDS):
                if not self._is_message_there(0):
                    break
                self._receive()
        super().handle_worker_expiration(expiration)

    def _is_message_there(self, timeout_s: float) -> bool:
        return bool(self.worker_manager.pool_channel.poll(timeout_s))  # type: ignore[union-attr]

    def _receive(self) -> None:
        with self._receiving:
            super().process_next_message(0)
