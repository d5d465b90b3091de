"""What a policy would delete, told while a history is read.

Each look reads some thousand checkpoints and goes on where the one before ended, so it costs the same however long the
history is (I6); a page that is shown a part asks again until all are read.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from threading import Lock

from kedge.care.retention import RetentionPolicy
from kedge.care.review import Verdict
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

SHOWN = 200  # of those that go, and of those that stay
_READ_AT_ONCE = 2000
_MOST = 16  # that are remembered
_FORGOTTEN_S = 30.0  # an unfinished one that nobody looked at for so long begins anew


class Preview:
    """How far it was read, and what goes and stays as far as that."""

    def __init__(self, verdicts: Iterator[Verdict], total: int) -> None:
        self._verdicts = verdicts
        self.lock = Lock()
        self.looked_at = time.monotonic()
        self.event = 0  # the newest change when the reading began
        self.total = total
        self.read = 0
        self.going = 0
        self.frees_bytes = 0
        self.is_complete = False
        self.is_shown = False
        self._last_going: deque[Checkpoint] = deque(maxlen=SHOWN)
        self.kept: list[Verdict] = []  # the newest ones
        self._going_by_job: Counter[str] = Counter()
        self._staying_by_job: Counter[str] = Counter()

    @property
    def staying(self) -> int:
        return self.read - self.going

    @property
    def doomed(self) -> Sequence[Checkpoint]:
        """The oldest of those that go, oldest first."""
        return list(reversed(self._last_going))

    @property
    def by_job(self) -> list[tuple[str, int, int]]:
        """(job, how many go, how many stay), of those that lose something, most first."""
        return [(name, count, self._staying_by_job[name]) for name, count in self._going_by_job.most_common()]

    def go_on(self) -> None:
        """Read some more."""
        for _ in range(_READ_AT_ONCE):
            verdict = next(self._verdicts, None)
            if verdict is None:
                self.is_complete = True
                return
            self.read += 1
            checkpoint = verdict.checkpoint
            if verdict.reasons:
                self._staying_by_job[checkpoint.job] += 1
                if len(self.kept) < SHOWN:
                    self.kept.append(verdict)
                continue
            self.going += 1
            self.frees_bytes += checkpoint.stored_bytes
            self._going_by_job[checkpoint.job] += 1
            self._last_going.append(checkpoint)


class Previews:
    """Those asked for last. Thread-safe; one for an application."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str | None, str], Preview] = OrderedDict()
        self._lock = Lock()

    def look(self, store: CheckpointManager, policy: RetentionPolicy, job: str | None) -> Preview:
        """The preview as far as it is read now. One that is complete is told again only while nothing changes."""
        newest = store.events(limit=1, newest=True)
        event, key = newest[-1].id if newest else 0, (store.namespace, job, policy.to_json())
        with self._lock:
            preview = self._known.get(key)
            if preview is None or not _holds(preview, event):
                preview = self._known[key] = Preview(store.review(policy, job=job), store.stats(job)["checkpoints"])
                preview.event = event
            self._known.move_to_end(key)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        with preview.lock:
            preview.looked_at = time.monotonic()
            if not preview.is_complete:
                preview.go_on()
            preview.is_shown |= preview.is_complete
        return preview


def _holds(preview: Preview, event: int) -> bool:
    if preview.is_complete:  # one that nobody has seen is as new as the look it was begun for
        return not preview.is_shown or preview.event == event
    return time.monotonic() - preview.looked_at < _FORGOTTEN_S
