"""Progress bars for long work: on stderr, only on a terminal, only after a moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from .text import clip, size

if TYPE_CHECKING:
    from rich.progress import Progress

Report = Callable[[int, int], None]  # (done, total)

_REST_WIDTH = 60  # a small bar, per cent, "1,000,000 of 1,000,000", a rate, a time
_LOOK_EVERY_S = 0.2
_QUIET_S = 0.3  # work that is done by then shows nothing, and does not pay for importing rich


@contextmanager
def progress(label: str, *, unit: str) -> Iterator[Report | None]:
    """Yield a callback for `progress=` parameters; None without a terminal. `unit` is "bytes" or what is counted."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = _Bar(label, unit)
    try:
        yield bar.report
    finally:
        bar.stop()


class _Bar:
    def __init__(self, label: str, unit: str) -> None:
        self._label = label
        self._unit = unit
        self._started = time.monotonic()
        self._lock = threading.Lock()
        self._shown: Progress | None = None

    def report(self, done: int, total: int) -> None:
        elapsed = time.monotonic() - self._started
        if elapsed < _QUIET_S:
            return
        with self._lock:
            if self._shown is None:
                from rich.markup import escape

                self._shown = _make()
                label = clip(self._label, self._shown.console.width - _REST_WIDTH)
                self._shown.add_task(escape(label), total=total, amount="", rate="")
                self._shown.start()
            rate = done / elapsed
            self._shown.update(
                self._shown.task_ids[0],
                completed=done,
                total=total or None,
                amount=f"{self._amount(done)} of {self._amount(total)}",
                rate=f"{self._amount(round(rate))}/s" if rate >= 1 else "",
            )

    def _amount(self, count: int) -> str:
        return size(count) if self._unit == "bytes" else f"{count:,}"

    def stop(self) -> None:
        with self._lock:
            if self._shown is not None:
                self._shown.stop()


def _make() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(20 if console.width >= 100 else 8),
        TaskProgressColumn(),
        TextColumn("{task.fields[amount]}"),
        TextColumn("[dim]{task.fields[rate]}"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        transient=True,
    )


def watched(report: Report | None, look: Callable[[], tuple[int, int]]) -> AbstractContextManager[None]:
    """Call `look()` for (done, total) from a thread while the block runs: for work without a callback."""
    if report is None:
        return nullcontext()
    from kedge.blobs.workers import repeating  # start time

    return repeating(lambda: report(*look()), _LOOK_EVERY_S, "kedge-progress")
