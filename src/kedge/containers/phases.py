"""How long each part of a checkpoint or a restore takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Report = Callable[[str], None]


@dataclass(slots=True)
class Phases:
    """Seconds of each phase. The time of a phase within another one counts for the inner one only."""

    seconds: dict[str, float] = field(default_factory=dict)
    report: Report | None = None
    _inner_s: float = 0.0  # of the phases within the one that is going on

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.report is not None:
            self.report(name)
        before_s, self._inner_s = self._inner_s, 0.0
        started = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds - self._inner_s
            self._inner_s = before_s + seconds

    def milliseconds(self) -> dict[str, float]:
        return {name: round(seconds * 1000, 1) for name, seconds in self.seconds.items()}
