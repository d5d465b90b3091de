"""Where in a run the code stands that runs now: its stage, its step, the item of a map."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import ormsgpack
from blake3 import blake3

from kedge.errors import Conflict
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

Work = tuple[str | bytes, ...]  # what tells a step of a run, or an item of a map, from all others, ever
_work: ContextVar[Work] = ContextVar("kedge_work", default=())

sample: ContextVar[int] = ContextVar("kedge_llm_sample", default=0)  # which of several answers to one prompt


@dataclass(frozen=True, slots=True)
class Carried:
    """What code in another process, or in a thread of another's pool, knows of the run that it works for."""

    run: str = ""
    step: str = ""
    sample: int = 0
    work: Work = ()

    @contextmanager
    def entered(self) -> Iterator[None]:
        tokens = _carried.set(self), sample.set(self.sample)
        try:
            with attempted(*self.work):
                yield
        finally:
            _carried.reset(tokens[0])
            sample.reset(tokens[1])


_carried: ContextVar[Carried] = ContextVar("kedge_carried", default=Carried())  # noqa: B039 - it is frozen


def carry(run: str, step: str) -> Carried:
    """What goes along from here with work for a step."""
    return Carried(run, step, sample.get(), _work.get())


@contextmanager
def attempted(*work: str | bytes) -> Iterator[None]:
    """Around an attempt of this step or item."""
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


class Attempted:
    """`with Attempted(…)`: around an attempt of a step, at its place and in its span.

    A class, because a small step passes several of these, and those of contextlib take much longer.
    """

    __slots__ = ("_place", "_span", "_tokens", "_work")

    def __init__(self, place: Place, work: Work, span: AbstractContextManager[object]) -> None:
        self._place = place
        self._work = work
        self._span = span

    def __enter__(self) -> None:
        self._tokens = _here.set(self._place), _work.set(self._work)
        try:
            self._span.__enter__()
        except BaseException:
            self._leave()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        try:
            return self._span.__exit__(kind, error, trace)
        finally:
            self._leave()

    def _leave(self) -> None:
        here, work = self._tokens
        _work.reset(work)
        _here.reset(here)


def idempotency_key(part: str = "") -> str:
    """A UUID for a request that the step or item makes here: the same whenever it is tried again, by whatever process.

    A service that takes idempotency keys carries the request out once. Steps and items that are not the same, by run,
    path, inputs or version, have keys of their own; `part` tells apart several requests of one step.
    """
    if not (work := _work.get()):
        raise Conflict("there is no step here", hint="call idempotency_key inside a step, or an item of a map")
    return str(uuid.UUID(bytes=blake3(ormsgpack.packb([*work, part])).digest(16), version=5))


def payer() -> tuple[str, str]:
    """The run and the step that pay for LLM calls made here; "" for none."""
    if (place := _here.get()) is not None:
        return place.run.key, "/".join(place.path)
    return _carried.get().run, _carried.get().step


def here() -> Place | None:
    return _here.get()


def place_in(run: Run) -> Place:
    """Where `run` stands in this thread or task: at its root, unless the code is inside one of its stages or steps."""
    place = _here.get()
    return place if place is not None and place.run is run else Place(run)
