"""What is due later. Each worker knows when: entries are read once, and wait in memory."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator

from kedge.manager import CheckpointManager

from .entries import DELAYED, Entry, entries_of

_PAGE = 500


class Delays:
    """The delayed entries of one job. An entry that is due stays until it is taken, and one that is put back is due
    again. Used by several threads at once."""

    def __init__(self, store: CheckpointManager, job: str) -> None:
        self._store = store
        self._job = job
        self._lock = threading.Lock()
        self._heap: list[tuple[float, int, Entry]] = []
        self._read_to = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_at(self) -> float:
        """When something is due; infinity when nothing is."""
        with self._lock:
            return self._heap[0][0] if self._heap else float("inf")

    def due(self) -> Iterator[Entry]:
        """What is due now of what was read, the longest first; ends at one that was neither taken nor put back."""
        last: Entry | None = None
        while True:
            with self._lock:
                if not self._heap or self._heap[0][0] > time.time() or self._heap[0][2] is last:
                    return
                last = self._heap[0][2]
            yield last

    def take(self, entry: Entry) -> None:
        with self._lock:
            if self._heap and self._heap[0][2] is entry:
                heapq.heappop(self._heap)

    def put_back(self, entry: Entry, wait_s: float) -> None:
        """It was due, and could not be carried out; anything else is found again by its state."""
        if entry.state == DELAYED:
            with self._lock:
                heapq.heappush(self._heap, (time.time() + wait_s, entry.seq, entry))

    def read(self) -> None:
        """Learn of those that were submitted since the last time."""
        while page := self._store.list(self._job, tags={"state": DELAYED}, after=self._read_to, limit=_PAGE):
            self._read_to = page[-1].seq
            with self._lock:
                for entry in entries_of(page):
                    heapq.heappush(self._heap, (entry.due_at, entry.seq, entry))
