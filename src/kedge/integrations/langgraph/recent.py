"""What was read of a store, for as long as nothing in the store has changed."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from kedge.store import Store

MOST_RESULTS = 64

T = TypeVar("T")


class Recent:
    """Asked again in the same generation of the store, the same look gives what it gave. Bounded; thread-safe.

    Results are shared: nobody may change them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._results: OrderedDict[Hashable, tuple[Hashable, Any]] = OrderedDict()

    def look(self, key: Hashable, read: Callable[[], T], is_kept: Callable[[T], bool] = lambda _: True) -> T:
        """What `read` gives, which may call the store several times; `is_kept` says whether it is small enough."""
        generation = self._store.generation()  # before reading: what changes meanwhile shows the next time
        if generation is not None:
            known = self._results.get(key)
            if known is not None and known[0] == generation:
                result: T = known[1]
                return result
        result = self._store.together(read)
        if generation is not None and is_kept(result):
            with self._lock:
                self._results[key] = generation, result
                self._results.move_to_end(key)
                if len(self._results) > MOST_RESULTS:
                    self._results.popitem(last=False)
        return result
