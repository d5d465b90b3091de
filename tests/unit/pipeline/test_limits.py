"""Limits of queues, for all workers together; groups, whose runs keep their order and take turns."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, Retry
from kedge.model import Lease
from kedge.pipeline.consumer import IDLE_S, Worker
from kedge.pipeline.entries import DEAD, DELAYED, HELD, READY, RUNNING, queue_job
from kedge.pipeline.groups import advance
from kedge.pipeline.limits import Limits, QueueLimits
from tests.unit.pipeline.test_queues import POSTGRES, serve


@pytest.fixture(params=["directory", POSTGRES])
def place(request: pytest.FixtureRequest, tmp_path: Any) -> Any:
    is_directory = request.param == "directory"
    return tmp_path / "store" if is_directory else request.getfixturevalue("postgres").empty_database()


@pytest.fixture
def store(place: Any) -> Iterator[CheckpointManager]:
    with kedge.open(place) as opened:
        yield opened


@pytest.fixture
def other(store: CheckpointManager, place: Any) -> Iterator[CheckpointManager]:
    """Another process at the same store."""
    with kedge.open(place) as opened:
        yield opened


@pytest.fixture
def queue(store: CheckpointManager) -> kedge.Queue:
    return kedge.queue("q", store=store)


class Watched:
    """A pipeline that says what is at work at the same time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.at_work: list[str] = []
        self.most = 0
        self.begun: list[str] = []
        self.overlaps: set[str] = set()

        @kedge.pipeline
        def work(name: str) -> str:
            group = name[0]
            with self.lock:
                if group in self.at_work:
                    self.overlaps.add(group)
                self.begun.append(name)
                self.at_work.append(group)
                self.most = max(self.most, len(self.at_work))
            kedge.current_run().step("work", str, name)
            with self.lock:
                self.at_work.remove(group)
            return name

        self.work = work


def test_so_many_at_once_on_all_workers(store: CheckpointManager, queue: kedge.Queue) -> None:
    watched = Watched()
    queue.limit(concurrency=2)
    handles = [queue.submit(watched.work, f"{number} run") for number in range(12)]
    workers = [Worker(store, ["q"], {"work": watched.work}, concurrency=3, lease_s=30) for _ in range(2)]
    threads = [threading.Thread(target=worker.serve, kwargs={"until_empty": True}) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [handle.result(0) for handle in handles] == [f"{number} run" for number in range(12)]
    assert watched.most <= 2


def test_a_run_that_nobody_can_take_over_takes_no_place(store: CheckpointManager, queue: kedge.Queue) -> None:
    """Its worker died, and the pipeline is in no file any more."""
    watched = Watched()
    queue.limit(concurrency=1)
    queue.submit(kedge.pipeline(name="gone")(lambda: None))
    (gone,) = queue.entries()
    store.tag(gone.id, state=RUNNING)
    handle = queue.submit(watched.work, "1 run")
    worker = Worker(store, ["q"], {"work": watched.work})
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        assert handle.result(60) == "1 run"
    finally:
        worker.stop("enough")
        thread.join()


def test_the_rate_is_that_of_all_workers(store: CheckpointManager, queue: kedge.Queue) -> None:
    queue.limit(rate_per_s=0.01)
    one, other = QueueLimits(store, "q"), QueueLimits(store, "q")
    assert [one.may_begin(), one.may_begin(), other.may_begin()] == [True, False, False]
    store.break_lease(Lease(f"{queue_job('q')}:rate", 1, "", 100))  # 100 s are over
    assert [QueueLimits(store, "q").may_begin(), one.may_begin()] == [True, False]
    queue.limit(rate_per_s=1000)
    fast = QueueLimits(store, "other")
    kedge.queue("other", store=store).limit(rate_per_s=0.1)
    assert fast.may_begin()  # other queues have their own


def test_a_worker_that_works_until_the_queue_is_empty_waits_for_its_limits(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    watched = Watched()
    queue.limit(rate_per_s=10)
    handles = [queue.submit(watched.work, name) for name in "abc"]
    serve(store, watched.work)
    assert [handle.result(0) for handle in handles] == ["a", "b", "c"]


def test_a_full_queue_refuses(store: CheckpointManager, queue: kedge.Queue) -> None:
    watched = Watched()
    queue.limit(max_queued=2)
    queue.submit(watched.work, "a")
    queue.submit(watched.work, "b")
    with pytest.raises(kedge.QueueFull, match="holds 2 runs, 2 at most") as refused:
        queue.submit(watched.work, "c")
    assert "start more workers" in refused.value.hint
    queue.submit(watched.work, "a")  # is in it already
    assert len(queue) == 2
    serve(store, watched.work)
    queue.submit(watched.work, "c")
    assert queue.limits == Limits(max_queued=2)
    queue.limit()
    assert queue.limits == Limits()


@pytest.mark.parametrize(
    "nonsense",
    [
        {"concurrency": 0},
        {"rate_per_s": 0},
        {"rate_per_s": True},
        {"max_queued": -1},
        {"group_concurrency": 0},
        {"group_rate_per_s": "1"},
    ],
)
def test_limits_that_make_no_sense(queue: kedge.Queue, nonsense: Any) -> None:
    with pytest.raises(kedge.Validation):
        queue.limit(**nonsense)


@pytest.mark.parametrize("nonsense", [{"concurrency": 0}, {"rate_per_s": "fast"}, {"max_queued": [1]}])
def test_limits_that_somebody_forged_change_nothing(
    store: CheckpointManager, queue: kedge.Queue, nonsense: dict[str, object]
) -> None:
    watched = Watched()
    queue.limit(max_queued=2)
    forged = store.save("queue:q:limits", "limits", 1, metadata=nonsense)
    newcomer = kedge.queue("q", store=store)
    with pytest.warns(UserWarning, match=f"checkpoint {forged}"):
        newcomer.submit(watched.work, "a")
    assert newcomer.limits == Limits(max_queued=2)
    said = serve(store, watched.work)
    assert watched.begun == ["a"]
    assert [line for line in said if forged in line and "queue q" in line]


def test_groups_take_turns_and_keep_their_order(store: CheckpointManager, queue: kedge.Queue) -> None:
    watched = Watched()
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        queue.submit(watched.work, name, group=name[0])
    assert [entry.state for entry in queue.entries()].count(HELD) == 3
    serve(store, watched.work)
    assert watched.begun == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_one_of_a_group_at_a_time(store: CheckpointManager, queue: kedge.Queue) -> None:
    watched = Watched()
    names = [f"{group}{number:02}" for number in range(8) for group in "ab"]
    for name in names:
        queue.submit(watched.work, name, group=name[0])
    workers = [Worker(store, ["q"], {"work": watched.work}, concurrency=3, lease_s=30) for _ in range(2)]
    threads = [threading.Thread(target=worker.serve, kwargs={"until_empty": True}) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not watched.overlaps
    for group in "ab":
        assert [name for name in watched.begun if name[0] == group] == sorted(n for n in names if n[0] == group)


def test_as_many_of_a_group_at_a_time_as_are_allowed(store: CheckpointManager, queue: kedge.Queue) -> None:
    two = threading.Barrier(2)
    begun: list[int] = []
    lock = threading.Lock()
    at_work = most = 0

    @kedge.pipeline
    def work(number: int) -> None:
        nonlocal at_work, most
        with lock:
            begun.append(number)
            at_work += 1
            most = max(most, at_work)
        two.wait(60)  # one alone would wait for ever
        with lock:
            at_work -= 1

    queue.limit(group_concurrency=2)
    for number in range(6):
        queue.submit(work, number, group="g")
    assert [entry.state for entry in queue.entries()].count(HELD) == 4
    serve(store, work, concurrency=4)
    assert most == 2
    assert sorted(begun) == list(range(6))
    assert [sorted(begun[at : at + 2]) for at in (0, 2, 4)] == [[0, 1], [2, 3], [4, 5]]


def test_each_group_has_its_rate(store: CheckpointManager, queue: kedge.Queue) -> None:
    queue.limit(group_rate_per_s=0.01)
    one, other = QueueLimits(store, "q"), QueueLimits(store, "q")
    assert [one.may_begin("a"), one.may_begin("a"), other.may_begin("a")] == [True, False, False]
    assert [one.may_begin("b"), other.may_begin("b"), one.may_begin(), one.may_begin()] == [True, False, True, True]
    assert other.holds_back("a")
    assert not other.holds_back("c")
    assert 0 < other.waits_s() <= 100


def test_a_group_at_its_rate_uses_up_nothing_of_the_queue(store: CheckpointManager, queue: kedge.Queue) -> None:
    queue.limit(rate_per_s=0.01, group_rate_per_s=0.01)
    assert QueueLimits(store, "q").may_begin("a")
    store.break_lease(
        Lease(f"{queue_job('q')}:rate", 1, "", 100)
    )  # 100 s are over for the queue, but not for the group
    later = QueueLimits(store, "q")
    assert [later.may_begin("a"), later.may_begin("b")] == [False, True]


def test_a_group_at_its_rate_keeps_no_other_waiting(store: CheckpointManager, queue: kedge.Queue) -> None:
    begun: list[str] = []

    @kedge.pipeline
    def work(name: str) -> None:
        begun.append(name)
        if name == "b":
            worker.stop("seen")

    queue.limit(group_concurrency=40, group_rate_per_s=0.001)
    for number in range(40):  # more than a worker looks at in one go
        queue.submit(work, f"a{number:02}", group="a")
    queue.submit(work, "b", group="b")
    worker = Worker(store, ["q"], {"work": work}, lease_s=30)
    worker.serve()
    assert begun == ["a00", "b"]


def test_a_worker_that_works_until_the_queue_is_empty_waits_for_the_rates_of_groups(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    watched = Watched()
    queue.limit(group_rate_per_s=5, group_concurrency=3)
    handles = [queue.submit(watched.work, name, group="g") for name in "abc"]
    serve(store, watched.work)
    assert [handle.result(0) for handle in handles] == ["a", "b", "c"]


def test_a_worker_of_two_queues_looks_again_as_soon_as_the_rate_of_one_allows(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    queue.limit(rate_per_s=0.01)
    assert QueueLimits(store, "q").may_begin()  # another worker: it is asked for again five times a second
    queue.submit(watched.work, "a")
    worker = Worker(store, ["q", "free"], {"work": watched.work}, lease_s=30)
    waits: list[float] = []
    read = store.events

    def events(*args: Any, **options: Any) -> Any:
        if "wait_s" not in options:
            return read(*args, **options)
        waits.append(options["wait_s"])
        if waits[-1] < IDLE_S or len(waits) == 20:  # where this machine stood still, the right moment is over
            worker.stop("seen")
        return []

    monkeypatch.setattr(store, "events", events)
    worker.serve()
    assert min(waits) < IDLE_S
    assert not watched.begun


def test_a_dead_run_lets_the_next_of_its_group_go_on(store: CheckpointManager, queue: kedge.Queue) -> None:
    done: list[int] = []
    broken = [1]

    @kedge.pipeline
    def work(number: int) -> None:
        if number in broken:
            raise ValueError("broken")
        done.append(number)

    for number in (1, 2):
        queue.submit(work, number, key=f"w{number}", group="g")
    serve(store, work)
    assert done == [2]
    assert [entry.key for entry in queue.entries(DEAD)] == ["w1"]
    broken.clear()
    queue.submit(work, 3, group="g", delay_s=0.01)
    queue.retry("w1")
    serve(store, work)
    assert sorted(done) == [1, 2, 3]


def test_a_turn_that_was_lost_with_a_process_is_given_again(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    with monkeypatch.context() as patch:  # who submits dies before it looks whose turn it is
        patch.setattr("kedge.pipeline.queues.advance", lambda *_: None)
        queue.submit(watched.work, "a1", group="a")
        queue.submit(watched.work, "a2", group="a")
    serve(store, watched.work)
    assert watched.begun == ["a1", "a2"]


def before_first(patch: pytest.MonkeyPatch, store: CheckpointManager, method: str, happens: Callable[[], None]) -> None:
    """Let something happen just before the next call of a method of `store`."""
    call = getattr(store, method)

    def interrupted(*args: Any, **options: Any) -> Any:
        patch.setattr(store, method, call)
        happens()
        return call(*args, **options)

    patch.setattr(store, method, interrupted)


def test_two_who_advance_a_group_at_once(
    store: CheckpointManager, other: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    before_first(monkeypatch, store, "load", lambda: advance(other, queue_job("q"), "a"))
    queue.submit(watched.work, "a1", group="a")
    assert [entry.state for entry in queue.entries()] == [READY]
    serve(store, watched.work)
    assert watched.begun == ["a1"]


@pytest.mark.parametrize("does_the_other_die", [False, True])
def test_a_run_has_one_entry_although_it_was_tried_before_another_one_advances_its_group(
    store: CheckpointManager,
    other: CheckpointManager,
    queue: kedge.Queue,
    monkeypatch: pytest.MonkeyPatch,
    does_the_other_die: bool,
) -> None:
    """The other one has put the held entry into its turn, and a worker has put that off, which frees its key."""

    @kedge.pipeline
    def work(name: str) -> None:
        raise ValueError("broken")

    def try_once() -> None:
        with monkeypatch.context() as patch:
            if does_the_other_die:
                patch.setattr("kedge.pipeline.groups.drop_entry", lambda *_: None)
            advance(other, queue_job("q"), "a")
        backoff = Retry(delay_s=1000, jitter=0)
        worker = Worker(other, ["q"], {"work": work}, backoff=backoff, report=lambda *_: worker.stop("tried"))
        worker.serve()

    with monkeypatch.context() as patch:
        patch.setattr("kedge.pipeline.queues.advance", lambda *_: None)
        queue.submit(work, "a1", group="a", retries=1)
    before_first(monkeypatch, store, "save_request", try_once)
    advance(store, queue_job("q"), "a")
    assert [(entry.state, entry.attempts) for entry in queue.entries()] == [(DELAYED, 1)]
