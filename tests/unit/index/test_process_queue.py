"""Processes that write to one index: who has the turn commits for those who wait, and nobody is told too early.

Two indexes of one process have files of their own, with locks of their own: they behave as two processes do.
"""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kedge.errors import LeaseHeld, OutcomeUnknown, StorageError, Validation
from kedge.index.group_commit import Save
from kedge.index.sqlite.index import SqliteIndex
from kedge.index.sqlite.process_queue import SUFFIX, Asked, ProcessQueue
from kedge.index.sqlite.writes import Writes
from kedge.model import Checkpoint
from kedge.ports import IdTaken, KeysChanged, NewCheckpoint
from kedge.testing.index_suite import record, save
from tests.torture import mutants
from tests.waiting import wait_for

WAIT_S = 600.0
Saving = Callable[[SqliteIndex, NewCheckpoint], "Future[list[Checkpoint]]"]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "index.sqlite")


@pytest.fixture
def pair(path: str) -> Iterator[tuple[SqliteIndex, SqliteIndex]]:
    """Two that have found out that they are not alone, each with a job of its own."""
    patient = partial(SqliteIndex, path, busy_timeout_s=WAIT_S)
    with closing(patient()) as one, closing(patient()) as two:
        for _ in range(3):
            save(one, record("one"))
            save(two, record("two"))
        yield one, two
    with closing(SqliteIndex(path)) as index:
        assert index.integrity_problems() == []


@pytest.fixture
def turn(path: str, pair: tuple[SqliteIndex, SqliteIndex], monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessQueue]:
    """Somebody who has the turn until the test gives it up, and is not taken for one who is stuck in it."""
    monkeypatch.setattr("kedge.index.sqlite.process_queue._STUCK_S", WAIT_S)
    turn = ProcessQueue(path, Path(path).stat().st_ino, 1)
    assert turn.wait(None, WAIT_S) == 0
    yield turn
    turn.close()


@pytest.fixture
def saving(turn: ProcessQueue) -> Iterator[Saving]:
    """Save in a thread; answers when the save has been asked for."""
    with ThreadPoolExecutor(4) as pool:

        def begin(index: SqliteIndex, new: NewCheckpoint) -> "Future[list[Checkpoint]]":
            future = pool.submit(index.commit, [new], actor="test")
            wait_for(lambda: asked_for(turn, new), "nobody asked for the save")
            return future

        yield begin
        turn.close()


def asked_for(turn: ProcessQueue, new: NewCheckpoint) -> Asked | None:
    return next((asked for asked in turn.asked() if asked.save and asked.save.records[0].id == new.id), None)


def test_a_save_is_what_it_was_when_it_was_asked_for(
    pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue, saving: Saving
) -> None:
    new = record("one", idempotency_key="key", request_digest=b"digest", metadata_json='{"a": 1}', is_pinned=True)
    future = saving(pair[0], new)
    (asked,) = turn.asked()
    assert asked.save == ((new,), "test")
    turn.end_turn(turn.answer([asked], [0]))
    assert future.result() == pair[1].list("one")[-1:]


def test_saves_that_wait_are_one_transaction(
    pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue, saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    run_all = Writes.run_all

    def counted(self: Writes, batch: Any) -> None:
        batches.append(len(batch))
        run_all(self, batch)

    monkeypatch.setattr(Writes, "run_all", counted)
    futures = [saving(pair[0], record("one")), saving(pair[1], record("two"))]
    turn.end_turn()
    assert [[checkpoint.seq for checkpoint in future.result()] for future in futures] == [[4], [4]]
    assert batches == [2]
    assert [index.get(future.result()[0].id) for index, future in zip(pair, futures, strict=True)] == [
        future.result()[0] for future in futures
    ]


def test_one_that_was_committed_by_a_process_that_was_killed_then_is_not_saved_twice(
    path: str, pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue, saving: Saving
) -> None:
    new = record("one")
    future = saving(pair[0], new)
    with closing(SqliteIndex(path)) as killed:
        (landed,) = killed.commit([new], actor="test")
    turn.close()  # without an answer
    assert future.result() == [landed]
    assert [checkpoint.seq for checkpoint in pair[0].list("one")] == [1, 2, 3, 4]


def test_nobody_is_told_when_the_commit_fails(
    pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue, saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_all = Writes.run_all
    failures = iter([StorageError("the disk failed", hint="")])

    def failing(self: Writes, batch: Any) -> None:
        if (failure := next(failures, None)) is not None:
            assert len(batch) == 2
            raise failure
        run_all(self, batch)

    monkeypatch.setattr(Writes, "run_all", failing)
    news = [record("one"), record("two")]
    futures = [saving(index, new) for index, new in zip(pair, news, strict=True)]
    turn.end_turn()
    errors = [future.exception() for future in futures]
    assert [type(error) for error in errors if error] == [StorageError]
    present = [bool(pair[0].list(new.job)[3:]) for new in news]
    assert present == [error is None for error in errors]


def test_one_that_is_refused_hears_why_and_disturbs_nobody(
    pair: tuple[SqliteIndex, SqliteIndex], path: str, turn: ProcessQueue, saving: Saving
) -> None:
    with closing(SqliteIndex(path)) as holder:
        holder.acquire_lease("one", "host:1", 600)
    futures = [saving(pair[0], record("one")), saving(pair[1], record("two"))]
    turn.end_turn()
    assert isinstance(futures[0].exception(), LeaseHeld)
    assert [checkpoint.seq for checkpoint in futures[1].result()] == [4]


def test_an_answer_for_one_that_was_given_up_is_not_taken_for_the_next(
    pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue, saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up = record("one")
    taken: list[Asked] = []

    def interrupted(_: float) -> None:
        monkeypatch.undo()
        taken.extend(turn.asked())
        raise KeyboardInterrupt

    monkeypatch.setattr("kedge.index.sqlite.process_queue.time.sleep", interrupted)  # sleep: of the product
    with pytest.raises(KeyboardInterrupt):
        pair[0].commit([given_up], actor="test")
    assert [asked.save and asked.save.records[0].id for asked in taken] == [given_up.id]
    assert turn.asked() == []
    turn.end_turn()
    assert turn.wait(None, WAIT_S) == 0
    future = saving(pair[0], record("one"))
    turn.answer(taken, [77])
    turn.end_turn()
    assert [checkpoint.seq for checkpoint in future.result()] == [4]


def test_who_waits_for_too_long_says_so_and_has_saved_nothing(
    path: str, pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue
) -> None:
    hasty_index = SqliteIndex(path, busy_timeout_s=0.01)  # limit: it is to be reached
    with closing(hasty_index) as hasty, closing(sqlite3.connect(path)) as suspended:
        save(hasty, record("three"))
        hasty_writes(hasty, path)
        suspended.execute("BEGIN IMMEDIATE")  # in its turn, inside a transaction
        with pytest.raises(StorageError, match="locked") as caught:
            save(hasty, record("three"))
        assert not isinstance(caught.value, OutcomeUnknown)
        suspended.rollback()
        assert [checkpoint.seq for checkpoint in hasty.list("three")] == [1, 2]
    assert turn.asked() == []


def test_who_gives_up_cannot_tell_whether_what_another_has_in_hand_is_committed_yet(
    path: str, turn: ProcessQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn.end_turn()
    hasty = ProcessQueue(path, Path(path).stat().st_ino, 1)
    assert hasty.wait(None, WAIT_S) == 0  # its turn, in which it takes a place
    hasty.end_turn()
    assert turn.wait(None, WAIT_S) == 0
    assert hasty.wait(Save((record("one"),), "test"), 0) == 0  # nobody has it, and nobody gets it any more
    assert turn.asked() == []
    asks = ProcessQueue._ask

    def seen(self: ProcessQueue, save: Save | None) -> int:
        token = asks(self, save)
        assert turn.asked()
        return token

    monkeypatch.setattr(ProcessQueue, "_ask", seen)
    with pytest.raises(OutcomeUnknown, match="another process"):
        hasty.wait(Save((record("one"),), "test"), 0)
    hasty.close()


def test_who_is_suspended_in_its_turn_keeps_nobody_waiting(
    pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue, saving: Saving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a save that it may have in hand: that may be committed when it wakes up."""
    new = record("one")
    in_hand = saving(pair[0], new)
    monkeypatch.setattr("kedge.index.sqlite.process_queue._STUCK_S", 0.0)
    for seq in (4, 5, 6):
        assert [checkpoint.seq for checkpoint in pair[1].commit([record("two")], actor="test")] == [seq]
    assert not in_hand.done()
    turn.end_turn()
    assert [checkpoint.seq for checkpoint in in_hand.result()] == [4]
    assert [checkpoint.seq for checkpoint in pair[0].commit([record("one")], actor="test")] == [5]


def test_who_goes_on_without_a_turn_finds_what_was_committed_for_it(
    path: str, pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who had the turn committed it and was killed; the next one is stuck."""
    new = record("one")
    with closing(SqliteIndex(path)) as killed:
        asks = ProcessQueue._ask

        def committed(self: ProcessQueue, save: Save | None) -> int:
            token = asks(self, save)
            killed.commit([new], actor="test")
            return token

        monkeypatch.setattr(ProcessQueue, "_ask", committed)
        monkeypatch.setattr("kedge.index.sqlite.process_queue._STUCK_S", 0.0)
        assert [checkpoint.seq for checkpoint in pair[0].commit([new], actor="test")] == [4]
    assert [checkpoint.seq for checkpoint in pair[0].list("one")] == [1, 2, 3, 4]


def hasty_writes(hasty: SqliteIndex, path: str) -> None:
    """Let it find out that others write: in between its saves."""
    with closing(SqliteIndex(path)) as another:
        save(another, record("four"))
    save(hasty, record("three"))


def test_what_a_process_had_asked_for_that_has_ended_is_not_saved(
    path: str, pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue
) -> None:
    """Else a state that its job has gone beyond since would be the newest."""
    queue = Path(path + SUFFIX)
    late = record("late")
    with ThreadPoolExecutor(1) as pool:
        ended = ProcessQueue(path, Path(path).stat().st_ino, 1)
        turn.end_turn()
        assert ended.wait(None, WAIT_S) == 0  # which gives it a place
        ended.end_turn()
        assert turn.wait(None, WAIT_S) == 0
        future = pool.submit(ended.wait, Save((late,), "test"), WAIT_S)
        wait_for(lambda: asked_for(turn, late), "nobody asked for the save")
        left_behind = queue.read_bytes()
        turn.end_turn()
        assert future.result() == 0
        ended.end_turn()
    ended.close()
    queue.write_bytes(left_behind)
    assert turn.wait(None, WAIT_S) == 0
    assert turn.asked() == []
    turn.end_turn()
    heir = ProcessQueue(path, Path(path).stat().st_ino, 1)
    assert heir.wait(None, WAIT_S) == 0  # takes the place
    heir.end_turn()
    assert turn.wait(None, WAIT_S) == 0
    assert turn.asked() == []
    heir.close()


def test_saves_that_many_threads_share_get_their_turn_beside_a_busy_process(
    pair: tuple[SqliteIndex, SqliteIndex],
) -> None:
    """A batch cannot be asked for: who has the turn passes it on."""
    is_busy, is_done = threading.Event(), threading.Event()

    def be_busy() -> None:
        while not is_done.is_set():
            save(pair[0], record("one"))
            is_busy.set()

    with ThreadPoolExecutor(1) as pool:
        busy = pool.submit(be_busy)
        try:
            assert is_busy.wait(WAIT_S)
            for _ in range(20):
                outcomes = pair[1].commit_each([(record("two"), "test") for _ in range(3)])
                assert not any(isinstance(outcome, BaseException) for outcome in outcomes)
        finally:
            is_done.set()
        busy.result()
    assert len(pair[0].list("two")) == 63


def test_saves_of_other_namespaces_and_files_are_left_alone(
    path: str, pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue
) -> None:
    inode = Path(path).stat().st_ino
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(pair[0].commit, [record("one")], actor="test")
        for stranger in (ProcessQueue(path, inode, 2), ProcessQueue(path, inode + 1, 1)):
            assert stranger.wait(None, 0) == 0  # without a turn
            asked = wait_for(lambda stranger=stranger: stranger.asked() or None, "nobody asked for the save")
            assert [each.save for each in asked] == [None]
            stranger.close()
        turn.end_turn()
        assert [checkpoint.seq for checkpoint in future.result()] == [4]


def test_a_damaged_queue_is_no_obstacle(
    path: str, pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue, saving: Saving
) -> None:
    future = saving(pair[0], record("one"))
    Path(path + SUFFIX).write_bytes(b"\xff" * 1_000_000)
    asked = turn.asked()
    assert not any(each.save for each in asked)
    turn.end_turn(asked)
    assert [checkpoint.seq for checkpoint in future.result()] == [4]


def test_the_queue_is_gone_when_the_last_has_closed(path: str, pair: tuple[SqliteIndex, SqliteIndex]) -> None:
    one, two = pair
    assert Path(path + SUFFIX).exists()
    one.close()
    assert Path(path + SUFFIX).exists()
    two.close()
    assert not Path(path + SUFFIX).exists()


@pytest.mark.parametrize(
    "fields", [{"key_id": "key"}, {"step": "\ud800"}, {"size_bytes": 1 << 70}, {"manifest": bytes(9000)}]
)
def test_what_is_not_for_others_waits_for_a_turn(
    pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue, fields: dict[str, Any]
) -> None:
    """Sealed saves too: nothing under an old key is left in a file."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(pair[0].commit, [record("one", **fields)], actor="test")
        (asked,) = wait_for(lambda: turn.asked() or None, "nobody waits")
        assert asked.save is None
        turn.end_turn([asked])
        assert future.exception() is None or isinstance(future.exception(), KeysChanged | Validation)


def test_several_in_one_save_wait_for_a_turn(pair: tuple[SqliteIndex, SqliteIndex], turn: ProcessQueue) -> None:
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(pair[0].commit, [record("one"), record("one")], actor="test")
        (asked,) = wait_for(lambda: turn.asked() or None, "nobody waits")
        turn.end_turn([asked])
        assert [checkpoint.seq for checkpoint in future.result()] == [4, 5]


def test_a_store_that_only_one_process_writes_has_no_queue(path: str) -> None:
    with closing(SqliteIndex(path)) as index:
        threads = [threading.Thread(target=save, args=(index, record(f"job-{n}"))) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with closing(SqliteIndex(path)) as reader:
            assert len(reader.jobs()) == 8
        save(index)
        assert not Path(path + SUFFIX).exists()


@pytest.mark.mutant
@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        ("answered before it is committed", test_nobody_is_told_when_the_commit_fails),
        ("saves of ended processes committed", test_what_a_process_had_asked_for_that_has_ended_is_not_saved),
        (
            "unanswered saves not looked for",
            test_one_that_was_committed_by_a_process_that_was_killed_then_is_not_saved_twice,
        ),
    ],
)
def test_these_notice(mutant: str, test: Callable[..., None], request: pytest.FixtureRequest) -> None:
    names = test.__code__.co_varnames[: test.__code__.co_argcount]
    arguments = {name: request.getfixturevalue(name) for name in names}
    with mutants.applied(mutant), pytest.raises((AssertionError, IdTaken)):
        test(**arguments)
