"""Queues and workers, the same on one machine and on PostgreSQL: each run is carried out once, whoever dies."""

import asyncio
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import Checkpoint, CheckpointManager, Conflict, Retry
from kedge.model import Lease
from kedge.pipeline.cancellation import cancel
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import DEAD, READY, RECOVERY, RUNNING, drop_entry, queue_job
from kedge.pipeline.history import find_run
from kedge.pipeline.inbox import Inbox
from kedge.pipeline.watch import Watch
from tests.waiting import wait_for

POSTGRES = pytest.param("postgres", marks=[pytest.mark.requires("postgres"), pytest.mark.xdist_group("postgres")])


@pytest.fixture(params=["directory", POSTGRES])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "store")
    return str(request.getfixturevalue("postgres").empty_database())


@pytest.fixture
def store(url: str) -> Iterator[CheckpointManager]:
    with kedge.open(url) as opened:
        yield opened


@pytest.fixture
def queue(store: CheckpointManager) -> kedge.Queue:
    return kedge.queue("q", store=store)


def serve(store: CheckpointManager, *pipelines: Any, **options: Any) -> list[str]:
    """A worker until nothing is left; what it reports. It soon takes over what it has lost, and never loses a lease."""
    said: list[str] = []
    by_name = {pipeline.name: pipeline for pipeline in pipelines}
    backoff = Retry(delay_s=0.01, jitter=0)
    worker = Worker(
        store, ["q"], by_name, lease_s=60, backoff=backoff, report=lambda run, text: said.append(f"{run} {text}"),
        **options,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kedge.pipeline.consumer.RECOVER_EVERY", 0.002)
        worker.serve(until_empty=True)
    return said


def test_a_run_is_carried_out_once_and_its_result_is_there_for_all(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    calls: list[int] = []

    @kedge.pipeline
    def square(number: int) -> int:
        calls.append(number)
        return kedge.current_run().step("square", lambda: number**2)  # type: ignore[no-any-return]

    handles = [queue.submit(square, number) for number in (2, 3, 2)]
    assert [handle.status for handle in handles] == ["queued"] * 3
    assert len(queue) == 2  # the same call is the same run
    apart = queue.submit(square, 2, deduplicate=False)
    serve(store, square, concurrency=2)
    assert [handle.result(0) for handle in handles] == [4, 9, 4]
    assert apart.result(0) == 4
    assert queue.handle(handles[0].key).status == "completed"
    assert sorted(calls) == [2, 2, 3]
    assert len(queue) == 0

    async def wait() -> Any:
        return await handles[1]

    assert asyncio.run(wait()) == 9


def test_a_key_stands_for_one_call_also_when_its_run_has_ended(store: CheckpointManager, queue: kedge.Queue) -> None:
    @kedge.pipeline
    def work(value: object) -> object:
        return value

    queue.submit(work, 1, key="a")
    serve(store, work)
    with pytest.raises(Conflict, match="with other arguments"):
        queue.submit(work, 2, key="a")
    assert queue.submit(work, 1, key="a").result(0) == 1
    assert queue.submit(work, 2, key="a", deduplicate=False).status == "queued"


def test_a_key_that_two_queues_were_given_for_different_calls_has_one_result(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    """Neither submission knows of the other: the second call is not carried out, and whoever made it learns that."""

    @kedge.pipeline
    def work(value: object) -> object:
        return value

    other = kedge.queue("other", store=store)
    first, same, second = queue.submit(work, 1, key="a"), other.submit(work, 3, key="b"), other.submit(work, 2, key="a")
    serve(store, work)
    Worker(store, ["other"], {"work": work}).serve(until_empty=True)
    assert (first.result(0), same.result(0)) == (1, 3)
    with pytest.raises(Conflict, match="run a was called with other arguments"):
        second.result(0)
    (dead,) = other.entries("dead")
    assert (dead.key, dead.note) == ("a", "run a was called with other arguments")
    assert queue.handle("a").result(0) == 1


def test_what_may_be_submitted(queue: kedge.Queue) -> None:
    @kedge.pipeline
    def work(value: object) -> object:
        return value

    queue.submit(work, 1, key="a")
    with pytest.raises(Conflict, match="with other arguments"):
        queue.submit(work, 2, key="a")
    for nonsense in (
        {"priority": 10},
        {"priority": True},
        {"delay_s": -1},
        {"retries": 1.5},
        {"group": "\ud800"},
    ):
        with pytest.raises(kedge.Validation):
            queue.submit(work, 3, **nonsense)
    for call in (lambda: queue.submit(work), lambda: queue.submit(work, 1, 2), lambda: queue.submit(work, vlaue=1)):
        with pytest.raises(kedge.Validation, match="pipeline work: "):
            call()
    with pytest.raises(kedge.Validation, match="is not a pipeline"):
        queue.submit(len, [])  # type: ignore[arg-type]
    with pytest.raises(kedge.UnsupportedType):
        queue.submit(work, object())
    with pytest.raises(kedge.StepTimeout):
        queue.handle("a").result(0)
    with pytest.raises(kedge.NotFound):
        queue.handle("unknown").result(0)
    assert len(queue) == 1
    assert [[entry.key for entry in queue.entries(state)] for state in (None, READY, DEAD)] == [["a"], ["a"], []]
    with pytest.raises(kedge.Validation, match="state 'raedy' is unknown"):
        queue.entries("raedy")


def test_priorities_and_delays(store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    @kedge.pipeline
    def work(name: str) -> None:
        done.append(name)

    queue.submit(work, "later", delay_s=3600, priority=9)
    for name, priority in (("low", 1), ("first", 5), ("second", 5), ("high", 9)):
        queue.submit(work, name, priority=priority)
    worker = Worker(store, ["q"], {"work": work})
    thread = threading.Thread(target=worker.serve)
    thread.start()
    wait_for(lambda: len(queue) == 1, "the others are not carried out")
    worker.stop("enough")
    thread.join()
    assert done == ["high", "first", "second", "low"]
    later = time.time() + 3601
    monkeypatch.setattr("time.time", lambda: later)
    serve(store, work)
    assert done[4:] == ["later"]


def test_a_queue_longer_than_a_look_is_carried_out_by_priority(store: CheckpointManager, queue: kedge.Queue) -> None:
    done: list[int] = []

    @kedge.pipeline
    def work(number: int) -> None:
        done.append(number)

    for number in range(12):  # a worker of one thread looks at ten
        queue.submit(work, number, priority=9 if number == 11 else 1)
    serve(store, work)
    assert done == [11, *range(11)]


def test_a_failed_run_is_tried_again_and_then_given_up(store: CheckpointManager, queue: kedge.Queue) -> None:
    calls: list[str] = []
    works = False

    @kedge.pipeline
    def work() -> str:
        run = kedge.current_run()
        run.step("first", calls.append, "first")
        calls.append("second")
        if not works:
            raise ConnectionError("no network")
        return "done"

    handle = queue.submit(work, retries=2)
    said = serve(store, work)
    assert calls == ["first", "second", "second", "second"]
    assert said[-1] == "work is given up: ConnectionError: no network"
    with pytest.raises(ConnectionError, match="no network"):
        handle.result(0)
    (dead,) = queue.entries(DEAD)
    assert (dead.key, dead.attempts) == ("work", 3)
    assert queue.submit(work).key == "work"  # nothing new: it waits for somebody to look
    assert serve(store, work) == []
    works = True
    queue.retry("work")
    serve(store, work)
    assert handle.result(0) == "done"
    assert calls.count("first") == 1
    with pytest.raises(Conflict, match="already completed"):
        queue.retry("work")


def test_a_completed_run_is_carried_out_again_for_its_failed_items(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    is_mended = False
    worked: list[int] = []

    @kedge.pipeline
    def work() -> list[int]:
        def item(number: int) -> int:
            worked.append(number)
            if number == 2 and not is_mended:
                raise ValueError("no")
            return number

        results = kedge.current_run().map(item, [1, 2, 3], name="items", workers=1, on_error="collect")
        return [result for result in results if not isinstance(result, kedge.ItemError)]

    handle = queue.submit(work, group="g")
    serve(store, work)
    assert handle.result(0) == [1, 3]
    with pytest.raises(kedge.NotFound):
        kedge.queue("other", store=store).retry(handle.key)
    queue.retry(handle.key)
    with pytest.raises(kedge.StepTimeout):
        handle.result(0)  # it is carried out again
    with pytest.raises(kedge.NotFound):
        queue.retry(handle.key)
    (entry,) = queue.entries()
    assert entry.group == "g"
    is_mended = True
    record = store.get(entry.id)
    store.save(  # somebody asked for it at the same moment
        record.job, record.step, store.load(record.id), level="pipeline", tags=record.tags, metadata=record.metadata
    )
    serve(store, work)
    assert handle.result(0) == [1, 2, 3]
    assert sorted(worked) == [1, 2, 2, 3]
    assert find_run(store, handle.key).sessions == 2
    assert len(queue) == 0
    with pytest.raises(Conflict, match="already completed"):
        queue.retry(handle.key)


def test_a_refused_retry_asks_for_nothing(store: CheckpointManager, queue: kedge.Queue) -> None:
    charged: list[int] = []

    def charge() -> None:
        charged.append(1)
        raise ValueError("no")

    @kedge.pipeline
    def order() -> None:
        run = kedge.current_run()
        try:
            run.step("charge", charge)
        except ValueError:
            run.step("release", list)

    handle = queue.submit(order)
    serve(store, order)
    with pytest.raises(kedge.NotFound):
        kedge.queue("other", store=store).retry(handle.key, retry_failed=True)
    with pytest.raises(Conflict, match="already completed") as refused:
        queue.retry(handle.key)
    assert "--retry-failed" in str(refused.value.hint)
    assert queue.retry(handle.key, retry_failed=True) == ["charge"]
    serve(store, order)
    assert len(charged) == 2


def test_arguments_may_be_called_as_options_are(store: CheckpointManager, queue: kedge.Queue) -> None:
    @kedge.pipeline
    def echo(name: str, tz: str, key: str = "", cron: str = "") -> list[str]:
        return [name, tz, key, cron]

    asked: dict[str, Any] = {"name": "n", "tz": "t", "key": "k", "cron": "c"}
    handles = [queue.submit_call(echo, (), asked), queue.submit(echo, "n", "t", "k", cron="c", key="run")]
    with pytest.raises(kedge.Validation, match="key= is an option here"):
        queue.submit(echo, "n", "t", key="run")
    with pytest.raises(kedge.Validation, match="tz= is an option here"):
        kedge.schedule(queue, "s", echo, "n", every_s=1, tz="Europe/Berlin")
    serve(store, echo)
    assert [handle.result(0) for handle in handles] == [["n", "t", "k", "c"]] * 2
    assert handles[1].key == "run"


def test_a_worker_that_was_suspended_is_refused_and_another_one_ends_the_run(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    charged: list[int] = []

    @kedge.pipeline
    def work() -> int:
        run = kedge.current_run()
        if not charged:
            charged.append(1)
            lease = run.lease  # it sleeps for longer than its lease, and somebody else takes the run
            store.break_lease(Lease(lease.job, lease.token, lease.holder, lease.ttl_s))
            taken = store.take_lease("work", "another worker", 60)
            store.break_lease(taken)
        run.step("charge", charged.append, 2)
        return 7

    handle = queue.submit(work)
    said = serve(store, work)
    assert said == ["work was taken over by another worker", "work is completed"]
    assert handle.result(0) == 7
    assert [record.step for record in store.list("work")].count("charge") == 1


def test_a_worker_that_dies_behind_the_end_of_a_run_leaves_nothing_to_repeat(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    @kedge.pipeline
    def work() -> int:
        calls.append(1)
        return 7

    handle = queue.submit(work, group="g")  # an entry of a group goes in a transaction of its own

    def die(*_: object, **__: object) -> bool:
        raise kedge.StorageError("killed here")

    with monkeypatch.context() as patch:
        patch.setattr(store.catalogue, "delete", die)
        worker = Worker(store, ["q"], {"work": work})
        thread = threading.Thread(target=worker.serve)
        thread.start()
        wait_for(lambda: handle.status == "completed", "it is not carried out")
        worker.stop("enough")
        thread.join()
    assert [entry.state for entry in queue.entries()] == [RUNNING]
    serve(store, work)
    assert (calls, len(queue), handle.result(0)) == ([1], 0, 7)


def test_a_run_is_completed_and_its_entry_and_lease_end_in_one_transaction(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    @kedge.pipeline
    def work() -> int:
        return 7

    handle = queue.submit(work)

    def die(*_: object, **__: object) -> None:
        raise kedge.StorageError("not by itself")

    with monkeypatch.context() as patch:
        patch.setattr(store.catalogue, "delete", die)
        patch.setattr(store.catalogue, "release_lease", die)
        serve(store, work)
    assert (len(queue), handle.result(0)) == (0, 7)
    done = [event.action for event in store.events(limit=100) if event.job != queue_job(RECOVERY) + ":workers"]
    assert done[-3:] == ["save", "delete", "release"]


def test_a_run_that_kills_its_workers_is_given_up(store: CheckpointManager, queue: kedge.Queue) -> None:
    @kedge.pipeline
    def work() -> None:
        raise AssertionError("never called again")

    handle = queue.submit(work)
    (entry,) = queue.entries()
    store.tag(entry.id, state=RUNNING, takeovers="2")
    assert serve(store, work, max_takeovers=2) == ["work is given up: 3 workers died at it"]
    with pytest.raises(Conflict, match="3 workers died at it"):
        handle.result(0)


@pytest.mark.parametrize("by", ["handle", "key"])
def test_a_run_that_waits_in_a_queue_is_cancelled_at_once(
    store: CheckpointManager, queue: kedge.Queue, by: str
) -> None:
    @kedge.pipeline
    def work(number: int) -> int:
        return number

    handle, follower = queue.submit(work, 1, group="tenant"), queue.submit(work, 2, group="tenant")
    if by == "handle":
        handle.cancel()
    else:
        assert cancel(store, handle.key)
    assert handle.status == "cancelled"
    assert find_run(store, handle.key).pipeline == "work"
    with pytest.raises(kedge.Cancelled):
        handle.result(0)
    assert [entry.key for entry in queue.entries()] == [follower.key]
    assert serve(store, work) == [f"{follower.key} is completed"]  # it has its turn
    handle.cancel()  # nothing more happens
    with pytest.raises(Conflict, match="is completed"):
        follower.cancel()


def test_a_held_run_that_is_cancelled_is_not_given_its_turn(store: CheckpointManager, queue: kedge.Queue) -> None:
    """Whose group has lost its turn with a process that died."""

    @kedge.pipeline
    def work(number: int) -> int:
        return number

    first, second = queue.submit(work, 1, group="tenant"), queue.submit(work, 2, group="tenant")
    (active,) = [entry for entry in queue.entries() if entry.key == first.key]
    drop_entry(store, active.id)
    second.cancel()
    assert (second.status, len(queue)) == ("cancelled", 0)


def test_a_dead_run_that_is_cancelled_leaves_the_queue(store: CheckpointManager, queue: kedge.Queue) -> None:
    @kedge.pipeline
    def work() -> None:
        raise ValueError("no luck")

    handle = queue.submit(work)
    serve(store, work)
    handle.cancel()
    assert (handle.status, len(queue)) == ("cancelled", 0)


def test_a_run_that_a_worker_has_is_told_to_stop(store: CheckpointManager, queue: kedge.Queue) -> None:
    @kedge.pipeline
    def work() -> None:
        raise AssertionError("never called")

    handle = queue.submit(work)
    with store.lease(handle.key, 60):  # a worker has just taken it
        assert not cancel(store, handle.key)
    assert (handle.status, len(queue)) == ("queued", 1)
    assert serve(store, work) == ["work was cancelled"]
    assert (handle.status, len(queue)) == ("cancelled", 0)


def test_a_cancelled_run_does_not_begin_while_another_thread_learns_that_it_is(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch over all runs may look into its inbox just as it is to begin."""

    @kedge.pipeline
    def work() -> None:
        raise AssertionError("never called")

    handle, new, reading = queue.submit(work), Inbox.new, threading.Event()
    with store.lease(handle.key, 60):  # a worker has just taken it
        assert not cancel(store, handle.key)

    def new_late(inbox: Inbox) -> Iterator[Checkpoint]:
        if not reading.is_set():
            reading.set()
            time.sleep(0.2)  # sleep: at least until a run that does not wait for the answer has begun
        yield from new(inbox)

    @contextmanager
    def calling_at_once(_: Watch, look: Callable[[], None]) -> Iterator[None]:
        thread = threading.Thread(target=look)
        thread.start()
        reading.wait()
        yield
        thread.join()

    monkeypatch.setattr(Inbox, "new", new_late)
    monkeypatch.setattr(Watch, "calling", calling_at_once)
    assert serve(store, work) == ["work was cancelled"]
    assert handle.status == "cancelled"


def test_a_run_that_nobody_submitted_is_not_found(queue: kedge.Queue) -> None:
    handle = queue.handle("never-submitted")
    with pytest.raises(kedge.NotFound, match="never-submitted"):
        _ = handle.status
    with pytest.raises(kedge.NotFound, match="never-submitted"):
        handle.cancel()
    with pytest.raises(kedge.NotFound, match="never-submitted"):
        handle.result(0)


def test_a_run_pauses_when_its_worker_is_told_to_stop(store: CheckpointManager, queue: kedge.Queue) -> None:
    begun, go = threading.Event(), threading.Event()

    @kedge.pipeline
    async def work() -> str:
        run = kedge.current_run()

        async def first() -> str:
            begun.set()
            await asyncio.to_thread(go.wait)
            return "a"

        async def second() -> str:
            return "b"

        return str(await run.step("first", first) + await run.step("second", second))

    handle = queue.submit(work)
    worker = Worker(store, ["q"], {"work": work}, grace_s=0)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    begun.wait()
    worker.stop("SIGTERM")
    wait_for(lambda: worker.is_stopping_runs, "the run is not told")
    go.set()
    thread.join()
    assert handle.status == "paused"
    serve(store, work)
    assert handle.result(0) == "ab"


def test_a_run_that_begins_when_its_worker_stops_pauses_too(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker has taken it, and has told all others to pause, before it is under way."""
    calls: list[str] = []

    @kedge.pipeline
    def work() -> None:
        kedge.current_run().step("first", calls.append, "first")

    handle = queue.submit(work)
    worker = Worker(store, ["q"], {"work": work}, grace_s=0)
    load = store.load_stored

    def load_late(*arguments: Any) -> Any:
        worker.stop("SIGTERM")
        wait_for(lambda: worker.is_stopping_runs, "the worker does not stop")
        return load(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(store, "load_stored", load_late)
        worker.serve()
    assert (handle.status, calls) == ("paused", [])
    serve(store, work)
    assert (handle.status, calls) == ("completed", ["first"])


PROGRAM = """
    import os, kedge

    @kedge.pipeline
    def work(number):
        run = kedge.current_run()
        run.step("first", note, f"first {number}")
        if not os.path.exists("go"):
            note(f"hangs {number}")
            import time
            while not os.path.exists("go"):
                time.sleep(0.02)  # sleep: until it is killed
        return number

    def note(line):
        with open("log", "a") as log:
            log.write(line + "\\n")
"""


def test_a_killed_worker_is_noticed_by_the_others(
    store: CheckpointManager, queue: kedge.Queue, url: str, tmp_path: Path
) -> None:
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(textwrap.dedent(PROGRAM))
    submit = "import program, kedge, sys; q = kedge.queue('q', store=sys.argv[1]); "
    submit += "[q.submit(program.work, n) for n in range(3)]"
    subprocess.run([sys.executable, "-c", submit, url], cwd=tmp_path, check=True, timeout=60)
    words = [sys.executable, "-m", "kedge", "worker", "program.py", "--queue", "q", "--concurrency", "3"]
    first = subprocess.Popen([*words, "--store", url], cwd=tmp_path)
    try:
        wait_for(lambda: log.exists() and log.read_text().count("hangs") == 3, "the worker does not begin")
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    (tmp_path / "go").touch()
    subprocess.run([*words, "--store", url, "--until-empty"], cwd=tmp_path, check=True, timeout=120)
    keys = [job.name for job in store.jobs("work-")]
    assert sorted(queue.handle(key).result(0) for key in keys if ":" not in key) == [0, 1, 2]
    assert sorted(log.read_text().split("\n"))[1:4] == ["first 0", "first 1", "first 2"]
    assert [find_run(store, key).sessions for key in keys if ":" not in key] == [2, 2, 2]


def test_a_program_catches_the_exceptions_it_defines_from_its_workers(tmp_path: Path) -> None:
    """It runs the file, and the worker imports it."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent("""
        import kedge

        class Refused(Exception): ...

        @kedge.pipeline
        def work():
            raise Refused("no")

        if __name__ == "__main__":
            with kedge.queue("q", store="store") as q:
                try:
                    q.submit(work).result(60)
                except Refused as error:
                    print("caught", error)
        """)
    )
    with kedge.open(tmp_path / "store"):
        pass
    words = [sys.executable, "-m", "kedge", "worker", "program.py", "--queue", "q", "--store", "store"]
    worker = subprocess.Popen(words, cwd=tmp_path)
    try:
        program = [sys.executable, "program.py"]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("caught no\n", "")
    finally:
        worker.terminate()
        worker.wait()
