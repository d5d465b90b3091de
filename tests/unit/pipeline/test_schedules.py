"""Schedules: when they are due, and that each moment is run once, whoever is there."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, InvalidName, Validation
from kedge.pipeline import schedules
from kedge.pipeline.cancellation import cancel
from kedge.pipeline.consumer import Worker
from kedge.pipeline.cron import Interval, parse_cron
from kedge.pipeline.entries import schedule_job
from tests.unit.pipeline.test_queues import POSTGRES


@pytest.fixture(params=["directory", POSTGRES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointManager]:
    is_directory = request.param == "directory"
    url = str(tmp_path / "store") if is_directory else request.getfixturevalue("postgres").empty_database()
    with kedge.open(url) as opened:
        yield opened


@kedge.pipeline
def nightly(city: str, scheduled_at: datetime) -> str:
    return f"{city} {scheduled_at:%d %H:%M}"


class Time:
    """The clock of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = datetime(2026, 1, 1, 12, tzinfo=UTC)
        monkeypatch.setattr("time.time", self.time)

    def time(self) -> float:
        return self.now.timestamp()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def serve(store: CheckpointManager) -> list[str]:
    said: list[str] = []
    worker = Worker(store, ["q"], {"nightly": nightly}, report=lambda run, text: said.append(f"{run} {text}"))
    worker.serve(until_empty=True)
    return said


@pytest.mark.parametrize(
    ("text", "zone", "after", "expected"),
    [
        ("*/15 * * * *", "UTC", "2026-01-01T00:01", ["01-01T00:15", "01-01T00:30"]),
        ("0 3 * * 1-5", "UTC", "2026-01-02T04:00", ["01-05T03:00", "01-06T03:00"]),
        ("0 0 13 * fri", "UTC", "2026-02-01T00:00", ["02-06T00:00", "02-13T00:00"]),
        ("30 2 29 feb *", "UTC", "2026-01-01T00:00", ["02-29T02:30"]),
        ("0 9 * * 7", "UTC", "2026-01-01T00:00", ["01-04T09:00"]),
        ("0 12 1,15 * *", "Europe/Berlin", "2026-07-01T11:00", ["07-15T10:00", "08-01T10:00"]),
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00", ["03-29T01:30", "03-30T00:30"]),  # skipped that night
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00", ["10-25T00:30", "10-26T01:30"]),  # twice that night
        ("30 * * * *", "Europe/Berlin", "2026-10-25T00:00", ["10-25T00:30", "10-25T01:30"]),  # every hour, twice too
        ("15,40 2 * * *", "Australia/Lord_Howe", "2026-10-03T12:00", ["10-03T15:40", "10-03T15:45"]),  # half an hour
        ("20 * * * *", "Australia/Lord_Howe", "2026-10-03T14:00", ["10-03T14:50", "10-03T15:50", "10-03T16:20"]),
        ("@daily", "UTC", "2026-12-31T00:00", ["01-01T00:00"]),
    ],
)
def test_when_a_cron_expression_is_due(text: str, zone: str, after: str, expected: list[str]) -> None:
    cron, moment = parse_cron(text, zone), datetime.fromisoformat(after).replace(tzinfo=UTC)
    found = []
    for _ in expected:
        following = cron.after(moment)
        assert following is not None
        moment = following
        found.append(f"{moment:%m-%dT%H:%M}")
    assert found == expected


@pytest.mark.parametrize(
    "text",
    ["", "* * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "5-1 * * * *", "*/0 * * * *", "x * * * *", "0 0 31 2 *"],
)
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(Validation, match="cron expression"):
        parse_cron(text, "UTC")


def test_an_interval_means_the_same_moments_everywhere() -> None:
    moment = datetime(2026, 1, 1, 0, 0, 7, tzinfo=UTC)
    assert Interval(60).after(moment) == datetime(2026, 1, 1, 0, 1, tzinfo=UTC)
    assert Interval(60).after(Interval(60).after(moment)) == datetime(2026, 1, 1, 0, 2, tzinfo=UTC)


@pytest.mark.parametrize("every_s", [1.1, 10 / 3, 90.1])
def test_an_interval_of_any_length_goes_on(every_s: float) -> None:
    """A moment that came after itself would be due for ever."""
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    for _ in range(1000):
        following = Interval(every_s).after(moment)
        assert 0 < (following - moment).total_seconds() < every_s + 1e-5
        moment = following


def test_each_moment_is_run_once(store: CheckpointManager, clock: Time) -> None:
    queue = kedge.queue("q", store=store)
    made = kedge.schedule(queue, "n", nightly, "Oslo", cron="0 3 * * *")
    assert made.due_at == datetime(2026, 1, 2, 3, tzinfo=UTC)
    assert serve(store) == []
    clock.now = datetime(2026, 1, 2, 3, 0, 1, tzinfo=UTC)
    key = "q:n-20260102T030000Z"
    assert serve(store) == [f"{key} is submitted by its schedule", f"{key} is completed"]
    assert queue.handle(key).result(0) == "Oslo 02 03:00"
    assert serve(store) == []
    assert len(store.list(schedule_job("q"))) == 1  # its history does not grow


@pytest.mark.parametrize(("catch_up", "days"), [("all", [2, 3, 4]), ("last", [4]), ("none", [])])
def test_missed_moments(store: CheckpointManager, clock: Time, catch_up: str, days: list[int]) -> None:
    kedge.schedule(kedge.queue("q", store=store), "n", nightly, "Oslo", cron="0 3 * * *", catch_up=catch_up)
    clock.now = datetime(2026, 1, 4, 12, tzinfo=UTC)
    said = serve(store)
    assert sorted(line for line in said if "completed" in line) == [
        f"q:n-2026010{day}T030000Z is completed" for day in days
    ]
    assert schedules.find_schedule(store, "q", "n").due_at == datetime(2026, 1, 5, 3, tzinfo=UTC)


def test_a_worker_that_dies_in_the_middle_leaves_one_schedule(
    store: CheckpointManager, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    kedge.schedule(kedge.queue("q", store=store), "n", nightly, "Oslo", cron="0 3 * * *")
    (record,) = store.list(schedule_job("q"))
    clock.now = datetime(2026, 1, 2, 3, 0, 1, tzinfo=UTC)

    def die(*_: object, **__: object) -> bool:
        raise kedge.StorageError("killed here")

    with monkeypatch.context() as patch, pytest.raises(kedge.StorageError):
        patch.setattr(store.catalogue, "delete", die)
        schedules.fire(store, record.id)
    assert len(store.list(schedule_job("q"))) == 2
    schedules.fire(store, record.id)
    assert len(store.list(schedule_job("q"))) == 1
    assert [line for line in serve(store) if "completed" in line] == ["q:n-20260102T030000Z is completed"]


def test_paused_changed_backfilled_deleted(store: CheckpointManager, clock: Time) -> None:
    queue = kedge.queue("q", store=store)
    kedge.schedule(queue, "n", nightly, "Oslo", every_s=3600, jitter_s=0)
    kedge.schedule(queue, "n", nightly, "Rome", cron="0 3 * * *")  # replaces it
    (found,) = schedules.schedules(store, "q")
    assert (found.cron, found.is_paused) == ("0 3 * * *", False)
    schedules.pause(store, "q", "n")
    clock.now += timedelta(days=1)
    assert serve(store) == []
    schedules.resume(store, "q", "n")
    with pytest.raises(kedge.Conflict, match="not paused"):
        schedules.resume(store, "q", "n")
    assert len([line for line in serve(store) if "completed" in line]) == 1
    start, end = datetime(2025, 12, 30, tzinfo=UTC), datetime(2026, 1, 3, tzinfo=UTC)
    with pytest.raises(Validation, match="is not later than the start"):
        schedules.backfill(store, "q", "n", end, start)
    keys = schedules.backfill(store, "q", "n", start, end)
    assert [key[4:12] for key in keys] == ["20251230", "20251231", "20260101", "20260102"]
    assert len([line for line in serve(store) if "completed" in line]) == 3  # one was run before
    assert queue.handle(keys[0]).result(0) == "Rome 30 03:00"
    schedules.unschedule(store, "q", "n")
    with pytest.raises(kedge.NotFound):
        schedules.pause(store, "q", "n")


def test_the_same_schedule_again_changes_nothing(store: CheckpointManager, clock: Time) -> None:
    """A program may declare its schedules whenever it starts: behind a time that no worker was there for, too."""
    queue = kedge.queue("q", store=store)

    def declare(city: str = "Oslo", hour: int = 3) -> schedules.Schedule:
        return kedge.schedule(queue, "n", nightly, city, cron=f"0 {hour} * * *")

    declare()
    clock.now = datetime(2026, 1, 2, 4, tzinfo=UTC)
    assert declare().due_at == datetime(2026, 1, 2, 3, tzinfo=UTC)
    assert len([line for line in serve(store) if "completed" in line]) == 1
    schedules.pause(store, "q", "n")
    assert declare().is_paused
    for other in (declare("Rome"), declare("Rome", 5)):
        assert not other.is_paused
        schedules.pause(store, "q", "n")
    assert len(store.list(schedule_job("q"))) == 1


def test_schedules_of_two_queues_may_have_one_name(store: CheckpointManager, clock: Time) -> None:
    for name, city in (("q", "Oslo"), ("other", "Rome")):
        kedge.schedule(kedge.queue(name, store=store), "n", nightly, city, cron="0 3 * * *")
    clock.now = datetime(2026, 1, 2, 4, tzinfo=UTC)
    said: list[str] = []
    worker = Worker(store, ["q", "other"], {"nightly": nightly}, report=lambda run, text: said.append(f"{run} {text}"))
    worker.serve(until_empty=True)
    assert sorted(line for line in said if "completed" in line) == [
        f"{name}:n-20260102T030000Z is completed" for name in ("other", "q")
    ]


def test_a_record_that_is_no_schedule_disturbs_nobody(store: CheckpointManager, clock: Time) -> None:
    made = kedge.schedule(kedge.queue("q", store=store), "n", nightly, "Oslo", cron="0 3 * * *")
    (record,) = store.list(schedule_job("q"))
    forged: list[dict[str, Any]] = [
        {}, {"schedule": 7}, {"schedule": {**record.metadata["schedule"], "zone": 1}}, {"due_at": 1e300},  # type: ignore[dict-item]
    ]  # fmt: skip
    for facts in forged:
        store.save(
            schedule_job("q"), "x", {}, metadata={**record.metadata, "schedule": None, **facts}, tags=record.tags
        )
    assert list(schedules.schedules(store, "q")) == [made]
    clock.now = datetime(2026, 1, 2, 4, tzinfo=UTC)
    assert len([line for line in serve(store) if "completed" in line]) == 1
    schedules.unschedule(store, "q", "n")
    assert list(schedules.schedules(store, "q")) == []


def test_a_name_that_leaves_no_room_for_the_keys_of_runs_is_refused(store: CheckpointManager, clock: Time) -> None:
    queue = kedge.queue("q", store=store)
    with pytest.raises(InvalidName, match="has too long a name"):
        kedge.schedule(queue, "n" * 104, nightly, "Oslo", cron="0 3 * * *")
    kedge.schedule(queue, "n" * 103, nightly, "Oslo", cron="0 3 * * *")
    clock.now = datetime(2026, 1, 2, 4, tzinfo=UTC)
    assert len([line for line in serve(store) if "completed" in line]) == 1


def test_a_backfill_of_too_many_times_submits_nothing(store: CheckpointManager) -> None:
    """The year 1900 for 2000 would otherwise fill the queue."""
    queue = kedge.queue("q", store=store)
    kedge.schedule(queue, "n", nightly, "Oslo", every_s=1)
    start = datetime(1900, 1, 1, tzinfo=UTC)
    with pytest.raises(Validation, match="more than 100,000 times from 1900-01-01 to 2000-01-01"):
        schedules.backfill(store, "q", "n", start, start.replace(year=2000))
    assert len(queue) == 0


def test_a_schedule_is_no_run_to_be_cancelled(store: CheckpointManager) -> None:
    kedge.schedule(kedge.queue("q", store=store), "nightly", nightly, "Berlin", every_s=60)
    with pytest.raises(kedge.NotFound):
        cancel(store, "schedule:q:nightly")
    assert schedules.find_schedule(store, "q", "nightly")


def test_what_a_schedule_may_be(store: CheckpointManager) -> None:
    queue = kedge.queue("q", store=store)
    nonsense: list[dict[str, Any]] = [
        {}, {"cron": "* * * * *", "every_s": 5}, {"every_s": 0.5}, {"cron": "@daily", "tz": "Mars/Base"},
        {"cron": "@daily", "catch_up": "some"}, {"every_s": 5, "jitter_s": -1},
    ]  # fmt: skip
    for rules in nonsense:
        with pytest.raises(Validation):
            kedge.schedule(queue, "n", nightly, "Oslo", **rules)
    assert store.list(schedule_job("q")) == []
