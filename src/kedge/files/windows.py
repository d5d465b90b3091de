"""Reused memory to read into, because touching new memory costs more than reading a cached file."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from queue import Empty, SimpleQueue

from kedge.blobs.direct import aligned_memory

_PATIENCE_S = 1.0


class Windows:
    """Hands out windows of one size; each returns automatically when its last view is gone.

    With `limit`, taking one more than that waits for one to return.
    """

    def __init__(self, size_bytes: int, limit: int = 0) -> None:
        self._size_bytes = size_bytes
        self._limit = limit
        self._made = 0
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()

    def take(self) -> memoryview:
        must_wait = 0 < self._limit <= self._made
        try:
            region = self._free.get(must_wait, _PATIENCE_S)
        except Empty:  # none yet; or somebody keeps views for long, such as an error's traceback: better more than none
            self._made += 1
            region = aligned_memory(self._size_bytes)
        lent = (ctypes.c_char * self._size_bytes).from_buffer(region)
        weakref.finalize(lent, self._free.put, region).atexit = False
        return memoryview(lent).cast("B")
