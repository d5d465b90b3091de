"""Which entries a worker takes next: those that are due, then by priority, in the order of submission."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from random import SystemRandom

from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.ports import Selection, Stored

from .delays import Delays
from .entries import PRIORITIES, RUNNING, Entry, ready
from .limits import QueueLimits
from .repertoire import Repertoire

LOOK_EVERY_S = 0.2
_NEXT_LOOK_S = 0.01  # after one that took all there was: what is submitted meanwhile is found, and begins, together
_CROWDED_S = 5.0  # so long after a collision a worker keeps to its lane, one of so many among which entries are divided
_LANES = 16
_BLOCK = 32  # entries, by their numbers, that are in one lane; the next ones are in the next
_MOST_BLOCKS = 4  # that are read in one look, where none of the entries may begin
_CROWD = 8  # times as many entries are read at once where the lane has none
_STRAY = 8  # one look of so many is at the first entries all the same: nobody may have their lane
_PAGE = 500  # entries read at once, behind those of pipelines that this worker does not have
_PASS_S = 2.0  # so long those are not read again, or longer: an entry among them may have become one that may begin
_MOST_SHARE = 20  # times as long as it took to read them all
_dice = SystemRandom()  # not the generator that users seed


Candidate = tuple[str, Entry, Stored | None]  # its job; as it was read, with its state, if that was just now


class Candidates:
    """The entries of some queues, read a few at a time. Asked by one thread."""

    def __init__(
        self,
        store: CheckpointManager,
        jobs: Sequence[str],
        delayed: Mapping[str, Delays],
        pipelines: Repertoire,
        limits: Mapping[str, QueueLimits],
        concurrency: int,
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._delayed = delayed
        self._pipelines = pipelines
        self._limits = limits
        self._window = 2 * concurrency + 8  # entries read at once
        self._ready: deque[Candidate] = deque()  # at the last look
        self._looked_at = self._thorough_at = 0.0
        self._ended: set[str] = set()  # entries whose work ended since: a look may find them as they were before
        self._took_all = False  # at the last look
        self._is_put_off = False  # a look was asked for, too soon after the last one
        self._crowded_until = 0.0
        self.lane = _dice.randrange(_LANES)
        self._collided_at = 0.0
        self._passed: dict[tuple[str, str], int] = {}  # by job and state: up to where all are of pipelines it lacks
        self._passed_until = 0.0
        self.are_held_back = False  # some, by the limits of their groups, at the last look

    def collide(self) -> None:
        """Another worker was faster: others want the same ones. Called by any thread."""
        now = time.monotonic()
        if self._looked_at > self._collided_at:
            self._looked_at = 0.0  # what was read is what they read
            self.lane = _dice.randrange(_LANES)
            self._collided_at = now
        self._crowded_until = now + _CROWDED_S

    def leave_if_taken(self, entry: Entry) -> bool:
        """Leave an entry, and its lane, to another worker if that was faster: it marked it, or ended its run.

        Whether it was so. Called by any thread.
        """
        try:
            current = Entry.of(self._store.get(entry.id))
        except NotFound:
            current = None
        if current is not None and current.state != RUNNING:
            return False
        self.collide()
        return True

    def end(self, entry: Entry) -> None:
        """This worker has nothing more to do with an entry, until it finds it again. Called by any thread."""
        self._ended.add(entry.id)

    def look_soon(self) -> None:
        """There is more than was found at the last look. Called by any thread."""
        self._took_all = False

    def next_look_s(self, is_of_no_use: bool = False) -> float:
        """How soon to look again, if nothing happens until then."""
        if is_of_no_use or not self._is_put_off:
            return LOOK_EVERY_S
        return max(0.0, self._looked_at + _NEXT_LOOK_S - time.monotonic())

    def find(self, *, is_thorough: bool) -> Iterator[Candidate]:
        """Those that may be taken. One that is not passed on from is the first the next time.

        Delayed ones that were submitted since are looked for now and then, unless the look is a thorough one.
        """
        if time.monotonic() < self._looked_at + LOOK_EVERY_S:
            yield from self._use_up()
        is_soon = time.monotonic() < self._looked_at + _NEXT_LOOK_S
        self._is_put_off = self._took_all and is_soon and not is_thorough
        if self._is_put_off:
            return
        self._ready.clear()
        self._ended.clear()
        self._looked_at = time.monotonic()
        if self._looked_at >= self._passed_until:
            self._passed.clear()
            self._passed_until = self._looked_at + _PASS_S
        self.are_held_back = self._took_all = False
        is_thorough = is_thorough or time.monotonic() >= self._thorough_at + LOOK_EVERY_S
        for job, delayed in self._delayed.items():
            if is_thorough:
                delayed.read()
            for entry in delayed.due():
                yield job, entry, None
        if is_thorough:
            self._thorough_at = time.monotonic()
        # All of a short queue, in one look instead of one for each priority.
        is_crowded = time.monotonic() < self._crowded_until
        keeps_lane = is_crowded and _dice.randrange(_STRAY) > 0
        window = self._window * (_CROWD if is_crowded else 1)
        pages = {job: self._page(job, None, 0, self._window) for job in self._jobs}
        short = {job: page for job, page in pages.items() if len(page) < self._window}
        for priority in reversed(PRIORITIES):
            for job in self._jobs:
                entries = self._in_lane(job, priority) if keeps_lane and job not in short else []
                entries = entries or self._of_priority(job, priority, window, short.get(job))
                if is_crowded:
                    _dice.shuffle(entries)
                self._ready.extend((job, entry, stored) for entry, stored in entries)
                yield from self._use_up()
        self._took_all = len(short) == len(pages)

    def _in_lane(self, job: str, priority: int) -> list[tuple[Entry, Stored]]:
        """The first that may begin among the entries of this worker's lane, which other workers seldom read."""
        state = ready(priority)
        first = self._page(job, state, 0, 1)
        for _ in range(_MOST_BLOCKS if first else 0):
            block = first[0][0].seq // _BLOCK
            block += (self.lane - block) % _LANES
            page = self._page(job, state, block * _BLOCK - 1, _BLOCK)
            own = [stored for stored in page if stored[0].seq // _BLOCK == block]
            if entries := self._beginnable(job, own):
                return entries
            if not (first := self._page(job, state, (block + 1) * _BLOCK - 1, 1) if own else page[:1]):
                break
        return []

    def _of_priority(
        self, job: str, priority: int, window: int, known: Sequence[Stored] | None
    ) -> list[tuple[Entry, Stored]]:
        """The first that may begin, however many others are before them; `known`: all of the job."""
        limit, state = window, ready(priority)
        if known is not None:
            return self._beginnable(job, [stored for stored in known if stored[0].tags.get("state") == state])
        began, first = time.monotonic(), self._passed.get((job, state), 0)
        after = first
        while True:
            page = self._page(job, state, after, limit)
            entries = self._beginnable(job, page)
            self._pass(job, state, after, page)
            if entries or len(page) < limit:
                break
            after, limit = page[-1][0].seq, _PAGE
        if not first:
            now = time.monotonic()
            self._passed_until = max(self._passed_until, now + _MOST_SHARE * (now - began))
        return entries

    def _pass(self, job: str, state: str, after: int, page: Sequence[Stored]) -> None:
        """Begin the next looks behind the entries at the front that this worker lacks the pipelines of."""
        if self._passed.get((job, state), 0) == after:
            for stored in page:
                if (entry := Entry.of(stored[0])) is not None and self._pipelines.has(entry, job):
                    break
                self._passed[job, state] = stored[0].seq

    def _beginnable(self, job: str, page: Sequence[Stored]) -> list[tuple[Entry, Stored]]:
        """Those that this worker has the pipelines of and whose groups may begin runs now."""
        return [
            (entry, stored)
            for stored in page
            if (entry := Entry.of(stored[0])) is not None
            and self._pipelines.has(entry, job)
            and not self._holds_back(entry, job)
        ]

    def _page(self, job: str, state: str | None, after: int, limit: int) -> Sequence[Stored]:
        """With what pipelines are called with: a run that begins soon need not read its entry once more."""
        tags = {} if state is None else {"state": [state]}
        return self._store.catalogue.list_stored(job, Selection(tags=tags, after=after, limit=limit))

    def _holds_back(self, entry: Entry, job: str) -> bool:
        is_held_back = job in self._limits and self._limits[job].holds_back(entry.group)
        self.are_held_back |= is_held_back
        return is_held_back

    def _use_up(self) -> Iterator[Candidate]:
        while self._ready:
            if self._ready[0][1].id not in self._ended:
                yield self._ready[0]
            self._ready.popleft()
