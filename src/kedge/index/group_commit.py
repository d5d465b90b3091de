"""Group commit: concurrent operations share one transaction and one sync.

An operation that finds no writer commits in its own thread: a lone writer pays nothing. Those that come meanwhile are
queued. One thread of this object runs the whole queue in one transaction, repeats until the queue is empty, and wakes
each caller with its result. It is one thread because its core then has in its caches what a commit touches: with the
callers' threads in turn, on one core after the other, the same commits take half as long again.

If a commit goes over a network, the thread waits for the callers it has just served. It waits up to half as long as the
commit took (`half_as_long`): they return one after another, and one that just missed a commit waits for two. It does
not wait for a disk: a slow disk cannot be told from a busy Python, and on a fast disk such waiting cost an eighth of
the rate.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from kedge.errors import CheckpointError
from kedge.ports import ChunksGone, IdTaken, Index, KeysChanged, NewCheckpoint, Outcomes, RowChanged, Unmet

T = TypeVar("T")

REFUSALS = (CheckpointError, ChunksGone, IdTaken, KeysChanged, RowChanged, Unmet)  # raised before anything is changed
_IDLE_S = 1.0  # then the thread ends
_MOST_GATHER_S = 0.05  # a commit may have waited for a server that was down


class Save(NamedTuple):
    """One `Index.commit`, which an index may combine with others."""

    records: Sequence[NewCheckpoint]
    actor: str


class Waiting(Generic[T]):
    """One operation in a group commit."""

    __slots__ = ("error", "operation", "result", "wake")

    needs_checkpoints = True  # as results of saves; otherwise their numbers suffice

    def __init__(self, operation: Callable[..., T] | Save) -> None:
        self.operation = operation
        self.result: T
        self.error: BaseException | None = None
        self.wake: threading.Lock | None = None  # created by the caller that queues


def half_as_long(took_s: float) -> float:
    return min(took_s / 2, _MOST_GATHER_S)


class GroupCommit:
    """`run_batch` runs operations in one transaction and sets the result or error of each.

    `gather` returns how many seconds to wait for others after a commit that took so long.
    """

    def __init__(
        self,
        run_batch: Callable[[Sequence[Waiting[Any]]], None],
        *,
        gather: Callable[[float], float] | None = None,
    ) -> None:
        self._run_batch = run_batch
        self._gather = gather
        self.took_s = 0.0  # the last commit
        self._crowd = 0  # operations in the last commit, or waiting for the next one
        self._is_complete = threading.Event()  # as many are waiting again
        self._queue: deque[Waiting[object]] = deque()
        self._lead = threading.Lock()  # held while anyone commits; passed on to the thread
        self._calling = threading.Lock()
        self._called: threading.Lock | None = None  # released to pass the lead on to the thread, if it exists

    def run(self, operation: Callable[..., T] | Save) -> T:
        """Return the operation's result once its transaction is durable, or raise its error or that of the commit."""
        mine = Waiting(operation)
        self._settle((mine,))
        if mine.error is not None:
            raise mine.error
        return mine.result

    def run_each(self, operations: Sequence[Callable[..., T] | Save]) -> list[T | BaseException]:
        """Return what `run` returns or raises for each of several operations, in one thread instead of many."""
        mine = [Waiting(operation) for operation in operations]
        self._settle(mine)
        return [waiting.result if waiting.error is None else waiting.error for waiting in mine]

    def _settle(self, mine: Sequence[Waiting[Any]]) -> None:
        if self._lead.acquire(blocking=False):
            try:
                self._commit(mine)
            finally:
                self._pass_on()
        else:
            self._wait(mine)

    def _commit(self, batch: Sequence[Waiting[Any]]) -> None:
        began = time.monotonic()
        try:
            self._run_batch(batch)
        finally:
            self.took_s = time.monotonic() - began
            self._crowd = len(batch) + len(self._queue)

    def _wait(self, mine: Sequence[Waiting[Any]]) -> None:
        wakes = []
        for waiting in mine:
            waiting.wake = wake = threading.Lock()
            wake.acquire()
            wakes.append(wake)
        try:
            self._queue.extend(mine)
            if self._gather is not None and len(self._queue) >= self._crowd:
                self._is_complete.set()
            if self._lead.acquire(blocking=False):  # the previous leader may have checked the queue just before
                self._pass_on()
            for wake in wakes:
                wake.acquire()
        except BaseException:  # a signal handler raised: take back what has not started
            for waiting in mine:
                try:
                    self._queue.remove(waiting)
                except ValueError:
                    pass  # it is running: its outcome is as unknown as after a kill
            raise

    def _pass_on(self) -> None:
        """Release the lead, or pass it to the thread if anyone waits."""
        if not self._queue:
            self._lead.release()
            if not self._queue or not self._lead.acquire(blocking=False):
                return
        with self._calling:
            if self._called is not None:
                self._called.release()
                return
            self._called = called = threading.Lock()  # whoever acquires it has the lead
        try:
            threading.Thread(target=_serve, args=(weakref.ref(self), called), name="kedge-commit", daemon=True).start()
        except BaseException as failure:
            if called.acquire(blocking=False):  # otherwise it has started, and the wait for that was interrupted
                self._called = None
                self.serve_queue()
            if not isinstance(failure, RuntimeError | MemoryError):  # no more threads, or the program ends
                raise

    def serve_queue(self) -> None:
        """Commit with the lead until the queue is empty."""
        while True:
            has_served = self._serve_batch()
            if not self._queue and not (has_served and self._crowd > 1 and self._gather is not None):
                self._lead.release()
                if not self._queue or not self._lead.acquire(blocking=False):
                    return

    def _serve_batch(self) -> bool:
        """Commit the queue. Return whether anyone waited."""
        batch: list[Waiting[Any]] = []
        try:
            if self._crowd > 1 and self._gather is not None:
                self._wait_for_crowd(self._gather(self.took_s))
            while self._queue:
                batch.append(self._queue.popleft())
            if batch:
                self._commit(batch)
        except BaseException as failure:  # noqa: BLE001 - raised where the operations came from
            self._crowd = 0  # the next commit does not wait for others
            for waiting in batch:
                waiting.error = waiting.error or failure
        for waiting in batch:
            assert waiting.wake is not None
            waiting.wake.release()
        return bool(batch)

    def is_called(self, called: threading.Lock) -> bool:
        """Return whether an idle thread has work now; if not, the thread must end."""
        with self._calling:
            if called.acquire(blocking=False):
                return True
            if self._called is called:
                self._called = None
            return False

    def _wait_for_crowd(self, timeout_s: float) -> None:
        self._is_complete.clear()
        if len(self._queue) < self._crowd:
            self._is_complete.wait(timeout_s)


def _serve(reference: weakref.ref[GroupCommit], called: threading.Lock) -> None:
    """Run the thread. While idle it keeps nothing alive."""
    while True:
        is_called = called.acquire(timeout=_IDLE_S)
        group = reference()
        if group is None or not (is_called or group.is_called(called)):
            return
        group.serve_queue()
        del group


def one_by_one(index: Index, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
    """`Index.commit_each` for an index where sharing a commit gains nothing."""
    outcomes: Outcomes = []
    for record, actor in saves:
        try:
            outcomes += index.commit((record,), actor=actor)
        except REFUSALS as refusal:
            outcomes.append(refusal)
    return outcomes
