"""The disaster drill: the index is gone, the packs are there."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import kedge
from kedge.errors import Validation
from kedge.manager import CheckpointManager
from tests.parts import require
from tests.unit.care.test_copy import noise
from tests.unit.cli.test_app import Run, answer, run, store  # noqa: F401 - fixtures

if TYPE_CHECKING:
    from tests.servers.postgres import Cluster


def fill(manager: CheckpointManager) -> list[str]:
    first = manager.save("a", "one", {"w": noise(1, 3)}, tags={"k": "v"}, pin=True, idempotency_key="once")
    second = manager.save("a", "two", {"w": noise(2), "n": 2}, parent=first)
    manager.save("a", "small", {"n": 3})
    gone = manager.save("a", "gone", {"w": noise(1, 3), "x": noise(3)})
    manager.delete("a", gone)
    return [first, second]


def check(manager: CheckpointManager, ids: list[str]) -> None:
    first, second = (manager.get(i) for i in ids)
    assert (first.tags, first.is_pinned, first.step) == ({"k": "v"}, True, "one")
    assert second.parent == first.id
    assert second.seq > first.seq
    assert np.array_equal(manager.load(second.id)["w"], noise(2))  # type: ignore[index]
    assert manager.save("a", "one", {"w": noise(1, 3)}, idempotency_key="once") == first.id
    assert manager.verify().is_ok


def test_a_store_that_is_well_stays_as_it_is(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "s") as manager:
        ids = fill(manager)
        before = manager.list("a")
        report = manager.rebuild()
        assert (report.found, report.added) == (3, 0)
        assert manager.list("a") == before
        check(manager, ids)


def test_an_old_index_gets_what_came_since(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with kedge.open(place) as manager:
        ids = fill(manager)
    shutil.copy(place / "index.sqlite", tmp_path / "backup")
    with kedge.open(place) as manager, kedge.open(place, namespace="tenant") as tenant:
        late = manager.save("a", "late", {"w": noise(7)}, parent=ids[1])
        other = tenant.save("b", "theirs", {"w": noise(8)})
        manager.save("a", "late and small", 1)
    shutil.copy(tmp_path / "backup", place / "index.sqlite")
    with kedge.open(place) as manager, kedge.open(place, namespace="tenant") as tenant:
        assert not manager.exists(late)
        assert manager.rebuild().added == 3
        assert manager.get(late).parent == ids[1]
        assert tenant.load(other)["w"].nbytes == 1 << 20  # type: ignore[index]
        assert [c.step for c in manager.list("a")] == ["one", "two", "small", "late", "late and small"]
        check(manager, ids)
        assert manager.rebuild().added == 0


def test_a_lost_index(store: Path, run: Run) -> None:
    with kedge.open(store) as manager:
        ids = fill(manager)
        manager.gc()
    (store / "index.sqlite").unlink()
    done = answer(run("rebuild", "--json"))
    assert (done["repaired"]["from_packs"], done["added"], done["corrupted"]) == (4, 0, [])  # a deletion is undone
    with kedge.open(store) as manager:
        check(manager, ids)
    assert "0 added" in run("rebuild").stdout


def test_copies_keep_their_numbers(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "one") as one, kedge.open(tmp_path / "two") as two:
        small = one.save("a", "small", 1)
        kept = one.save("a", "large", noise(1))
        one.copy_to(two)
    index = next((tmp_path / "two").glob("index*.sqlite"))
    for part in (tmp_path / "two").glob(index.name + "*"):
        part.unlink()
    from kedge.care.repair import repair

    repair(tmp_path / "two", actor="t")
    with kedge.open(tmp_path / "two") as two:
        assert [(c.id, c.seq) for c in two.list("a")] == [(small, 1), (kept, 2)]


def test_what_memory_is_kept_in_is_repaired(tmp_path: Path, run: Run) -> None:
    place = tmp_path / "kept"
    url = f"memory:{place}"
    with kedge.open(url) as store:
        saved = store.save("a", "large", {"w": noise(1)})
        with pytest.raises(Validation, match="no packs to rebuild from"):
            store.rebuild()
    (place / "index.sqlite").unlink()
    run("list", "a", "--store", url, code=6)
    assert answer(run("rebuild", "--store", url, "--json"))["repaired"]["from_packs"] == 1
    with kedge.open(url) as store:
        assert store.exists(saved)


KEY = "kdk1_" + "A" * 42 + "E"
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "encrypted": {"key": KEY},
    "hidden": {"key": KEY, "encrypt_names": True},
}


@pytest.mark.xdist_group("postgres")
@pytest.mark.requires("postgres", "s3")
def test_a_lost_database(postgres: Cluster, s3: str, run: Run) -> None:
    bucket = "&blobs=s3://kedge/rebuild"
    with kedge.open(lose_the_database(postgres, bucket, {}, run, added=3)) as manager:
        first = manager.list("a")[0]
        third = manager.save("a", "three", {"w": noise(1, 3), "x": noise(3)})
        pack = next(name for name, size in manager.store.blobs.packs() if size > 2 << 20)
        assert manager.store.blobs.remove(pack, lambda: True)
    empty = postgres.empty_database() + bucket
    with pytest.raises(kedge.StorageError, match="another store"):  # its gc would remove them all
        kedge.open(empty)
    done = answer(run("rebuild", "--store", empty, "--json", code=6))
    assert (done["added"], done["corrupted"]) == (4, [first.id, third])  # which share what was in that pack


@pytest.mark.xdist_group("postgres")
@pytest.mark.requires("postgres")
@pytest.mark.parametrize("how", HOW)
def test_a_lost_database_beside_packs(postgres: Cluster, run: Run, how: str, tmp_path: Path) -> None:
    lose_the_database(postgres, f"&blobs=file:{tmp_path / 'packs'}", HOW[how], run, added=4)  # a deletion is undone


@pytest.mark.xdist_group("postgres")
@pytest.mark.requires("postgres")
def test_an_index_made_with_the_wrong_key_removes_nothing(postgres: Cluster, run: Run, tmp_path: Path) -> None:
    blobs = f"&blobs=file:{tmp_path / 'packs'}"
    with kedge.open(postgres.empty_database() + blobs, key=KEY) as manager:
        fill(manager)
    packs = {path: path.read_bytes() for path in tmp_path.rglob("*.pack")}
    assert packs
    empty = postgres.empty_database() + blobs
    wrong = "kdk1_" + "B" * 42 + "E"
    run("rebuild", "--store", empty, "--key", wrong, code=3)
    run("gc", "--store", empty, "--key", wrong, code=5)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.pack")} == packs


def lose_the_database(postgres: Cluster, blobs: str, how: dict[str, Any], run: Run, added: int) -> str:
    """The drill of docs/machines.md: an empty database gets what the packs know, under their keys."""
    key = ["--key", how["key"]] if how else []
    with kedge.open(postgres.empty_database() + blobs, **how) as manager:
        ids = fill(manager)
        manager.gc()
        store_id = manager.store.index.store_id
    url = postgres.empty_database() + blobs
    for wrong in (["--key", "kdk1_" + "B" * 42 + "E"], []) if how else ():
        assert "under key" in run("rebuild", "--store", url, *wrong, code=3).stderr
        url = postgres.empty_database() + blobs
    done = answer(run("rebuild", "--store", url, "--json", *key))
    assert (done["added"], done["corrupted"], done["locked"]) == (added, [], {})
    assert answer(run("rebuild", "--store", url, "--json", *key))["added"] == 0
    with kedge.open(url, key=how.get("key")) as manager:
        assert manager.store.index.store_id != store_id
        assert (manager.encryption or {}).get("encrypts_names", False) == ("encrypt_names" in how)
        check(manager, ids)
        assert [manager.load(c.id) for c in manager.list("a") if c.step == "small"] == [{"n": 3}]
        if how:
            manager.rekey(rewrite=True)
            manager.gc()
            check(manager, ids)
    return url


def test_records_whose_keys_turn_up_later(tmp_path: Path) -> None:
    """The master key was changed: the first records have their keys under the old one, the last under the new one."""
    require("module:cryptography")
    place, new = tmp_path / "store", bytes(range(32))
    with kedge.open(place, key=KEY) as manager:
        first = manager.save("a", "under the old one", noise(1))
        manager.rekey(new)
        second = manager.save("a", "under the new one", noise(2))
    for part in (*place.glob("index*"), place / "keyrings"):
        part.unlink()
    from kedge.care.repair import repair
    from kedge.crypto import parse_master

    repair(place, actor="t", master=parse_master(new))
    with kedge.open(place, key=new) as manager:
        assert [c.id for c in manager.list("a")] == [first, second]
        assert manager.verify().is_ok


def damage(journal: Path, how: str) -> None:
    data = journal.read_bytes()
    if how == "lost":
        journal.unlink()
    elif how == "cut":
        place = len(data) // 5  # not in the last transaction, which a crash may have torn
        journal.write_bytes(data[:place] + b"x" * 200 + data[place + 200 :])
    else:
        journal.write_bytes(b"garbage")


@pytest.mark.parametrize(
    ("how", "damaged"),
    [("plain", "lost"), ("plain", "cut"), ("plain", "garbage"), ("encrypted", "cut"), ("hidden", "lost")],
)
def test_a_journal_is_made_anew(tmp_path: Path, run: Run, how: str, damaged: str) -> None:
    """Small states too: they are in the readable files."""
    place, options = tmp_path / "files", HOW[how]
    url, key = f"files:{place}", ["--key", options["key"]] if options else []
    with kedge.open(url, **options) as manager, kedge.open(url, namespace="t", key=options.get("key")) as tenant:
        ids = fill(manager)
        small = manager.list("a")[2]
        late = manager.save("b", "late", {"text": "ü", "n": 1.5, "list": [None, True, 2**40]}, metadata={"loss": 0.5})
        manager.tag(late, seen="yes")
        odd = manager.save("b", "odd", {"tuple": (1, 2)})
        theirs = tenant.save("b", "theirs", "small")
    journal = place / ".kedge" / "journal"
    damage(journal, damaged)
    run("list", "a", "--store", url, *key, code=6)
    if options:
        run("rebuild", "--store", url, code=3)
        assert journal.exists() == (damaged != "lost")
    done = answer(run("rebuild", "--store", url, "--json", *key))
    assert done["corrupted"] == []
    with kedge.open(url, key=options.get("key")) as manager:
        assert (manager.get(small.id).seq, manager.load(small.id)) == (small.seq, {"n": 3})
        assert manager.load(late) == {"text": "ü", "n": 1.5, "list": [None, True, 2**40]}
        assert (manager.get(late).tags, manager.get(late).metadata) == ({"seen": "yes"}, {"loss": 0.5})
        assert manager.load(odd) == {"tuple": (1, 2)}  # of what is no JSON, plain files have an outline only
        assert np.array_equal(manager.load(ids[1])["w"], noise(2))  # type: ignore[index]
        assert manager.verify().is_ok
        with kedge.open(url, namespace="t", key=options.get("key")) as tenant:
            assert tenant.load(theirs) == "small"
    assert answer(run("rebuild", "--store", url, "--json", *key))["repaired"] is None


@pytest.mark.parametrize("how", ["plain", "encrypted"])
@pytest.mark.parametrize("backup", [False, True], ids=["lost", "backup"])
def test_a_key_that_was_used_again_belongs_to_the_newer_one(tmp_path: Path, how: str, backup: bool) -> None:
    """Its deletion may be forgotten, and both come back: nothing that was acknowledged is left out."""
    place, options = tmp_path / "store", HOW[how]
    states = [{"w": noise(1)}, {"w": noise(2)}]
    with kedge.open(place, **options) as manager:
        old = manager.save("a", "first", states[0], idempotency_key="once")
        if backup:
            manager.close()
            shutil.copy(place / "index.sqlite", tmp_path / "index.sqlite")
    with kedge.open(place, **options) as manager:
        manager.delete("a", old)
        new = manager.save("a", "second", states[1], idempotency_key="once")
        assert manager.get(new).stored_bytes > 0
    for part in place.glob("index*"):
        part.unlink()
    if backup:
        shutil.copy(tmp_path / "index.sqlite", place / "index.sqlite")
        with kedge.open(place, **options) as manager:
            assert manager.rebuild().added == 1
    else:
        from kedge.care.repair import repair
        from kedge.crypto import parse_master

        repair(place, actor="t", master=parse_master(options["key"]) if options else None)
    with kedge.open(place, **options) as manager:
        assert [c.id for c in manager.list("a")] == [old, new]
        assert manager.get_by_key("a", "once").id == new  # type: ignore[union-attr]
        assert manager.save("a", "second", states[1], idempotency_key="once") == new
        assert manager.verify().is_ok
