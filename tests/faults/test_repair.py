"""Repair: what a damaged or lost index costs, and that a repair killed anywhere costs nothing."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import kedge
from kedge.care.repair import repair
from kedge.crypto import parse_master
from tests.parts import require

ACTOR = "tests"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with small and large states, a branch into an earlier job, a key, a policy and a used lease."""
    with kedge.open(tmp_path / "store") as store:
        for n in range(20):
            store.save("small", f"step {n}", {"n": n})
        for n in range(4):
            store.save("large", f"step {n}", {"n": n, "blob": bytes([n]) * 300_000 + os.urandom(200_000)})
        store.resume_from(store.list("small")[3].id, "a-branch")
        store.save("keyed", "once", 1, idempotency_key="k")
        store.set_retention("small", kedge.RetentionPolicy(keep_last=50))
        store.delete("small", store.list("small")[-1].id)
        with store.lease("leased"):
            pass
    return tmp_path / "store"


def contents(place: Path) -> dict[str, list[tuple[int, str, object]]]:
    with kedge.open(place, create=False) as store:
        assert store.verify().is_ok
        return {j.name: [(c.seq, c.id, store.load(c.id)) for c in store.list(j.name)] for j in store.jobs()}


def damage_middle(path: Path) -> None:
    data = bytearray(path.read_bytes())
    page = len(data) // 4096 // 2
    data[page * 4096 : page * 4096 + 4096] = os.urandom(4096)
    path.write_bytes(data)


def test_a_sound_index_is_made_anew_with_everything(place: Path) -> None:
    before = contents(place)
    report = repair(place, actor=ACTOR)
    assert report.is_index_complete
    assert not report.corrupted
    assert contents(place) == before


def test_keys_policies_sequence_and_tokens_survive(place: Path) -> None:
    repair(place, actor=ACTOR)
    with kedge.open(place) as store:
        assert store.save("keyed", "once", 1, idempotency_key="k") == store.list("keyed")[0].id
        assert [j.retention is not None for j in store.jobs("small")] == [True]
        assert store.get(store.save("small", "next", 0)).seq == 21  # the deleted number 20 is not used again (I4)
        with store.lease("leased") as lease:
            assert lease.token == 2  # I5


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_what_is_deleted_stays_deleted_however_often_the_index_is_made(tmp_path: Path, is_encrypted: bool) -> None:
    """The packs tell of it until gc has been there, and the second repair has only what the first one wrote."""
    if is_encrypted:
        require("module:cryptography")
    key, master = (b"k" * 32, parse_master(b"k" * 32)) if is_encrypted else (None, None)
    place = tmp_path / "store"
    with kedge.open(place, key=key) as store:
        small, large = (store.save("job", "gone", os.urandom(size)) for size in (20, 100_000))
        kept = store.save("job", "kept", os.urandom(100_000))
    with kedge.open(place, key=key) as store:
        store.delete("job", small)
        store.delete("job", large)
    for _ in range(3):
        repair(place, actor=ACTOR, master=master)
        with kedge.open(place, key=key) as store:
            assert [c.id for c in store.list("job")] == [kept]
            store.rebuild()
            assert [c.id for c in store.list("job")] == [kept]
            deletions = [e for e in store.events() if e.action == "delete"]
            assert sorted(str(e.checkpoint) for e in deletions) == sorted([small, large])
            assert store.audit().broken_at is None


def test_what_came_back_from_a_backup_is_not_taken_for_deleted(place: Path, tmp_path: Path) -> None:
    """Its deletion is in the log, too, before it was saved again."""
    with kedge.open(place) as store, kedge.open(tmp_path / "backup") as backup:
        saved = store.list("large")[1]
        store.copy_to(backup)
        store.delete("large", saved.id)
        backup.copy_to(store)
    for _ in range(3):
        (index,) = (path for path in place.glob("index*.sqlite") if "damaged" not in path.name)
        with sqlite3.connect(index) as db:
            db.execute("UPDATE checkpoint SET level = 'nonsense' WHERE id = ?", (saved.id,))
        db.close()
        repair(place, actor=ACTOR)
        assert saved.id in [id_ for _, id_, _ in contents(place)["large"]]
        with kedge.open(place) as store:
            *_, last = (event for event in store.events(limit=1000) if event.checkpoint == saved.id)
            assert last.action == "save"


def test_a_lost_index_is_rebuilt_from_packs(place: Path) -> None:
    before = contents(place)
    for name in os.listdir(place):
        if name.startswith("index"):
            (place / name).unlink()
    with pytest.raises(kedge.Corrupted, match="is missing"):
        kedge.open(place)
    report = repair(place, actor=ACTOR)
    assert not report.is_index_complete
    assert report.from_packs == sum(map(len, before.values()))
    assert contents(place) == {job: saves for job, saves in before.items() if saves}


def test_a_damaged_page_costs_what_was_on_it_only(place: Path) -> None:
    before = contents(place)
    damage_middle(place / "index.sqlite")
    repair(place, actor=ACTOR)
    with kedge.open(place) as store:
        for job in store.jobs():
            for checkpoint in store.list(job.name):
                known = {i: state for _, i, state in before.get(job.name, [])}
                if checkpoint.id in known:
                    assert store.load(checkpoint.id) == known[checkpoint.id]
        assert len(store.list("large")) == 4


KILLED_REPAIR = """
import os, sqlite3, sys
from pathlib import Path
import kedge.care.repair, kedge.store.directory, kedge.index.sqlite.salvage

left = int(sys.argv[2])

def counted(function):
    def call(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os._exit(9)
        return function(*args, **kwargs)
    return call

for name in ("rename", "replace", "unlink", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
kedge.care.repair.SqliteIndex = counted(kedge.care.repair.SqliteIndex)
kedge.care.repair.put_jobs = counted(kedge.care.repair.put_jobs)
kedge.care.repair.write_marker = counted(kedge.care.repair.write_marker)
kedge.care.repair.repair(Path(sys.argv[1]), actor="killed")
"""


def test_a_repair_killed_anywhere_loses_nothing(place: Path) -> None:
    before = contents(place)
    for kill_at in range(1, 60):
        run = subprocess.run([sys.executable, "-c", KILLED_REPAIR, str(place), str(kill_at)], timeout=60, check=False)
        assert contents(place) == before, f"killed at {kill_at}"
        if run.returncode == 0:
            break
        assert run.returncode == 9
    else:
        pytest.fail("repair never came to its end")
    assert kill_at > 5


def test_who_has_the_old_index_open_is_not_told_that_a_save_succeeded(place: Path) -> None:
    with kedge.open(place) as store:
        run = [
            sys.executable,
            "-c",
            "import sys, pathlib, kedge.care.repair as r; r.repair(pathlib.Path(sys.argv[1]), actor='x')",
        ]
        subprocess.run([*run, str(place)], check=True, timeout=60)
        with pytest.raises(kedge.StorageError, match="replaced or removed"):
            store.save("small", "too late", 1)


def test_a_bad_cell_costs_nothing_that_packs_know(place: Path) -> None:
    with sqlite3.connect(place / "index.sqlite") as db:
        db.execute("UPDATE checkpoint SET level = 'nonsense' WHERE step = 'step 7'")
    db.close()
    report = repair(place, actor=ACTOR)
    assert not report.is_index_complete
    assert len(contents(place)["small"]) == 19  # the packs know it too
