"""Whole jobs: copied to a new name, and deleted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from kedge.manager import CheckpointManager
from tests.parts import require
from tests.torture.races import Background, gate_after


@pytest.fixture(params=["", "files:", "memory:"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(f"{request.param}{tmp_path / 'store'}") as opened:
        yield opened


def fill(store: CheckpointManager, job: str, count: int = 3) -> list[str]:
    return [store.save(job, f"step {n}", {job: n}) for n in range(count)]


def test_a_copy_onto_another_history_is_refused(store: CheckpointManager) -> None:
    fill(store, "a")
    other = fill(store, "b", 1)
    with pytest.raises(kedge.Conflict, match="job b exists and is not a copy of job a"):
        store.copy("a", "b")
    assert [checkpoint.id for checkpoint in store.list("b")] == other
    assert store.restore("b") == {"b": 0}


def test_a_copy_goes_on_and_is_refused_once_the_copy_was_written_to(store: CheckpointManager) -> None:
    fill(store, "a")
    first = store.copy("a", "c")
    assert store.copy("a", "c") == first
    newest = store.save("a", "more", 3)
    assert [checkpoint.step for checkpoint in store.copy("a", "c")] == ["step 0", "step 1", "step 2", "more"]
    store.save("c", "own", 4)
    store.delete("a", newest)
    with pytest.raises(kedge.Conflict):
        store.copy("a", "c")
    assert len(store.list("c")) == 5


@pytest.mark.parametrize(("method", "job"), [("get", "above"), ("get", "a"), ("read", "a")])
def test_what_is_deleted_while_a_job_is_copied_is_left_out(store: CheckpointManager, method: str, job: str) -> None:
    """Before it is copied, or when it was just found to be the parent of what is."""
    parent = store.save("above", "step", 0)
    store.save("a", "step", 1)
    source = store.save("a", "step", b"2" * 100_000, parent=parent)
    with gate_after(store.catalogue, method) as gate:
        copying = Background(store.copy, "a", "new")
        gate.wait_until_reached()
        assert store.delete(job, parent if job == "above" else source)
        store.gc()
        gate.open()
        copies = copying.result()
    assert [store.load(copy.id) for copy in copies] == [1, b"2" * 100_000][: 1 if job == "a" else 2]
    assert [copy.parent for copy in copies] == [None, None][: len(copies)]
    assert store.list("new") == copies
    assert store.verify(deep=True).is_ok


def test_a_copy_waits_for_no_writer(store: CheckpointManager) -> None:
    fill(store, "a")
    with store.lease("new"), pytest.raises(kedge.LeaseHeld):
        store.copy("a", "new")
    assert store.list("new") == []
    assert len(store.copy("a", "new")) == 3
    with store.lease("new"):
        pass  # given back at the end of the copy


def test_a_job_is_deleted(store: CheckpointManager) -> None:
    ids = fill(store, "a")
    fill(store, "b", 1)
    store.set_retention("a", kedge.RetentionPolicy(keep_last=9))
    store.pin(ids[1])
    with pytest.raises(kedge.Conflict, match="pinned"):
        store.delete_job("a")
    assert len(store.list("a")) == 3
    with store.lease("a"), pytest.raises(kedge.LeaseHeld):
        store.delete_job("a", even_pinned=True)
    assert store.delete_job("a", even_pinned=True) == 3
    assert store.delete_job("a") == 0
    assert store.delete_job("nobody") == 0
    assert [job.name for job in store.jobs()] == ["b"]
    assert store.list("a") == []
    assert store.load_latest("a") is None
    store.save("a", "again", 1)
    (again,) = store.jobs("a")
    assert (again.checkpoints, again.last_seq, again.retention) == (1, 4, None)


def test_pages_of_jobs_leave_deleted_ones_out(store: CheckpointManager) -> None:
    for name in ("a", "b", "c", "d", "e"):
        fill(store, name, 1)
    for name in ("a", "c", "d"):
        store.delete_job(name)
    assert [job.name for job in store.jobs(limit=1)] == ["b"]
    assert [job.name for job in store.jobs(limit=2)] == ["b", "e"]
    assert [job.name for job in store.jobs(limit=2, after="b")] == ["e"]
    assert store.jobs("c") == store.jobs("c", limit=1) == []


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["plain", "encrypted"])
def test_a_damaged_checkpoint_that_is_copied_is_not_called_deleted(tmp_path: Path, key: bytes | None) -> None:
    if key is not None:
        require("module:cryptography")
    with kedge.open(tmp_path / "store", key=key or "none") as store:
        damaged = store.save("job", "step", os.urandom(300_000))
    (pack,) = (tmp_path / "store" / "packs").iterdir()
    data = bytearray(pack.read_bytes())
    data[5000] ^= 1
    pack.write_bytes(data)
    with kedge.open(tmp_path / "store", key=key or "none") as store:
        assert store.verify().corrupted == (damaged,)
        with pytest.raises(kedge.Corrupted, match=damaged):
            store.copy("job", "new")
        assert store.list("new") == []
