"""Workers that meet trouble: nothing is forgotten, and what is not the run's fault is not counted against it."""

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, Retry
from kedge.errors import NoSpace, OutcomeUnknown, StorageError, Unauthorized, Unavailable
from kedge.model import Lease, RunStatus
from kedge.pipeline import candidates
from kedge.pipeline.candidates import Candidates
from kedge.pipeline.consumer import Worker
from kedge.pipeline.delays import Delays
from kedge.pipeline.entries import DEAD, DELAYED, READY, RUNNING, new_entry
from kedge.pipeline.heartbeat import Heartbeat
from kedge.pipeline.history import find_run
from kedge.pipeline.leases import Leases
from kedge.pipeline.repertoire import Repertoire
from kedge.pipeline.session import Session
from tests.unit.pipeline.test_queues import POSTGRES, serve
from tests.waiting import Clock, wait_for


@pytest.fixture(params=["directory", POSTGRES])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[CheckpointManager]:
    is_directory = request.param == "directory"
    place = tmp_path / "store" if is_directory else request.getfixturevalue("postgres").empty_database()
    with kedge.open(place) as opened:
        yield opened


@pytest.fixture
def queue(store: CheckpointManager) -> kedge.Queue:
    return kedge.queue("q", store=store)


@kedge.pipeline
def work(number: int) -> int:
    return number


def test_what_is_due_when_all_threads_are_busy_is_not_forgotten(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    handles = [queue.submit(work, number, delay_s=60) for number in range(5)]
    clock.advance(61)
    serve(store, work, concurrency=1)
    assert [handle.result(0) for handle in handles] == list(range(5))


def test_a_due_run_is_not_forgotten_when_the_store_fails(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = queue.submit(work, 7, delay_s=0.01)
    _fail_once(monkeypatch, Leases, "hold")
    said = serve(store, work)
    assert "cannot be carried out now" in said[0]
    assert handle.result(0) == 7


def test_a_worker_outlives_an_outage_of_its_store(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = queue.submit(work, 7)
    _fail_once(monkeypatch, store, "events")
    said = serve(store, work)
    assert said[0].startswith("the store cannot be used now")
    assert handle.result(0) == 7


def _fail_once(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    method, failures = getattr(owner, name), [Unavailable("the database is away", hint="wait")]

    def fails(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return method(*args, **options)

    monkeypatch.setattr(owner, name, fails)


def test_an_outage_is_no_failed_attempt(store: CheckpointManager, queue: kedge.Queue) -> None:
    outages = [1]

    @kedge.pipeline
    def meets_an_outage() -> str:
        if outages:
            outages.pop()
            raise StorageError("the database is away", hint="wait")
        return "done"

    handle = queue.submit(meets_an_outage)
    serve(store, meets_an_outage)
    assert handle.result(0) == "done"


@pytest.mark.parametrize("meets_it", ["the run", "the worker"])
def test_a_worker_rests_when_the_store_fails_a_run(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch, meets_it: str
) -> None:
    """A full disk would fail the next runs, too, after all that they do and pay for."""
    calls: list[int] = []

    def refuse(*args: Any, **options: Any) -> None:
        calls.append(1)
        raise NoSpace("the disk is full")

    full = kedge.pipeline(name="work")(lambda number: refuse())
    handles = [queue.submit(work, number) for number in range(2)]
    looks: list[int] = []
    beat = Heartbeat.beat
    monkeypatch.setattr(Heartbeat, "beat", lambda self: (looks.append(1), beat(self)))
    monkeypatch.setattr("kedge.pipeline.consumer.RECOVER_EVERY", 0.002)
    if meets_it == "the worker":
        monkeypatch.setattr(Leases, "hold", refuse)
    worker = Worker(store, ["q"], {"work": full}, backoff=Retry(delay_s=3600, max_delay_s=3600), lease_s=60)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    wait_for(lambda: calls, "nothing was taken")
    seen = len(looks)
    wait_for(lambda: len(looks) > seen + 4, "the worker does not look any more")
    worker.stop("enough")
    thread.join()
    monkeypatch.undo()
    assert len(calls) == 1
    entries = sorted(queue.entries(), key=lambda entry: entry.key != handles[0].key)
    assert [entry.state for entry in entries] == [DELAYED if meets_it == "the run" else READY, READY]
    assert [(entry.takeovers, entry.attempts) for entry in entries] == [(0, 0)] * 2
    if meets_it == "the run":
        assert entries[0].due_at > time.time() + 1000  # clock: it is due in half an hour or more


def test_an_outage_however_long_gives_no_run_up(store: CheckpointManager, queue: kedge.Queue) -> None:
    outages = list(range(9))

    @kedge.pipeline
    def meets_outages() -> str:
        if outages:
            outages.pop()
            raise Unavailable("the database is away", hint="wait")
        return "done"

    handle = queue.submit(meets_outages)
    serve(store, meets_outages, max_takeovers=2)
    assert handle.result(0) == "done"


def test_a_run_that_ended_without_an_answer_of_the_store_has_ended(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = Session.record

    def unanswered(session: Session, status: RunStatus, **options: Any) -> None:
        record(session, status, **options)
        if status is RunStatus.COMPLETED:
            raise OutcomeUnknown("the connection broke")

    monkeypatch.setattr(Session, "record", unanswered)
    handle = queue.submit(work, 7)
    said = serve(store, work)
    assert handle.result(0) == 7
    assert find_run(store, handle.key).sessions == 1
    assert not any("cannot be carried out" in line for line in said)


def test_a_store_that_is_broken_stops_a_run_after_so_many_takeovers(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    calls: list[int] = []

    @kedge.pipeline
    def always() -> None:
        calls.append(1)
        raise StorageError("no such luck", hint="none")

    handle = queue.submit(always)
    serve(store, always, max_takeovers=2)
    assert len(calls) == 3
    with pytest.raises(StorageError, match="no such luck"):
        handle.result(0)
    assert [entry.note for entry in queue.entries(DEAD)] == ["3 workers died at it"]


def test_a_run_that_ends_while_the_worker_looks_does_not_hide_the_next_one(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look found all threads busy, and after it nothing is at work."""
    may_end, take = threading.Event(), Worker._take

    @kedge.pipeline
    def gated(number: int) -> int:
        assert may_end.wait(60)
        return number

    def take_late(worker: Worker, threads: Any, **options: Any) -> int:
        count = take(worker, threads, **options)
        if not count and not may_end.is_set():
            may_end.set()
            wait_for(lambda: not worker._at_work, "the first one does not end")
        return count

    monkeypatch.setattr(Worker, "_take", take_late)
    handles = [queue.submit(gated, number) for number in range(2)]
    serve(store, gated, concurrency=1)
    assert [handle.result(0) for handle in handles] == [0, 1]


def test_a_pipeline_that_exits_has_failed(store: CheckpointManager, queue: kedge.Queue) -> None:
    @kedge.pipeline
    def exits() -> None:
        sys.exit(3)

    queue.submit(exits)
    assert serve(store, exits) == ["exits is given up: SystemExit: 3"]


def test_a_run_whose_result_cannot_be_saved_has_failed(store: CheckpointManager, queue: kedge.Queue) -> None:
    calls: list[int] = []

    @kedge.pipeline
    def odd(number: int) -> object:
        kedge.current_run().step("count", lambda: calls.append(number))
        return object()

    submitted, started = queue.submit(odd, 1, retries=1), kedge.start(odd, 2, store=store)
    with pytest.raises(kedge.UnsupportedType):
        started.result(600)
    said = serve(store, odd)
    assert said[-1].startswith(f"{submitted.key} is given up: UnsupportedType: ")
    with pytest.raises(kedge.UnsupportedType):
        submitted.result(0)
    for handle in (submitted, started):
        run = find_run(store, handle.key)
        assert (run.status, run.error.partition(":")[0]) == (RunStatus.FAILED, "UnsupportedType")
    assert sorted(calls) == [1, 2]


def test_a_worker_names_once_each_pipeline_that_it_does_not_have_and_passes_its_runs_over(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    other = kedge.pipeline(name="other")(lambda number: number)
    for number in range(20):  # more than a worker looks at at first
        queue.submit(other, number)
    handle = queue.submit(work, 1)
    said = serve(store, work)
    assert handle.result(0) == 1
    first, *rest = said
    assert first.startswith("pipeline other is not in this worker's file, so run other-")
    assert first.endswith(": kedge worker FILE.py --queue q")
    assert rest == [f"{handle.key} is completed"]
    assert len(queue) == 20


def test_a_worker_says_nothing_of_what_another_one_is_at(store: CheckpointManager, queue: kedge.Queue) -> None:
    queue.submit(kedge.pipeline(name="other")(lambda number: number), 1)
    for entry in queue.entries():
        store.tag(entry.id, state=RUNNING)
    said: list[str] = []
    worker = Worker(store, ["q"], {"work": work}, report=lambda run, text: said.append(text) or worker.stop("enough"))
    queue.submit(work, 2)
    worker.serve()
    assert said == ["is completed"]


def test_runs_at_work_elsewhere_do_not_hide_an_abandoned_one(store: CheckpointManager, queue: kedge.Queue) -> None:
    handles = [queue.submit(work, number) for number in range(3)]
    for entry in queue.entries():
        store.tag(entry.id, state=RUNNING)
    others = [store.take_lease(handle.key, "a worker elsewhere", 600) for handle in handles[:2]]
    worker = Worker(store, ["q"], {"work": work}, lease_s=60, report=lambda run, text: worker.stop("enough"))
    worker.serve()
    assert handles[2].result(0) == 2
    for lease in others:
        store.break_lease(lease)
    serve(store, work)
    assert [handle.result(0) for handle in handles] == [0, 1, 2]


def test_a_record_that_is_no_entry_disturbs_nobody(store: CheckpointManager, queue: kedge.Queue) -> None:
    for state in ("ready5", "running", "delayed", "dead"):
        store.save("queue:q", "strange", {}, tags={"state": state, "run": "work-1"})
        store.save("queue:q", "strange", {}, tags={"state": state}, metadata={"kind": "entry", "run": 7})
        unnamed = new_entry("work:inbox", "work", "")  # what no run can be called
        store.save("queue:q", "strange", {}, tags={"state": state}, metadata={**unnamed, "kind": "entry"})
    handle = queue.submit(work, 1)
    assert len(list(queue.entries())) == 1
    worker = Worker(store, ["q"], {"work": work}, report=lambda run, text: worker.stop("enough"))
    worker.serve()
    assert handle.result(0) == 1


def test_a_notice_that_nobody_can_read_fails_no_run(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of the worker's stderr is gone: `kedge worker … 2>&1 | head`."""

    @kedge.pipeline
    def waits() -> str:
        return kedge.current_run().approval("go", wait_s=0).comment

    read, written = os.pipe()
    os.close(read)
    handle, done = queue.submit(waits), queue.submit(work, 1)
    with open(written, "w", buffering=1) as stderr:

        def report(run: str, text: str) -> None:
            stderr.write(f"{run} {text}\n")

        monkeypatch.setattr("sys.stderr", stderr)
        worker = Worker(store, ["q"], {"waits": waits, "work": work}, report=report)
        thread = threading.Thread(target=worker.serve)
        thread.start()
        wait_for(lambda: [entry.state for entry in queue.entries()] == [DELAYED], "it was not put off")
        worker.stop("enough")
        thread.join()
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            stderr.close()
    assert (handle.status, done.result(0)) == ("paused", 1)


@pytest.mark.parametrize("error", [Unauthorized("the token has expired"), MemoryError()])
def test_a_lease_that_cannot_be_renewed_keeps_no_other_from_it(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tried, renewed = list[str](), list[str]()

    def renew(lease: Lease) -> None:
        tried.append(lease.job)
        if lease.job == "refused" and tried.count("refused") < 3:
            raise error
        renewed.append(lease.job)

    with kedge.open(tmp_path / "store") as store:
        monkeypatch.setattr(store, "renew_lease", renew)
        leases = Leases(store, 0.03)
        with leases.hold("refused"), leases.hold("other"), leases.renewed():
            wait_for(lambda: {"refused", "other"} <= set(renewed), "the thread has ended")


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_run_that_another_worker_began_meanwhile_costs_no_lease(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch, has_ended: bool
) -> None:
    """A look tells that it was faster; a lease and its release would be two commits."""
    from kedge.pipeline import consumer

    handle = queue.submit(work, 7)
    (entry,) = queue.entries()
    first_lease, others = consumer.first_lease, iter([True])

    def begin_second(key: str, ttl_s: float) -> Lease:
        for _ in others:
            if has_ended:
                serve(store, work)
            else:
                store.tag(entry.id, state=RUNNING)
        return first_lease(key, ttl_s)

    monkeypatch.setattr(consumer, "first_lease", begin_second)
    serve(store, work)  # what is marked and has no lease is taken over
    assert handle.result(0) == 7
    leases = [event for event in store.events(limit=100) if event.action == "lease" and event.job == entry.key]
    assert len(leases) == 1


@pytest.mark.parametrize("change", ["dead", "deleted"])
def test_an_entry_that_has_changed_since_it_was_listed_is_not_carried_out(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """It is not read again: the commit with which its run begins finds out."""
    from kedge.pipeline import consumer

    handle = queue.submit(work, 7)
    (entry,) = queue.entries()
    first_lease = consumer.first_lease

    def begin_late(key: str, ttl_s: float) -> Lease:
        if change == "dead":
            store.tag(entry.id, state=DEAD)
        else:
            handle.cancel()
        return first_lease(key, ttl_s)

    monkeypatch.setattr(consumer, "first_lease", begin_late)
    serve(store, work)
    assert [record.step for record in store.list(handle.key)] == ([] if change == "dead" else ["run cancelled"])


def looking(store: CheckpointManager, queue: kedge.Queue) -> Candidates:
    job = f"queue:{queue.name}"
    has = Repertoire(store, {"work": work}, lambda run, text: None)
    return Candidates(store, [job], {job: Delays(store, job)}, has, {}, 4)


def found(looks: Candidates, *, is_thorough: bool = False) -> list[str]:
    return [entry.key for _, entry, _ in looks.find(is_thorough=is_thorough)]


def test_what_is_submitted_while_runs_are_at_work_is_found_together(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker that is as fast as those who submit looks once for each run."""
    monkeypatch.setattr(candidates, "_NEXT_LOOK_S", 100.0)
    looks, first = looking(store, queue), queue.submit(work, 1).key
    assert looks.next_look_s() == candidates.LOOK_EVERY_S
    assert found(looks) == [first]
    both = [first, queue.submit(work, 2).key]
    assert found(looks) == []
    assert 1.0 < looks.next_look_s() <= 100.0
    assert found(looks, is_thorough=True) == both  # at rest
    looks.look_soon()
    assert found(looks) == both
    assert looks.next_look_s() == candidates.LOOK_EVERY_S


def test_a_look_that_left_something_is_followed_by_another_at_once(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "_NEXT_LOOK_S", 100.0)
    monkeypatch.setattr(candidates, "LOOK_EVERY_S", 100.0)  # what was read once is used up first
    looks = looking(store, queue)
    urgent, usual = queue.submit(work, 1, priority=9).key, queue.submit(work, 2).key
    for _, entry, _ in looks.find(is_thorough=False):
        assert entry.key == urgent
        break  # all threads are at work
    assert found(looks) == [urgent, urgent, usual]


def test_workers_that_collided_read_different_entries(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of many workers finds that others have begun most of what it has read."""
    monkeypatch.setattr(candidates, "_BLOCK", 4)
    monkeypatch.setattr(candidates, "_LANES", 2)
    dice = Dice(last=True)  # no look elsewhere
    monkeypatch.setattr(candidates, "_dice", dice)
    one, other = looking(store, queue), looking(store, queue)
    keys = [queue.submit(work, number).key for number in range(40)]
    assert found(one) == found(other) == keys[:16]
    one, other = lane(store, queue, 0), lane(store, queue, 1)
    assert (set(found(one)), set(found(other))) == ({*keys[:3]}, {*keys[3:7]})  # numbers begin with 1
    for entry in list(queue.entries()):
        if entry.seq // 4 % 2:
            store.tag(entry.id, state=RUNNING)
    other = lane(store, queue, 1)
    assert set(found(other)) >= {*keys[:3]}  # nothing is left in its own lane
    dice.last = False  # a look at what nobody may have as a lane
    other = lane(store, queue, 1)
    assert set(found(other)) >= {*keys[:3]}


def test_a_lane_full_of_what_the_worker_lacks_is_not_read_to_its_end(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(candidates, "_BLOCK", 1)
    monkeypatch.setattr(candidates, "_LANES", 1)
    monkeypatch.setattr(candidates, "_dice", Dice(last=True))
    for number in range(40):
        queue.submit(other_work, number)
    mine = queue.submit(work, 1).key
    looks, pages = lane(store, queue, 0), list[object]()
    list_stored = store.catalogue.list_stored

    def counted(job: str, wanted: Any) -> Any:
        pages.append(wanted)
        return list_stored(job, wanted)

    monkeypatch.setattr(store.catalogue, "list_stored", counted)
    assert found(looks) == [mine]
    assert len(pages) < 30  # two for each of 40 blocks, else


def test_a_backlog_that_the_worker_lacks_is_read_once_and_then_passed_over(
    store: CheckpointManager, queue: kedge.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1e6, monotonic=lambda: clock.now)
    monkeypatch.setattr(candidates, "time", clock)
    early = queue.submit(work, 0)
    (entry,) = queue.entries()
    store.tag(entry.id, state=DEAD)
    for number in range(60):
        queue.submit(other_work, number)
    looks, rows = looking(store, queue), list[object]()
    list_stored = store.catalogue.list_stored

    def counted(job: str, wanted: Any) -> Any:
        page = list_stored(job, wanted)
        rows.extend(page)
        return page

    monkeypatch.setattr(store.catalogue, "list_stored", counted)

    def look(after_s: float) -> tuple[list[str], bool]:
        """What is found, and whether all of the backlog was read for it."""
        clock.now += after_s
        rows.clear()
        return found(looks), len(rows) > 60

    assert look(0.0) == ([], True)
    assert look(0.3) == ([], False)
    late = queue.submit(work, 1)
    assert look(0.3) == ([late.key], False)
    queue.retry(early.key)  # in front of the backlog
    assert look(0.3) == ([late.key], False)
    assert look(3.0) == ([early.key], False)
    store.tag(entry.id, state=RUNNING)
    assert look(0.3) == ([late.key], True)
    assert look(0.3) == ([late.key], False)


@kedge.pipeline
def other_work(number: int) -> int:
    return number


class Dice(random.Random):
    """Always the last number, or always the first."""

    def __init__(self, *, last: bool) -> None:
        super().__init__(1)
        self.last = last

    def randrange(self, start: int, *_: object) -> int:  # type: ignore[override]
        return start - 1 if self.last else 0


def lane(store: CheckpointManager, queue: kedge.Queue, number: int) -> Candidates:
    """Those of a worker that has collided with another one."""
    looks = looking(store, queue)
    looks.lane = number
    looks.collide()
    return looks


def test_a_run_that_ended_during_a_look_is_no_collision_with_another_worker(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    """The look found it as it was before this worker began it."""
    looks = looking(store, queue)
    keys = [queue.submit(work, number).key for number in range(3)]
    for _, entry, _ in looks.find(is_thorough=True):
        if entry.key == keys[0]:
            for other in queue.entries():
                if other.key == keys[1]:
                    looks.end(other)
        assert entry.key != keys[1]
    assert found(looks, is_thorough=True) == keys


def test_the_neighbours_of_a_run_that_kills_its_workers_are_not_given_up(
    store: CheckpointManager, queue: kedge.Queue
) -> None:
    """Runs on which two workers died are taken over one at a time: the next death says whose fault it was."""
    lock, overlap, at_work, most = threading.Lock(), threading.Event(), [0], [0]

    @kedge.pipeline
    def suspect(number: int) -> int:
        with lock:
            at_work[0] += 1
            most[0] = max(at_work[0], most[0])
            if at_work[0] > 1:
                overlap.set()
        overlap.wait(0.3)  # limit: always reached when they come one at a time
        with lock:
            at_work[0] -= 1
        return number

    handles = [queue.submit(suspect, number) for number in range(3)]
    for entry in queue.entries():
        store.tag(entry.id, state=RUNNING, takeovers="1")
    serve(store, suspect, concurrency=4)
    assert [handle.result(0) for handle in handles] == [0, 1, 2]
    assert most == [1]
    overlap.clear()
    handles = [queue.submit(suspect, number) for number in (3, 4)]
    for entry in queue.entries():
        store.tag(entry.id, state=RUNNING)
    serve(store, suspect, concurrency=4)
    assert most == [2]  # one death may be anybody's: a machine that lost its power loses no time here
