"""Small states, which are rows of the index, come back from packs when the index is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from kedge.care.gc import JOIN_FROM
from kedge.care.repair import repair
from kedge.errors import Unavailable
from kedge.ports import KeysChanged, Unrecorded
from kedge.store import backlog as backlogs
from tests.fixtures.format_1 import save_in_parts
from tests.parts import require
from tests.waiting import wait_for

PROCESSES, SAVES = 4, 50
KEY = bytes(range(32)).hex()

_CHILD = """
import os, signal, sys
import kedge
place, number, count, is_killed = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "killed"
store = kedge.open(place)
for n in range(count):
    key = f"key-{n}" if n % 7 == 0 else None
    store.save(f"job-{number}", f"step {n}", {"n": n, "of": number}, tags={"n": str(n)}, idempotency_key=key)
    print(n, flush=True)
if is_killed:
    os.kill(os.getpid(), signal.SIGKILL)
store.close()
"""


@pytest.fixture(params=["plain", "encrypted"], autouse=True)
def _key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "encrypted":
        require("module:cryptography")
        monkeypatch.setenv("KEDGE_KEY", KEY)
    return None


def lose_index(place: Path) -> None:
    for file in place.glob("index.sqlite*"):
        file.unlink()


def rebuild(place: Path) -> None:
    key = os.environ.get("KEDGE_KEY")
    if key is not None:
        from kedge.crypto import parse_master
    report = repair(place, actor="test", master=None if key is None else parse_master(key))
    assert report.corrupted == ()


@pytest.mark.faults
def test_small_states_of_many_processes_survive_the_index(tmp_path: Path) -> None:
    place = tmp_path / "store"
    kedge.open(place).close()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(place), str(n), str(SAVES), "killed" if n % 2 else "closed"],
            stdout=subprocess.PIPE,
        )
        for n in range(PROCESSES)
    ]
    for n, child in enumerate(children):
        out, _ = child.communicate(timeout=120)
        assert len(out.split()) == SAVES
        assert child.returncode == (-signal.SIGKILL if n % 2 else 0)
    with kedge.open(place) as store:
        before = {job.name: [(c.id, c.seq, c.step, c.tags) for c in store.list(job.name)] for job in store.jobs()}
        doomed = before["job-1"].pop(10)
        store.delete("job-1", doomed[0])
        store.gc()  # copies what the killed ones left
    lose_index(place)
    rebuild(place)
    with kedge.open(place) as store:
        assert store.verify(deep=True).problems == ()
        for job, checkpoints in before.items():
            there = [(c.id, c.seq, c.step, c.tags) for c in store.list(job)]
            assert [row for row in there if row[0] != doomed[0]] == checkpoints
            for checkpoint_id, _, step, _ in checkpoints:
                assert store.load(checkpoint_id) == {"n": int(step.split()[1]), "of": job.removeprefix("job-")}
        first = before["job-0"][0][0]
        assert store.save("job-0", "step 0", {"n": 0, "of": "0"}, tags={"n": "0"}, idempotency_key="key-0") == first


def test_chunks_that_are_rows_survive_too(tmp_path: Path) -> None:
    place = tmp_path / "store"
    items = [f"message {n}" for n in range(40)]
    with kedge.open(place) as store:
        save_in_parts(store, "parted", items)
        saved = store.list("values")[0]
    lose_index(place)
    rebuild(place)
    with kedge.open(place) as store:
        assert store.load(saved.id) == items
        store.gc()
        assert store.load(saved.id) == items
        assert store.verify(deep=True).problems == ()


def test_gc_keeps_the_records_of_what_lives_and_drops_the_rest(tmp_path: Path) -> None:
    place = tmp_path / "store"
    with kedge.open(place) as store:
        ids = [store.save("job", f"step {n}", {"n": n, "text": os.urandom(2000).hex()}) for n in range(20)]
    with kedge.open(place) as store:
        for checkpoint_id in ids[:18]:
            store.delete("job", checkpoint_id)
        report = store.gc()
        assert report.packs_rewritten == 1
    lose_index(place)
    rebuild(place)
    with kedge.open(place) as store:
        assert [c.id for c in store.list("job")] == ids[18:]
        assert [c.seq for c in store.list("job")] == [19, 20]
        for checkpoint_id in ids[18:]:
            store.delete("job", checkpoint_id)
        store.gc()
        assert list(store.store.blobs.packs()) == []


def test_gc_joins_what_many_short_processes_left(tmp_path: Path) -> None:
    place = tmp_path / "store"
    ids = []
    for n in range(JOIN_FROM):
        with kedge.open(place) as store:
            ids.append(store.save("job", "step", n))
    with kedge.open(place) as store:
        assert len(list(store.store.blobs.packs())) == JOIN_FROM
        assert store.gc().packs_kept == 1
        assert store.gc().packs_rewritten == 0
    lose_index(place)
    rebuild(place)
    with kedge.open(place) as store:
        assert [c.id for c in store.list("job")] == ids


def test_a_save_costs_nothing_that_was_copied_before(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        for n in range(30):
            store.save("job", "step", n)
        backlog = store.store.backlog
        assert backlog is not None
        assert backlog.copy() == 30
        assert backlog.copy() == 0
        store.save("job", "step", "one more")
        assert backlog.copy() == 1


def is_all_copied(store: kedge.CheckpointManager) -> bool:
    batch = store.store.index.unrecorded(1)
    return not batch.rows and not batch.chunks


def test_it_is_copied_while_the_store_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlogs, "AFTER_S", 0.01)
    with kedge.open(tmp_path / "store") as store:
        for n in range(3):
            store.save("job", "step", n)
            wait_for(lambda: is_all_copied(store), "nobody copies what was saved")


def test_gc_comes_to_an_end_beside_those_who_save_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It copies what there was when it began; somebody saves more than that each time it looks."""
    monkeypatch.setattr(backlogs, "_AT_ONCE", 4)
    looks = 0
    with kedge.open(tmp_path / "store") as store, kedge.open(tmp_path / "store") as other:
        for n in range(10):
            store.save("job", "step", n)
        index = store.store.index
        real = index.unrecorded

        def unrecorded(limit: int) -> Unrecorded:
            nonlocal looks
            looks += 1
            assert looks < 20, "gc does not end"
            for n in range(2 * limit):
                other.save("busy", "step", n)
            return real(limit)

        monkeypatch.setattr(index, "unrecorded", unrecorded)
        store.gc()
        assert looks > 2


def test_a_page_of_deleted_saves_hides_nothing_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlogs, "_AT_ONCE", 4)
    with kedge.open(tmp_path / "store") as store:
        for n in range(9):
            store.save("gone", "step", n)
        store.delete_job("gone")
        store.save("job", "step", 1)
        backlog = store.store.backlog
        assert backlog is not None
        assert backlog.copy() == 1
        assert is_all_copied(store)


@pytest.mark.parametrize("error", [Unavailable("the disk is away"), KeysChanged("changed")])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_copying_begins_again_after_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setattr(backlogs, "AFTER_S", 0.01)
    with kedge.open(tmp_path / "store") as store:
        failed = threading.Event()

        def fail(*_args: object, **_options: object) -> None:
            failed.set()
            raise error

        with monkeypatch.context() as broken:
            broken.setattr(store.store.index, "unrecorded", fail)
            store.save("job", "step", 1)
            assert failed.wait(60)
        backlog = store.store.backlog
        assert backlog is not None
        wait_for(lambda: backlog._timer is None, "it goes on")
        store.save("job", "step", 2)
        wait_for(lambda: is_all_copied(store), "nobody copies what was saved")


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_save_needs_no_thread_for_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(_: threading.Thread) -> None:
        raise error

    with kedge.open(tmp_path / "store") as store:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Timer, "start", fail)
            store.save("job", "first", 1)
        monkeypatch.setattr(backlogs, "AFTER_S", 0.01)
        store.save("job", "second", 2)
        wait_for(lambda: is_all_copied(store), "nobody copies what was saved")
        assert [store.load(each.id) for each in store.list("job")] == [1, 2]
