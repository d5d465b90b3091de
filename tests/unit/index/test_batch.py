"""Saves that SQLite commits in one statement: the same as one by one, whatever others have done meanwhile."""

import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kedge.errors import IdempotencyConflict, LeaseHeld, LeaseLost, NotFound, Validation
from kedge.index.sqlite import file, writes
from kedge.index.sqlite.index import SqliteIndex
from kedge.index.sqlite.writes import MAX_ROWS
from kedge.model import Checkpoint, CheckpointId
from kedge.ports import IdTaken, Selection
from kedge.testing.index_suite import record, save


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "index.sqlite")


@pytest.fixture
def index(path: str) -> Iterator[SqliteIndex]:
    """One that knows its job: from the second save on, a statement is enough."""
    with closing(SqliteIndex(path)) as index:
        save(index)
        yield index
        assert index.integrity_problems() == []
        assert_counted(index)


@pytest.fixture
def other(index: SqliteIndex, path: str) -> Iterator[SqliteIndex]:
    with closing(SqliteIndex(path)) as other:
        yield other


def assert_counted(index: SqliteIndex) -> None:
    """Each job counts what it holds, and the log of changes is whole."""
    for job in index.jobs():
        checkpoints = index.list(job.name)
        assert job.checkpoints == len(checkpoints)
        assert job.size_bytes == sum(checkpoint.size_bytes for checkpoint in checkpoints)
        assert job.stored_bytes == sum(checkpoint.stored_bytes for checkpoint in checkpoints)
        assert job.last_seq >= max((checkpoint.seq for checkpoint in checkpoints), default=0)
        assert [index.get(checkpoint.id) for checkpoint in checkpoints] == checkpoints
    assert index.audit().broken_at is None
    saves = Counter(event.checkpoint for event in index.events(limit=10_000) if event.action == "save")
    assert all(saves[checkpoint.id] == 1 for job in index.jobs() for checkpoint in index.list(job.name))


def test_a_save_of_a_known_job_is_one_statement(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    connect = file.connect

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect(*args, **options)
        connection.set_trace_callback(statements.append)
        return connection

    monkeypatch.setattr(file, "connect", traced)
    with closing(SqliteIndex(path)) as index:
        for _ in range(3):
            save(index)
        for fields in ({}, {"idempotency_key": "key"}, {"parent": save(index)[0].id}):
            statements.clear()
            (saved,) = save(index, record(**fields))
            assert len(set(statements)) == 1  # told again for each statement of the trigger
            assert index.get(saved.id) == saved
        tags = {"env": 'ü"\\ 😀\n', "empty": ""}
        statements.clear()
        (saved,) = save(index, record(tags=tags))
        assert len(set(statements)) == 1
        for name, value in tags.items():
            assert index.list("job", Selection(tags={name: [value]})) == [saved]
        assert index.integrity_problems() == []
        assert_counted(index)


def test_saves_that_wait_together_get_numbers_in_order(index: SqliteIndex) -> None:
    save(index, record("other"))
    records = [record(job) for job in ("job", "other", "job", "job", "other")]
    saved = index.commit_each([(new, "tester") for new in records])
    assert [checkpoint.seq for checkpoint in saved if isinstance(checkpoint, Checkpoint)] == [2, 2, 3, 4, 3]
    assert [index.read(new.id)[1] for new in records] == [new.manifest for new in records]


@pytest.mark.parametrize("count", [3, MAX_ROWS, MAX_ROWS + 1])
def test_any_number_of_saves(index: SqliteIndex, count: int) -> None:
    saved = index.commit_each([(record(), "tester") for _ in range(count)])
    assert [checkpoint.seq for checkpoint in saved if isinstance(checkpoint, Checkpoint)] == list(range(2, count + 2))


def test_one_that_is_refused_disturbs_no_other(index: SqliteIndex) -> None:
    taken = save(index, record(idempotency_key="key", request_digest=b"state"))[0]
    lease = index.acquire_lease("leased", "me", 60)
    refused: list[tuple[Any, type[BaseException]]] = [
        (record(id=taken.id), IdTaken),
        (record(parent=CheckpointId("unknown")), NotFound),
        (record("leased"), LeaseHeld),
        (record("leased", lease_token=lease.token + 1), LeaseLost),
        (record(idempotency_key="key", request_digest=b"another"), IdempotencyConflict),
        (record(step="\ud800"), Validation),
    ]
    for new, error in refused:
        good = [record(), record("leased", lease_token=lease.token)]
        first, outcome, last = index.commit_each([(good[0], "tester"), (new, "tester"), (good[1], "tester")])
        assert isinstance(outcome, error)
        assert [index.get(new.id) for new in good] == [first, last]


def test_a_key_of_the_same_moment_answers_the_first(index: SqliteIndex) -> None:
    new = [record(idempotency_key="key", request_digest=b"state") for _ in range(2)]
    first, second = index.commit_each([(each, "tester") for each in new])
    assert first == second == index.get(new[0].id)


def acquire(other: SqliteIndex) -> Callable[[SqliteIndex], None]:
    other.acquire_lease("job", "another", 60)

    def check(index: SqliteIndex) -> None:
        with pytest.raises(LeaseHeld):
            save(index)

    return check


def reserve(other: SqliteIndex) -> Callable[[SqliteIndex], None]:
    other.reserve_numbers("job", 41)
    return lambda index: check_seq(index, 42)


def save_there(other: SqliteIndex) -> Callable[[SqliteIndex], None]:
    save(other, record())
    return lambda index: check_seq(index, 3)


def save_another_job(other: SqliteIndex) -> Callable[[SqliteIndex], None]:
    save(other, record("another"))
    return lambda index: check_seq(index, 2)


def delete(other: SqliteIndex) -> Callable[[SqliteIndex], None]:
    other.delete([checkpoint.id for checkpoint in other.list("job")], actor="another")
    return lambda index: check_seq(index, 2)


def check_seq(index: SqliteIndex, seq: int) -> None:
    assert save(index)[0].seq == seq


@pytest.mark.parametrize("change", [acquire, reserve, save_there, save_another_job, delete])
def test_what_another_process_has_changed_is_seen(
    index: SqliteIndex, other: SqliteIndex, change: Callable[[SqliteIndex], Callable[[SqliteIndex], None]]
) -> None:
    save(index, record("warm"))
    change(other)(index)


MUTANTS = {
    "any event": ("INSERT INTO event", "INSERT OR REPLACE INTO event", acquire),
    "any number": ("AND last_seq = (new.row & 0xffffffff) - 1", "", reserve),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_safeguard_of_the_statement_is_needed(path: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    safeguard, instead, change = MUTANTS[mutant]
    (view, trigger) = writes.PREPARATION
    assert safeguard in trigger
    monkeypatch.setattr(writes, "PREPARATION", (view, trigger.replace(safeguard, instead)))
    with closing(SqliteIndex(path)) as index, closing(SqliteIndex(path)) as other:
        save(index)
        save(index, record("warm"))
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            change(other)(index)


def test_several_indexes_and_threads_save_one_job(index: SqliteIndex, other: SqliteIndex) -> None:
    def work(where: SqliteIndex) -> None:
        for _ in range(25):
            save(where)

    threads = [threading.Thread(target=work, args=(where,)) for where in (index, other) * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [checkpoint.seq for checkpoint in index.list("job")] == list(range(1, 152))
