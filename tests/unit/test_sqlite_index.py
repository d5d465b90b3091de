"""What is special about the SQLite index, beyond the contract every index keeps."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.errors import CheckpointError, Corrupted, StorageError, UnsupportedFormat
from holdfast.index import database
from holdfast.index.sqlite import SqliteIndex
from holdfast.testing.index_suite import record, references, save


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "index.sqlite")


@pytest.fixture
def index(path: str) -> Iterator[SqliteIndex]:
    index = SqliteIndex(path, busy_timeout_s=5)
    yield index
    index.close()


def alter(path: str, *statements: str) -> None:
    with sqlite3.connect(path, isolation_level=None) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


# Formats


def test_a_newer_format_is_refused_and_both_versions_named(path: str) -> None:
    SqliteIndex(path).close()
    alter(path, "PRAGMA user_version=7")
    with pytest.raises(UnsupportedFormat, match=r"7.* 2\b"):
        SqliteIndex(path)


def test_an_older_format_is_brought_forward_in_one_transaction(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = SqliteIndex(path)
    saved = save(first)[0]
    first.close()
    steps = database.migrations()
    good = (2, "CREATE TABLE later (x);\nINSERT INTO later\n  VALUES (';');")
    monkeypatch.setattr(database, "migrations", lambda: [*steps, good, (3, "CREATE TABLE later (y);")])
    with pytest.raises(CheckpointError):
        SqliteIndex(path)
    monkeypatch.setattr(database, "migrations", lambda: [*steps, good])
    second = SqliteIndex(path)  # the failed attempt left nothing behind
    assert second.get(saved.id) == saved
    assert second.store_id == first.store_id
    second.close()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT x FROM later").fetchall() == [(";",)]
        assert db.execute("PRAGMA user_version").fetchone() == (2,)
    db.close()


@pytest.mark.parametrize("content", [b"garbage " * 1000, b"SQLite format 3\0" + b"\xff" * 5000], ids=["text", "header"])
def test_what_is_no_database_is_refused_untouched(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"holdfast|database"):
        SqliteIndex(path)
    assert Path(path).read_bytes() == content


def test_a_database_of_something_else_is_refused(path: str) -> None:
    alter(path, "CREATE TABLE theirs (x)")
    with pytest.raises(CheckpointError, match="not of Holdfast"):
        SqliteIndex(path)


def test_another_process_may_finish_the_index_while_its_format_is_read(path: str) -> None:
    class Watched:
        """A connection; before it looks for tables, another one has made them."""

        def __init__(self, connection: sqlite3.Connection) -> None:
            self.connection = connection
            self.is_made = False

        def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
            if "sqlite_schema" in sql and not self.is_made:
                self.is_made = True
                SqliteIndex(path).close()
            return self.connection.execute(sql, *parameters)

        @property
        def in_transaction(self) -> bool:
            return self.connection.in_transaction

    connection = database.connect(path, 10)
    database.migrate(Watched(connection), path, None)  # type: ignore[arg-type]
    connection.close()
    SqliteIndex(path).close()


def test_many_processes_may_create_one_index_at_once(path: str) -> None:
    code = (
        "import sys; from holdfast.index.sqlite import SqliteIndex; sys.stdin.read(1)\n"
        "i = SqliteIndex(sys.argv[1]); print(i.store_id); i.close()"
    )
    start = [sys.executable, "-c", code, path]
    racing = [subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    time.sleep(0.5)
    for process in racing:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    answers = [process.communicate(timeout=60)[0] for process in racing]
    assert [process.returncode for process in racing] == [0] * 4
    assert len(set(answers)) == 1


def test_a_path_with_odd_characters(tmp_path: Path) -> None:
    place = tmp_path / "a?b#c%20 d"
    place.mkdir()
    index = SqliteIndex(str(place / "index.sqlite"))
    save(index)
    assert len(index.list("job")) == 1
    index.close()
    assert (place / "index.sqlite").stat().st_size > 0


# The file under an open index


def test_a_removed_file_is_noticed_by_writers_and_readers_and_not_made_anew(path: str, index: SqliteIndex) -> None:
    save(index)
    for suffix in ("", "-wal", "-shm"):
        os.unlink(path + suffix)
    attempts: list[Callable[[], object]] = [lambda: save(index), index.jobs, lambda: index.sweep(references)]
    for attempt in attempts:
        with pytest.raises(StorageError, match="replaced or removed"):
            attempt()
    assert not os.path.exists(path)


def test_a_replaced_file_is_noticed(path: str, index: SqliteIndex, tmp_path: Path) -> None:
    save(index)
    another = SqliteIndex(str(tmp_path / "another"))
    another.close()
    os.replace(tmp_path / "another", path)
    with pytest.raises(StorageError, match="replaced or removed"):
        save(index)


def test_rows_nobody_can_have_written_are_corrupted(path: str) -> None:
    index = SqliteIndex(path)
    ids = [save(index)[0].id for _ in range(4)]
    index.close()
    damages = ["level = 'bogus'", "tags = '{'", "step = cast(x'ff' as text)", "digest = 5"]
    for checkpoint_id, damage in zip(ids, damages, strict=True):
        alter(path, f"UPDATE checkpoint SET {damage} WHERE id = '{checkpoint_id}'")
    index = SqliteIndex(path)
    for checkpoint_id in ids:
        with pytest.raises(Corrupted):
            index.get(checkpoint_id)
    index.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE event SET actor = 'somebody else' WHERE id = 2", "event log"),
        ("DELETE FROM event WHERE id = 2", "event log"),
        ("UPDATE job SET size_bytes = size_bytes + 1", "counters of job job"),
        ("UPDATE job SET last_seq = 1", "counters of job job"),
    ],
)
def test_the_index_finds_what_was_altered(path: str, change: str, words: str) -> None:
    index = SqliteIndex(path)
    for _ in range(3):
        save(index)
    assert index.integrity_problems() == []
    index.close()
    alter(path, change)
    index = SqliteIndex(path)
    assert any(words in problem for problem in index.integrity_problems())
    index.close()


# Threads, signals


def hold_commits(index: SqliteIndex, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Transactions begin only once the answered event is set."""
    gate = threading.Event()
    begin = index._writes.begin

    def wait_and_begin() -> None:
        gate.wait()
        begin()

    monkeypatch.setattr(index._writes, "begin", wait_and_begin)
    return gate


@pytest.fixture
def interrupt() -> Iterator[Callable[[float], None]]:
    """Raise KeyboardInterrupt in the main thread after so many seconds, as Ctrl-C does."""

    def raise_it(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raise_it)
    yield lambda after_s: (signal.setitimer(signal.ITIMER_REAL, after_s), None)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_an_interrupted_waiter_leaves_and_the_others_go_on(
    index: SqliteIndex, monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[float], None]
) -> None:
    gate = hold_commits(index, monkeypatch)
    leader = threading.Thread(target=save, args=(index,))
    leader.start()
    time.sleep(0.1)
    interrupt(0.2)
    with pytest.raises(KeyboardInterrupt):
        save(index)
    gate.set()
    leader.join(10)
    later = threading.Thread(target=save, args=(index,), daemon=True)
    later.start()
    later.join(10)
    assert not later.is_alive(), "the lead went to somebody who had left"
    assert len(index.list("job")) == 2  # what was interrupted before it ran was taken back


def test_an_interrupted_leader_keeps_the_interrupt_for_itself(
    index: SqliteIndex, monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[float], None]
) -> None:
    gate = hold_commits(index, monkeypatch)
    errors: list[BaseException] = []

    def follow() -> None:
        time.sleep(0.1)
        try:
            save(index)
        except BaseException as error:
            errors.append(error)

    follower = threading.Thread(target=follow)
    follower.start()
    interrupt(0.4)
    with pytest.raises(KeyboardInterrupt):
        save(index)
    gate.set()
    follower.join(10)
    assert errors == []  # it came too late for the interrupted batch, and led the next one
    assert [c.seq for c in index.list("job")] == [1]


def test_the_pool_of_readers_does_not_grow_with_threads_that_come_and_go(index: SqliteIndex) -> None:
    save(index)
    for _ in range(50):
        thread = threading.Thread(target=index.jobs)
        thread.start()
        thread.join()
    assert len(index._pool._idle) == 1


def test_memory_serves_threads(tmp_path: Path) -> None:
    index = SqliteIndex(None)
    threads = [threading.Thread(target=lambda: [save(index, record()) for _ in range(20)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [c.seq for c in index.list("job")] == list(range(1, 161))
    assert index.integrity_problems() == []
    index.close()


def test_scrubbing_waits_for_another_process_that_writes(index: SqliteIndex, path: str) -> None:
    """Keys are changed beside writers."""
    save(index)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    done = threading.Timer(0.05, lambda: other.execute("ROLLBACK"))
    done.start()
    index.scrub()
    done.join()
    other.close()
    assert [c.seq for c in index.list("job")] == [1]


def test_gc_takes_its_turn_among_writers_as_they_do(
    index: SqliteIndex, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again sooner than SQLite would: beside busy writers that hardly ever found the moment."""
    save(index)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        def wait(seconds: float) -> None:
            assert seconds <= 0.001
            other.execute("ROLLBACK")

        monkeypatch.setattr("holdfast.index.database.time.sleep", wait)
        assert index.sweep(references) == (0, 0)
