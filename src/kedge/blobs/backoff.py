"""Retries for `Unavailable`, and for nothing else.

The pauses double, and each is random between half of that and all of it. So many clients of an overloaded server do not
all return at once, and none gives up at once on a server that restarts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kedge.errors import Unavailable

_T = TypeVar("_T")
_dice = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often and how long to retry. The default waits at least 9 s, at most 18.3 s, before it gives up."""

    attempts: int = 9
    first_s: float = 0.1
    most_s: float = 6.0

    def pause(self, failures: int, failure: Unavailable) -> None:
        """Wait before the next attempt. Raises `failure` if that was the last one."""
        if failures >= self.attempts:
            raise failure
        pause_s = min(self.most_s, self.first_s * 2 ** (failures - 1))
        time.sleep(_dice.uniform(pause_s / 2, pause_s))

    def run(self, action: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                return action()
            except Unavailable as failure:
                failures += 1
                self.pause(failures, failure)
