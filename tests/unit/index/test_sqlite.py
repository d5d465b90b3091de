"""What is special about the SQLite index, beyond the contract every index keeps."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kedge.errors import CheckpointError, Corrupted, StorageError, UnsupportedFormat
from kedge.index.sqlite import database
from kedge.index.sqlite.index import SqliteIndex
from kedge.testing.index_suite import record, references, save
from tests.waiting import wait_for


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "index.sqlite")


@pytest.fixture
def index(path: str) -> Iterator[SqliteIndex]:
    index = SqliteIndex(path, busy_timeout_s=60)
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
    with pytest.raises(UnsupportedFormat, match=r"format 7.* Kedge \d.* Kedge \d"):
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
    with pytest.raises(CheckpointError, match=r"kedge|database"):
        SqliteIndex(path)
    assert Path(path).read_bytes() == content


def test_a_database_of_something_else_is_refused(path: str) -> None:
    alter(path, "CREATE TABLE theirs (x)")
    with pytest.raises(CheckpointError, match="not of Kedge"):
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
    SqliteIndex(path).close()
    connection.close()


def test_many_processes_may_create_one_index_at_once(path: str) -> None:
    code = (
        "import sys; from kedge.index.sqlite.index import SqliteIndex; print('ready', flush=True); sys.stdin.read(1)\n"
        "i = SqliteIndex(sys.argv[1]); print(i.store_id); i.close()"
    )
    start = [sys.executable, "-c", code, path]
    racing = [subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for process in racing:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
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


class Gate:
    """Transactions wait here until the gate is opened."""

    def __init__(self, index: SqliteIndex, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self._begin = index._writes.begin
        monkeypatch.setattr(index._writes, "begin", self._wait_and_begin)

    def _wait_and_begin(self) -> None:
        self.reached.set()
        assert self._open.wait(60)
        self._begin()

    def open(self) -> None:
        self._open.set()


def is_queued(thread: threading.Thread) -> bool:
    """It waits for somebody else's commit."""
    frame = sys._current_frames().get(thread.ident or 0)
    return (
        frame is not None and frame.f_code.co_name == "_wait" and frame.f_code.co_filename.endswith("group_commit.py")
    )


@contextmanager
def interrupted_when(condition: Callable[[], bool]) -> Iterator[None]:
    """Raise KeyboardInterrupt in the main thread once the condition holds, as Ctrl-C does; to be caught inside."""

    def raise_it(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupt() -> None:
        wait_for(condition, "the moment to interrupt does not come")
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, raise_it)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join()
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_waiter_leaves_and_the_others_go_on(index: SqliteIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(index, monkeypatch)
    leader = threading.Thread(target=save, args=(index,))
    leader.start()
    assert gate.reached.wait(60)
    with interrupted_when(lambda: is_queued(threading.main_thread())):
        save(index)
    gate.open()
    leader.join(60)
    later = threading.Thread(target=save, args=(index,), daemon=True)
    later.start()
    later.join(60)
    assert not later.is_alive(), "the lead went to somebody who had left"
    assert len(index.list("job")) == 2  # what was interrupted before it ran was taken back


def test_an_interrupted_leader_keeps_the_interrupt_for_itself(
    index: SqliteIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(index, monkeypatch)
    errors: list[BaseException] = []

    def follow() -> None:
        assert gate.reached.wait(60)
        try:
            save(index)
        except BaseException as error:
            errors.append(error)

    follower = threading.Thread(target=follow)
    follower.start()
    with interrupted_when(lambda: is_queued(follower)):
        save(index)
    gate.open()
    follower.join(60)
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

        monkeypatch.setattr("kedge.index.sqlite.database.time.sleep", wait)  # sleep: of the product
        assert index.sweep(references) == (0, 0)
