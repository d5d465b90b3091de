"""The jobs of a namespace, the ones that changed last first: what each is, how it stands, and whom it waits for.

Each look reads some of them and goes on where the one before ended, so it costs the same however many there are (I6).
Once all were read, the log of changes says which to ask again. A look that has not come to all of them says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from threading import Lock

from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX
from kedge.pipeline.approval import PendingApproval, pending_approvals

from .kinds import About, Kind, about, named_kind

_READ_JOBS = 2000  # by one look
_ASKED = 100  # of them, what they are; those that changed last come first
_EVENTS = 2000  # of the log, by one look; who is further behind reads the jobs again
_MOST = 100_000  # that are remembered
_place = attrgetter("place")


@dataclass(slots=True)
class Entry:
    job: str
    place: tuple[datetime, str]  # by which they are sorted, and pages of them begin: when it changed last, and its name
    about: About | None = None  # not asked yet
    approvals: Sequence[PendingApproval] = ()


@dataclass(frozen=True, slots=True)
class Roll:
    entries: Sequence[Entry]  # the ones that changed last first
    approvals: Sequence[PendingApproval]  # that nobody has decided yet, the newest first
    is_partial: bool  # a later look knows more
    is_cut: bool  # there are more jobs than are remembered
    number: int  # of the look


class Roster:
    """Thread-safe; one for a namespace."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._order: list[Entry] = []
        self._unasked: set[str] = set()
        self._waiting: dict[str, Entry] = {}  # those with approvals
        self._after: str | None = None  # the job that was read last
        self._is_read = False
        self._event = -1  # up to here the log of changes was followed
        self._looks = 0
        self._lock = Lock()

    def look(self, store: CheckpointManager) -> Roll:
        with self._lock:
            self._follow(store)
            self._read(store)
            if self._unasked:
                self._order.sort(key=_place, reverse=True)  # quick: they nearly are
                self._ask(store)
            self._looks += 1
            is_partial = not self._is_read or bool(self._unasked)
            is_cut = len(self._entries) >= _MOST
            return Roll(list(self._order), self._approvals(), is_partial, is_cut, self._looks)

    def _follow(self, store: CheckpointManager) -> None:
        """What changed since the last look: before anything is read, so that what changes meanwhile comes next time."""
        newest = store.events(limit=1, newest=True)
        last = newest[-1].id if newest else 0
        if not 0 <= last - self._event <= _EVENTS or self._event < 0:
            self._after, self._is_read = None, False
            self._unasked.update(self._waiting)
        elif last > self._event:
            for event in store.events(self._event, _EVENTS):
                if event.job is not None:
                    self._note(event.job.removesuffix(INBOX_SUFFIX), event.at if event.action == "save" else None)
        self._event = last

    def _read(self, store: CheckpointManager) -> None:
        if self._is_read:
            return
        page = store.jobs("", _READ_JOBS, self._after)
        for job in page:
            entry = self._entries.get(job.name)
            if entry is None or entry.place[0] != job.updated_at:
                self._note(job.name, job.updated_at)
        self._after = page[-1].name if page else self._after
        self._is_read = len(page) < _READ_JOBS or len(self._entries) >= _MOST

    def _note(self, job: str, changed_at: datetime | None) -> None:
        """A job that has to be asked; with the moment of its newest save, if that is why."""
        entry = self._entries.get(job)
        if entry is None:
            if changed_at is None or named_kind(job) is not None or len(self._entries) >= _MOST:
                return
            entry = self._entries[job] = Entry(job, (changed_at, job))
            self._order.append(entry)
        if changed_at is not None:
            entry.place = changed_at, job
        self._unasked.add(job)

    def _ask(self, store: CheckpointManager) -> None:
        asked = [entry for entry in self._order if entry.job in self._unasked][:_ASKED]
        for entry in asked:
            entry.about = about(store, entry.job)
            is_run = entry.about.kind in (Kind.RUN, Kind.WORKFLOW)
            entry.approvals = tuple(pending_approvals(store, entry.job)) if is_run else ()
            self._unasked.discard(entry.job)
            if entry.approvals:
                self._waiting[entry.job] = entry
            else:
                self._waiting.pop(entry.job, None)

    def _approvals(self) -> list[PendingApproval]:
        pending = [asked for entry in self._waiting.values() for asked in entry.approvals if not asked.is_expired]
        return sorted(pending, key=lambda asked: asked.asked_at.timestamp() if asked.asked_at else 0.0, reverse=True)
