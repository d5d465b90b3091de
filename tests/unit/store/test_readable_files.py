"""`files:dir`: checkpoints as files that people can read; `memory:dir`: kept when it is closed."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import kedge
from kedge.cli import cli
from kedge.errors import Corrupted, NotAStore, NotFound, StorageError, UnsupportedFormat, Validation
from kedge.index.files.index import FilesIndex
from kedge.manager import CheckpointManager
from tests.parts import require
from tests.torture.kill_loop import kill_loop
from tests.unit.care.test_copy import fill, noise, same


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(place: Path) -> Iterator[CheckpointManager]:
    with kedge.open(f"files:{place}") as opened:
        yield opened


def files(place: Path) -> list[str]:
    return sorted(str(p.relative_to(place)) for p in place.glob("**/*.json") if ".kedge" not in p.parts)


def test_a_checkpoint_is_a_file(store: CheckpointManager, place: Path) -> None:
    state = {"epoch": 3, "names": ["ä", "b"], "loss": 0.5, "none": None}
    saved = store.save("train:1", "epoch 3", state, tags={"kind": "best"}, metadata={"by": "me"}, level="stage")
    file = place / "train:1" / "stage" / f"{saved}.json"
    shown = json.loads(file.read_text())
    assert shown["state"] == state
    assert (shown["seq"], shown["step"], shown["tags"]) == (1, "epoch 3", {"kind": "best"})
    store.tag(saved, kind="worst")
    assert json.loads(file.read_text())["tags"] == {"kind": "worst"}
    store.delete("train:1", saved)
    assert files(place) == []


def test_what_is_not_json_is_outlined_and_what_is_large_is_in_packs(store: CheckpointManager, place: Path) -> None:
    odd = store.save("a", "odd", {"t": (1, 2), "b": b"xyz"})
    large = store.save("a", "large", {"w": noise(1, 2)})
    assert store.load(odd) == {"t": (1, 2), "b": b"xyz"}
    assert np.array_equal(store.load(large)["w"], noise(1, 2))  # type: ignore[index]
    shown = [json.loads((place / "a" / "step" / f"{i}.json").read_text()) for i in (odd, large)]
    assert shown[0]["state"]["t"] == {"$type": "tuple", "items": [1, 2]}
    assert shown[1]["state_in"] == "chunks"
    store.delete("a", large)
    assert store.gc().bytes_kept < 1 << 20  # what is small is in packs too
    assert store.verify().is_ok


def test_copies_and_another_process(store: CheckpointManager, place: Path, tmp_path: Path) -> None:
    fill(store)
    code = f"import kedge; s = kedge.open('files:{place}'); print(s.save('c', 'there', 7)); s.close()"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert store.load(there) == 7
    with kedge.open(tmp_path / "copy") as copy, kedge.open(f"files:{tmp_path / 'back'}") as back:
        store.copy_to(copy)
        same(store, copy)
        copy.copy_to(back)
        same(store, back)


def test_a_file_that_a_crash_left_out_is_written_and_others_are_left_alone(place: Path) -> None:
    with kedge.open(f"files:{place}") as store:
        saved = store.save("a", "one", 1)
    path = place / "a" / "step" / f"{saved}.json"
    text = path.read_text()
    path.unlink()
    (place / "a" / "step" / "gone_1_00000000.json").write_text(
        json.dumps({**json.loads(text), "id": "gone_1_00000000"})
    )
    (place / "notes.json").write_text("{}")
    kedge.open(f"files:{place}").close()
    assert files(place) == [f"a/step/{saved}.json", "notes.json"]
    assert path.read_text() == text


def test_what_was_half_written_is_cut_off(place: Path) -> None:
    with kedge.open(f"files:{place}") as store:
        first = store.save("a", "one", 1)
        with open(place / ".kedge" / "journal", "ab") as journal:
            journal.write(b"-- 500 " + b"0" * 64 + b"\nREPLACE INTO")
        assert [c.id for c in store.list("a")] == [first]
        second = store.save("a", "two", 2)
    with kedge.open(f"files:{place}") as store:
        assert [c.id for c in store.list("a")] == [first, second]
        assert store.verify().is_ok


def test_a_failed_sync_is_not_acknowledged_and_the_next_save_goes_to_a_new_file(
    store: CheckpointManager, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.save("a", "one", 1)
    journal = place / ".kedge" / "journal"
    before = os.stat(journal).st_ino

    sync = os.fsync

    def fail(handle: int) -> None:
        if ".kedge/" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(5, "Input/output error")
        sync(handle)

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr("kedge.index.files.journal.os.fsync", fail)
        store.save("a", "two", 2)
    assert [c.id for c in store.list("a")] == [first]
    third = store.save("a", "three", 3)
    assert os.stat(journal).st_ino != before
    with kedge.open(f"files:{place}") as again:
        assert [c.id for c in again.list("a")] == [first, third]


def test_the_journal_is_compacted_and_others_follow(
    store: CheckpointManager, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.index.files.index._COMPACT_OVER_BYTES", 20_000)
    with kedge.open(f"files:{place}") as other:
        for n in range(60):
            saved = store.save("a", f"step {n}", n)
            if n >= 3:
                store.delete("a", store.list("a")[0].id)
            assert other.load(saved) == n
            if n % 7 == 0:
                other.save("b", "theirs", n)
        assert (place / ".kedge" / "journal").stat().st_size < 90_000
        assert [c.id for c in store.list("b")] == [c.id for c in other.list("b")]
    assert store.verify().is_ok


def test_a_journal_that_was_replaced_twice_is_another_one(store: CheckpointManager, place: Path) -> None:
    """File systems give the number of a removed file to the next one, which a follower must not mix up."""
    with kedge.open(f"files:{place}") as other:
        for n in range(4):
            saved = other.save("a", "theirs", n)
            index = store.store.index
            assert isinstance(index, FilesIndex)
            store.delete("a", store.save("a", "ours, to make it longer", {"n": "x" * 1000}))
            index.scrub()
            index.scrub()
            kept = store.save("a", "kept", n)
            assert other.load(kept) == n
            assert other.exists(saved)
        assert len(other.list("a")) == 8
        assert other.verify().is_ok
    assert store.verify().is_ok


def damaged(place: Path, data: bytes) -> None:
    (place / ".kedge" / "journal").write_bytes(data)


def test_journals_that_are_none(place: Path) -> None:
    with kedge.open(f"files:{place}") as store:
        store.save("a", "one", 1)
        store.save("a", "two", 2)
    journal = (place / ".kedge" / "journal").read_bytes()
    for wrong in (b"", b"hello", journal[:200] + b"x" + journal[201:]):
        damaged(place, wrong)
        with pytest.raises(Corrupted):
            kedge.open(f"files:{place}")
    damaged(place, journal.replace(b"format 1", b"format 9", 1))
    with pytest.raises(UnsupportedFormat):
        kedge.open(f"files:{place}")


@pytest.mark.parametrize(
    "hostile",
    [
        "ATTACH DATABASE '{0}' AS x; CREATE TABLE x.t (a);",
        "PRAGMA writable_schema=ON;",
        "SELECT load_extension('{0}');",
        "DROP TABLE job;",
        "INSERT INTO no_table VALUES (1);",
    ],
)
def test_a_journal_can_only_change_rows(place: Path, tmp_path: Path, hostile: str) -> None:
    from kedge.index.files.journal import _framed

    kedge.open(f"files:{place}").close()
    path = place / ".kedge" / "journal"
    damaged(place, path.read_bytes() + _framed(hostile.format(tmp_path / "made") + "\n"))
    with pytest.raises(Corrupted):
        kedge.open(f"files:{place}")
    assert not (tmp_path / "made").exists()


def test_the_journal_is_sql(place: Path) -> None:
    from kedge.index.sqlite.database import migrations

    with kedge.open(f"files:{place}") as store:
        store.save("a", "with \0 and \n; '", {"n": 1})
        step = store.list("a")[0].step
    with kedge.open(f"files:{place}") as store:
        assert store.list("a")[0].step == step == "with \0 and \n; '"
    db = sqlite3.connect(":memory:")
    for _, sql in migrations():
        db.executescript(sql)
    db.executescript((place / ".kedge" / "journal").read_text())
    assert db.execute("SELECT count(*) FROM checkpoint").fetchone() == (1,)
    db.close()


def test_places_that_are_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        kedge.open(f"files:{place}", create=False)
    assert not place.exists()
    place.mkdir()
    (place / "mine.txt").touch()
    with pytest.raises(NotAStore):
        kedge.open(f"files:{place}")
    with pytest.raises(NotAStore):
        kedge.open(f"files:{place / 'mine.txt'}")


@pytest.mark.faults
@pytest.mark.slow
def test_nothing_acknowledged_is_lost_by_kills(place: Path) -> None:
    assert kill_loop(f"files:{place}", rounds=3, seed=3)["acknowledged"] > 0


def test_memory_that_is_kept(tmp_path: Path) -> None:
    url = f"memory:{tmp_path / 'kept'}"
    with pytest.raises(NotFound):
        kedge.open(url, create=False)
    assert not (tmp_path / "kept").exists()
    with kedge.open(url) as store:
        ids = fill(store)
    with kedge.open(url) as store:
        assert store.get(ids[0]).tags == {"k": "v"}
        assert [c.seq for c in store.list("b")] == [1, 3]
        store.delete("a", ids[0])
        late = store.save("a", "late", {"w": noise(5)})
    with kedge.open(tmp_path / "kept") as store:
        assert not store.exists(ids[0])
        assert store.get(late).seq == 3
        assert store.verify().is_ok


def test_memory_that_is_kept_deletes_only_what_was_deleted_in_it(tmp_path: Path) -> None:
    """What another process has saved in the directory meanwhile was acknowledged there (I1)."""
    place = tmp_path / "kept"
    with kedge.open(place) as store:
        first, second = store.save("job", "first", 1), store.save("job", "second", 2)
    memory = kedge.open(f"memory:{place}")
    with kedge.open(place) as store:
        third = store.save("job", "third", 3)
    memory.delete("job", first)
    memory.close()
    with kedge.open(place) as store:
        assert [c.id for c in store.list("job")] == [second, third]


def test_memory_that_is_kept_brings_nothing_back_that_others_deleted(place: Path) -> None:
    with kedge.open(f"memory:{place}") as store:
        deleted, other = store.save("job", "a", {"n": 1}), store.save("job", "b", {"n": 2})
    stale = kedge.open(f"memory:{place}")
    with kedge.open(f"memory:{place}") as store:
        store.delete("job", deleted)
    stale.tag(deleted, seen="yes")  # changing it is no reason either
    stale.tag(other, seen="yes")
    saved = stale.save("job", "c", {"n": 3})
    stale.close()
    with kedge.open(place) as store:
        assert [c.id for c in store.list("job")] == [other, saved]
        assert store.get(other).tags == {"seen": "yes"}


def test_memory_that_is_kept_is_not_shared_with_processes(place: Path) -> None:
    with (
        pytest.raises(Validation, match="cannot be shared with processes"),
        kedge.open(f"memory:{place}") as store,
        kedge.run("r", store=store) as run,
    ):
        run.map(abs, [1, 2], executor="process")


@pytest.mark.requires("module:fastapi")
def test_every_kind_of_directory_is_served(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[str] = []
    monkeypatch.setattr("kedge.server.process.serve", lambda settings: served.append(settings.store))
    monkeypatch.chdir(place.parent)
    for url in ("files:store", "memory:store", "file:store", "store", "memory:"):
        assert CliRunner().invoke(cli, ["serve", "--store", url]).exit_code == 0
    assert served == [f"files:{place}", f"memory:{place}", f"file:{place}", str(place), "memory:"]
    assert CliRunner().invoke(cli, ["serve", "--store", "memory:store", "--workers", "2"]).exit_code == 3


def test_names_never_become_paths() -> None:
    from kedge.index.files.shown_files import _safe

    for hostile in ("..", ".", "../../etc", "a/b", "\0", ".kedge", "a\nb"):
        safe = _safe(hostile)
        assert "/" not in safe
        assert "\0" not in safe
        assert not safe.startswith(".")


def test_drafts_of_killed_writers_are_swept(place: Path) -> None:
    """By opening and by gc; both hold the lock under which drafts are made, so none of a live writer is touched."""
    program = (
        "import os, sys, kedge\nstore = kedge.open(sys.argv[1])\nstore.save('a', 'one', 1)\n"
        "os.replace = lambda *_: os.kill(os.getpid(), 9)\nstore.save('a', 'two', 2)\n"
    )

    def drafts() -> list[Path]:
        return [path for path in place.rglob(".*") if path.name.endswith(".new")]

    def kill_one() -> None:
        subprocess.run([sys.executable, "-c", program, f"files:{place}"], capture_output=True, check=False)
        assert drafts()

    kill_one()
    with kedge.open(f"files:{place}") as store:
        assert drafts() == []
        assert [c.step for c in store.list("a")] == ["one", "two"]  # the journal had it
        kill_one()
        store.gc()
        assert drafts() == []
        (place / "a" / ".mine.new").touch()
        store.gc()
        assert [path.name for path in drafts()] == [".mine.new"]
    with kedge.open(f"files:{place}") as store:
        assert len(list(place.glob("a/*/*.json"))) == len(store.list("a")) == 4


@pytest.mark.parametrize("key", [None, "kdk1_" + "A" * 42 + "E"])
def test_memory_never_uses_a_number_twice(tmp_path: Path, key: str | None) -> None:
    """I4: neither one that was deleted in the directory, nor one that was only ever in memory."""
    if key is not None:
        require("module:cryptography")
    place, url = tmp_path / "kept", f"memory:{tmp_path / 'kept'}"
    with kedge.open(place, key=key) as store:
        ids = [store.save("job", "step", n) for n in range(3)]
        store.delete("job", ids[2])
        gone = store.save("other", "step", 1)
        store.delete("other", gone)
    with kedge.open(url, key=key) as store:
        in_memory = store.save("job", "step", 4)
        assert store.get(in_memory).seq == 4
        store.delete("job", in_memory)
        assert store.get(store.save("other", "step", 2)).seq == 2
    with kedge.open(url, key=key) as store:
        assert store.get(store.save("job", "step", 5)).seq == 5
    with kedge.open(place, key=key) as store:
        assert [c.seq for c in store.list("job")] == [1, 2, 5]
        assert store.verify().is_ok
