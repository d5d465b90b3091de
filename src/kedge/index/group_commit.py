"""Group commit: operations that wait at the same time share one transaction and one sync.

Whoever finds nobody writing leads: runs all that is queued in one transaction, passes the lead to the first of those
who came meanwhile, and wakes the others with their results. No thread of its own: a lone writer pays nothing.

Where a commit takes long, because it goes over a network, the lead may wait a moment (`gather_s`) for those who were
served together last: they come back one after another, and whoever just missed a commit waits for two.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from kedge.errors import CheckpointError
from kedge.ports import ChunksGone, IdTaken, Index, KeysChanged, NewCheckpoint, Outcomes, RowChanged

T = TypeVar("T")

REFUSALS = (CheckpointError, ChunksGone, IdTaken, KeysChanged, RowChanged)  # raised before anything is changed


class Save(NamedTuple):
    """One `Index.commit`, an operation that an index may do together with others."""

    records: Sequence[NewCheckpoint]
    actor: str


class Waiting(Generic[T]):
    """One operation on its way through a commit."""

    __slots__ = ("error", "is_done", "is_leader", "operation", "result", "wake")

    def __init__(self, operation: Callable[..., T] | Save) -> None:
        self.operation = operation
        self.result: T
        self.error: BaseException | None = None
        self.is_done = False
        self.is_leader = False
        self.wake = threading.Lock()
        self.wake.acquire()


class GroupCommit:
    """`run_batch` runs operations in one transaction and sets each one's result or error."""

    def __init__(self, run_batch: Callable[[Sequence[Waiting[Any]]], None], *, gather_s: float = 0.0) -> None:
        self._run_batch = run_batch
        self._gather_s = gather_s
        self._served = 0  # by the last batch
        self._queue: deque[Waiting[Any]] = deque()
        self._lead = threading.Lock()  # held while anybody leads; it passes on with the lead
        self._passing = threading.Lock()  # so that the lead never goes to somebody who is leaving

    def run(self, operation: Callable[..., T] | Save) -> T:
        """The operation's result once its transaction is durable; else its error, or that of the commit."""
        mine = Waiting(operation)
        self._queue.append(mine)  # before asking for the lead: whoever holds it looks here before letting go
        try:
            if self._lead.acquire(blocking=False):
                mine.is_leader = True
            else:
                mine.wake.acquire()
            if mine.is_leader:
                self._run_queued(mine)
        except BaseException:  # a signal handler raised
            self._leave(mine)
            raise
        if mine.error is not None:
            raise mine.error
        return mine.result

    def run_each(self, operations: Sequence[Callable[..., T] | Save]) -> list[T | BaseException]:
        """What `run` answers or raises, for each of several that come together: one thread instead of many."""
        mine = [Waiting(operation) for operation in operations]
        self._queue.extend(mine)
        try:
            for each in mine:
                if each.is_done:
                    continue
                if self._lead.acquire(blocking=False):
                    each.is_leader = True
                else:
                    each.wake.acquire()
                if each.is_leader:
                    self._run_queued(each)
        except BaseException:
            for each in mine:
                self._leave(each)
            raise
        return [each.result if each.error is None else each.error for each in mine]

    def _run_queued(self, mine: Waiting[Any]) -> None:
        batch: list[Waiting[Any]] = []
        try:
            if not mine.is_done:  # else the leader before us ran it
                if self._served > 1 and self._gather_s:
                    self._gather()
                while self._queue:
                    batch.append(self._queue.popleft())
                self._served = len(batch)
                self._run_batch(batch)
        finally:
            for each in batch:
                each.is_done = True
            mine.is_leader = False
            self._pass_on()  # first, so that the next transaction is under way while the others wake up
            for other in batch:
                if other is not mine:
                    other.wake.release()

    def _gather(self) -> None:
        until = time.monotonic() + self._gather_s
        while len(self._queue) < self._served and time.monotonic() < until:
            time.sleep(self._gather_s / 8)

    def _leave(self, mine: Waiting[Any]) -> None:
        """Somebody stops waiting: what nobody has begun to run is taken back, and the lead, if it came, goes on."""
        with self._passing:
            try:
                self._queue.remove(mine)
            except ValueError:
                pass  # it is being run: its outcome is as unknown as after a kill
            is_leader = mine.is_leader
        if is_leader:
            self._pass_on()

    def _pass_on(self) -> None:
        while True:
            if self._queue:
                with self._passing:
                    if self._queue:
                        heir = self._queue[0]
                        heir.is_leader = True
                        heir.wake.release()
                        return
            self._lead.release()
            if not self._queue or not self._lead.acquire(blocking=False):
                return


def one_by_one(index: Index, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
    """`Index.commit_each` where nothing is gained by sharing a commit."""
    outcomes: Outcomes = []
    for record, actor in saves:
        try:
            outcomes += index.commit((record,), actor=actor)
        except REFUSALS as refusal:
            outcomes.append(refusal)
    return outcomes
