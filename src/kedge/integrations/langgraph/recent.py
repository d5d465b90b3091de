"""What was read of a job, for as long as nothing of the job has changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kedge.blobs.shelter import together
from kedge.errors import Corrupted
from kedge.ports import Catalogue

MOST_RESULTS = 64
MOST_EVENTS = 64  # looked at to find out which jobs have changed; after more of them, all have

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _View:
    """The log of events, as far as it was read. Never changed, but replaced by another: threads and signal handlers
    need no lock."""

    newest: int  # the last event that was read
    since: int  # the event before which nothing is known
    changed: Mapping[str, int] = field(default_factory=dict)  # by job, its last event since


class Recent:
    """Asked again while nothing of a job has changed, the same look gives what it gave. Bounded; thread-safe.

    Results are shared: nobody may change them.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._view = _View(0, 0)
        self._results: OrderedDict[Hashable, tuple[Hashable, Any]] = OrderedDict()

    def look(
        self, job: str | None, key: Hashable, read: Callable[[], T], is_kept: Callable[[T], bool] = lambda _: True
    ) -> T:
        """What `read` gives of a job, or of all jobs, which may call the store several times; `is_kept` says whether
        it is small enough."""
        state = self._state_of(job)  # before reading: what changes meanwhile shows the next time
        known = None if state is None else self._results.get((job, key))
        if known is not None and known[0] == state:
            result: T = known[1]
            return result
        result = together(self._catalogue, read)
        if state is not None and is_kept(result):
            self._results[job, key] = state, result
            self._results.move_to_end((job, key))
            if len(self._results) > MOST_RESULTS:
                self._results.popitem(last=False)
        return result

    def _state_of(self, job: str | None) -> Hashable | None:
        """A value that stays the same only while nothing of the job changes; None where that cannot be told."""
        view = self._view
        try:
            events = self._catalogue.changed_jobs(view.newest, MOST_EVENTS)
            if events is None:
                return None
            if events:
                view = self._view = _followed(view, events)
        except Corrupted:
            return None
        return view.newest if job is None else (view.since, view.changed.get(job, 0))


def _followed(view: _View, events: Sequence[tuple[int, str | None]]) -> _View:
    """Every change of a checkpoint is an event of its job, or of no job: then all jobs may have changed."""
    newest = events[0][0]
    changed = {**view.changed, **{job: number for number, job in reversed(events) if job is not None}}
    if len(events) < MOST_EVENTS >= len(changed) and all(job is not None for _, job in events):
        return _View(newest, view.since, changed)
    return _View(newest, newest)
