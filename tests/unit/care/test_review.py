"""Reviews, page by page, against a plan of the whole history; and policies applied after saves in bounded steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kedge
from kedge.care.policies import PERIODS, RetentionPolicy, parse_duration
from kedge.care.review import carry_out, review
from kedge.care.upkeep import PAGE_ROWS
from kedge.model import Checkpoint, CheckpointStatus
from kedge.ports import Index
from tests.unit.care.test_costs import record
from tests.unit.care.test_retention import Row, fill, jobs, linked, links, rows, rules

# The reference: the rules, said of a whole history at once


def expected(
    histories: dict[str, list[Checkpoint]], policy: RetentionPolicy, everything: dict[str, Checkpoint]
) -> set[str]:
    """IDs that stay in these jobs."""
    keep: set[str] = set()
    for history in histories.values():
        keep |= by_rules(history, policy)
    for checkpoint_id in list(keep):
        above = everything[checkpoint_id].parent
        while above is not None and above in everything:
            keep.add(above)
            above = everything[above].parent
    return keep & {c.id for history in histories.values() for c in history}


def by_rules(history: list[Checkpoint], policy: RetentionPolicy) -> set[str]:
    usable = [c for c in reversed(history) if c.status is not CheckpointStatus.CORRUPTED]
    chosen = [c for c in history if c.is_pinned or not usable or any(has_tag(c, tag) for tag in policy.keep_tags)]
    return {c.id for c in chosen} | counted(usable, policy) | counted(history[::-1], policy)


def counted(usable: Sequence[Checkpoint], policy: RetentionPolicy) -> set[str]:
    chosen: list[Iterable[Checkpoint]] = [usable[: max(1, policy.keep_last or 0)]]
    for counts in (policy.keep_last_per_level or {}, policy.min_per_level or {}):
        chosen += [[c for c in usable if c.level == level][:count] for level, count in counts.items()]
    if policy.keep_within is not None:
        chosen.append(young(usable, parse_duration(policy.keep_within).total_seconds()))
    for name, period in PERIODS.items():
        chosen.append(islice(newest_of_each(usable, period), getattr(policy, name) or 0))
    return {c.id for some in chosen for c in some}


def has_tag(checkpoint: Checkpoint, tag: str) -> bool:
    name, equals, value = tag.partition("=")
    return checkpoint.tags.get(name) == value if equals else name in checkpoint.tags


def newest_of_each(usable: Sequence[Checkpoint], period: Callable[..., Any]) -> Iterator[Checkpoint]:
    seen = set()
    for checkpoint in usable:
        if (bucket := period(checkpoint.created_at)) not in seen:
            seen.add(bucket)
            yield checkpoint


def young(usable: Sequence[Checkpoint], within_s: float) -> Sequence[Checkpoint]:
    """Back to the last whose age, along the longest series of times that agrees with the sequence, is within."""
    times = [c.created_at.timestamp() for c in usable]
    series: list[tuple[int, float]] = []  # of each: the longest series that ends with it, and its age in that
    count = 0
    for n, time_s in enumerate(times):
        before = [(series[m][0], -times[m], m) for m in range(n) if times[m] >= time_s]
        if before:
            # Of the longest series before it the one that starts last, so that the age is the least.
            length = max(before)[0]
            m = max(m for of_length, _, m in before if of_length == length)
            series.append((length + 1, series[m][1] + min(times[m] - time_s, within_s / 2)))
        else:
            series.append((1, 0.0))
        longest = max(length for length, _ in series)
        if min(age for length, age in series if length == longest) <= within_s:
            count = n + 1
    return usable[:count]


@given(rows=rows, links=links, rules=rules, job=jobs, page_rows=st.integers(1, 5))
def test_page_by_page_the_same_goes_as_by_the_whole_history(
    rows: list[Row], links: list[int | None], rules: dict[str, object], job: str | None, page_rows: int
) -> None:
    policy = RetentionPolicy(**rules)  # type: ignore[arg-type]
    with kedge.open("memory:") as manager:
        index = manager.store.index
        saved = fill(index, linked(rows, links))
        names = [job] if job else sorted({c.job for c in saved})
        stays = expected({name: index.list(name) for name in names}, policy, {c.id: c for c in saved})
        told = list(review(index, policy, job))
        assert {v.checkpoint.id for v in told if v.reasons} == stays
        assert [(v.checkpoint.job, v.checkpoint.seq) for v in told] == sorted(
            ((c.job, c.seq) for c in saved if c.job in names), key=lambda place: (place[0], -place[1])
        )
        for _ in carry_out(index, policy, job, actor="test", page_rows=page_rows):
            left = {c.id: c for name in index.jobs() for c in index.list(name.name)}
            others = [c for c in left.values() if job is not None and c.job != job]
            broken = [c.id for c in left.values() if c.parent is not None and c.parent not in left and c not in others]
            assert not broken  # an interruption here leaves no checkpoint without its ancestors
        assert {c.id for name in names for c in index.list(name)} == stays


def test_a_child_saved_during_the_walk_keeps_its_ancestors() -> None:
    """MUTANT: without `_look_above`, row_0 goes and leaves the new one without its parent (I3)."""
    with kedge.open("memory:") as manager:
        index = manager.store.index
        first = fill(index, [Row() for _ in range(6)])[0]
        walk = carry_out(index, RetentionPolicy(keep_last=1), "job", actor="test", page_rows=2)
        next(walk)
        child = manager.save("job", "step", {}, parent=first.id)
        list(walk)
        left = [c.id for c in manager.list("job")]
    assert left == ["row_0", "row_5", child]


# After saves


class Counted:
    """An index that counts the rows it was asked for."""

    def __init__(self, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        real = index.list

        def counting(*args: Any, **kwargs: Any) -> list[Checkpoint]:
            found = real(*args, **kwargs)
            self.rows += len(found)
            return found

        monkeypatch.setattr(index, "list", counting)


POLICIES = [RetentionPolicy(keep_last=10_000), RetentionPolicy(keep_last=5), RetentionPolicy(keep_within="9d", daily=3)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.to_json())
def test_no_save_reads_the_history(policy: RetentionPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: neither the first save of a process nor any other; whatever the policy keeps."""
    with kedge.open(tmp_path) as manager:
        manager.store.index.commit([record(n) for n in range(2000)], actor="test")
        manager.set_retention("long", policy)
        counted = Counted(manager.store.index, monkeypatch)
        for _ in range(3):
            manager.save("long", "step", {})
            assert counted.rows <= PAGE_ROWS + 16
            counted.rows = 0
    with kedge.open(tmp_path) as manager:
        counted = Counted(manager.store.index, monkeypatch)
        for _ in range(3):
            manager.save("long", "step", {})
            assert counted.rows <= PAGE_ROWS + 16
            counted.rows = 0


def test_of_processes_that_save_once_few_walk_through_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I6: closing goes on with a walk, so each of them would read all of it; one in a tenth of the history does."""
    with kedge.open(tmp_path) as manager:
        manager.store.index.commit([record(n) for n in range(2000)], actor="test")
        manager.set_retention("long", RetentionPolicy(keep_last=10_000))
    rows = 0
    for _ in range(20):
        with kedge.open(tmp_path) as manager:
            counted = Counted(manager.store.index, monkeypatch)
            manager.save("long", "step", {})
        rows += counted.rows
    assert rows <= 2000 + 20 * 16 + PAGE_ROWS


def test_saves_together_do_all_that_the_policy_asks_for(tmp_path: Path) -> None:
    with kedge.open(tmp_path) as manager:
        manager.store.index.commit([replace(record(n), is_pinned=n == 7) for n in range(1000)], actor="test")
        manager.set_retention("long", RetentionPolicy(keep_last=20))
        for _ in range(1000 // PAGE_ROWS + 4):
            newest = manager.save("long", "step", {})
        left = manager.list("long")
    assert left[0].id == "row_7"
    assert left[-1].id == newest
    assert 21 <= len(left) <= 21 + 1000 // PAGE_ROWS + 4


def test_a_process_that_saves_to_many_jobs_remembers_some_and_keeps_to_all_policies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.care.upkeep.MOST_JOBS", 2)
    names = [f"job-{n}" for n in range(5)]
    with kedge.open(tmp_path) as manager:
        for job in names:
            manager.set_retention(job, RetentionPolicy(keep_last=2))
        for n in range(40):
            for job in names:
                manager.save(job, f"step {n}", {"n": n})
        assert max(job.checkpoints for job in manager.jobs()) <= 4


def test_processes_that_save_once_keep_to_the_policy_too(tmp_path: Path) -> None:
    """What is kept is more than a save may look at, and no process lives long enough for a second save."""
    keep = 2 * PAGE_ROWS + 50
    with kedge.open(tmp_path) as manager:
        manager.store.index.commit([record(n) for n in range(keep)], actor="test")
        manager.store.index.set_retention("long", f'{{"keep_last":{keep}}}', actor="another process")
    most = 0
    for _ in range(36):
        with kedge.open(tmp_path) as manager:
            manager.save("long", "step", {})
            most = max(most, manager.jobs("long")[0].checkpoints)
    assert most <= keep + keep // 10 + 1
