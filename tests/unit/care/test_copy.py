"""Copies between stores: everything arrives, only what is missing moves, nothing is merged."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

from __future__ import annotations

import contextlib
import functools
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kedge
from kedge.care.copy import CopyReport
from kedge.errors import Conflict, LeaseHeld, NotFound, Validation
from kedge.manager import CheckpointManager
from tests.parts import library, require
from tests.unit.cli.test_app import Run, answer, run, store  # noqa: F401 - fixtures

OLD = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "source") as store:
        yield store


@pytest.fixture
def target(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "target") as store:
        yield store


def noise(seed: int, megabytes: int = 1) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, megabytes << 20, dtype="u1")


def fill(store: CheckpointManager) -> list[str]:
    """Small and large states, with all that a checkpoint may have."""
    first = store.save("a", "small", {"n": 1}, tags={"k": "v"}, metadata={"loss": 0.5})
    second = store.save("a", "large ü", {"w": noise(1, 3)}, parent=first, pin=True, idempotency_key="once")
    third = store.save("b", "other", {"w": noise(1, 3), "text": "x" * 5000}, level="stage", parent=second)
    gone = store.save("b", "gone", 1)
    store.delete("b", gone)
    store.save("b", "after a gap", [1, 2])
    store.set_retention("b", kedge.RetentionPolicy(keep_last=5))
    return [first, second, third]


def same(a: CheckpointManager, b: CheckpointManager) -> None:
    """The same jobs, checkpoints and states; only what a save added to its store may differ."""

    def shown(store: CheckpointManager) -> list[object]:
        fields = (
            "id",
            "job",
            "seq",
            "step",
            "level",
            "parent",
            "created_at",
            "digest",
            "tags",
            "is_pinned",
            "metadata",
        )
        return [[getattr(c, f) for f in fields] for job in store.jobs() for c in store.list(job.name)]

    assert shown(a) == shown(b)
    assert [j.retention for j in a.jobs()] == [j.retention for j in b.jobs()]
    for job in a.jobs():
        for checkpoint in a.list(job.name):
            assert repr(a.load(checkpoint.id)) == repr(b.load(checkpoint.id))
    assert b.verify().is_ok


def test_everything_arrives(source: CheckpointManager, target: CheckpointManager) -> None:
    ids = fill(source)
    seen: list[tuple[int, int]] = []
    report = source.copy_to(target, progress=lambda done, total: seen.append((done, total)))
    assert (report.copied, report.present) == (4, 0)
    same(source, target)
    assert seen[-1][0] <= seen[-1][1]
    # keys too: who resumes on the copy does nothing twice
    assert target.save("a", "large ü", {"w": noise(1, 3)}, idempotency_key="once") == ids[1]


def test_only_what_is_missing_moves(source: CheckpointManager, target: CheckpointManager) -> None:
    weights = noise(2, 10)
    source.save("a", "one", {"w": weights})
    first = source.copy_to(target)
    weights[:100] = 0
    source.save("a", "two", {"w": weights})
    second = source.copy_to(target)
    assert (second.copied, second.present) == (1, 1)
    assert second.bytes_moved <= 0.11 * first.bytes_moved
    assert source.copy_to(target) == CopyReport(present=2)
    same(source, target)


def test_changes_and_deletions(source: CheckpointManager, target: CheckpointManager) -> None:
    first, second, third = fill(source)
    source.copy_to(target)
    source.tag(first, k=None, new="1")
    source.pin(second, False)
    source.set_status(third, "archived")
    assert source.copy_to(target).changed == 3
    same(source, target)
    assert target.get(third).status == "archived"
    source.delete("a", first)
    assert source.copy_to(target).deleted == 0
    assert target.exists(first)
    assert source.copy_to(target, mirror=True).deleted == 1
    same(source, target)
    assert target.get(second).parent == first  # as in the source, where it was deleted too


def test_one_job_and_since(source: CheckpointManager, target: CheckpointManager) -> None:
    _, second, third = fill(source)
    with pytest.raises(NotFound):
        source.copy_to(target, job="unknown")
    with pytest.raises(Validation):
        source.copy_to(target, since=datetime(2026, 1, 1))  # noqa: DTZ001 - that is what is refused
    assert source.copy_to(target, since=datetime.now(UTC) + timedelta(hours=1)).copied == 0
    assert source.copy_to(target, job="b").copied == 2
    assert [job.name for job in target.jobs()] == ["b"]
    assert target.get(third).parent == second  # which comes later, or never
    assert source.copy_to(target).copied == 2
    same(source, target)


def test_nothing_is_merged(source: CheckpointManager, target: CheckpointManager) -> None:
    fill(source)
    mine = target.save("a", "mine", 1)
    with pytest.raises(Conflict, match=mine):
        source.copy_to(target)
    assert [c.id for c in target.list("a")] == [mine]


def test_the_same_id_with_another_content_is_a_conflict(source: CheckpointManager, target: CheckpointManager) -> None:
    from dataclasses import replace

    from kedge.ports import NewCheckpoint

    taken = source.save("a", "step", {"n": 1})
    checkpoint, _ = source.store.index.read(taken)
    other = target.save("elsewhere", "step", {"n": 2})
    record = replace(NewCheckpoint.of(*target.store.index.read(other)), job="a")
    target.store.index.commit([replace(record, id=checkpoint.id)], actor="t")
    with pytest.raises(Conflict, match=taken):
        source.copy_to(target)
    assert target.load(taken) == {"n": 2}
    source.save("b", "step", {"n": 1})
    with pytest.raises(Conflict):
        source.copy_to(target)


def test_a_leased_job_is_left_to_its_holder(source: CheckpointManager, target: CheckpointManager) -> None:
    fill(source)
    with target.lease("a"), pytest.raises(LeaseHeld):
        source.copy_to(target)
    assert source.copy_to(target).copied == 4


def test_damage_in_the_source_stays_there(source: CheckpointManager, target: CheckpointManager, tmp_path: Path) -> None:
    _, second, third = fill(source)
    for pack in (tmp_path / "source" / "packs").iterdir():
        pack.write_bytes(pack.read_bytes()[:100_000] + bytes(200_000) + pack.read_bytes()[300_000:])
    report = source.copy_to(target)
    assert sorted(report.damaged) == sorted([second, third])
    assert report.copied == 2
    assert target.verify().is_ok


def test_a_chunk_that_gc_of_the_target_takes_away_is_moved_again(
    source: CheckpointManager, target: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.save("a", "one", {"w": noise(3, 2)})
    doomed = target.save("other", "same bytes", {"w": noise(3, 2)})
    target.delete("other", doomed)
    commit = target.store.index.commit
    calls: list[int] = []

    def late(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            target.gc()
        return commit(*args, **options)

    monkeypatch.setattr(target.store.index, "commit", late)
    assert source.copy_to(target).copied == 1
    assert len(calls) == 2
    assert target.verify().is_ok


def test_following(source: CheckpointManager, target: CheckpointManager) -> None:
    first, second, _ = fill(source)
    stop, rounds, moved = threading.Event(), [], threading.Semaphore(0)

    def changed(report: CopyReport) -> None:
        rounds.append(report)
        moved.release()

    follower = threading.Thread(
        target=source.follow_to, args=(target,), kwargs={"stop": stop, "changed": changed, "mirror": True}
    )
    follower.start()
    try:
        assert moved.acquire(timeout=60)
        source.save("c", "new", {"w": noise(9)})
        source.tag(second, late="yes")
        source.delete("a", first)
        source.set_retention("c", kedge.RetentionPolicy(keep_last=2))
        position = source.events(limit=1, newest=True)[0].id
        while not (target.jobs("c") and target.jobs("c")[0].retention):  # the last change
            assert moved.acquire(timeout=60), rounds
        assert position == source.events(limit=1, newest=True)[0].id
    finally:
        stop.set()
        follower.join()
    same(source, target)


def follow_once(source: CheckpointManager, target: CheckpointManager, **options: Any) -> CopyReport:
    """A follower that is stopped as soon as it has caught up."""
    stop, reports = threading.Event(), []
    seen = source.store.index.wait_for_event

    def wait(after: int, timeout_s: float) -> bool:
        stop.set()
        return seen(after, 0)

    with mock.patch.object(source.store.index, "wait_for_event", wait):
        source.follow_to(target, stop=stop, changed=reports.append, **options)
    return functools.reduce(CopyReport.plus, reports)


@contextlib.contextmanager
def comparing(source: CheckpointManager) -> Iterator[list[str]]:
    """The jobs whose histories are compared: nothing else reads a history as a whole."""
    compared: list[str] = []
    real = source.store.index.list

    def listed(job: str, *options: Any) -> Any:
        compared.append(job)
        return real(job, *options)

    with mock.patch.object(source.store.index, "list", listed):
        yield compared


def test_a_follower_goes_on_where_the_last_one_was(source: CheckpointManager, target: CheckpointManager) -> None:
    fill(source)
    with comparing(source) as compared:
        assert follow_once(source, target).copied == 4
        assert compared
        compared.clear()
        late = source.save("c", "late", {"w": noise(9)})
        source.tag(late, k="v")
        assert follow_once(source, target).copied == 1
        assert follow_once(source, target) == CopyReport()
        assert compared == []
    same(source, target)
    notes = [e for e in target.events(limit=1000) if e.action == "sync"]
    assert len(notes) == 2  # none where nothing had happened


def test_places_in_an_encrypted_store(source: CheckpointManager, tmp_path: Path) -> None:
    require("module:cryptography")
    fill(source)
    with kedge.open(tmp_path / "vault", key=bytes(32), encrypt_names=True) as vault, comparing(source) as compared:
        follow_once(source, vault, job="a")
        compared.clear()
        source.save("a", "late", 1)
        assert follow_once(source, vault, job="a").copied == 1
        assert compared == []


@pytest.mark.parametrize(
    ("first", "second", "is_enough"),
    [
        ({}, {"job": "a"}, True),
        ({"job": "a"}, {}, False),
        ({"job": "a"}, {"job": "b"}, False),
        ({}, {"mirror": True}, False),
        ({"mirror": True}, {}, True),
        ({"since": OLD}, {}, False),
        ({"since": OLD}, {"since": OLD + timedelta(1)}, True),
        ({"since": OLD + timedelta(1)}, {"since": OLD}, False),
    ],
)
def test_who_followed_less_is_no_predecessor(
    source: CheckpointManager,
    target: CheckpointManager,
    first: dict[str, Any],
    second: dict[str, Any],
    is_enough: bool,
) -> None:
    fill(source)
    follow_once(source, target, **first)
    with comparing(source) as compared:
        follow_once(source, target, **second)
        assert (compared == []) == is_enough


def test_another_log_is_compared_as_a_whole(
    source: CheckpointManager, target: CheckpointManager, tmp_path: Path
) -> None:
    """A source put back from a backup, which has gone on otherwise since: its log has the same numbers."""
    fill(source)
    store_id = source.store.index.store_id
    source.close()
    shutil.copytree(tmp_path / "source", tmp_path / "backup")
    with kedge.open(tmp_path / "source") as store:
        gone = store.save("d", "gone with the disk", 1)
        follow_once(store, target)
    with kedge.open(tmp_path / "backup") as store:
        other = [store.save("e", "since", n) for n in range(3)]
        assert store.store.index.store_id == store_id
        assert follow_once(store, target).copied == 3
        assert all(target.exists(i) for i in (gone, *other))
        assert follow_once(store, target) == CopyReport()


def test_a_log_that_was_pruned_is_compared_as_a_whole(
    source: CheckpointManager, target: CheckpointManager, tmp_path: Path
) -> None:
    fill(source)
    follow_once(source, target)
    late = source.save("c", "late", 1)
    source.close()
    db = sqlite3.connect(tmp_path / "source" / "index.sqlite")
    with db:
        db.execute("DELETE FROM event")
    db.close()
    with kedge.open(tmp_path / "source") as store:
        assert follow_once(store, target).copied == 1
        assert target.load(late) == 1


def test_what_could_not_be_read_is_tried_again(
    source: CheckpointManager, target: CheckpointManager, tmp_path: Path
) -> None:
    _, second, third = fill(source)
    whole = {pack: pack.read_bytes() for pack in (tmp_path / "source" / "packs").iterdir()}
    for pack, data in whole.items():
        pack.write_bytes(data[:100_000] + bytes(200_000) + data[300_000:])
    assert sorted(follow_once(source, target).damaged) == sorted([second, third])
    assert sorted(follow_once(source, target).damaged) == sorted([second, third])
    for pack, data in whole.items():
        pack.write_bytes(data)
    with comparing(source) as compared:
        assert follow_once(source, target).copied == 2
        assert follow_once(source, target) == CopyReport()
        assert compared == []
    same(source, target)


def test_two_stores_that_follow_each_other_come_to_rest(source: CheckpointManager, target: CheckpointManager) -> None:
    fill(source)
    for _ in range(3):
        follow_once(source, target)
        follow_once(target, source)
    before = [store.events(limit=1, newest=True)[0].id for store in (source, target)]
    for _ in range(3):
        follow_once(source, target)
        follow_once(target, source)
    assert [store.events(limit=1, newest=True)[0].id for store in (source, target)] == before


def test_command_line(tmp_path: Path, run: Run) -> None:
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    with kedge.open(one) as store:
        fill(store)
    assert answer(run("copy", one, two, "--json"))["copied"] == 4
    assert "4 were there already" in run("sync", one, two, "--since", "2d").stdout
    for wrong in (("a", two), (one, "a"), ("a", "b", "--delete"), (one, two, "--since", "soon")):
        run("copy", *wrong, code=2)
    run("copy", str(tmp_path / "nowhere"), two, code=4)
    with contextlib.chdir(tmp_path):
        assert "write ./two" in run("copy", "two", "backup", "--store", one, code=4).stderr
    assert not (tmp_path / "nowhere").exists()
    assert "copied to tenant" in run("copy", "a", "tenant", "--store", two).stdout
    run("copy", one, three, "--into", "tenant", "--job", "a", "--since", "2001-01-01")
    with kedge.open(three, namespace="tenant") as store:
        assert [job.name for job in store.jobs()] == ["a"]


# A key that is used again


@pytest.mark.parametrize(
    ("key", "is_large", "is_same", "mirror", "is_following"),
    [
        (None, False, False, False, False),
        (None, True, True, False, True),
        (None, False, True, True, False),
        (None, True, False, True, True),
        ("kdk1_" + "A" * 42 + "E", False, True, False, True),
        ("kdk1_" + "A" * 42 + "E", True, False, False, False),
    ],
)
def test_a_key_that_was_used_again_moves_with_the_copy(
    tmp_path: Path, key: str | None, is_large: bool, is_same: bool, mirror: bool, is_following: bool
) -> None:
    if key is not None:
        library("cryptography")

    def bring() -> CopyReport:
        return follow_once(source, target, mirror=mirror) if is_following else source.copy_to(target, mirror=mirror)

    states = [{"w": noise(n)} if is_large else {"n": n} for n in (1, 1 if is_same else 2, 3)]
    with kedge.open(tmp_path / "source") as source, kedge.open(tmp_path / "target", key=key) as target:
        old = source.save("a", "first", states[0], idempotency_key="once")
        bring()
        source.delete("a", old)
        new = source.save("a", "second", states[1], idempotency_key="once")
        assert bring().copied == 1
        assert target.exists(old) != mirror
        assert bring().copied == 0  # it comes to rest
        # who resumes on the copy does nothing twice, and is told of a key used for another state, as in the source
        assert target.save("a", "second", states[1], idempotency_key="once") == new
        with pytest.raises(Conflict, match=new):
            target.save("a", "third", states[2], idempotency_key="once")
        found = target.load_by_key("a", "once")
        assert found is not None
        assert found[0].id == new
        for step in ("third", "fourth"):  # and again
            source.delete("a", new)
            new = source.save("a", step, states[2], idempotency_key="once")
        assert bring().copied == 1
        assert target.get_by_key("a", "once").id == new  # type: ignore[union-attr]
        assert target.verify().is_ok


def test_a_key_of_the_targets_own_is_not_taken_away(source: CheckpointManager, target: CheckpointManager) -> None:
    for n in range(3):
        target.delete("a", target.save("a", f"mine {n}", n))
    mine = target.save("a", "mine", 1, idempotency_key="once")
    source.save("a", "theirs", 2, idempotency_key="once")
    with pytest.raises(Conflict, match="once"):
        source.copy_to(target)
    assert target.get_by_key("a", "once").id == mine  # type: ignore[union-attr]


def test_a_copy_uses_no_number_that_its_source_gave_up(tmp_path: Path) -> None:
    """I4: nor does one that follows."""
    with kedge.open(tmp_path / "one") as one, kedge.open(tmp_path / "two") as two:
        ids = [one.save("a", "step", n) for n in range(3)]
        one.delete("a", ids[2])
        one.copy_to(two)
        assert two.get(two.save("a", "step", "here")).seq == 4
