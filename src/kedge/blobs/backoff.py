"""Trying again what may succeed the next time: `Unavailable`, and nothing else.

The pauses double and are drawn at random between nothing and that, so that many clients of a server that is too busy
do not all come back at once.
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
    """How often and how patiently. The default waits 12 s on average, 25 s at most, before it gives up."""

    attempts: int = 9
    first_s: float = 0.1
    most_s: float = 6.0

    def pause(self, failures: int, failure: Unavailable) -> None:
        """Wait before the next attempt; raises `failure` if that was the last one."""
        if failures >= self.attempts:
            raise failure
        time.sleep(_dice.uniform(0, min(self.most_s, self.first_s * 2 ** (failures - 1))))

    def run(self, action: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                return action()
            except Unavailable as failure:
                failures += 1
                self.pause(failures, failure)
