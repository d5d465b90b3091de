"""What was added to the store, when, and by which jobs.

Each look reads some thousand checkpoints, the newest first, and goes on where the one before ended: a page that
follows the store soon has counted them all, and then reads only what came since. Bytes are kept by minute, of which all
bars are multiples. Where something is deleted, that job is counted anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock

from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Job

MOST_JOBS = 1000  # that are looked at
_PAGE = 1000
_READ_AT_ONCE = 4000  # checkpoints, by one look
_READ_JOBS = 200  # the most recently changed ones
_MINUTE_S = 60

SPANS: Mapping[str, tuple[int, int]] = {  # name → (seconds, bars)
    "hour": (3600, 60),
    "day": (86_400, 48),
    "week": (7 * 86_400, 42),
    "month": (30 * 86_400, 30),
    "year": (364 * 86_400, 52),
}


@dataclass(slots=True)
class _Known:
    """What a job saved, as far back as was read: by minute, bytes it added and how many saves."""

    deleted: int = 0
    last_seq: int = 0
    first_seq: int = 0
    is_whole: bool = False
    minutes: dict[int, tuple[int, int]] = field(default_factory=dict)

    def add(self, saves: Sequence[Checkpoint]) -> None:
        for checkpoint in saves:
            minute = int(checkpoint.created_at.timestamp() // _MINUTE_S)
            stored_bytes, count = self.minutes.get(minute, (0, 0))
            self.minutes[minute] = stored_bytes + checkpoint.stored_bytes, count + 1


@dataclass(frozen=True, slots=True)
class Grown:
    """What was added in a span of time, in bars of equal length, oldest first; in each, bytes by job."""

    span: str
    begin: datetime
    bar_s: float
    bars: Sequence[Counter[str]]
    added: Counter[str]  # by job
    saves: Counter[str]
    is_partial: bool  # older ones are still to be read


class Growth:
    """Thread-safe; one for a namespace."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._lock = Lock()

    def look(self, store: CheckpointManager, jobs: Sequence[Job], span: str = "", now: float | None = None) -> Grown:
        """`span` is one of SPANS, or "" for the shortest that has everything."""
        recent = sorted(jobs, key=lambda job: job.updated_at, reverse=True)[:_READ_JOBS]
        with self._lock:
            left = _READ_AT_ONCE
            known = {}
            for job in recent:
                known[job.name], left = self._read(store, job, left)
            self._known = known
            minutes = {name: dict(history.minutes) for name, history in known.items()}
        is_partial = not all(history.is_whole for history in known.values())
        now = datetime.now(UTC).timestamp() if now is None else now
        return _grown(minutes, span or _fitting(minutes, now), now, is_partial=is_partial)

    def _read(self, store: CheckpointManager, job: Job, left: int) -> tuple[_Known, int]:
        """What is known of a job now, and how many checkpoints may still be read by this look."""
        deleted = job.last_seq - job.checkpoints
        known = self._known.get(job.name)
        if known is None or known.deleted != deleted or job.last_seq - known.last_seq > _READ_AT_ONCE:
            known = _Known(deleted, job.last_seq, job.last_seq + 1)
        elif job.last_seq > known.last_seq:
            came = store.list(job.name, after=known.last_seq, before=job.last_seq + 1)
            known.add(came)
            known.last_seq, left = job.last_seq, left - len(came)
        while not known.is_whole and left > 0:
            page = store.list(job.name, before=known.first_seq, limit=_PAGE)
            known.add(page)
            left -= len(page)
            known.is_whole = len(page) < _PAGE
            known.first_seq = page[0].seq if page else known.first_seq
        return known, left


_Minutes = Mapping[str, Mapping[int, tuple[int, int]]]


def _fitting(saves: _Minutes, now: float) -> str:
    first = min((minute * _MINUTE_S for minutes in saves.values() for minute in minutes), default=now)
    return next((name for name, (seconds, _) in SPANS.items() if now - first <= seconds), "year")


def _grown(saves: _Minutes, span: str, now: float, *, is_partial: bool) -> Grown:
    seconds, count = SPANS[span]
    bar_s = seconds / count
    end = (now // bar_s + 1) * bar_s  # bars begin at whole minutes, hours, days
    begin = end - seconds
    bars: list[Counter[str]] = [Counter() for _ in range(count)]
    added, times = Counter[str](), Counter[str]()
    for name, minutes in saves.items():
        for minute, (stored_bytes, number) in minutes.items():
            bar = int((minute * _MINUTE_S - begin) // bar_s)
            if 0 <= bar < count:
                bars[bar][name] += stored_bytes
                added[name] += stored_bytes
                times[name] += number
    return Grown(span, datetime.fromtimestamp(begin, UTC), bar_s, bars, added, times, is_partial)
