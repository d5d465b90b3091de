"""Verify: what it finds, what it leaves alone, and how a damaged store heals."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

import kedge


def only_pack(place: Path) -> Path:
    (pack,) = (place / "packs").iterdir()
    return pack


@pytest.fixture
def state() -> dict[str, object]:
    return {"blob": os.urandom(500_000)}


def test_a_damaged_chunk_is_not_reused_and_a_new_save_heals_the_old_one(
    tmp_path: Path, state: dict[str, object]
) -> None:
    place = tmp_path / "store"
    with kedge.open(place) as store:
        first = store.save("job", "step", state)
    data = bytearray(only_pack(place).read_bytes())
    data[4096 + 1000] ^= 1
    only_pack(place).write_bytes(data)
    with kedge.open(place) as store:
        report = store.verify()
        assert report.corrupted == (first,)
        with pytest.raises(kedge.Corrupted):
            store.load_latest("job")
        second = store.save("job", "step", state)
        assert store.load(second) == state
        assert store.load(first) == state
        assert store.verify().is_ok
        assert store.get(first).status == "valid"


def test_a_pack_that_is_put_back_is_trusted_again(tmp_path: Path, state: dict[str, object]) -> None:
    place = tmp_path / "store"
    with kedge.open(place) as store:
        saved = store.save("job", "step", state)
    shutil.copy(only_pack(place), tmp_path / "copy")
    name = only_pack(place)
    for deep in (True, False):
        name.unlink()
        with kedge.open(place) as store:
            assert saved in store.verify(deep=deep).corrupted
        shutil.copy(tmp_path / "copy", name)
        with kedge.open(place) as store:
            assert store.verify().is_ok
            assert store.load_latest("job") is not None
            again = store.get(store.save("other", "step", state))
            assert again.stored_bytes < 10_000  # reused


@pytest.mark.parametrize("deep", [True, False])
def test_nothing_is_wrong_with_a_store_in_use(tmp_path: Path, deep: bool) -> None:
    with kedge.open(tmp_path / "store") as store, kedge.open(tmp_path / "store") as other:
        done = threading.Event()

        def write() -> None:
            n = 0
            while not done.is_set():
                n += 1
                saved = other.save("job", f"step {n}", {"blob": os.urandom(150_000)})
                if n % 3 == 0:
                    other.delete("job", saved)
                if n % 10 == 0:
                    other.gc()

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(15):
                report = store.verify(deep=deep)
                assert report.is_ok, report.problems
        finally:
            done.set()
            thread.join()
        assert all(c.status != "corrupted" for c in store.list("job"))


def test_no_save_rests_on_what_was_condemned(tmp_path: Path) -> None:
    state = {"blob": os.urandom(3_000_000)}
    place = tmp_path / "store"
    with kedge.open(place) as store:
        first = store.save("job", "first", state)
    data = bytearray(only_pack(place).read_bytes())
    data[4096 + 1000] ^= 1
    only_pack(place).write_bytes(data)
    with kedge.open(place) as store:
        with pytest.raises(kedge.Corrupted):
            store.load(first)
        assert store.condemn(first).status == "corrupted"
        second = store.save("other", "second", state)
        assert 0 < store.get(second).stored_bytes < 3_000_000  # what is sound is used
        assert store.load(second) == state


def test_damage_never_looks_like_a_fresh_start(tmp_path: Path, state: dict[str, object]) -> None:
    with kedge.open(tmp_path / "store") as store:
        older = store.save("job", "older", {"n": 1})
        newer = store.save("job", "newer", state)
        store.set_status(newer, "corrupted")
        with pytest.warns(UserWarning, match=f"{newer}.*passed over"):
            found = store.load_latest("job")
        assert found is not None
        assert found[0].id == older
        store.set_status(older, "corrupted")
        with pytest.raises(kedge.Corrupted, match="every checkpoint of job job"):
            store.load_latest("job")
        with pytest.raises(kedge.Corrupted):
            store.restore("job")


def test_a_job_that_does_not_exist_is_not_sound() -> None:
    with kedge.open("memory:") as store, pytest.raises(kedge.NotFound):
        store.verify("typo")


def test_a_save_does_not_rest_on_a_pack_that_is_gone(tmp_path: Path, state: dict[str, object]) -> None:
    place = tmp_path / "store"
    with kedge.open(place) as store:
        first = store.save("job", "one", state)
    only_pack(place).unlink()
    with kedge.open(place) as store:
        second = store.save("job", "two", state)
        assert store.load(second) == state
        assert store.load(first) == state


def test_what_gc_will_free_is_told_before(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store, kedge.open(tmp_path / "store", namespace="other") as other:
        shared = os.urandom(300_000)
        first = store.save("job", "a", {"blob": os.urandom(400_000), "small": os.urandom(9000)})
        store.save("job", "b", {"blob": shared, "more": os.urandom(100_000)})
        other.save("job", "b", {"blob": shared})
        assert store.gc(dry_run=True).chunks_removed == 0
        store.delete("job", first)
        events = store.events(limit=1, newest=True)
        foreseen = store.gc(dry_run=True)
        assert foreseen.chunks_removed > 0
        assert store.events(limit=1, newest=True) == events  # nothing was changed
        done = store.gc()
        assert foreseen.chunks_removed == done.chunks_removed
        assert (foreseen.packs_removed, foreseen.packs_rewritten) == (done.packs_removed, done.packs_rewritten)
        assert foreseen.bytes_freed >= done.bytes_freed > 300_000  # compaction writes new packs, of full blocks
        assert store.gc(dry_run=True).bytes_freed == 0
