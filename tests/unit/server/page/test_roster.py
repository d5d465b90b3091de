"""Which jobs changed last, and which wait for a person, however many there are."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

import kedge
from kedge.pipeline.approval import decide
from kedge.server.page import roster
from kedge.server.page.roster import Roll, Roster


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> kedge.CheckpointManager:
    monkeypatch.setattr(roster, "_READ_JOBS", 4)
    monkeypatch.setattr(roster, "_ASKED", 3)
    return kedge.open(tmp_path / "store")


def ask(store: kedge.CheckpointManager, key: str, **options: object) -> None:
    with suppress(SystemExit, kedge.CheckpointError), kedge.run(key, store=store, progress=False) as run:
        run.approval("go", wait_s=0, **options)  # type: ignore[arg-type]


def last_look(known: Roster, store: kedge.CheckpointManager, most: int = 40) -> Roll:
    for _ in range(most):
        if not (roll := known.look(store)).is_partial:
            return roll
    raise AssertionError("it never comes to an end")


def waiting(roll: Roll) -> list[str]:
    return [approval.job for approval in roll.approvals]


def test_all_approvals_are_known_after_some_looks(store: kedge.CheckpointManager) -> None:
    with store:
        ask(store, "zz-last")
        for n in range(12):
            store.save(f"job-{n:02d}", "one", {})
        known = Roster()
        assert known.look(store).is_partial
        roll = last_look(known, store)
        assert waiting(roll) == ["zz-last"]
        assert [entry.job for entry in roll.entries][:2] == ["job-11", "job-10"]
        assert len(roll.entries) == 13


def test_what_changed_is_asked_again(store: kedge.CheckpointManager) -> None:
    with store:
        known = Roster()
        ask(store, "one")
        store.save("other", "one", {})
        assert waiting(last_look(known, store)) == ["one"]
        ask(store, "two")
        roll = last_look(known, store, 2)
        assert waiting(roll) == ["two", "one"]
        assert roll.entries[0].job == "two"
        decide(store, "one", "go", True)
        assert waiting(last_look(known, store, 2)) == ["two"]
        store.delete_job("two")
        assert waiting(last_look(known, store, 2)) == []


def test_who_is_far_behind_reads_the_jobs_again(
    store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "_EVENTS", 2)
    with store:
        known = Roster()
        ask(store, "one")
        ask(store, "two")
        last_look(known, store)
        decide(store, "one", "go", True)
        ask(store, "three")
        for n in range(6):
            store.save("busy", f"{n}", {})
        roll = last_look(known, store)
        assert waiting(roll) == ["three", "two"]
        assert [entry.job for entry in roll.entries] == ["busy", "three", "two", "one"]


def test_an_approval_whose_time_is_over_waits_no_more(
    store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store:
        known = Roster()
        ask(store, "one", expires_s=1000)
        assert waiting(last_look(known, store)) == ["one"]
        monkeypatch.setattr("kedge.pipeline.approval.time.time", lambda: 1e12)
        assert waiting(known.look(store)) == []


def test_only_so_many_are_remembered(store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "_MOST", 5)
    with store:
        for n in range(9):
            store.save(f"job-{n}", "one", {})
        roll = last_look(Roster(), store)
        assert len(roll.entries) == 5
        assert roll.is_cut
