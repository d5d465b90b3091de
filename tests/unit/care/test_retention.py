"""Retention: what each rule keeps, what always stays, and that clocks decide nothing dangerous."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kedge
from kedge.care.retention import RetentionPolicy, execute, format_duration, parse_duration, plan
from kedge.errors import NotFound, Validation
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus
from kedge.ports import Index, NewCheckpoint, Selection, Update

MINUTE = 60
HOUR = 3600
DAY = 86_400
START_S = 1_750_032_000  # 2025-06-16 00:00 UTC, a Monday


@dataclass(frozen=True)
class Row:
    """A checkpoint to be: when its clock said it was made, and what else rules look at."""

    at_s: int = 0
    job: str = "job"
    level: str = "step"
    is_corrupted: bool = False
    is_pinned: bool = False
    tags: tuple[tuple[str, str], ...] = ()
    parent: int | None = None  # the number of an earlier row


def fill(index: Index, rows: Sequence[Row]) -> list[Checkpoint]:
    saved: list[Checkpoint] = []
    for number, row in enumerate(rows, sum(job.last_seq for job in index.jobs())):
        record = NewCheckpoint(
            id=CheckpointId(f"row_{number}"),
            job=row.job,
            step="step",
            level=CheckpointLevel(row.level),
            created_us=(START_S + row.at_s) * 1_000_000,
            size_bytes=1,
            stored_bytes=10,
            digest=bytes(32),
            codec="kedge1",
            schema_version="1.0",
            manifest=b"\x01\xc0",
            parent=None if row.parent is None else saved[row.parent].id,
            tags=dict(row.tags),
            is_pinned=row.is_pinned,
            status=CheckpointStatus.CORRUPTED if row.is_corrupted else CheckpointStatus.CREATED,
        )
        saved += index.commit([record], actor="test")
    return saved


@pytest.fixture
def index() -> Iterator[Index]:
    with kedge.open("memory:") as manager:
        yield manager.store.index


def kept(index: Index, job: str | None = "job", **rules: object) -> list[int]:
    """Numbers of the rows a policy keeps."""
    return _numbers(k.checkpoint.id for k in plan(index, RetentionPolicy(**rules), job).keep)  # type: ignore[arg-type]


def _numbers(ids: Iterator[str] | Sequence[str]) -> list[int]:
    return sorted(int(each.removeprefix("row_")) for each in ids)


# Policies


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": True},
        {"keep_last": 2.0},
        {"keep_last": 10**12},
        {"daily": "7"},
        {"keep_last_per_level": {}},
        {"keep_last_per_level": {"step": 0}},
        {"keep_last_per_level": {"epoch": 3}},
        {"keep_last_per_level": [("step", 3)]},
        {"min_per_level": {"step": None}},
        {"keep_within": ""},
        {"keep_within": "7"},
        {"keep_within": "7 days"},
        {"keep_within": "-7d"},
        {"keep_within": "0d"},
        {"keep_within": "12h1d"},
        {"keep_within": "٧d"},
        {"keep_within": "9" * 20 + "d"},
        {"keep_within": "9" * 5000 + "d"},
        {"keep_within": 3600},
        {"keep_within": timedelta()},
        {"keep_within": timedelta(microseconds=5)},
        {"keep_tags": []},
        {"keep_tags": "release"},
        {"keep_tags": ["two words"]},
        {"keep_tags": [3]},
        {"keep_tags": {"bad/name": None}},
        {"keep_tags": ["a=" + "x" * 2000]},
    ],
    ids=lambda rules: str(rules)[:50],
)
def test_a_policy_that_makes_no_sense_is_refused_with_a_hint(rules: dict[str, object]) -> None:
    with pytest.raises(Validation) as failure:
        RetentionPolicy(**rules)  # type: ignore[arg-type]
    assert failure.value.hint


@pytest.mark.parametrize(
    ("text", "seconds", "shortest"),
    [
        ("90s", 90, "90s"),
        ("90m", 5400, "90m"),
        ("36h", 36 * HOUR, "36h"),
        ("7d", 7 * DAY, "7d"),
        ("2w", 14 * DAY, "14d"),
        ("1d12h", 36 * HOUR, "36h"),
        (" 1w1d1h1m1s ", 694_861, "694861s"),
    ],
)
def test_durations(text: str, seconds: int, shortest: str) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)
    assert format_duration(parse_duration(text)) == shortest
    assert parse_duration(shortest) == timedelta(seconds=seconds)


def test_a_policy_is_the_same_after_json() -> None:
    policy = RetentionPolicy(
        keep_last=3,
        keep_last_per_level={"stage": 2},
        keep_within="1d12h",
        hourly=1,
        daily=2,
        weekly=3,
        monthly=4,
        keep_tags={"release": None, "env": "prod"},
        min_per_level={CheckpointLevel.PIPELINE: 1},
    )
    text = policy.to_json()
    assert RetentionPolicy.from_json(text) == policy
    assert json.loads(text)["keep_within"] == "36h"
    assert json.loads(text)["keep_tags"] == ["release", "env=prod"]
    assert json.loads(RetentionPolicy(keep_last=5).to_json()) == {"keep_last": 5}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"keep_lst": 3}',
        '{"keep_last": "3"}',
        '{"keep_last": null}',
        '{"keep_within": 7}',
        '{"keep_tags": "a"}',
        '{"keep_tags": null}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:30],
)
def test_json_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(Validation):
        RetentionPolicy.from_json(text)


# Each rule


def test_keep_last_follows_the_sequence(index: Index) -> None:
    fill(index, [Row(at_s=-n * DAY) for n in range(5)])  # the clock runs backwards
    assert kept(index, keep_last=2) == [3, 4]


def test_keep_last_does_not_count_corrupted_ones(index: Index) -> None:
    fill(index, [Row(), Row(), Row(is_corrupted=True), Row(), Row(is_corrupted=True)])
    assert kept(index, keep_last=2) == [1, 3, 4]


def test_levels_are_counted_apart(index: Index) -> None:
    fill(index, [Row(level=level) for level in ("stage", "stage", "step", "step", "stage", "step")])
    assert kept(index, keep_last_per_level={"stage": 2, "step": 1}) == [1, 4, 5]
    assert kept(index, keep_last=1, min_per_level={"stage": 1}) == [4, 5]


def test_minimums_hold_when_age_keeps_nothing(index: Index) -> None:
    rows = [Row(level="stage"), Row(level="stage"), Row(MINUTE, level="step"), Row(90 * DAY, level="step")]
    fill(index, [*rows, Row(180 * DAY, level="substep")])
    assert kept(index, keep_within="1h", min_per_level={"stage": 1, "step": 2}) == [1, 2, 3, 4]


def test_age_is_seen_from_the_newest(index: Index) -> None:
    fill(index, [Row(n * HOUR) for n in range(10)])  # years ago
    assert kept(index, keep_within="3h") == [6, 7, 8, 9]
    assert kept(index, keep_within=timedelta(hours=3)) == [6, 7, 8, 9]


def test_periods_keep_the_newest_of_each_that_has_any(index: Index) -> None:
    fill(index, [Row(n * 20 * MINUTE) for n in range(9)] + [Row(5 * DAY), Row(5 * DAY + MINUTE)])
    assert kept(index, hourly=3) == [5, 8, 10]
    assert kept(index, daily=5) == [8, 10]


def test_weeks_and_months(index: Index) -> None:
    fill(index, [Row(n * DAY) for n in range(21)])  # Monday 16 June to Sunday 6 July 2025
    assert kept(index, weekly=2) == [13, 20]
    assert kept(index, monthly=2) == [14, 20]


def test_tags_keep_by_name_or_by_value(index: Index) -> None:
    fill(index, [Row(tags=(("env", value),)) for value in ("prod", "test", "prod")] + [Row()])
    assert kept(index, keep_tags=["env"]) == [0, 1, 2, 3]
    assert kept(index, keep_tags=["env=test"]) == [1, 3]
    assert kept(index, keep_tags={"env": "prod", "other": None}) == [0, 2, 3]


def test_every_reason_is_told(index: Index) -> None:
    fill(index, [Row(tags=(("release", "1"),), is_pinned=True), Row(), Row(parent=1)])
    made = plan(index, RetentionPolicy(keep_last=1, keep_tags=["release"], daily=1), "job")
    reasons = {k.checkpoint.id: k.reasons for k in made.keep}
    assert reasons["row_0"] == ("pinned", "tag release")
    assert reasons["row_1"] == ("ancestor of row_2",)
    assert reasons["row_2"] == ("newest", "last 1", "daily")


# What always stays


def test_the_only_usable_one_stays(index: Index) -> None:
    fill(index, [Row(), Row(is_corrupted=True), Row(is_corrupted=True)])
    assert kept(index, keep_tags=["none"]) == [0, 2]


def test_if_all_are_corrupted_all_stay(index: Index) -> None:
    fill(index, [Row(is_corrupted=True)] * 3)
    assert kept(index, keep_last=1) == [0, 1, 2]


def test_an_unknown_job_has_an_empty_plan(index: Index) -> None:
    made = plan(index, RetentionPolicy(keep_last=1), "nobody")
    assert (made.keep, made.delete, made.frees_bytes) == ((), (), 0)
    assert execute(index, made, actor="test") == made


def test_ancestors_stay_in_other_jobs(index: Index) -> None:
    fill(index, [Row(job="a"), Row(job="a", parent=0), Row(job="a"), Row(job="b", parent=1), Row(job="b")])
    assert kept(index, job=None, keep_last=2) == [0, 1, 2, 3, 4]
    assert kept(index, job=None, keep_last=1) == [2, 4]


def test_a_chain_that_leaves_the_job_and_comes_back_is_followed(index: Index) -> None:
    fill(index, [Row(), Row(job="other", parent=0), Row(job="other", parent=1), Row(), Row(parent=2)])
    assert kept(index, keep_last=1) == [0, 4]


def test_a_parent_that_was_deleted_before_ends_the_chain(index: Index) -> None:
    saved = fill(index, [Row(), Row(parent=0), Row(parent=1), Row(job="other"), Row(parent=2)])
    index.delete([saved[1].id], actor="test")
    assert kept(index, keep_last=1) == [2, 4]
    index.delete([saved[2].id], actor="test")
    assert kept(index, keep_last=1) == [4]


# Clocks


def test_a_clock_in_the_future_does_not_wipe_the_job(index: Index) -> None:
    fill(index, [*(Row(n * HOUR) for n in range(10)), Row(25 * 365 * DAY)])
    assert kept(index, keep_within="6h") == [6, 7, 8, 9, 10]


def test_a_wrong_clock_that_was_set_right_ages_nothing(index: Index) -> None:
    times = [0, 1, 2, 3, 4, 5, 6, 7]
    ahead = [0, 1, 2, 99_999, 4, 99_999, 6, 7]
    behind = [0, 1, 2, -99_999, 4, -99_999, 6, 7]
    for job, hours in {"right": times, "ahead": ahead, "behind": behind}.items():
        first = len(fill(index, [Row(n * HOUR, job=job) for n in hours]))
        assert first == 8
    right = [n % 8 for n in kept(index, "right", keep_within="6h")]
    assert right == [1, 2, 3, 4, 5, 6, 7]
    assert [n % 8 for n in kept(index, "ahead", keep_within="6h")] == right
    assert [n % 8 for n in kept(index, "behind", keep_within="6h")] == right


@pytest.mark.parametrize("wrong", [99_999, -99_999])
def test_wrong_readings_do_not_keep_everything_either(index: Index, wrong: int) -> None:
    """One clock that was far ahead, or one that starts in 1970 at each boot, must not end all deleting."""
    fill(index, [Row((wrong if n % 10 == 3 else n) * HOUR) for n in range(100)])
    assert kept(index, keep_within="20h") == list(range(79, 100))


def test_two_hosts_with_different_clocks(index: Index) -> None:
    fill(index, [Row(n * MINUTE + (n % 2) * DAY) for n in range(100)])
    assert kept(index, keep_within="2h") == list(range(1, 100))  # the first may be a day old


def test_a_clock_set_back_does_not_delete_the_newest(index: Index) -> None:
    fill(index, [*(Row(n * DAY) for n in range(5)), Row(-365 * DAY)])
    for rules in ({"daily": 2}, {"keep_within": "1h"}, {"keep_last": 1}, {"keep_tags": ["none"]}):
        assert 5 in kept(index, **rules)
    assert kept(index, daily=3) == [3, 4, 5]


# Executing


def test_execute_deletes_what_was_planned(index: Index) -> None:
    fill(index, [Row() for _ in range(5)])
    made = plan(index, RetentionPolicy(keep_last=2), "job")
    assert made.frees_bytes == 30
    assert len(index.list("job")) == 5
    done = execute(index, made, actor="test")
    assert done == made
    assert _numbers([c.id for c in index.list("job")]) == [3, 4]


def test_what_changed_since_the_plan_is_respected(index: Index) -> None:
    saved = fill(index, [Row(parent=None if n == 0 else 0 if n == 1 else None) for n in range(6)])
    made = plan(index, RetentionPolicy(keep_last=1, keep_tags=["keep"]), "job")
    assert _numbers([c.id for c in made.delete]) == [0, 1, 2, 3, 4]
    index.update(saved[1].id, Update(is_pinned=True), actor="test")  # its parent 0 stays with it
    index.update(saved[2].id, Update(tags={"keep": "yes"}), actor="test")
    index.delete([saved[3].id], actor="test")
    fill(index, [Row()])  # row 5 is not the last any more, and yet was not planned to go
    late = index.list("job", Selection(limit=1))[0]
    done = execute(index, made, actor="test")
    assert _numbers([c.id for c in done.delete]) == [4]
    assert done.frees_bytes == 10
    left = index.list("job")
    assert {c.id for c in left} == {saved[0].id, saved[1].id, saved[2].id, saved[5].id, late.id}
    assert [k.checkpoint.id for k in done.keep] == [c.id for c in left]
    reasons = {k.checkpoint.id: k.reasons for k in done.keep}
    assert reasons[saved[0].id] == (f"ancestor of {saved[1].id}",)
    assert reasons[saved[1].id] == ("pinned",)
    assert reasons[saved[2].id] == ("tag keep",)


def test_pinned_between_planning_again_and_deleting(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last moment: the index refuses the batch, the rest of it still goes, ancestors of the pinned stay."""
    fill(index, [Row(), Row(parent=0), Row(parent=1), Row(), Row()])
    made = plan(index, RetentionPolicy(keep_last=1), "job")
    delete = index.delete

    def pin_first(ids: Sequence[str], *, actor: str) -> Sequence[CheckpointId]:
        monkeypatch.undo()
        index.update("row_2", Update(is_pinned=True), actor="test")
        return delete(ids, actor=actor)

    monkeypatch.setattr(index, "delete", pin_first)
    done = execute(index, made, actor="test")
    assert _numbers([c.id for c in done.delete]) == [3]
    assert _numbers([c.id for c in index.list("job")]) == [0, 1, 2, 4]
    assert _numbers([k.checkpoint.id for k in done.keep]) == [0, 1, 2, 4]


def test_many_go_in_small_transactions_children_first(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(index, [*(Row(parent=n - 1 if n % 350 else None) for n in range(1000)), Row()])
    made = plan(index, RetentionPolicy(keep_last=1), "job")
    seen: list[tuple[int, int]] = []
    batches: list[int] = []
    delete = index.delete

    def watch(ids: Sequence[str], *, actor: str) -> Sequence[CheckpointId]:
        batches.append(len(ids))
        gone = delete(ids, actor=actor)
        left = {c.id for c in index.list("job")}
        assert all(c.parent is None or c.parent in left for c in index.list("job"))
        return gone

    monkeypatch.setattr(index, "delete", watch)
    done = execute(index, made, actor="test", progress=lambda n, total: seen.append((n, total)))
    assert len(done.delete) == sum(batches) == 1000
    assert max(batches) <= 500
    assert seen[-1] == (1000, 1000)
    assert [n for n, _ in seen] == sorted(n for n, _ in seen)


def test_through_the_manager() -> None:
    with kedge.open("memory:") as manager:
        ids = [manager.save("job", "step", {"n": n}) for n in range(5)]
        assert len(manager.apply(RetentionPolicy(keep_last=3), job="job").delete) == 2
        assert manager.cleanup("job", keep_last=3) == 2
        assert manager.cleanup("job", keep_last=10) == 0
        assert [c.id for c in manager.list("job")] == ids[2:]
        with pytest.raises(NotFound):
            manager.load(ids[0])
        manager.set_retention("job", RetentionPolicy(keep_last=1))
        last = manager.save("job", "step", {"n": 5})
        assert [c.id for c in manager.list("job")] == [last]


# Invariants

rows = st.lists(
    st.builds(
        Row,
        at_s=st.integers(-3 * DAY, 3 * DAY) | st.just(10_000 * DAY),
        job=st.sampled_from(["a", "b"]),
        level=st.sampled_from(list(CheckpointLevel)),
        is_corrupted=st.integers(0, 3).map(lambda n: n == 0),
        is_pinned=st.integers(0, 9).map(lambda n: n == 0),
        tags=st.sampled_from([(), (), (("t", "1"),), (("t", "2"),)]),
    ),
    min_size=1,
    max_size=14,
)
counts = st.integers(1, 4)
levels = st.dictionaries(st.sampled_from(list(CheckpointLevel)), counts, min_size=1)
rules = st.fixed_dictionaries(
    {},
    optional={
        "keep_last": counts,
        "keep_last_per_level": levels,
        "keep_within": st.sampled_from(["1m", "5h", "1d", "2d12h"]),
        "hourly": counts,
        "daily": counts,
        "weekly": counts,
        "monthly": counts,
        "keep_tags": st.sampled_from([["t"], ["t=1"]]),
        "min_per_level": levels,
    },
).filter(bool)
links = st.lists(st.none() | st.integers(0, 13), min_size=14, max_size=14)
jobs = st.sampled_from(["a", "b", None])


def linked(rows: list[Row], links: list[int | None]) -> list[Row]:
    return [
        replace(row, parent=link % n if link is not None and n else None)
        for n, (row, link) in enumerate(zip(rows, links, strict=False))
    ]


@given(rows=rows, links=links, rules=rules, job=jobs)
def test_invariants(rows: list[Row], links: list[int | None], rules: dict[str, object], job: str | None) -> None:
    with kedge.open("memory:") as manager:
        index = manager.store.index
        saved = fill(index, linked(rows, links))
        policy = RetentionPolicy(**rules)  # type: ignore[arg-type]
        made = plan(index, policy, job)
        keep = {k.checkpoint.id for k in made.keep}
        delete = {c.id for c in made.delete}
        scope = [c for c in saved if job in (None, c.job)]

        assert keep | delete == {c.id for c in scope}
        assert not keep & delete
        assert all(k.reasons for k in made.keep)
        assert {c.id for c in scope if c.is_pinned} <= keep
        for name in {c.job for c in scope}:
            usable = [c for c in scope if c.job == name and c.status is not CheckpointStatus.CORRUPTED]
            if usable:
                assert usable[-1].id in keep
            else:
                assert {c.id for c in scope if c.job == name} <= keep
            for level, count in (policy.min_per_level or {}).items():
                assert {c.id for c in usable if c.level == level} - delete >= {
                    c.id for c in [c for c in usable if c.level == level][-count:]
                }
        by_id = {c.id: c for c in saved}
        for each in keep:
            above = by_id[each].parent
            while above is not None:
                assert above not in delete
                above = by_id[above].parent

        done = execute(index, made, actor="test")
        assert done.delete == made.delete
        assert done.keep == made.keep
        again = plan(index, policy, job)
        assert again.delete == ()
        assert {k.checkpoint.id for k in again.keep} == keep


@given(rows=rows, links=links, rules=rules, job=jobs)
def test_a_mark_of_damage_deletes_nothing(
    rows: list[Row], links: list[int | None], rules: dict[str, object], job: str | None
) -> None:
    policy = RetentionPolicy(**rules)  # type: ignore[arg-type]
    kept_ids: list[set[str]] = []
    for marked in (True, False):
        with kedge.open("memory:") as manager:
            index = manager.store.index
            fill(index, [replace(row, is_corrupted=marked and row.is_corrupted) for row in linked(rows, links)])
            kept_ids.append({k.checkpoint.id for k in plan(index, policy, job).keep})
    assert kept_ids[0] >= kept_ids[1]


@given(rows=rows, links=links, few=rules, more=rules, job=jobs)
def test_more_rules_never_delete_more(
    rows: list[Row], links: list[int | None], few: dict[str, object], more: dict[str, object], job: str | None
) -> None:
    with kedge.open("memory:") as manager:
        index = manager.store.index
        fill(index, linked(rows, links))
        less = plan(index, RetentionPolicy(**few), job)  # type: ignore[arg-type]
        both = plan(index, RetentionPolicy(**{**more, **few}), job)  # type: ignore[arg-type]
        assert {c.id for c in both.delete} <= {c.id for c in less.delete}


@given(rows=rows, one=st.integers(1, 5 * DAY), other=st.integers(1, 5 * DAY))
def test_a_longer_time_never_deletes_more(rows: list[Row], one: int, other: int) -> None:
    with kedge.open("memory:") as manager:
        index = manager.store.index
        fill(index, [replace(row, job="job") for row in rows])
        shorter, longer = (kept(index, keep_within=timedelta(seconds=s)) for s in sorted((one, other)))
        assert set(shorter) <= set(longer)


@given(rows=rows, times=st.permutations(range(14)), count=counts)
@example(rows=[Row(at_s=n) for n in range(5)], times=list(range(13, -1, -1)), count=2)
def test_clocks_do_not_matter_for_keep_last(rows: list[Row], times: list[int], count: int) -> None:
    rows = [replace(row, job="job") for row in rows]
    shuffled = [replace(row, at_s=at * DAY) for row, at in zip(rows, times, strict=False)]
    results = []
    for variant in (rows, shuffled):
        with kedge.open("memory:") as manager:
            fill(manager.store.index, variant)
            results.append(kept(manager.store.index, keep_last=count, keep_last_per_level={"step": count}))
    assert results[0] == results[1]
