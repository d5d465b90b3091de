"""I3: gc never removes what is reachable or being written. Each interleaving is made by hand."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import kedge
from kedge.store.request import request_again
from tests.torture import children
from tests.torture.children import Child, Report
from tests.torture.races import Background, gate_after, gate_before
from tests.torture.states import make, same

pytestmark = pytest.mark.faults

Manager = kedge.CheckpointManager


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def user(place: str) -> Iterator[Manager]:
    with kedge.open(place) as manager:
        yield manager


@pytest.fixture
def other(place: str, user: Manager) -> Iterator[Manager]:
    """A second manager: shares nothing with the first but the files."""
    with kedge.open(place) as manager:
        yield manager


def is_whole(store: Manager, checkpoint: str, kind: str, seed: int) -> None:
    """The checkpoint is what was saved, now and after another gc, and for someone who opens the store anew."""
    assert same(store.load(checkpoint), make(kind, seed))
    assert store.verify(deep=True).problems == ()
    store.gc()
    with kedge.open(store.url) as fresh:
        assert same(fresh.load(checkpoint), make(kind, seed))


@pytest.mark.parametrize("kind", ["arrays", "packed", "tree", "inline"])
def test_chunks_removed_before_the_commit_that_reuses_them(user: Manager, other: Manager, kind: str) -> None:
    first = user.save("old", "step", make(kind, 1))
    with gate_before(user.store.index, "commit") as gate:
        saving = Background(user.save, "new", "step", make(kind, 1))
        gate.wait_until_reached()
        assert other.delete("old", first)
        assert other.gc().chunks_removed > 0
        gate.open()
        saved = saving.result()
    assert gate.passed == 2  # told that chunks are gone, written again, committed
    is_whole(other, saved, kind, 1)


def test_files_of_a_checkpoint_that_is_deleted_after_it_was_loaded(
    user: Manager, other: Manager, tmp_path: Path
) -> None:
    """Their content is still in the store then. That it is gone is no damage."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(random.Random(1).randbytes(300_000))
    tree = user.load(user.save("job", "step", kedge.Tree(tmp_path / "folder")))
    other.delete("job", other.list("job")[0].id)
    assert other.gc().chunks_removed > 0
    with pytest.raises(kedge.NotFound, match="deleted while it was read"):
        tree.read("file")
    with pytest.raises(kedge.NotFound, match="deleted while it was read"):
        tree.write_to(tmp_path / "back")


def test_a_checkpoint_that_is_deleted_before_it_is_branched(user: Manager, other: Manager) -> None:
    """Also one whose manifest lies in chunks, which are read once more."""
    states: dict[str, object] = {
        "packed": random.Random(1).randbytes(100_000),
        "spilled": {"pages": [bytes(4096)] * 14_000},
    }
    for job, state in states.items():
        source = user.catalogue.read(user.save(job, "step", state))
        other.delete(job, source[0].id)
        other.gc()
        request = request_again(source[0], job="new", parent=None)
        with pytest.raises(kedge.NotFound, match="deleted meanwhile"):
            user.store.branch(source, request, actor="test")
    assert user.list("new") == []


def test_chunks_removed_right_after_they_were_found(user: Manager, other: Manager) -> None:
    first = user.save("old", "step", make("packed", 1))
    with gate_after(user.store.index, "locate") as gate:
        saving = Background(user.save, "new", "step", make("packed", 1))
        gate.wait_until_reached()
        other.delete("old", first)
        other.gc()
        gate.open()
        saved = saving.result()
    is_whole(other, saved, "packed", 1)


def test_chunks_remembered_from_the_last_save_of_the_job(user: Manager, other: Manager) -> None:
    """A saver compares with the checkpoint it wrote before, without asking the index."""
    first = user.save("job", "step", make("arrays", 1))
    other.delete("job", first)
    assert other.gc().chunks_removed > 0
    is_whole(other, user.save("job", "step", make("arrays", 1)), "arrays", 1)


def test_chunks_reused_while_gc_is_marking(user: Manager, other: Manager) -> None:
    user.save("new", "step", 1)  # gc walks job by job: it has passed this one when the save below comes
    user.save("stays", "step", make("packed", 2))
    first = user.save("old", "step", make("arrays", 1))
    other.delete("old", first)
    with gate_before(other.store, "references") as gate:
        collecting = Background(other.gc)
        gate.wait_until_reached()
        saved = user.save("new", "step", make("arrays", 1))  # reuses what gc is about to find unnamed
        gate.open()
        collecting.result()
    is_whole(user, saved, "arrays", 1)


def test_a_pack_whose_save_is_not_committed_yet(user: Manager, other: Manager) -> None:
    with gate_before(user.store.index, "commit") as gate:
        saving = Background(user.save, "job", "step", make("arrays", 1))
        gate.wait_until_reached()
        assert other.gc().packs_removed == 0
        assert user.gc().packs_removed == 0
        gate.open()
        saved = saving.result()
    assert gate.passed == 1
    is_whole(other, saved, "arrays", 1)


def test_a_pack_named_since_gc_looked(user: Manager, other: Manager) -> None:
    """The list of used packs is old when gc comes to remove: it asks again about each."""
    with gate_before(user.store.index, "commit") as committing, gate_before(other.store.blobs, "remove") as removing:
        saving = Background(user.save, "job", "step", make("arrays", 1))
        committing.wait_until_reached()
        collecting = Background(other.gc)
        removing.wait_until_reached()
        committing.open()
        saved = saving.result()
        removing.open()
        assert collecting.result().packs_removed == 0
    is_whole(other, saved, "arrays", 1)


def save_when_told(report: Report, connection: Connection, place: str) -> None:
    """A process that waits between its pack's sync and its commit."""
    store = kedge.open(place)
    with gate_before(store.store.index, "commit") as gate:
        saving = Background(store.save, "job", "step", make("arrays", 1))
        gate.wait_until_reached()
        report("waiting")
        connection.recv()
        gate.open()
        report("saved", saving.result(), "job", "arrays", 1)


def test_a_pack_of_a_writer_in_another_process(user: Manager, place: str) -> None:
    child = Child(save_when_told, place)
    child.wait_for("waiting")
    assert user.gc().packs_removed == 0
    child.tell("go on")
    saved = str(child.wait_for("saved")[1])
    assert child.drain() == 0
    is_whole(user, saved, "arrays", 1)


def test_a_pack_of_a_writer_that_died(user: Manager, place: str) -> None:
    child = Child(save_when_told, place)
    child.wait_for("waiting")
    child.kill()
    assert user.gc().packs_removed == 1
    assert user.stats()["packs"] == 0


def sparse_pack(user: Manager) -> tuple[str, str]:
    """Two checkpoints in one pack; gc rewrites it when the large one is gone."""
    large = user.save("job", "large", make("arrays", 1))
    small = user.save("job", "small", make("packed", 2))
    assert user.stats()["packs"] == 1
    return large, small


def test_a_reader_of_a_pack_that_is_rewritten(user: Manager, other: Manager, place: str) -> None:
    large, small = sparse_pack(user)
    with kedge.open(place) as reader, gate_before(reader.store.blobs, "read_into") as gate:
        loading = Background(reader.load, small)
        gate.wait_until_reached()
        other.delete("job", large)
        report = other.gc()
        assert (report.packs_rewritten, report.packs_removed) == (1, 1)
        gate.open()
        assert same(loading.result(), make("packed", 2))
    is_whole(other, small, "packed", 2)


def test_a_checkpoint_deleted_while_its_pack_is_rewritten(user: Manager, other: Manager) -> None:
    large, small = sparse_pack(user)
    user.delete("job", large)
    with gate_before(other.store.index, "relocate") as gate:
        collecting = Background(other.gc)
        gate.wait_until_reached()
        user.delete("job", small)
        user.gc()
        gate.open()
        collecting.result()
    other.gc()
    assert other.stats()["packs"] == 0
    assert other.verify().is_ok


def test_a_chunk_reused_while_its_pack_is_rewritten(user: Manager, other: Manager) -> None:
    large, _ = sparse_pack(user)
    user.delete("job", large)
    with gate_before(other.store.index, "relocate") as gate:
        collecting = Background(other.gc)
        gate.wait_until_reached()
        saved = user.save("new", "step", make("packed", 2))
        gate.open()
        collecting.result()
    is_whole(user, saved, "packed", 2)


def test_two_collectors_rewrite_the_same_pack(user: Manager, other: Manager) -> None:
    large, small = sparse_pack(user)
    user.delete("job", large)
    with gate_before(other.store.index, "relocate") as gate:
        collecting = Background(other.gc)
        gate.wait_until_reached()
        user.gc()
        gate.open()
        collecting.result()
    is_whole(user, small, "packed", 2)
    other.gc()
    assert other.stats()["packs"] == 2  # its chunks, and its record


@pytest.mark.parametrize("point", ["packs", "chunks_of"])
def test_a_collector_whose_pack_another_one_removed_reports_no_damage(
    user: Manager, other: Manager, point: str
) -> None:
    large, small = sparse_pack(user)
    user.delete("job", large)
    with gate_after(other.store.index, point) as gate:
        collecting = Background(other.gc)
        gate.wait_until_reached()
        assert user.gc().packs_rewritten == 1
        gate.open()
        assert collecting.result().damaged == ()
    is_whole(user, small, "packed", 2)


def test_a_collector_that_reads_a_pack_while_another_one_removes_it(user: Manager, other: Manager) -> None:
    large, small = sparse_pack(user)
    user.delete("job", large)
    with gate_before(other.store.blobs, "read_into") as gate:
        collecting = Background(other.gc)
        gate.wait_until_reached()
        assert user.gc().packs_rewritten == 1
        gate.open()
        assert collecting.result().damaged == ()
    is_whole(user, small, "packed", 2)


def test_a_pack_that_is_damaged_is_still_reported(user: Manager, place: str) -> None:
    large, small = sparse_pack(user)
    user.delete("job", large)
    (row,) = user.store.index.locate(user.store.chunks(user.store.index.read(small)[1])).values()
    path = Path(str(user.store.blobs.file_of(row.pack)))
    with open(path, "r+b") as file:
        file.seek(row.offset)
        file.write(bytes(row.stored_bytes))
    with kedge.open(place) as fresh:
        assert fresh.gc().damaged == (row.pack,)


def test_two_collectors_again_and_again(user: Manager, other: Manager) -> None:
    kept = [user.save("kept", "step", make("packed", n)) for n in range(3)]
    for turn in range(8):
        doomed = [user.save("job", "step", make(kind, 100 + turn)) for kind in ("arrays", "packed", "tree")]
        for checkpoint in doomed:
            user.delete("job", checkpoint)
        together = threading.Barrier(2)

        def collect(store: Manager, together: threading.Barrier = together) -> None:
            together.wait()
            store.gc()

        both = [Background(collect, store) for store in (user, other)]
        for collecting in both:
            collecting.result()
        for n, checkpoint in enumerate(kept):
            assert same(other.load(checkpoint), make("packed", n))
    is_whole(user, kept[0], "packed", 0)


def test_a_checkpoint_deleted_while_it_is_loaded(user: Manager, other: Manager, place: str) -> None:
    """Its bytes are gone: that is NotFound. "Corrupted" would send people looking for a broken disk."""
    saved = user.save("job", "step", make("packed", 1))
    with kedge.open(place) as reader, gate_before(reader.store.blobs, "read_into") as gate:
        loading = Background(reader.load, saved)
        gate.wait_until_reached()
        other.delete("job", saved)
        assert other.gc().packs_removed == 1
        gate.open()
        with pytest.raises(kedge.NotFound):
            loading.result()


def test_a_source_deleted_while_it_is_copied(user: Manager, other: Manager) -> None:
    saved = user.save("job", "step", make("packed", 1))
    with gate_before(user.store.index, "commit") as gate:
        copying = Background(user.resume_from, saved, "branch")
        gate.wait_until_reached()
        other.delete("job", saved)
        other.gc()
        gate.open()
        with pytest.raises(kedge.NotFound):
            copying.result()
    assert user.list("branch") == []
    assert user.verify().is_ok


def test_saves_while_a_collector_never_rests(user: Manager, place: str) -> None:
    """Every save reuses what was deleted a moment ago, next to a gc in another process."""
    collector = Child(children.collect, place)
    collector.wait_for("ready")
    last = user.save("job", "step", make("arrays", 0))
    for turn in range(30):
        saved = user.save("job", "step", make("arrays", turn % 3))
        user.delete("job", last)
        last = saved
        assert same(user.load(saved), make("arrays", turn % 3))
    collector.tell("end")
    collector.drain()
    assert collector.ledger.failures == []
    assert user.verify(deep=True).is_ok
