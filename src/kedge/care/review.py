"""A policy's verdict on each checkpoint, newest first, while the history is read page by page.

Only newer checkpoints decide about a checkpoint: counts, periods and ages start at the newest, and a parent is older
than its children. So nothing needs the whole history in memory, and deletions can happen at once, children before their
parents: an interruption leaves no checkpoint without its ancestors.

Memory grows with what rules count (periods, open links to parents), never with the history, except that `keep_within`
holds thirty-two bytes for each checkpoint of a job.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kedge.errors import Conflict, NotFound
from kedge.model import Checkpoint, CheckpointLevel, CheckpointStatus
from kedge.ports import NEWEST_INTACT, Index, NewCheckpoint, Selection, pages

from .policies import PERIODS, RetentionPolicy, format_duration, parse_duration
from .records import needed_for

C = TypeVar("C", Checkpoint, NewCheckpoint)

_PAGE = 1000
_BATCH = 200  # deletions per transaction: few, so that savers do not wait for them
_ATTEMPTS = 8

UNPLANNED = "saved after the plan was made"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A checkpoint and every reason to keep it; without a reason it is deleted."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]


def review(index: Index, policy: RetentionPolicy, job: str | None = None) -> Iterator[Verdict]:
    """Yield the verdict of `policy` on each checkpoint of one job or, with None, of all by name. Changes nothing.

    Of all jobs, those that Kedge itself needs later lose nothing (`records.py`), unless they are named. The newest of a
    job comes first. What is saved meanwhile gets no verdict, but keeps its ancestors. A review of one job reads only
    that job (I6): it does not see children in other jobs.
    """
    for history in _histories(index, policy, job):
        for page in history.pages():
            yield from page


def carry_out(
    index: Index,
    policy: RetentionPolicy,
    job: str | None = None,
    *,
    actor: str,
    among: Collection[str] | None = None,
    page_rows: int = _PAGE,
) -> Iterator[list[Verdict]]:
    """`review`, with deletion in small transactions. Yields pages of what was done; some are empty.

    With `among`, only these IDs may be deleted. What was pinned meanwhile stays, with its ancestors.
    """
    links = _links(index, policy) if job is None else _Links()
    last: list[Checkpoint] = []  # to be deleted after their children in other jobs
    for history in _histories(index, policy, job, links, among, page_rows):
        for page in history.pages():
            now = [v.checkpoint for v in page if not v.reasons and v.checkpoint.id not in links.late]
            last += [v.checkpoint for v in page if not v.reasons and v.checkpoint.id in links.late]
            spared = _delete(index, now, actor)
            for checkpoint in now:
                if checkpoint.id in spared:
                    history.keep_ancestors_of(checkpoint)
            yield [
                Verdict(v.checkpoint, spared.get(v.checkpoint.id, v.reasons))
                for v in page
                if v.reasons or v.checkpoint.id not in links.late
            ]
    spared = _delete(index, parents_first(last)[::-1], actor)
    yield [Verdict(checkpoint, spared.get(checkpoint.id, ())) for checkpoint in last]


def _delete(index: Index, doomed: Sequence[Checkpoint], actor: str) -> dict[str, tuple[str, ...]]:
    """Delete these, children first, in small transactions. Return the spared ones with reasons."""
    spared: dict[str, tuple[str, ...]] = {}
    needed: dict[str, str] = {}  # parent → the spared descendant
    for start in range(0, len(doomed), _BATCH):
        batch = doomed[start : start + _BATCH]
        for attempt in range(1, _ATTEMPTS + 1):
            for checkpoint in batch:
                if checkpoint.id in needed and checkpoint.id not in spared:
                    spared[checkpoint.id] = (f"ancestor of {needed[checkpoint.id]}",)
                if checkpoint.id in spared and checkpoint.parent is not None:
                    needed.setdefault(checkpoint.parent, needed.get(checkpoint.id, checkpoint.id))
            try:
                if ids := [checkpoint.id for checkpoint in batch if checkpoint.id not in spared]:
                    index.delete(ids, actor=actor)
                break
            except Conflict:
                if attempt == _ATTEMPTS:
                    raise
            spared.update((c.id, ("pinned",)) for c in batch if c.id not in spared and _is_pinned(index, c.id))
    return spared


def _is_pinned(index: Index, checkpoint_id: str) -> bool:
    try:
        return index.get(checkpoint_id).is_pinned
    except NotFound:
        return False


def parents_first(checkpoints: Sequence[C]) -> list[C]:
    """Return the same checkpoints, every parent before its children."""
    by_id = {checkpoint.id: checkpoint for checkpoint in checkpoints}
    placed: dict[str, C] = {}
    for checkpoint in checkpoints:
        line: dict[str, C] = {}
        above: C | None = checkpoint
        while above is not None and above.id not in placed and above.id not in line:
            line[above.id] = above
            above = by_id.get(above.parent) if above.parent else None
        placed.update(reversed(line.items()))
    return list(placed.values())


# Links between jobs


class _Links:
    """What the checkpoints of one job mean for those of others."""

    def __init__(self) -> None:
        self.protected: dict[str, str] = {}  # ancestors of what stays in another job → that checkpoint
        self.late: set[str] = set()  # ancestors of what is deleted in another job: they are deleted after it


def _links(index: Index, policy: RetentionPolicy) -> _Links:
    links = _Links()
    for history in _histories(index, policy, None, links):
        of_going: dict[str, str] = {}  # unvisited parents
        for page in history.pages():
            for verdict in page:
                of_going.pop(verdict.checkpoint.id, None)
                if not verdict.reasons and verdict.checkpoint.parent is not None:
                    of_going[verdict.checkpoint.parent] = verdict.checkpoint.id
        for parent, descendant in history.open_links.items():
            for ancestor in _line(index, parent, links.protected):
                links.protected[ancestor.id] = descendant
        for parent in of_going:
            links.late.update([ancestor.id for ancestor in _line(index, parent, links.late)])
    return links


def _line(index: Index, checkpoint_id: str | None, known: Collection[str]) -> Iterator[Checkpoint]:
    """Yield a checkpoint and its ancestors, up to one that is known or deleted."""
    while checkpoint_id is not None and checkpoint_id not in known:
        try:
            checkpoint = index.get(checkpoint_id)
        except NotFound:
            return
        yield checkpoint
        checkpoint_id = checkpoint.parent


def _histories(
    index: Index,
    policy: RetentionPolicy,
    job: str | None,
    links: _Links | None = None,
    among: Collection[str] | None = None,
    page_rows: int = _PAGE,
) -> Iterator[_History]:
    if job is not None:
        yield _History(index, policy, job, None, among, page_rows)
        return
    if links is None:
        links = _links(index, policy)
    after = ""
    while jobs := index.jobs(limit=_PAGE, after=after):
        for record in jobs:
            needed = needed_for(index, record.name)
            yield _History(index, policy, record.name, links.protected, among, page_rows, needed)
        after = jobs[-1].name


# One job


class _History:
    """The checkpoints of a job, newest first, and the verdict on each."""

    def __init__(
        self,
        index: Index,
        policy: RetentionPolicy,
        job: str,
        protected: Mapping[str, str] | None,
        among: Collection[str] | None,
        page_rows: int,
        needed: str = "",
    ) -> None:
        """Prepare a review.

        `protected`: what other jobs need; None if they are not reviewed, so that links through them are followed.
        `needed`: what Kedge itself needs this job for; then all of it stays.
        """
        self._index = index
        self._policy = policy
        self._job = job
        self._protected = protected
        self._among = among
        self._page_rows = page_rows
        self._needed = needed
        self._top = 0  # the newest sequence number whose parent is known
        self.open_links: dict[str, str] = {}  # by unvisited parent of what stays: the descendant that keeps it
        self._followed: set[str] = set()  # those of them known to be in this job
        self._elsewhere: set[str] = set()

    def keep_ancestors_of(self, checkpoint: Checkpoint, descendant: str = "") -> None:
        if checkpoint.parent is not None:
            self.open_links.setdefault(checkpoint.parent, descendant or checkpoint.id)

    def pages(self) -> Iterator[list[Verdict]]:
        """Yield verdicts, newest first; pages that only measure ages are empty."""
        young_from = young_usable_from = 0
        if self._policy.keep_within is not None and not self._needed:
            within_s = parse_duration(self._policy.keep_within).total_seconds()
            ages, usable_ages = _Ages(within_s), _Ages(within_s)
            for page in self._read():
                for checkpoint in page:
                    ages.add(checkpoint)
                    if checkpoint.status is not CheckpointStatus.CORRUPTED:
                        usable_ages.add(checkpoint)
                yield []
            young_from, young_usable_from = ages.young_from, usable_ages.young_from
        has_usable = bool(self._index.list(self._job, NEWEST_INTACT))
        rules = _Rules(
            self._policy, has_usable, _Counts(self._policy, young_usable_from), _Counts(self._policy, young_from)
        )
        for page in self._read():
            self._look_above()
            yield [self._judge(rules, checkpoint) for checkpoint in page]

    def _read(self) -> Iterator[list[Checkpoint]]:
        """Yield pages from separate transactions, so that none lasts long."""
        before: int | None = None
        while page := self._index.list(self._job, Selection(limit=self._page_rows, before=before)):
            self._top = max(self._top, page[-1].seq)
            before = page[0].seq
            yield page[::-1]

    def _look_above(self) -> None:
        """Keep the ancestors of what was saved since; the next review judges it."""
        for newer in pages(self._index.list, self._job, self._page_rows, Selection(after=self._top)):
            for checkpoint in newer:
                self.keep_ancestors_of(checkpoint)
            self._top = newer[-1].seq

    def _judge(self, rules: _Rules, checkpoint: Checkpoint) -> Verdict:
        reasons = [self._needed] if self._needed else rules.reasons(checkpoint)
        descendant = self.open_links.pop(checkpoint.id, None)
        self._followed.discard(checkpoint.id)
        if not reasons:
            if descendant is None:
                descendant = self._is_needed(checkpoint)
            if descendant is not None:
                reasons = [f"ancestor of {descendant}"]
            elif self._among is not None and checkpoint.id not in self._among:
                reasons = [UNPLANNED]
        else:
            descendant = None
        if reasons:
            self.keep_ancestors_of(checkpoint, descendant or checkpoint.id)
        return Verdict(checkpoint, tuple(reasons))

    def _is_needed(self, checkpoint: Checkpoint) -> str | None:
        """Return the descendant, in other jobs or through them, that keeps a checkpoint no rule keeps."""
        if self._protected is not None:
            return self._protected.get(checkpoint.id)
        for parent, descendant in list(self.open_links.items()):
            if parent not in self._followed:
                self._follow(parent, descendant)
        return self.open_links.pop(checkpoint.id, None)

    def _follow(self, parent: str, descendant: str) -> None:
        """Follow a link to a parent: into this job, directly or through others, or nowhere."""
        del self.open_links[parent]
        for ancestor in _line(self._index, parent, self._elsewhere):
            if ancestor.job == self._job:
                self.open_links.setdefault(ancestor.id, descendant)
                self._followed.add(ancestor.id)
                return
            self._elsewhere.add(ancestor.id)


class _Rules:
    """The rules of a policy, applied to a job's checkpoints one by one, newest first.

    They are counted twice. Among the usable ones, so that no damaged one takes a sound one's place. And among all, so
    that a mark of damage, which may be wrong, deletes nothing that would stay without it.
    """

    def __init__(self, policy: RetentionPolicy, has_usable: bool, usable: _Counts, every: _Counts) -> None:
        self._policy = policy
        self._has_usable = has_usable
        self._usable = usable
        self._every = every

    def reasons(self, checkpoint: Checkpoint) -> list[str]:
        reasons = [] if self._has_usable else ["all of this job are corrupted"]
        if checkpoint.is_pinned:
            reasons.append("pinned")
        if checkpoint.status is not CheckpointStatus.CORRUPTED:
            reasons += self._usable.reasons(checkpoint)
        reasons += self._every.reasons(checkpoint)
        reasons += [f"tag {wanted}" for wanted in self._policy.keep_tags if _has_tag(checkpoint, wanted)]
        return list(dict.fromkeys(reasons))


class _Counts:
    """The rules that count checkpoints, periods or time, applied newest first."""

    def __init__(self, policy: RetentionPolicy, young_from: int) -> None:
        """Start counting. `keep_within` keeps sequence numbers from `young_from`."""
        self._policy = policy
        self._young_from = young_from
        self._count = 0  # checkpoints so far
        self._of_level: dict[CheckpointLevel, int] = {}
        self._periods: dict[str, set[Hashable]] = {name: set() for name in PERIODS}

    def reasons(self, checkpoint: Checkpoint) -> Iterator[str]:
        policy, level = self._policy, checkpoint.level
        self._count += 1
        number = self._of_level[level] = self._of_level.get(level, 0) + 1
        if self._count == 1:
            yield "newest"
        if policy.keep_last is not None and self._count <= policy.keep_last:
            yield f"last {policy.keep_last}"
        for rule, counts in (("last", policy.keep_last_per_level), ("minimum", policy.min_per_level)):
            if (count := (counts or {}).get(level, 0)) and number <= count:
                yield f"{rule} {count} of level {level}"
        if policy.keep_within is not None and checkpoint.seq >= self._young_from:
            yield f"within {format_duration(parse_duration(policy.keep_within))}"
        for name, period in PERIODS.items():
            if self._is_newest_of(period, checkpoint, self._periods[name], getattr(policy, name) or 0):
                yield name

    @staticmethod
    def _is_newest_of(period: Callable[..., Hashable], checkpoint: Checkpoint, seen: set[Hashable], most: int) -> bool:
        if len(seen) >= most or (bucket := period(checkpoint.created_at)) in seen:
            return False
        seen.add(bucket)
        return True


def _has_tag(checkpoint: Checkpoint, wanted: str) -> bool:
    name, equals, value = wanted.partition("=")
    return checkpoint.tags.get(name) == value if equals else name in checkpoint.tags


class _Ages:
    """Ages in seconds, newest first, by the longest series of times so far that agrees with the sequence.

    A checkpoint outside that series has a wrong clock, and the age of its newer neighbour in it. An age depends only on
    newer checkpoints, so that deleting older ones changes nothing. A pause counts for at most half of `within_s`.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self.young_from = 0  # the oldest sequence number within the limit; all above it stay, too
        # For each length of a series: minus the latest time at which one can start, and the age of that start.
        self._starts = array("d")
        self._start_ages = array("d")
        self._longest, self._age = 0, 0.0

    def add(self, checkpoint: Checkpoint) -> None:
        time_s = checkpoint.created_at.timestamp()
        starts, ages = self._starts, self._start_ages
        length = bisect_right(starts, -time_s)  # of the longest series this one can precede
        own = ages[length - 1] + min(-starts[length - 1] - time_s, self._within_s / 2) if length else 0.0
        starts[length : length + 1] = array("d", [-time_s])
        ages[length : length + 1] = array("d", [own])
        if length + 1 > self._longest:
            self._longest, self._age = length + 1, own
        elif length + 1 == self._longest:
            self._age = min(self._age, own)
        if self._age <= self._within_s:
            self.young_from = checkpoint.seq
