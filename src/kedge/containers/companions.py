"""Who has a part in a checkpoint or a restore besides CRIU, and how long each part takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

Report = Callable[[str], None]


class Companion(Protocol):
    """Somebody with a part in the same moment, such as the memory of a GPU. Errors end the attempt."""

    def before_dump(self, pids: Sequence[int], phases: Phases) -> None:
        """The processes still run. If this fails, it has undone what it did."""
        ...

    def after_dump(self, phases: Phases, *, is_running: bool) -> None:
        """The dump is over, or was given up. What still runs must be able to go on."""
        ...

    def facts(self) -> Mapping[str, object]:
        """What the checkpoint's metadata says of its part."""
        ...

    def before_restore(self, metadata: Mapping[str, object]) -> None:
        """Refuse what cannot be restored here, before anything is touched."""
        ...

    def after_restore(self, pids: Sequence[int], phases: Phases) -> None:
        """The processes are there again."""
        ...


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


@contextmanager
def accompanied(
    companions: Sequence[Companion], pids: Sequence[int], phases: Phases, is_running: Callable[[], bool]
) -> Iterator[None]:
    """Companions before and after a dump: those that were told of its beginning are told of its end."""
    with ExitStack() as undo:
        for companion in companions:
            companion.before_dump(pids, phases)
            undo.callback(_after_dump, companion, phases, is_running)
        yield


def _after_dump(companion: Companion, phases: Phases, is_running: Callable[[], bool]) -> None:
    companion.after_dump(phases, is_running=is_running())


def facts_of(companions: Sequence[Companion]) -> dict[str, object]:
    return {name: fact for companion in companions for name, fact in companion.facts().items()}


def companions_for(spec: Mapping[str, Any]) -> list[Companion]:
    """The memory of GPUs, if the container was given any; others do not wait for that to be imported."""
    devices = [str(entry.get("path", "")) for entry in spec.get("linux", {}).get("devices") or ()]
    mounts = [str(entry.get("destination", "")) for entry in spec.get("mounts") or ()]
    environment = [str(entry) for entry in spec.get("process", {}).get("env") or ()]
    is_given = any(path.startswith("/dev/nvidia") for path in (*devices, *mounts)) or any(
        entry.startswith("NVIDIA_VISIBLE_DEVICES=") and entry.partition("=")[2] not in ("", "void", "none")
        for entry in environment
    )
    if not is_given:
        return []
    from .gpu.memory import GpuMemory

    return [GpuMemory()]
