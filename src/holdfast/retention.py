"""Which checkpoints stay. A plan is made first, shown if wanted, then executed.

A checkpoint stays when any rule of the policy keeps it. Whatever the rules say, these stay too:

    pinned     until somebody lets go of them
    newest     the newest checkpoint of each job that is not corrupted, so never the only usable one
    ancestors  the parents of what stays, and their parents, in other jobs too when all jobs are planned

"Last" and "newest" come from sequence numbers (I4). Corrupted checkpoints satisfy no counting or time rule
and go, unless a job has no other ones.

Clocks cannot be trusted with deleting, so the time of day is never asked. Age is counted back from the job's
newest usable checkpoint, along the sequence: readings of the clock that contradict the sequence are passed
over, and a pause counts for at most half of `keep_within`. An idle job, a clock that jumps ahead and one that
is set back therefore lose no history at once. Hourly to monthly rules keep the newest checkpoint, by sequence,
of each of the last n such periods (UTC) that have any.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from itertools import islice

from .errors import Conflict, NotFound, Validation
from .model import Checkpoint, CheckpointLevel, CheckpointStatus, parse_choice, parse_name, parse_tags
from .ports import Index

Progress = Callable[[int, int], None]  # (deleted so far, to delete)

_PAGE = 1000
_BATCH = 200  # deletions per transaction: few enough that savers do not wait for them
_ATTEMPTS = 8
_MAX_COUNT = 1_000_000_000

_DURATION = re.compile(r"(?:(\d+)w)?(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", re.ASCII)
_UNITS_S = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}

_PERIODS: Mapping[str, Callable[[datetime], Hashable]] = {
    "hourly": lambda at: (at.year, at.month, at.day, at.hour),
    "daily": lambda at: (at.year, at.month, at.day),
    "weekly": lambda at: at.isocalendar()[:2],
    "monthly": lambda at: (at.year, at.month),
}


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What to keep: a checkpoint stays when any of these says so. A policy that keeps nothing is refused.

    keep_last            the newest n of a job
    keep_last_per_level  the newest n of each level named: {"stage": 5, "step": 20}
    keep_within          what is at most so much older than the newest: a timedelta, "7d", "36h", "1d12h"
    hourly … monthly     the newest of each of the last n hours, days, ISO weeks, months with checkpoints
    keep_tags            what has any of these tags: ["release", "env=prod"], {"release": None, "env": "prod"}
    min_per_level        a floor below all other rules: of each level named, at least its newest n stay
    """

    keep_last: int | None = None
    keep_last_per_level: Mapping[CheckpointLevel, int] | Mapping[str, int] | None = None
    keep_within: timedelta | str | None = None
    hourly: int | None = None
    daily: int | None = None
    weekly: int | None = None
    monthly: int | None = None
    keep_tags: Mapping[str, str | None] | Sequence[str] = ()
    min_per_level: Mapping[CheckpointLevel, int] | Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        for name in ("keep_last", *_PERIODS):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        for name in ("keep_last_per_level", "min_per_level"):
            object.__setattr__(self, name, _parse_levels(name, getattr(self, name)))
        within = None if self.keep_within is None else parse_duration(self.keep_within)
        object.__setattr__(self, "keep_within", within)
        object.__setattr__(self, "keep_tags", _parse_keep_tags(self.keep_tags))
        if not any(getattr(self, field.name) for field in fields(self)):
            raise Validation("the policy keeps nothing", hint="give at least one rule, such as keep_last=10")

    def to_json(self) -> str:
        """The policy as JSON text: only the rules it has, durations as text."""
        rules = {field.name: getattr(self, field.name) for field in fields(self)}
        if isinstance(self.keep_within, timedelta):
            rules["keep_within"] = format_duration(self.keep_within)
        return json.dumps({name: rule for name, rule in rules.items() if rule}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RetentionPolicy:
        """The policy of `to_json`; anything else, an unknown rule included, is refused."""
        try:
            rules = json.loads(text)
        except (ValueError, TypeError, RecursionError) as error:
            raise Validation(
                f"the retention policy is not JSON: {error}", hint='write it like {"keep_last": 10}'
            ) from error
        if not isinstance(rules, dict):
            raise Validation("a retention policy is a JSON object", hint='write it like {"keep_last": 10}')
        known = [field.name for field in fields(cls)]
        if unknown := sorted(rules.keys() - set(known)):
            raise Validation(f"no retention rule is called {unknown[0]!r}", hint=f"use some of: {', '.join(known)}")
        return cls(**rules)


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint that stays, and every reason for it."""

    checkpoint: Checkpoint
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy keeps and deletes, by job and sequence; after `execute`, what was kept and deleted.

    `frees_bytes` is what the deleted saves once added to the store. gc gives back the part of it that nothing
    else shares.
    """

    policy: RetentionPolicy
    keep: tuple[Kept, ...]
    delete: tuple[Checkpoint, ...]
    frees_bytes: int
    job: str | None = None  # None: all jobs


def plan(index: Index, policy: RetentionPolicy, job: str | None = None) -> Plan:
    """What `policy` would delete in one job or, with None, in all. Nothing is changed.

    A plan for one job reads only that job (I6): it does not see that a checkpoint has children in other jobs.
    """
    reasons: dict[str, list[str]] = {}
    found: dict[str, Checkpoint] = {}
    for name in [job] if job is not None else _job_names(index):
        history = _history(index, name)
        found.update((c.id, c) for c in history)
        reasons.update(_kept_by_rules(policy, history))
    _keep_ancestors(index, found, reasons, job)
    delete = tuple(c for c in found.values() if c.id not in reasons)
    keep = tuple(Kept(c, tuple(reasons[c.id])) for c in found.values() if c.id in reasons)
    return Plan(policy, keep, delete, sum(c.stored_bytes for c in delete), job)


def execute(index: Index, planned: Plan, *, actor: str, progress: Progress | None = None) -> Plan:
    """Delete what was planned and answer what was really deleted.

    The policy is asked again first, and only what both plans delete goes: so what was pinned, tagged or made
    a parent meanwhile stays, and a checkpoint saved since is never touched. Children go before their parents,
    in small transactions: an interruption leaves no checkpoint without its ancestors.
    """
    if not planned.delete:
        return planned
    now = plan(index, planned.policy, planned.job)
    meant = {c.id for c in planned.delete}
    doomed = _children_first([c for c in now.delete if c.id in meant])
    parents: dict[str, str | None] = {c.id: c.parent for c in doomed}
    spared: dict[str, list[str]] = {}
    deleted: set[str] = set()
    for start in range(0, len(doomed), _BATCH):
        batch = [c.id for c in doomed[start : start + _BATCH]]
        deleted.update(_delete(index, batch, parents, spared, actor=actor))
        if progress:
            progress(start + len(batch), len(doomed))

    reasons: dict[str, tuple[str, ...]] = {kept.checkpoint.id: kept.reasons for kept in (*planned.keep, *now.keep)}
    reasons.update((each, tuple(why)) for each, why in spared.items())
    keep = [
        Kept(c, reasons.get(c.id, ("saved after the plan was made",)))
        for c in sorted([*(kept.checkpoint for kept in now.keep), *now.delete], key=lambda c: (c.job, c.seq))
        if c.id in reasons or c.id not in meant
    ]
    gone = tuple(c for c in planned.delete if c.id in deleted)
    return Plan(planned.policy, tuple(keep), gone, sum(c.stored_bytes for c in gone), planned.job)


def _delete(
    index: Index,
    batch: Sequence[str],
    parents: Mapping[str, str | None],
    spared: dict[str, list[str]],
    *,
    actor: str,
) -> Sequence[str]:
    """Delete a batch in one transaction; what was pinned since the plan is spared, with its ancestors."""
    for attempt in range(1, _ATTEMPTS + 1):
        batch = [each for each in batch if each not in spared]
        if not batch:
            break
        try:
            return index.delete(batch, actor=actor)
        except Conflict:
            if attempt == _ATTEMPTS:
                raise
        for each in batch:
            if _is_pinned(index, each):
                spared.setdefault(each, []).append("pinned")
                above = parents[each]
                while above is not None and above in parents:
                    spared.setdefault(above, []).append(f"ancestor of {each}")
                    above = parents[above]
    return ()


def _is_pinned(index: Index, checkpoint_id: str) -> bool:
    try:
        return index.get(checkpoint_id).is_pinned
    except NotFound:
        return False


def _children_first(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    """The same checkpoints, every child before its parent."""
    by_id = {c.id: c for c in checkpoints}
    placed: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:
        line = []
        above: Checkpoint | None = checkpoint
        while above is not None and above.id not in placed:
            line.append(above)
            above = by_id.get(above.parent) if above.parent else None
        placed.update((c.id, c) for c in reversed(line))
    return list(reversed(placed.values()))


# Reading the index


def _job_names(index: Index) -> Iterator[str]:
    after = ""
    while page := index.jobs(limit=_PAGE, after=after):
        yield from (job.name for job in page)
        after = page[-1].name


def _history(index: Index, job: str) -> list[Checkpoint]:
    """All checkpoints of a job, oldest first, read in pages so that no read transaction lasts long."""
    pages: list[Sequence[Checkpoint]] = []
    before: int | None = None
    while page := index.list(job, limit=_PAGE, before=before):
        pages.append(page)
        before = page[0].seq
        if len(page) < _PAGE:
            break
    return [checkpoint for page in reversed(pages) for checkpoint in page]


# The rules


def _kept_by_rules(policy: RetentionPolicy, history: Sequence[Checkpoint]) -> dict[str, list[str]]:
    """ID → reasons of what stays in one job, by rules, pins, and as the newest. `history` is oldest first."""
    reasons: dict[str, list[str]] = {}

    def keep(chosen: Iterable[Checkpoint], reason: str) -> None:
        for checkpoint in chosen:
            reasons.setdefault(checkpoint.id, []).append(reason)

    usable = [c for c in reversed(history) if c.status is not CheckpointStatus.CORRUPTED]  # newest first
    if not usable:
        keep(history, "all of this job are corrupted")
    keep((c for c in history if c.is_pinned), "pinned")
    keep(usable[:1], "newest")
    if policy.keep_last is not None:
        keep(usable[: policy.keep_last], f"last {policy.keep_last}")
    for level, count in (policy.keep_last_per_level or {}).items():
        keep(islice((c for c in usable if c.level == level), count), f"last {count} of level {level}")
    for level, count in (policy.min_per_level or {}).items():
        keep(islice((c for c in usable if c.level == level), count), f"minimum {count} of level {level}")
    if policy.keep_within is not None:
        within = parse_duration(policy.keep_within)
        keep(_young(usable, within), f"within {format_duration(within)}")
    for name, period in _PERIODS.items():
        if (count := getattr(policy, name)) is not None:
            keep(islice(_newest_of_each(usable, period), count), name)
    for wanted in policy.keep_tags:
        keep((c for c in history if _has_tag(c, wanted)), f"tag {wanted}")
    return reasons


def _young(usable: Sequence[Checkpoint], within: timedelta) -> Sequence[Checkpoint]:
    """The newest ones, back to the oldest that is at most `within` older than the newest."""
    within_s = within.total_seconds()
    ages_s = _ages([c.created_at.timestamp() for c in usable], longest_pause_s=within_s / 2)
    count = max((n for n, age_s in enumerate(ages_s, 1) if age_s <= within_s), default=0)
    return usable[:count]


def _ages(times: Sequence[float], *, longest_pause_s: float) -> Iterator[float]:
    """Ages in seconds, newest first, by the longest series of times so far that agrees with the sequence.

    What is not in that series has a wrong clock, and the age of its newer neighbour in it. An age depends on newer
    checkpoints only, so that deleting older ones changes nothing.
    """
    # For each length of a series: minus the latest time at which one can start, and the age of that start.
    starts: list[float] = []
    start_ages: list[float] = []
    longest, age = 0, 0.0
    for time in times:
        length = bisect_right(starts, -time)  # of the longest series this one can go before
        own = start_ages[length - 1] + min(-starts[length - 1] - time, longest_pause_s) if length else 0.0
        starts[length : length + 1] = [-time]
        start_ages[length : length + 1] = [own]
        if length + 1 > longest:
            longest, age = length + 1, own
        elif length + 1 == longest:
            age = min(age, own)
        yield age


def _newest_of_each(usable: Sequence[Checkpoint], period: Callable[[datetime], Hashable]) -> Iterator[Checkpoint]:
    seen: set[Hashable] = set()
    for checkpoint in usable:
        if (bucket := period(checkpoint.created_at)) not in seen:
            seen.add(bucket)
            yield checkpoint


def _has_tag(checkpoint: Checkpoint, wanted: str) -> bool:
    name, equals, value = wanted.partition("=")
    return checkpoint.tags.get(name) == value if equals else name in checkpoint.tags


def _keep_ancestors(
    index: Index, found: Mapping[str, Checkpoint], reasons: dict[str, list[str]], job: str | None
) -> None:
    """Add the ancestors of what stays; with one job in `found`, chains may leave it and come back.

    A chain is followed into other jobs only if that may save something: a parent exists before its child, so
    nothing with a higher sequence number can be an ancestor.
    """
    at_risk = [c.seq for c in found.values() if c.id not in reasons]
    if not at_risk:
        return
    first_at_risk = min(at_risk)
    elsewhere: set[str] = set()
    for descendant in [found[each] for each in reasons]:
        at = descendant
        while at.parent is not None:
            above = found.get(at.parent)
            if above is not None:
                if above.id in reasons:
                    break  # its own ancestors are followed from there
                reasons[above.id] = [f"ancestor of {descendant.id}"]
            elif job is None or first_at_risk > descendant.seq or at.parent in elsewhere:
                break
            else:
                elsewhere.add(at.parent)
                try:
                    above = index.get(at.parent)
                except NotFound:
                    break  # deleted before: the chain ends here
            at = above


# What users write


def _check_count(name: str, count: object) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAX_COUNT:
        raise Validation(f"{name}={count!r}", hint="use a whole number from 1 on, or leave the rule out")
    return count


def _parse_levels(name: str, counts: object) -> dict[CheckpointLevel, int]:
    if counts is None:
        return {}
    if not isinstance(counts, Mapping):
        raise Validation(f"{name}={counts!r}", hint='map levels to numbers, such as {"stage": 5}')
    return {
        parse_choice(CheckpointLevel, level): _check_count(f"{name}[{level!r}]", count)
        for level, count in counts.items()
    }


def _parse_keep_tags(tags: object) -> tuple[str, ...]:
    """Tags as "name" (with any value) or "name=value"; tag names cannot hold "="."""
    if isinstance(tags, Mapping):
        tags = [name if value is None else f"{name}={value}" for name, value in tags.items()]
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not all(isinstance(tag, str) for tag in tags):
        raise Validation(f"keep_tags={tags!r}", hint='give names or names with values: ["release", "env=prod"]')
    for tag in tags:
        name, _, value = tag.partition("=")
        parse_tags({parse_name("tag", name): value})
    return tuple(dict.fromkeys(tags))


def parse_duration(duration: timedelta | str) -> timedelta:
    """A timedelta of whole seconds, or text of numbers with units: "90m", "36h", "7d", "2w", "1d12h"."""
    if isinstance(duration, str):
        found = _DURATION.fullmatch(duration.strip())
        amounts = found.groups(default="0") if found else ()
        try:
            seconds = sum(int(n) * unit_s for n, unit_s in zip(amounts, _UNITS_S.values(), strict=False))
            parsed = timedelta(seconds=seconds)
        except (OverflowError, ValueError):
            parsed = timedelta()
    else:
        parsed = duration
    if not isinstance(parsed, timedelta) or parsed.microseconds or parsed <= timedelta():
        raise Validation(
            f"{str(duration)[:40]!r} is not a duration",
            hint="use whole seconds or more: 90m, 36h, 7d, 2w, 1d12h",
        )
    return parsed


def format_duration(duration: timedelta) -> str:
    """The text `parse_duration` reads, in the largest of d, h, m, s that needs no fraction."""
    seconds = duration.days * 86_400 + duration.seconds
    unit = next(unit for unit in "dhms" if seconds % _UNITS_S[unit] == 0)
    return f"{seconds // _UNITS_S[unit]}{unit}"
