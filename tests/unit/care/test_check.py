"""Check: only what was read and is wrong is damage, and only as long as it is what was read."""

# ruff: noqa: F811 - tests take the fixtures imported below by their names

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.care.repair import repair
from kedge.errors import CheckpointError, Corrupted, StorageError, Unavailable, storage_error
from kedge.index.sqlite.sweep import integrity_problems
from kedge.manager import CheckpointManager
from kedge.store.request import Request
from kedge.store.rope import PartedTree, Piece, Pieces
from tests.parts import library
from tests.unit.cli.test_app import Run as Command
from tests.unit.cli.test_app import run, store  # noqa: F401 - fixtures

KEY = "kdk1_" + "A" * 42 + "E"
STATE = {"blob": random.Random(1).randbytes(300_000)}

OUTAGES = {
    "unavailable": Unavailable("the server cannot be reached"),
    "too many open files": storage_error("read", "a pack", OSError(errno.EMFILE, "too many open files")),
    "permission": storage_error("read", "a pack", PermissionError(errno.EACCES, "permission denied")),
    "disk": storage_error("read", "a pack", OSError(errno.EIO, "input/output error")),
    "memory": MemoryError(),
    "timeout": TimeoutError("no answer"),
    "bug": RuntimeError("can't start new thread"),
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(params=[None, KEY], ids=["plain", "encrypted"])
def key(request: pytest.FixtureRequest) -> str | None:
    if request.param is not None:
        library("cryptography")
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def pair(place: Path, key: str | None) -> Iterator[tuple[CheckpointManager, CheckpointManager]]:
    """One that checks, and one that works beside it."""
    with kedge.open(place, key=key) as checking, kedge.open(place, key=key) as working:
        yield checking, working


def before(monkeypatch: pytest.MonkeyPatch, owner: object, method: str, *actions: Callable[[], object]) -> None:
    """Do the first action before the first call of `method`, the second before the second, and so on."""
    call, left = getattr(owner, method), list(actions)

    def gated(*args: Any, **options: Any) -> Any:
        if left:
            left.pop(0)()
        return call(*args, **options)

    monkeypatch.setattr(owner, method, gated)


def statuses(manager: CheckpointManager) -> set[str]:
    return {str(c.status) for job in manager.jobs() for c in manager.list(job.name)}


def parted(manager: CheckpointManager) -> str:
    """A state whose names of chunks are in chunks themselves, which are in a pack."""
    head, size = b"\xdc" + (40).to_bytes(2, "big"), 5000
    draw = random.Random(4)
    lines = Pieces(
        [Piece(b"\xda" + size.to_bytes(2, "big") + draw.randbytes(size // 2).hex().encode()) for _ in range(40)]
    )
    saved = manager.store.save(Request(job="job", step="parted"), PartedTree([head, lines]), actor="t")
    return saved.id


# An outage


@pytest.mark.parametrize("outage", OUTAGES.values(), ids=OUTAGES)
def test_an_outage_condemns_nothing(
    pair: tuple[CheckpointManager, CheckpointManager], outage: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    checking, _ = pair
    older = checking.save("job", "older", {"n": 1})
    newest = checking.save("job", "newest", STATE)

    def fail(*_: object) -> None:
        raise outage

    with monkeypatch.context() as patched:
        patched.setattr(checking.store.blobs, "read_into", fail)
        with pytest.raises(StorageError, match=r"could not look at pack [0-9a-f]{32}"):
            checking.verify()
        with pytest.raises(StorageError, match="could not look at"):
            checking.condemn(newest)
    assert statuses(checking) == {"created"}
    found = checking.load_latest("job")
    assert found is not None
    assert found[0].id == newest
    assert checking.apply(kedge.RetentionPolicy(keep_last=1), job="job", dry_run=False).delete[0].id == older
    assert checking.get(checking.save("other", "again", STATE)).stored_bytes < 10_000  # its chunks are still trusted
    assert checking.verify().is_ok


@pytest.mark.parametrize("deep", [True, False])
def test_an_outage_while_names_are_read_condemns_nothing(
    deep: bool, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    with kedge.open(place) as manager:
        saved = parted(manager)

        def fail(*_: object, **__: object) -> None:
            raise Unavailable("the server cannot be reached")

        with monkeypatch.context() as patched:
            patched.setattr(manager.store.reader, "read_named", fail)
            with pytest.raises(Unavailable, match=f"could not look at checkpoint {saved}"):
                manager.verify(deep=deep)
        assert statuses(manager) == {"created"}
        assert manager.verify().is_ok


def test_a_folder_of_packs_that_is_away_is_no_damage(
    store: Path,
    run: Command,
) -> None:
    with kedge.open(store) as manager:
        saved = manager.save("job", "step", STATE)
    shutil.move(store / "packs", store.parent / "away")
    with kedge.open(store) as manager:
        with pytest.raises(StorageError):
            manager.load(saved)
        with pytest.raises(StorageError):
            manager.condemn(saved)
        assert statuses(manager) == {"created"}
    for words in (("check",), ("check", "--quick"), ("check", "--repair")):
        assert "could not look at" in run(*words, code=StorageError.exit_code).stderr
    shutil.rmtree(store / "packs", ignore_errors=True)
    shutil.move(store.parent / "away", store / "packs")
    run("check")


def test_what_was_spoilt_on_its_way_is_read_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kedge.open(place) as manager:
        manager.save("job", "step", STATE)
        read, calls = manager.store.blobs.read_into, []

        def spoil(pack: str, offset: int, target: memoryview) -> None:
            read(pack, offset, target)
            if not calls:
                target[7] ^= 1
            calls.append(pack)

        monkeypatch.setattr(manager.store.blobs, "read_into", spoil)
        assert manager.verify().is_ok


def test_a_rebuild_during_an_outage_condemns_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kedge.open(place) as manager:
        parted(manager)
    for index in place.glob("index.sqlite*"):
        index.unlink()

    def fail(*_: object, **__: object) -> None:
        raise Unavailable("the server cannot be reached")

    with monkeypatch.context() as patched:
        patched.setattr("kedge.store.chunk_reader.ChunkReader.read_named", fail)
        with pytest.raises(Unavailable):
            repair(place, actor="t")
    assert repair(place, actor="t").corrupted == ()
    with kedge.open(place) as manager:
        assert [c.step for c in manager.list("job")] == ["parted"]
        assert manager.verify().is_ok


# Beside others


def test_content_that_is_deleted_and_saved_again_is_sound(
    pair: tuple[CheckpointManager, CheckpointManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    checking, working = pair
    old = working.save("job", "step", STATE)

    def collect() -> None:
        working.delete("job", old)
        working.gc()

    before(monkeypatch, checking.store.blobs, "read_into", collect)
    before(monkeypatch, checking.store.index, "manifests", lambda: working.save("job", "again", STATE))
    assert checking.verify().is_ok
    assert "corrupted" not in statuses(working)


MUTANTS: dict[str, tuple[str, Callable[..., object]]] = {
    "says what it saw, whatever it is now": (
        "kedge.index.sqlite.writes.stands", lambda db, ns, look, found: found is not None
    ),
    "looks at the checkpoint's row alone": (
        "kedge.index.sqlite.writes.stands", lambda db, ns, look, found: found[0].digest.hex() == look.checkpoint.digest
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_check_that_compares_less_marks_what_was_healed(
    place: Path, mutant: tuple[str, Callable[..., object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kedge.open(place) as checking, kedge.open(place) as working:
        working.save("job", "step", STATE)
        for pack in (place / "packs").iterdir():
            pack.unlink()
        working.store.blobs.seal()
        before(monkeypatch, checking.store.index, "mark", lambda: working.save("job", "again", STATE))
        monkeypatch.setattr(*mutant)
        checking.verify()
        assert "corrupted" in statuses(working)


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("method", ["mark_damaged", "mark"])
def test_what_a_save_heals_while_it_is_checked_is_not_marked(
    pair: tuple[CheckpointManager, CheckpointManager], place: Path, method: str, deep: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    checking, working = pair
    old = working.save("job", "step", STATE)
    for pack in (place / "packs").iterdir():
        pack.unlink()
    working.store.blobs.seal()  # it adds nothing to a file that is gone
    before(monkeypatch, checking.store.index, method, lambda: working.save("job", "again", STATE))
    checking.verify(deep=deep)
    assert "corrupted" not in statuses(working)
    assert working.load(old) == STATE
    assert checking.verify().is_ok


def test_real_damage_is_marked_beside_a_save(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant of the tests above: one that marks nothing at all."""
    with kedge.open(place) as checking, kedge.open(place) as working:
        old = working.save("job", "step", STATE)
        (pack,) = (place / "packs").iterdir()
        data = bytearray(pack.read_bytes())
        data[4096 + 100] ^= 1
        pack.write_bytes(data)
        before(monkeypatch, checking.store.index, "mark", lambda: working.save("other", "step", {"n": 1}))
        report = checking.verify()
        assert report.corrupted == (old,)
        assert working.get(old).status == "corrupted"


@pytest.mark.parametrize("where", ["read_into", "manifests", "locate", "mark_damaged", "mark"])
def test_a_change_of_keys_beside_a_check_marks_nothing(
    place: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library("cryptography")
    with kedge.open(place, key=KEY) as checking, kedge.open(place, key=KEY) as working:
        working.save("job", "large", STATE)
        working.save("job", "small", {"n": 1})
        working.save("job", "inline chunks", {"b": b"crown-jewels" * 700})
        parted(working)
        owner = checking.store.blobs if where == "read_into" else checking.store.index

        at_once = threading.Lock()  # a check reads with several threads, and keys change one at a time

        def change() -> None:
            with at_once:
                working.rekey(rewrite=True)
                working.gc()

        before(monkeypatch, owner, where, change, change)
        report = checking.verify()
        assert report.is_ok, report.problems
        assert "corrupted" not in statuses(working)
        assert checking.verify().is_ok


def test_nothing_is_marked_beside_deleting_collecting_and_saving_the_same(place: Path) -> None:
    """By chance, for a second; the order of things is drawn anew every time."""
    with kedge.open(place) as checking, kedge.open(place) as working:
        stop = threading.Event()
        failures: list[BaseException] = []

        def work() -> None:
            try:
                while not stop.is_set():
                    saved = working.save("job", "step", STATE)
                    working.delete("job", saved)
                    working.gc()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            for n in range(20):
                report = checking.verify(deep=n % 2 == 0)
                assert report.is_ok, report.problems
        finally:
            stop.set()
            thread.join()
        assert failures == []


def test_what_was_saved_during_a_check_is_called_valid_only_when_it_was_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kedge.open(place) as checking, kedge.open(place) as working:

        def save_and_damage() -> None:
            working.save("late", "step", STATE)
            working.store.blobs.close()
            for pack in (place / "packs").iterdir():
                data = bytearray(pack.read_bytes())
                data[4096 + 100] ^= 1
                pack.write_bytes(data)

        before(monkeypatch, checking.store.index, "manifests", save_and_damage)
        checking.verify()
        assert statuses(checking) == {"corrupted"}


def test_damage_inside_the_index_is_not_reused(place: Path) -> None:
    state = {"b": random.Random(2).randbytes(20_000)}
    with kedge.open(place) as manager:
        saved = manager.save("job", "step", state)
    db = sqlite3.connect(place / "index.sqlite")
    with db:
        db.execute("UPDATE chunk SET data = zeroblob(length(data))")
    db.close()
    with kedge.open(place) as manager:
        assert manager.verify().corrupted == (saved,)
        again = manager.save("job", "again", state)
        assert manager.load(again) == manager.load(saved) == state
        assert manager.verify().is_ok


# Latest


def test_the_first_save_of_a_job_is_never_taken_for_damage(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kedge.open(place) as reading, kedge.open(place) as working:
        latest = reading.store.index.list_stored
        saves: list[str] = []

        def late(*args: Any) -> Any:
            found = latest(*args)
            if args[1].is_intact and not saves:
                saves.append(working.save("job", "first", {"n": 1}))
            return found

        monkeypatch.setattr(reading.store.index, "list_stored", late)
        found = reading.load_latest("job")
        assert found is not None
        assert found[0].id == saves[0]


def test_a_save_after_only_damage_is_found(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sound one, and a damaged one behind it, come between the two looks."""
    with kedge.open(place) as reading, kedge.open(place) as working:
        working.set_status(working.save("job", "damaged", 0), "corrupted")
        latest = reading.store.index.list_stored
        saves: list[str] = []

        def late(*args: Any) -> Any:
            found = latest(*args)
            if args[1].is_intact and not saves:
                saves.append(working.save("job", "sound", {"n": 1}))
                working.set_status(working.save("job", "damaged too", 0), "corrupted")
            return found

        monkeypatch.setattr(reading.store.index, "list_stored", late)
        with pytest.warns(UserWarning, match="passed over"):
            found = reading.load_latest("job")
        assert found is not None
        assert found[0].id == saves[0]


# Cost


def steps_to_check(place: Path, jobs: int) -> int:
    """Steps of SQLite's machine, in hundreds, for a check of so many jobs."""
    with kedge.open(place) as manager:
        for n in range(jobs):
            manager.save(f"job{n}", "step", n)
    steps = [0]

    def count() -> int:
        steps[0] += 1
        return 0

    db = sqlite3.connect(place / "index.sqlite")
    db.set_progress_handler(count, 100)
    assert integrity_problems(db) == []
    db.close()
    return steps[0]


def test_a_check_costs_as_much_as_there_is(tmp_path: Path) -> None:
    few, many = steps_to_check(tmp_path / "few", 100), steps_to_check(tmp_path / "many", 400)
    assert many < 6 * few


def test_counters_that_are_off_are_told(place: Path) -> None:
    with kedge.open(place) as manager:
        for job in ("a", "b", "c", "d", "e", "whole"):
            manager.save(job, "step", 1)
        manager.delete("e", manager.save("e", "gone", 2))
    db = sqlite3.connect(place / "index.sqlite")
    with db:
        db.execute("UPDATE job SET checkpoints = checkpoints + 1 WHERE name = 'a'")
        db.execute("UPDATE job SET size_bytes = size_bytes + 1 WHERE name = 'b'")
        db.execute("UPDATE job SET stored_bytes = stored_bytes + 1 WHERE name = 'c'")
        db.execute("UPDATE job SET last_seq = 0 WHERE name = 'd'")
        db.execute("INSERT INTO job VALUES (99, 1, 'empty', 0, 0, 0, 0, 0, 0, NULL)")
    problems = integrity_problems(db)
    db.close()
    assert [text.split()[4] for text in problems] == ["a", "b", "c", "d"]


def test_many_packs_that_are_cut_are_listed_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kedge.open(place) as manager:
        for n in range(5):
            manager.save("job", f"step {n}", {"blob": os.urandom(100_000)})
            manager.store.blobs.seal()
        packs = list((place / "packs").iterdir())
        assert len(packs) == 5
        manager.store.blobs.close()
        for pack in packs:
            os.truncate(pack, 8192)
        lists, calls = manager.store.blobs.packs, []

        def counted() -> Any:
            calls.append(1)
            return lists()

        monkeypatch.setattr(manager.store.blobs, "packs", counted)
        report = manager.verify(deep=False)
        assert len(report.corrupted) == 5
        assert len(calls) <= 2


def test_errors_say_what_and_what_next(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with kedge.open(place) as manager:
        manager.save("job", "step", STATE)

        def fail(*_: object) -> None:
            raise Unavailable("cannot read packs/1: timed out", hint="check the network")

        monkeypatch.setattr(manager.store.blobs, "read_into", fail)
        with pytest.raises(CheckpointError) as failure:
            manager.verify()
        assert not isinstance(failure.value, Corrupted)
        assert "timed out" in failure.value.message
        assert failure.value.hint
