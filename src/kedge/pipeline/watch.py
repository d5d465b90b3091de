"""What one thread of this process looks at again and again, such as runs: whether they are to be ended.

How a cancellation, and the time limit of a run, reach steps that are under way; and results of a map that wait behind a
slow item. Between steps a run learns of its end by itself (`Session.pause_point`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


class Watch:
    """Calls that one thread makes every so often, while there are any."""

    def __init__(self, every_s: float, name: str) -> None:
        self.process = os.getpid()
        self._every_s = every_s
        self._looks: set[Callable[[], None]] = set()
        self._has_some = threading.Event()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    @contextmanager
    def calling(self, look: Callable[[], None]) -> Iterator[None]:
        """Call `look` while the block runs; what it raises is ignored."""
        self._looks.add(look)
        self._has_some.set()
        try:
            yield
        finally:
            self._looks.discard(look)

    def _serve(self) -> None:
        while True:
            self._has_some.wait()
            time.sleep(self._every_s)
            for look in list(self._looks):
                with suppress(Exception):  # a store that is away, for one: others meet that, and the rest is watched
                    look()
            self._has_some.clear()
            if self._looks:
                self._has_some.set()


_watches: dict[str, Watch] = {}


def watch_here(every_s: float, name: str) -> Watch:
    """That of this process: a fork has none of its parent's threads."""
    watch = _watches.get(name)
    if watch is None or watch.process != os.getpid():
        watch = _watches[name] = Watch(every_s, name)  # another one, where several threads make the first
    return watch
