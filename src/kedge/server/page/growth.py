"""What was added to the store, when, and by which jobs.

Jobs are looked at by their newest checkpoints. What was read is remembered as long as nothing of a job is deleted, so
that looking again, as a page that follows the store does, reads only what came since.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from threading import Lock

from kedge.manager import CheckpointManager
from kedge.model import Job

MOST_JOBS = 1000  # that are looked at
_RECENT = 500  # checkpoints of each
_READ_JOBS = 200  # the most recently changed ones

SPANS: Mapping[str, tuple[int, int]] = {  # name → (seconds, bars)
    "hour": (3600, 60),
    "day": (86_400, 48),
    "week": (7 * 86_400, 42),
    "month": (30 * 86_400, 30),
    "year": (364 * 86_400, 52),
}


@dataclass(slots=True)
class _Known:
    """The newest saves of a job: (epoch s, bytes it added)."""

    checkpoints: int = 0
    last_seq: int = 0
    saves: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))


@dataclass(frozen=True, slots=True)
class Grown:
    """What was added in a span of time, in bars of equal length, oldest first; in each, bytes by job."""

    span: str
    begin: datetime
    bar_s: float
    bars: Sequence[Counter[str]]
    added: Counter[str]  # by job
    saves: Counter[str]
    is_partial: bool  # some job saved more often than was looked at


class Growth:
    """Thread-safe; one for a namespace."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._lock = Lock()

    def look(self, store: CheckpointManager, jobs: Sequence[Job], span: str = "", now: float | None = None) -> Grown:
        """`span` is one of SPANS, or "" for the shortest that has everything."""
        recent = sorted(jobs, key=lambda job: job.updated_at, reverse=True)[:_READ_JOBS]
        with self._lock:
            self._known = {job.name: self._read(store, job) for job in recent}
            saves = {name: list(known.saves) for name, known in self._known.items()}
        now = datetime.now(UTC).timestamp() if now is None else now
        return _grown(saves, span or _fitting(saves, now), now)

    def _read(self, store: CheckpointManager, job: Job) -> _Known:
        known = self._known.get(job.name)
        if known is not None and known.last_seq == job.last_seq and known.checkpoints == job.checkpoints:
            return known
        came = store.list(job.name, after=known.last_seq, limit=_RECENT) if known is not None else []
        if known is None or known.checkpoints + len(came) != job.checkpoints or len(came) == _RECENT:
            known, came = _Known(), store.list(job.name, limit=_RECENT)
        known.saves.extend((c.created_at.timestamp(), c.stored_bytes) for c in came)
        known.checkpoints, known.last_seq = job.checkpoints, job.last_seq
        return known


def _fitting(saves: Mapping[str, Sequence[tuple[float, int]]], now: float) -> str:
    first = min((at for each in saves.values() for at, _ in each), default=now)
    return next((name for name, (seconds, _) in SPANS.items() if now - first <= seconds), "year")


def _grown(saves: Mapping[str, Sequence[tuple[float, int]]], span: str, now: float) -> Grown:
    seconds, count = SPANS[span]
    bar_s = seconds / count
    end = (now // bar_s + 1) * bar_s  # bars begin at whole minutes, hours, days
    begin = end - seconds
    bars: list[Counter[str]] = [Counter() for _ in range(count)]
    added, times = Counter[str](), Counter[str]()
    is_partial = False
    for name, each in saves.items():
        is_partial |= len(each) == _RECENT and each[0][0] > begin
        for at, stored_bytes in each:
            bar = int((at - begin) // bar_s)
            if 0 <= bar < count:
                bars[bar][name] += stored_bytes
                added[name] += stored_bytes
                times[name] += 1
    return Grown(span, datetime.fromtimestamp(begin, UTC), bar_s, bars, added, times, is_partial)
