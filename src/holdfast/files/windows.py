"""Memory to read into, used again: touching fresh memory costs more than reading a cached file."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from queue import Empty, SimpleQueue

WINDOW_BYTES = 4 << 20
_COUNT = 4  # as many as keep the workers busy
_PATIENCE_S = 1.0


class Windows:
    """Hands out windows; each comes back by itself when the last view of it is gone."""

    def __init__(self) -> None:
        self._free: SimpleQueue[mmap.mmap] = SimpleQueue()
        self._made = 0

    def take(self) -> memoryview:
        if self._made < _COUNT:
            region = self._make()
        else:
            try:
                region = self._free.get(timeout=_PATIENCE_S)
            except Empty:  # somebody keeps views for long, such as an error's traceback: better more memory than none
                region = self._make()
        lent = (ctypes.c_char * WINDOW_BYTES).from_buffer(region)
        weakref.finalize(lent, self._free.put, region).atexit = False
        return memoryview(lent).cast("B")

    def _make(self) -> mmap.mmap:
        self._made += 1
        return mmap.mmap(-1, WINDOW_BYTES)
