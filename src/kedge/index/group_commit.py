"""Group commit: operations that wait at the same time share one transaction and one sync.

Whoever finds nobody writing commits what it came with, in its own thread: a lone writer pays nothing. Those who come
meanwhile queue. A thread of this object runs all that is queued in one transaction, again and again until nobody is
left, and wakes each with its result. One thread, because its core has in its caches what a commit touches: led by one
saver after the other, on one core after the other, the same commits take half as long again.

Where a commit goes over a network, the thread waits for those it has just served, up to half as long as that took
(`half_as_long`): they come back one after another, and whoever just missed a commit waits for two. Not for a disk: how
slow it is cannot be told from how busy Python is, and on a fast disk such waiting cost an eighth of the rate.
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
_MOST_GATHER_S = 0.05  # a commit may have waited for a server that was away


class Save(NamedTuple):
    """One `Index.commit`, an operation that an index may do together with others."""

    records: Sequence[NewCheckpoint]
    actor: str


class Waiting(Generic[T]):
    """One operation on its way through a commit."""

    __slots__ = ("error", "operation", "result", "wake")

    needs_checkpoints = True  # as results of a save; else their numbers are enough

    def __init__(self, operation: Callable[..., T] | Save) -> None:
        self.operation = operation
        self.result: T
        self.error: BaseException | None = None
        self.wake: threading.Lock | None = None  # made by who queues


def half_as_long(took_s: float) -> float:
    return min(took_s / 2, _MOST_GATHER_S)


class GroupCommit:
    """`run_batch` runs operations in one transaction and sets each one's result or error.

    `gather`: how many seconds to wait for others, by what the last commit took.
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
        self._crowd = 0  # how many there were at the last commit: in it, or waiting for the next one
        self._is_complete = threading.Event()  # so many wait again
        self._queue: deque[Waiting[object]] = deque()
        self._lead = threading.Lock()  # held while anybody commits; passed on to the thread
        self._calling = threading.Lock()
        self._called: threading.Lock | None = None  # released to pass the lead on to the thread, if there is one

    def run(self, operation: Callable[..., T] | Save) -> T:
        """The operation's result once its transaction is durable; else its error, or that of the commit."""
        mine = Waiting(operation)
        self._settle((mine,))
        if mine.error is not None:
            raise mine.error
        return mine.result

    def run_each(self, operations: Sequence[Callable[..., T] | Save]) -> list[T | BaseException]:
        """What `run` answers or raises, for each of several that come together: one thread instead of many."""
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
            if self._lead.acquire(blocking=False):  # who had it may have looked at the queue just before
                self._pass_on()
            for wake in wakes:
                wake.acquire()
        except BaseException:  # a signal handler raised: what nobody has begun to run is taken back
            for waiting in mine:
                try:
                    self._queue.remove(waiting)
                except ValueError:
                    pass  # it is being run: its outcome is as unknown as after a kill
            raise

    def _pass_on(self) -> None:
        """Let go of the lead; the thread has it, if anybody waits."""
        if not self._queue:
            self._lead.release()
            if not self._queue or not self._lead.acquire(blocking=False):
                return
        with self._calling:
            if self._called is not None:
                self._called.release()
                return
            self._called = called = threading.Lock()  # who gets it has the lead
        try:
            threading.Thread(target=_serve, args=(weakref.ref(self), called), name="kedge-commit", daemon=True).start()
        except BaseException as failure:
            if called.acquire(blocking=False):  # else it has begun, and somebody interrupted who waited for that
                self._called = None
                self.serve_queue()
            if not isinstance(failure, RuntimeError | MemoryError):  # no more threads, or the program ends
                raise

    def serve_queue(self) -> None:
        """With the lead: until nobody waits."""
        while True:
            has_served = self._serve_batch()
            if not self._queue and not (has_served and self._crowd > 1 and self._gather is not None):
                self._lead.release()
                if not self._queue or not self._lead.acquire(blocking=False):
                    return

    def _serve_batch(self) -> bool:
        """Whether anybody waited."""
        batch: list[Waiting[Any]] = []
        try:
            if self._crowd > 1 and self._gather is not None:
                self._wait_for_crowd(self._gather(self.took_s))
            while self._queue:
                batch.append(self._queue.popleft())
            if batch:
                self._commit(batch)
        except BaseException as failure:  # noqa: BLE001 - raised where the operations came from
            self._crowd = 0  # nobody is gathered before the next one
            for waiting in batch:
                waiting.error = waiting.error or failure
        for waiting in batch:
            assert waiting.wake is not None
            waiting.wake.release()
        return bool(batch)

    def is_called(self, called: threading.Lock) -> bool:
        """Asked by the thread when it has had nothing to do: whether it has now. If not, it is no more."""
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
    """The thread. While it has nothing to do it keeps nothing alive."""
    while True:
        is_called = called.acquire(timeout=_IDLE_S)
        group = reference()
        if group is None or not (is_called or group.is_called(called)):
            return
        group.serve_queue()
        del group


def one_by_one(index: Index, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
    """`Index.commit_each` where nothing is gained by sharing a commit."""
    outcomes: Outcomes = []
    for record, actor in saves:
        try:
            outcomes += index.commit((record,), actor=actor)
        except REFUSALS as refusal:
            outcomes.append(refusal)
    return outcomes
