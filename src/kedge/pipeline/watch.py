"""How a cancellation, and the time limit of a run, reach steps that are under way.

One thread for all runs of this process looks once a second. Between steps a run learns of it by itself
(`Session.pause_point`).
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .session import Session

LOOK_EVERY_S = 1.0


class Watch:
    """The runs at work in this process."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._sessions: set[Session] = set()
        self._has_some = threading.Event()
        threading.Thread(target=self._serve, name="kedge-watch", daemon=True).start()

    def add(self, session: Session) -> None:
        self._sessions.add(session)
        self._has_some.set()

    def remove(self, session: Session) -> None:
        self._sessions.discard(session)

    def _serve(self) -> None:
        while True:
            self._has_some.wait()
            time.sleep(LOOK_EVERY_S)
            for session in list(self._sessions):
                with suppress(Exception):  # a store that is away, for one: the run meets that, the others are watched
                    session.look()
            self._has_some.clear()
            if self._sessions:
                self._has_some.set()


_watch: Watch | None = None


def watch_here() -> Watch:
    """That of this process: a fork has none of its parent's threads."""
    global _watch
    if _watch is None or _watch.process != os.getpid():
        _watch = Watch()
    return _watch
