"""What agent frameworks call a session, a thread or a flow: a job whose newest checkpoint is its state."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from kedge.errors import IdempotencyConflict, NotFound
from kedge.model import parse_name

from .agents import StoreOwner

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_ESCAPE = re.compile(r"\+([0-9A-F]{2})")


def job_of(prefix: str, *parts: str) -> str:
    """The job of a thread that is known by several names: `prefix:part@part`. Any text is a name; a byte outside the
    grammar is written as + and two hex digits."""
    return parse_name("session", f"{prefix}:{'@'.join(_escape(part) for part in parts)}")


def parts_of(job: str) -> list[str]:
    """What `job_of` made the name of."""
    return [_unescape(part) for part in job.partition(":")[2].split("@")]


def _escape(text: str) -> str:
    return _UNSAFE.sub(lambda match: "".join(f"+{byte:02X}" for byte in match[0].encode()), text)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), text).encode("latin-1").decode()


class Threads(StoreOwner):
    """Threads in a store. Several processes may change the same one at the same time: each change is made to what the
    one before it left, and none is lost."""

    def read(self, job: str) -> dict[str, Any]:
        """The newest state of a thread; {} before its first."""
        latest = self.manager.load_latest(job)
        return {} if latest is None else latest[1]

    def change(self, job: str, step: str, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> dict[str, Any]:
        """Save what `change` makes of the state as the next checkpoint; answers the state before.

        Where it answers None, nothing changes. It may be called several times, each time with a state of its own.
        """
        while True:
            # The number of the newest checkpoint, damaged or not, is read first: if the state is newer, it belongs to a
            # change that was made meanwhile.
            counted = self.manager.catalogue.job(job)
            latest = self.manager.load_latest(job)
            parent, before = (None, {}) if latest is None else (latest[0].id, latest[1])
            if (after := change(before)) is None:
                return before
            # Two who make the same change of the same state make two changes: the key alone would take them for one.
            state = {**after, "change": os.urandom(8).hex()}
            try:
                key = f"after {0 if counted is None else counted.last_seq}"
                self.manager.save(job, step, state, parent=parent, idempotency_key=key)
            except (IdempotencyConflict, NotFound):
                continue  # another one was first, or has deleted the thread
            return before
