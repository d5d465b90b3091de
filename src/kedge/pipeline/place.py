"""Where in a run the code stands that runs now: its stage, its step, the item of a map."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kedge.model import CheckpointLevel

from .keys import Path

if TYPE_CHECKING:
    from .run import Run


@dataclass(frozen=True, slots=True)
class Place:
    """A path in a run, and what stands there."""

    run: Run
    path: Path = ()
    level: CheckpointLevel = CheckpointLevel.PIPELINE

    def below(self, name: str) -> Place:
        """The place of a step that is called here: a step, or a substep inside another one."""
        is_inner = self.level in (CheckpointLevel.STEP, CheckpointLevel.SUBSTEP)
        return Place(self.run, (*self.path, name), CheckpointLevel.SUBSTEP if is_inner else CheckpointLevel.STEP)

    @contextmanager
    def entered(self) -> Iterator[None]:
        token = _here.set(self)
        try:
            yield
        finally:
            _here.reset(token)


_here: ContextVar[Place | None] = ContextVar("kedge_place", default=None)

# (run, step) for which code works that is in another process than the run
payer: ContextVar[tuple[str, str]] = ContextVar("kedge_payer", default=("", ""))


def here() -> Place | None:
    return _here.get()


def place_in(run: Run) -> Place:
    """Where `run` stands in this thread or task: at its root, unless the code is inside one of its stages or steps."""
    place = _here.get()
    return place if place is not None and place.run is run else Place(run)
