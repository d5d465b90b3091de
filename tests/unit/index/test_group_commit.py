"""Operations that wait share a batch, whoever runs it; each hears of its own outcome, and nobody waits for ever."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from kedge.index.group_commit import GroupCommit, Waiting
from tests.waiting import wait_for

WAIT_S = 60.0


class Batches:
    """What a group commit runs: it notes who runs which operations, and waits where it is told to."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.threads: list[str] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    def run(self, batch: Sequence[Waiting[Any]]) -> None:
        self.sizes.append(len(batch))
        self.threads.append(threading.current_thread().name)
        self.has_begun.set()
        assert self.may_go_on.wait(WAIT_S)
        for waiting in batch:
            assert callable(waiting.operation)
            try:
                waiting.result = waiting.operation()
            except ValueError as error:
                waiting.error = error


@pytest.fixture
def batches() -> Batches:
    return Batches()


@pytest.fixture
def group(batches: Batches) -> GroupCommit:
    return GroupCommit(batches.run)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8, "saver") as pool:
        yield pool


def begin(
    pool: ThreadPoolExecutor, group: GroupCommit, batches: Batches, operations: Sequence[Callable[[], int]]
) -> list["Future[int]"]:
    """The first one runs until `may_go_on`; the others wait."""
    batches.may_go_on.clear()
    first = pool.submit(group.run, operations[0])
    assert batches.has_begun.wait(WAIT_S)
    others = [pool.submit(group.run, operation) for operation in operations[1:]]
    wait_for(lambda: len(group._queue) == len(others), "they do not queue")
    return [first, *others]


def number(n: int) -> Callable[[], int]:
    return lambda: n


def refused() -> int:
    raise ValueError("refused")


def test_who_is_alone_runs_its_own(group: GroupCommit, batches: Batches) -> None:
    assert [group.run(number(n)) for n in range(3)] == [0, 1, 2]
    assert group.run_each([number(3), refused, number(4)])[::2] == [3, 4]
    assert batches.sizes == [1, 1, 1, 3]
    assert set(batches.threads) == {threading.current_thread().name}


def test_those_who_wait_are_one_batch_of_a_thread_of_its_own(
    group: GroupCommit, batches: Batches, pool: ThreadPoolExecutor
) -> None:
    futures = begin(pool, group, batches, [number(0), number(1), refused, number(3)])
    batches.may_go_on.set()
    assert [future.result(WAIT_S) for future in (futures[0], futures[1], futures[3])] == [0, 1, 3]
    assert isinstance(futures[2].exception(WAIT_S), ValueError)
    assert batches.sizes == [1, 3]
    assert batches.threads[1] == "kedge-commit"


def test_where_commits_take_long_those_who_come_back_are_waited_for(batches: Batches, pool: ThreadPoolExecutor) -> None:
    group = GroupCommit(batches.run, gather=lambda took_s: WAIT_S)
    futures = begin(pool, group, batches, [number(0), number(1), number(2)])
    batches.may_go_on.set()
    assert futures[0].result(WAIT_S) == 0
    assert pool.submit(group.run, number(3)).result(WAIT_S) == 3  # the first one is back: nobody else is missing
    assert [future.result(WAIT_S) for future in futures[1:]] == [1, 2]
    assert batches.sizes == [1, 3]


def test_several_of_one_caller_wait_too(group: GroupCommit, batches: Batches, pool: ThreadPoolExecutor) -> None:
    batches.may_go_on.clear()
    first = pool.submit(group.run, number(0))
    assert batches.has_begun.wait(WAIT_S)
    several = pool.submit(group.run_each, [number(1), refused, number(2)])
    wait_for(lambda: len(group._queue) == 3, "they do not queue")
    batches.may_go_on.set()
    assert first.result(WAIT_S) == 0
    one, error, two = several.result(WAIT_S)
    assert (one, two) == (1, 2)
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_where_there_is_no_thread_who_commits_runs_the_others_too(
    group: GroupCommit, batches: Batches, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    futures = begin(pool, group, batches, [number(0), number(1), number(2)])

    def fail(_: threading.Thread) -> None:
        raise error

    monkeypatch.setattr(threading.Thread, "start", fail)
    batches.may_go_on.set()
    assert [future.result(WAIT_S) for future in futures] == [0, 1, 2]
    assert all(name.startswith("saver") for name in batches.threads)
    assert group.run(number(3)) == 3


@pytest.mark.parametrize("has_begun", [False, True])
def test_who_is_interrupted_while_the_thread_begins_leaves_nobody_waiting(
    group: GroupCommit, batches: Batches, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    start = threading.Thread.start
    futures = begin(pool, group, batches, [number(0), number(1), number(2)])

    def interrupted(thread: threading.Thread) -> None:
        if has_begun:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    batches.may_go_on.set()
    assert isinstance(futures[0].exception(WAIT_S), KeyboardInterrupt)
    assert [future.result(WAIT_S) for future in futures[1:]] == [1, 2]
    assert batches.sizes == [1, 2]
    assert group.run(number(3)) == 3


def test_a_thread_that_fails_outside_a_batch_leaves_nobody_waiting(batches: Batches, pool: ThreadPoolExecutor) -> None:
    def fail(took_s: float) -> float:
        raise MemoryError

    group = GroupCommit(batches.run, gather=fail)
    futures = begin(pool, group, batches, [number(0), number(1), number(2)])
    batches.may_go_on.set()
    assert [future.result(WAIT_S) for future in futures] == [0, 1, 2]
    assert group.run(number(3)) == 3


def test_a_batch_that_fails_fails_for_each_and_the_next_one_runs(pool: ThreadPoolExecutor) -> None:
    batches = Batches()
    run = batches.run

    def failing(batch: Sequence[Waiting[Any]]) -> None:
        if len(batch) == 2:
            raise MemoryError
        run(batch)

    group = GroupCommit(failing)
    futures = begin(pool, group, batches, [number(0), number(1), number(2)])
    batches.may_go_on.set()
    assert futures[0].result(WAIT_S) == 0
    assert [type(future.exception(WAIT_S)) for future in futures[1:]] == [MemoryError] * 2
    assert group.run(number(3)) == 3


def test_the_thread_ends_when_there_is_nothing_to_do_and_another_one_begins(
    group: GroupCommit, batches: Batches, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.index.group_commit._IDLE_S", 0.001)
    for _ in range(3):
        futures = begin(pool, group, batches, [number(0), number(1)])
        batches.may_go_on.set()
        assert [future.result(WAIT_S) for future in futures] == [0, 1]
        wait_for(lambda: group._called is None, "the thread does not end")


def test_a_thread_that_waits_for_work_keeps_nothing_alive(batches: Batches, pool: ThreadPoolExecutor) -> None:
    group = GroupCommit(batches.run)
    futures = begin(pool, group, batches, [number(0), number(1)])
    batches.may_go_on.set()
    assert [future.result(WAIT_S) for future in futures] == [0, 1]
    reference = weakref.ref(group)
    del group, futures

    def is_gone() -> bool:
        gc.collect()
        return reference() is None

    wait_for(is_gone, "it is kept alive")


def test_nobody_is_left_waiting_whatever_meets(group: GroupCommit, batches: Batches, pool: ThreadPoolExecutor) -> None:
    def many(first: int) -> list[int]:
        return [group.run(number(first + n)) for n in range(300)]

    futures = [pool.submit(many, 1000 * thread) for thread in range(8)]
    for thread, future in enumerate(futures):
        assert future.result(WAIT_S) == list(range(1000 * thread, 1000 * thread + 300))
    assert sum(batches.sizes) == 8 * 300
