"""Schedules: runs that are submitted to a queue again and again.

A schedule is an entry of the job `queue:<name>:schedules`, delayed until the next moment it is due. The worker that
takes it submits the run of that moment, whose key is made of the queue, the schedule's name and the moment, and puts a
new entry in the place of the old one. So it is fenced and taken over as any entry is, no moment is run twice, and
waiting costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from blake3 import blake3

from kedge.errors import Conflict, InvalidName, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, parse_name

from .cron import Interval, Ticks, now, parse_cron, parse_zone
from .declaration import Pipeline, parse_pipeline
from .entries import (
    DELAYED,
    Arguments,
    Entry,
    EntryFacts,
    after_key,
    call_of,
    drop_entry,
    facts_of,
    inputs_of,
    new_entry,
    queue_job,
    save_entry,
    schedule_job,
)
from .inbox import parse_run_key
from .owner import take_lease
from .queues import Queue
from .retry import parse_count
from .wait import parse_seconds

PAUSED = "paused"
CATCH_UP = ("all", "last", "none")
LATE_S = 60.0  # with catch_up="none", what is later than this is left out
MOST_AT_ONCE = 1000  # missed moments that are submitted in one turn
_LEASE_S = 10.0
_MOST_BACKFILLED = 100_000  # times at once: a range of centuries is a typing mistake
_MOMENT = "scheduled_at"  # the parameter that is given the moment
_MOMENT_IN_KEYS = "%Y%m%dT%H%M%SZ"
_MOST_CHARACTERS = 104  # of the names of a queue and a schedule together: so much that the keys of runs are valid
_FIELDS = {
    "name": str, "queue": str, "cron": str, "every_s": int | float, "zone": str, "catch_up": str,
    "jitter_s": int | float, "retries": int, "takes_moment": bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Schedule:
    """When something is run, and what."""

    name: str
    queue: str
    pipeline: str
    cron: str
    every_s: float
    zone: str
    catch_up: str
    jitter_s: float
    retries: int
    due_at: datetime
    is_paused: bool
    takes_moment: bool  # the pipeline has a parameter `scheduled_at`

    @classmethod
    def of(cls, record: Checkpoint) -> Schedule | None:
        """None for a record that is no schedule: anybody who may save can write one, and it disturbs nobody."""
        entry, rule = Entry.of(record), record.metadata.get("schedule")
        if entry is None or not isinstance(rule, Mapping):
            return None
        if not all(isinstance(rule.get(name), kind) for name, kind in _FIELDS.items()):
            return None
        try:
            due_at = datetime.fromtimestamp(entry.due_at, UTC)
        except (ValueError, OverflowError):
            return None
        facts = {name: rule[name] for name in _FIELDS}
        return cls(**facts, pipeline=entry.pipeline, due_at=due_at, is_paused=record.tags.get("state") == PAUSED)

    @property
    def ticks(self) -> Ticks:
        return parse_cron(self.cron, self.zone) if self.cron else Interval(self.every_s)

    def key_at(self, moment: datetime) -> str:
        """Of the run: queues may have schedules of the same name."""
        return f"{self.queue}:{self.name}-{moment.astimezone(UTC):{_MOMENT_IN_KEYS}}"

    def missed(self, until: datetime) -> tuple[list[datetime], datetime | None]:
        """The moments from `due_at` to `until` that are to be run, and the next one to wait for."""
        moments: list[datetime] = []
        ticks = self.ticks
        following: datetime | None = self.due_at
        while following is not None and following <= until and len(moments) < MOST_AT_ONCE:
            moments.append(following)
            following = ticks.after(following)
        if self.catch_up == "all":
            return moments, following
        while following is not None and following <= until:  # a long pause: only the last ones matter
            moments[-1], following = following, ticks.after(max(following, until - timedelta(days=1)))
        latest = moments[-1:]
        if self.catch_up == "none":
            latest = [moment for moment in latest if (until - moment).total_seconds() <= LATE_S]
        return latest, following

    def submission(self, moment: datetime, call: Arguments) -> tuple[EntryFacts, Arguments]:
        """The entry, and the call, of the run for one moment."""
        key = parse_run_key(self.key_at(moment))
        share = int.from_bytes(blake3(key.encode()).digest(4), "big") / 2**32  # the same whoever submits it
        due_at = moment.timestamp() + share * self.jitter_s
        entry = new_entry(key, self.pipeline, due_at=due_at, retries=self.retries)
        kwargs = {**call["kwargs"], **({_MOMENT: moment} if self.takes_moment else {})}
        return entry, {**call, "kwargs": kwargs}

    def to_json(self) -> dict[str, object]:
        facts = {name: getattr(self, name) for name in self.__slots__ if name != "takes_moment"}
        return {**facts, "due_at": self.due_at.isoformat()}


@dataclass(frozen=True, slots=True)
class Rule:
    """When a schedule is due: the options of `schedule`."""

    cron: str | None = None
    every_s: float | None = None
    tz: str = "UTC"
    catch_up: str = "last"
    jitter_s: float = 0.0
    retries: int = 0

    def __post_init__(self) -> None:
        if (self.cron is None) == (self.every_s is None):
            raise Validation("a schedule needs either cron= or every_s=")
        if self.catch_up not in CATCH_UP:
            raise Validation(f"catch_up={self.catch_up!r}", hint=f"use one of: {', '.join(CATCH_UP)}")
        if self.every_s is not None and parse_seconds("every_s", self.every_s) < 1:
            raise Validation(f"every_s must be at least 1 (got {self.every_s!r})")
        parse_seconds("jitter_s", self.jitter_s)
        parse_count("retries", self.retries)
        parse_zone(self.tz)

    @property
    def ticks(self) -> Ticks:
        return parse_cron(self.cron, self.tz) if self.cron is not None else Interval(self.every_s or 0)


def schedule(
    queue: Queue,
    name: str,
    pipeline: Pipeline[..., object],
    /,
    *args: object,
    cron: str | None = None,
    every_s: float | None = None,
    tz: str = "UTC",
    catch_up: str = "last",
    jitter_s: float = 0.0,
    retries: int = 0,
    **kwargs: object,
) -> Schedule:
    """Submit `pipeline(*args, **kwargs)` whenever it is due; workers of the queue do it. Durable when this returns.

    `cron` has five fields, in the time zone `tz`; `every_s` is an interval. `catch_up` says what to do about moments at
    which no worker was there: run "all" of them, the "last" one, or "none". A run begins up to `jitter_s` later. A
    parameter `scheduled_at` of the pipeline is given the moment. The same call again changes nothing: not when the
    schedule is due, nor that it is paused. With other options or arguments, the schedule of that name is replaced.
    """
    rule = Rule(cron, every_s, tz, catch_up, jitter_s, retries)
    parse_pipeline(pipeline).check_options(args, rule)
    return schedule_call(queue, name, pipeline, args, kwargs, rule)


def schedule_call(
    queue: Queue,
    name: str,
    pipeline: Pipeline[..., object],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    rule: Rule,
) -> Schedule:
    """`schedule` for arguments whose names the options of `schedule` have, too."""
    if len(parse_name("schedule", name)) + len(queue.name) > _MOST_CHARACTERS:
        raise InvalidName(
            f"schedule {name[:60]}… has too long a name",
            hint=f"use at most {_MOST_CHARACTERS} characters for the names of the queue and the schedule together",
        )
    takes_moment = _MOMENT in inspect.signature(parse_pipeline(pipeline).function).parameters
    pipeline.check_call(args, {**kwargs, _MOMENT: now()} if takes_moment else kwargs)
    due_at = rule.ticks.after(now())
    assert due_at is not None  # nosec B101 # parse_cron has looked
    entry = new_entry(_lease_name(queue.name, name), pipeline.name, due_at=due_at.timestamp())
    entry["schedule"] = {
        "name": name, "queue": queue.name, "cron": rule.cron or "", "every_s": rule.every_s or 0.0, "zone": rule.tz,
        "catch_up": rule.catch_up, "jitter_s": rule.jitter_s, "retries": rule.retries, "takes_moment": takes_moment,
    }  # fmt: skip
    job = schedule_job(queue.name)
    with take_lease(queue.store, entry["run"], _LEASE_S, wait_s=_LEASE_S):
        earlier = _records(queue.store, queue.name, name)
        call = call_of(pipeline.function, args, kwargs)
        if earlier and _is_same(queue.store, earlier[-1], entry, call):
            return find_schedule(queue.store, queue.name, name)
        save_entry(queue.store, job, entry, call, tags={"schedule": name})
        for record in earlier:
            drop_entry(queue.store, record.id)
    return find_schedule(queue.store, queue.name, name)


def _is_same(store: CheckpointManager, record: Checkpoint, entry: EntryFacts, call: Arguments) -> bool:
    """Whether a schedule is as it is declared once more, such as by a program that does so whenever it starts."""
    saved = facts_of(record)
    if (saved["pipeline"], saved["schedule"]) != (entry["pipeline"], entry["schedule"]):
        return False
    return inputs_of(entry["pipeline"], store.load(record.id)) == inputs_of(entry["pipeline"], call)


def schedules(store: CheckpointManager, queue: str) -> Iterator[Schedule]:
    return (schedule for record in store.walk(schedule_job(queue)) if (schedule := Schedule.of(record)) is not None)


def find_schedule(store: CheckpointManager, queue: str, name: str) -> Schedule:
    return _parsed(_record(store, queue, name))


def _parsed(record: Checkpoint) -> Schedule:
    schedule = Schedule.of(record)
    assert schedule is not None  # nosec B101 # `_records` has looked
    return schedule


def pause(store: CheckpointManager, queue: str, name: str) -> None:
    """Submit nothing until `resume`."""
    with take_lease(store, _lease_name(queue, name), _LEASE_S, wait_s=_LEASE_S):
        store.tag(_record(store, queue, name).id, state=PAUSED)


def resume(store: CheckpointManager, queue: str, name: str) -> None:
    """Go on; what was due meanwhile is treated as `catch_up` says."""
    with take_lease(store, _lease_name(queue, name), _LEASE_S, wait_s=_LEASE_S):
        record = _record(store, queue, name)
        if record.tags.get("state") != PAUSED:
            raise Conflict(f"schedule {name} is not paused", hint=f"kedge schedule list {queue} shows it")
        _replace(store, record, facts_of(record))


def unschedule(store: CheckpointManager, queue: str, name: str) -> None:
    """Delete a schedule; its runs stay."""
    with take_lease(store, _lease_name(queue, name), _LEASE_S, wait_s=_LEASE_S):
        drop_entry(store, _record(store, queue, name).id)


def backfill(store: CheckpointManager, queue: str, name: str, start: datetime, end: datetime) -> list[str]:
    """Submit the runs of all moments from `start` to before `end`; those that were run stay as they are. Their keys.

    Validation, and nothing is submitted, if there are more than 100,000.
    """
    if start.tzinfo is None or end.tzinfo is None:
        raise Validation("backfill takes two moments with a time zone", hint="use datetime(…, tzinfo=UTC)")
    if end <= start:
        raise Validation(f"the end ({end:%Y-%m-%d %H:%M}) is not later than the start ({start:%Y-%m-%d %H:%M})")
    schedule, call = _with_call(store, queue, name)
    moments: list[datetime] = []
    moment = schedule.ticks.after(start - timedelta(microseconds=1))
    while moment is not None and moment < end:
        if len(moments) == _MOST_BACKFILLED:
            raise Validation(
                f"schedule {name} has more than {_MOST_BACKFILLED:,} times from {start:%Y-%m-%d} to {end:%Y-%m-%d}",
                hint="backfill shorter ranges, one after another",
            )
        moments.append(moment)
        moment = schedule.ticks.after(moment)
    return [_submit(store, queue_job(queue), schedule, due_at, call) for due_at in moments]


def _with_call(store: CheckpointManager, queue: str, name: str) -> tuple[Schedule, Arguments]:
    while True:
        record = _record(store, queue, name)
        try:
            return _parsed(record), store.load(record.id)
        except NotFound:
            if store.exists(record.id):
                raise
            # a worker has put another one in its place


def fire(store: CheckpointManager, entry_id: str) -> list[str]:
    """Submit what is due of a schedule whose lease the caller holds, and wait for the next moment; keys of runs."""
    try:
        record = store.get(entry_id)
    except NotFound:
        return []  # it was deleted, or another worker was here
    if (schedule := Schedule.of(record)) is None:
        return []
    if _record(store, schedule.queue, schedule.name).id != record.id:
        drop_entry(store, record.id)  # whoever replaced it died before this
        return []
    if schedule.is_paused or schedule.due_at > now():
        return []
    call = store.load(record.id)
    moments, following = schedule.missed(now())
    keys = [_submit(store, queue_job(schedule.queue), schedule, moment, call) for moment in moments]
    if following is None:
        drop_entry(store, record.id)
    else:
        _replace(store, record, {**facts_of(record), "due_at": following.timestamp()})
    return keys


def _submit(store: CheckpointManager, job: str, schedule: Schedule, moment: datetime, call: Arguments) -> str:
    entry, bound = schedule.submission(moment, call)
    if not store.list(job, tags={"run": entry["run"]}, limit=1) and not store.list(entry["run"], limit=1):
        save_entry(store, job, entry, bound)
    return entry["run"]


def _replace(store: CheckpointManager, record: Checkpoint, entry: EntryFacts) -> None:
    """Put a new entry in the place of an old one: workers learn of new ones by themselves."""
    if store.get_by_key(record.job, after_key(record.id)) is None:  # else somebody did this, and died
        tags = {"schedule": entry["schedule"]["name"]}
        save_entry(store, record.job, entry, store.load(record.id), after=record.id, tags=tags, state=DELAYED)
    drop_entry(store, record.id)


def _lease_name(queue: str, name: str) -> str:
    return parse_run_key(f"schedule:{queue}:{name}")


def _records(store: CheckpointManager, queue: str, name: str) -> list[Checkpoint]:
    records = store.list(schedule_job(queue), tags={"schedule": name})
    return [record for record in records if Schedule.of(record) is not None]


def _record(store: CheckpointManager, queue: str, name: str) -> Checkpoint:
    records = _records(store, queue, name)
    if not records:
        raise NotFound(f"queue {queue} has no schedule {name}", hint=f"kedge schedule list {queue} shows them")
    return records[-1]
