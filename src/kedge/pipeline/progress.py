"""What a person sees of a run at work: on a terminal a tree of steps and bars for maps, elsewhere plain lines."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from .keys import Path, show

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 10.0
BAR_EVERY_S = 0.1

_LOOKS = {"ran": "[green]✓[/]", "reused": "[cyan]↺[/]", "failed": "[red]✗[/]"}


@dataclass(slots=True)
class Tally:
    """How far a map is. Rate and time left come from what this session did: items it found done tell nothing."""

    total: int | None  # None: the items do not say how many they are
    done: int = 0  # in this session
    reused: int = 0
    failed: int = 0
    money: str = ""  # what LLM calls cost
    clock: Callable[[], float] = time.monotonic
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def rate(self) -> float:
        """Items a second."""
        return (self.done + self.failed) / max(self.clock() - self.began, 1e-9)

    @property
    def left_s(self) -> float | None:
        """Seconds the rest will take; None while nobody can know."""
        if self.total is None or not self.done + self.failed:
            return None
        return max(0, self.total - self.done - self.reused - self.failed) / self.rate

    def __str__(self) -> str:
        of = "" if self.total is None else f" of {self.total:,}"
        notes = [f"{self.reused:,} of them before"] if self.reused else []
        notes += [f"{self.failed:,} failed"] if self.failed else []
        text = f"{self.done + self.reused:,}{of} items" + (f" ({', '.join(notes)})" if notes else "")
        if self.done + self.failed:
            text += f", {_number(self.rate)}/s"
        left_s = self.left_s
        text += f", {duration(left_s)} left" if left_s else ""
        return text + (f"; {self.money}" if self.money else "")


class Watcher:
    """Told what happens in a run, by any of its threads. This one shows nothing."""

    def stage(self, path: Path) -> None: ...

    def step(self, path: Path, verdict: str, seconds: float | None = None, note: str = "", money: str = "") -> None:
        """`verdict` is ran, reused or failed; `money` what LLM calls inside it cost."""

    def items(self, path: Path, tally: Tally, *, is_over: bool) -> None: ...

    def money(self, text: str) -> None:
        """What LLM calls cost in all."""

    def say(self, text: str) -> None:
        """A line that everybody should see who has not asked for silence."""

    def close(self) -> None: ...


class Quiet(Watcher):
    """Where nobody asked for progress, and there is no terminal."""

    def say(self, text: str) -> None:
        write_line(sys.stderr, text)


class Lines(Watcher):
    """A line for each step, and for a map one every ten seconds."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._said: dict[Path, float] = {}

    def stage(self, path: Path) -> None:
        self._say(f"stage {show(path)}")

    def step(self, path: Path, verdict: str, seconds: float | None = None, note: str = "", money: str = "") -> None:
        took = "" if seconds is None else f" in {duration(seconds)}"
        bill = f" ({money})" if money else ""
        self._say(f"step {show(path)} {verdict}{took}{bill}" + (f": {note}" if note else ""))

    def items(self, path: Path, tally: Tally, *, is_over: bool) -> None:
        now = time.monotonic()
        if is_over or now - self._said.setdefault(path, now) >= LINE_EVERY_S:
            self._said[path] = now
            self._say(f"map {show(path)}: {tally}")

    def money(self, text: str) -> None:
        self._say(f"models: {text}")

    def say(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        write_line(self._out, text)


class Terminal(Watcher):
    """The tree of steps as it grows, with a bar for each map at work (rich, imported when first needed)."""

    def __init__(self, console: Any = None) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._bars: dict[Path, TaskID] = {}
        self._drawn_at: dict[Path, float] = {}
        self._lock = threading.Lock()

    def stage(self, path: Path) -> None:
        self._print(path, "[bold]", "", "")

    def step(self, path: Path, verdict: str, seconds: float | None = None, note: str = "", money: str = "") -> None:
        took = "" if seconds is None else f"{duration(seconds)}"
        facts = [took or ("reused" if verdict == "reused" else ""), money]
        self._print(path, f"{_LOOKS[verdict]} ", ", ".join(filter(None, facts)), note)

    def items(self, path: Path, tally: Tally, *, is_over: bool) -> None:
        now = time.monotonic()
        with self._drawing():
            if not is_over and now - self._drawn_at.get(path, 0.0) < BAR_EVERY_S:
                return
            self._drawn_at[path] = now
            shown = self._live()
            name, text = _fitted(show(path), str(tally), shown.console.width)
            facts: dict[str, Any] = {"description": _escaped(name), "text": _escaped(text), "total": tally.total}
            facts["completed"] = tally.done + tally.reused + tally.failed
            if path not in self._bars:
                self._bars[path] = shown.add_task(**facts)
            shown.update(self._bars[path], **facts)
            if is_over:
                shown.remove_task(self._bars.pop(path))
        if is_over:
            self._print(path, f"{_LOOKS['reused' if tally.reused and not tally.done else 'ran']} ", str(tally), "")

    def money(self, text: str) -> None:
        self._print(("models",), "", text, "")

    def say(self, text: str) -> None:
        with self._drawing():
            self._live().console.print(_escaped(text), highlight=False)

    def close(self) -> None:
        with self._drawing():
            if self._progress is not None:
                self._progress.stop()
                self._progress = None
                self._bars.clear()

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """One thread at a time; where the terminal is gone, nothing is drawn, and the run goes on."""
        with self._lock, suppress(OSError, ValueError):
            yield

    def _print(self, path: Path, look: str, right: str, note: str) -> None:
        indent = "  " * (len(path) - 1)
        end = "[/]" if look == "[bold]" else ""
        with self._drawing():
            console = self._live().console
            tail = f" [dim]{_escaped(right)}[/]" if right else ""
            problem = f" [red]{_escaped(note)}[/]" if note else ""
            console.print(f"{indent}{look}{_escaped(path[-1])}{end}{tail}{problem}", highlight=False)

    def _live(self) -> Progress:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._console = self._console or Console(stderr=True)
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(_bar_width(self._console.width)),
                TextColumn("[dim]{task.fields[text]}"),
                console=self._console,
                transient=True,
            )
            self._progress.start()
        return self._progress


def _bar_width(width: int) -> int:
    return 24 if width >= 100 else 8


def _fitted(name: str, text: str, width: int) -> tuple[str, str]:
    """What stands before and behind a bar, cut so that all three fit into one line."""
    name = _cut(name, width // 4)
    return name, _cut(text, width - len(name) - _bar_width(width) - 2)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def write_line(out: TextIO | None, text: str) -> None:
    """A notice of Kedge. One that nobody can read any more fails nothing."""
    safe = "".join(c if c.isprintable() else "?" for c in text)
    try:
        if out is not None:
            out.write(f"kedge: {safe}\n")
            out.flush()
    except (OSError, ValueError):
        pass  # the reader is gone; the run goes on


def watcher(progress: bool | None) -> Watcher:
    """True: shown somehow. None: shown where stderr is a terminal. False: not shown."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    if progress is False:
        return Watcher()
    if progress is None and not is_terminal:
        return Quiet()
    return Terminal() if is_terminal else Lines(sys.stderr)


def duration(seconds: float) -> str:
    """A length of time: 12 µs, 3.4 ms, 7.1 s, 2 min 5 s, 3 h 12 min."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (60, 1, "s")):
        if seconds < limit:
            return f"{seconds * factor:.2g} {unit}" if seconds * factor < 10 else f"{seconds * factor:.0f} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "?" for c in text))
