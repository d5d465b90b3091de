"""A cancellation, and the time limit of a run, reach steps that are under way."""

import asyncio
import contextvars
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import pytest

import kedge
from kedge import Cancelled, CheckpointManager, StepTimeout
from kedge.pipeline import attempt, interruption
from kedge.pipeline.cancellation import cancel
from kedge.pipeline.consumer import Worker
from kedge.pipeline.history import find_run
from kedge.pipeline.watch import Watch
from tests.pipeline_work import hang
from tests.waiting import wait_for, wait_for_async


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


async def forever(begun: threading.Event) -> None:
    begun.set()
    await asyncio.Event().wait()


def test_a_coroutine_is_cancelled(store: CheckpointManager) -> None:
    begun = threading.Event()

    def canceller() -> None:
        begun.wait()
        assert not cancel(store, "r")

    async def pipeline() -> None:
        async with kedge.run("r", store=store, grace_s=0) as run:
            await run.step("wait", forever, begun, inputs=None)

    thread = threading.Thread(target=canceller)
    thread.start()
    with pytest.raises(Cancelled, match="was cancelled by"):
        asyncio.run(pipeline())
    thread.join()
    assert find_run(store, "r").status == "cancelled"


def test_a_process_is_killed(store: CheckpointManager, tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def canceller() -> None:
        wait_for(file.exists, "the step does not begin")
        cancel(store, "r")

    thread = threading.Thread(target=canceller)
    thread.start()
    with pytest.raises(Cancelled), kedge.run("r", store=store, grace_s=0) as run:
        run.step("hang", hang, str(file), timeout_s=600)
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
    assert find_run(store, "r").status == "cancelled"


PROGRAM = """
import sys, time, kedge
from pathlib import Path
with kedge.run("r", store=sys.argv[1], grace_s=0) as run:
    run.step("hang", lambda: (Path(sys.argv[2]).touch(), time.sleep(600)))  # sleep: until it is cancelled
"""


def test_the_main_thread_is_interrupted(store: CheckpointManager, tmp_path: Path) -> None:
    file = tmp_path / "begun"
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(file)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as program:
        try:
            wait_for(file.exists, "the step does not begin")
            cancel(store, "r")
            _, said = program.communicate(timeout=60)
        finally:
            program.send_signal(signal.SIGKILL)
    assert "Cancelled: run r was cancelled by" in said
    assert find_run(store, "r").status == "cancelled"


def test_a_run_has_a_time_limit_that_counts_from_its_first_beginning(store: CheckpointManager) -> None:
    async def pipeline(timeout_s: float) -> int:
        async with kedge.run("r", store=store, timeout_s=timeout_s) as run:
            if timeout_s < 1:
                await run.step("wait", forever, threading.Event(), inputs=None)
            return await run.step("last", last)  # type: ignore[no-any-return]

    async def last() -> int:
        return 1

    with pytest.raises(StepTimeout, match=r"run r took longer than 0\.05 s"):
        asyncio.run(pipeline(0.05))
    assert find_run(store, "r").status == "failed"
    with pytest.raises(StepTimeout):
        asyncio.run(pipeline(0.05))  # it began long ago
    assert asyncio.run(pipeline(3600)) == 1


@pytest.mark.parametrize("kind", ["items", "retry", "signal", "cancelled", 7])
@pytest.mark.parametrize("state", [{}, {"value": 5}, {"value": {"a": []}}, {"value": [{}]}, [1]])
def test_a_record_that_is_no_message_disturbs_nobody(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch, kind: object, state: object
) -> None:
    monkeypatch.setattr("kedge.pipeline.session.INBOX_EVERY_S", 0)
    for number in range(2):  # it comes while the run is at work, and is there when it is resumed
        with kedge.run("r", store=store) as run:
            with suppress(ZeroDivisionError):
                run.step("fails", lambda: 1 / 0)
            store.save("r:inbox", "forged", state, metadata={"kind": kind, "name": "m"})
            assert run.map(abs, [number], name="m") == [number]
            if kind == "signal":
                run.signal("m")


def test_the_watch_outlives_whatever_a_look_meets() -> None:
    looks, watch = list[int](), Watch(0.001, "test-watch")

    def look(number: int) -> None:
        looks.append(number)
        raise TypeError("a bug")

    with watch.calling(partial(look, 0)), watch.calling(partial(look, 1)):
        wait_for(lambda: min(looks.count(0), looks.count(1)) > 1, "one of the runs is not watched")


LATER = kedge.Retry(times=1, delay_s=120, max_delay_s=120, jitter=0)


def fails(begun: threading.Event) -> None:
    begun.set()
    raise ValueError("no")


async def fails_too(begun: threading.Event) -> None:
    fails(begun)


def of_a_step(run: kedge.Run, begun: threading.Event) -> None:
    run.step("fails", fails, begun, inputs=None, retries=LATER)


def of_a_coroutine(run: kedge.Run, begun: threading.Event) -> None:
    asyncio.run(run.step("fails", fails_too, begun, inputs=None, retries=LATER))


def of_an_item(run: kedge.Run, begun: threading.Event) -> None:
    run.map(lambda _: fails(begun), [1], retries=LATER)


@pytest.mark.parametrize("attempt", [of_a_step, of_a_coroutine, of_an_item])
@pytest.mark.parametrize("end", [kedge.pipeline.Paused, Cancelled])
def test_a_run_that_waits_for_another_attempt_is_stopped(
    store: CheckpointManager, attempt: Callable[[kedge.Run, threading.Event], None], end: type[BaseException]
) -> None:
    begun, ends = threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            attempt(run, begun)
        except BaseException as error:  # a pause is a SystemExit
            ends.append(error)

    with kedge.run("r", store=store, signals=False) as run:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), daemon=True)
        thread.start()
        begun.wait()
        if end is Cancelled:
            cancel(store, "r")
        else:
            run.stop("enough")
        thread.join(60)
    assert [type(error) for error in ends] == [end]


def test_steps_that_wait_for_another_attempt_keep_no_others_from_saving(store: CheckpointManager) -> None:
    """However many there are: asyncio has a few threads for all."""

    async def pipeline() -> int:
        async with kedge.run("r", store=store, signals=False) as run:
            waiting = [
                asyncio.create_task(
                    run.step(f"fails {number}", fails_too, threading.Event(), inputs=None, retries=LATER)
                )
                for number in range(40)
            ]
            await wait_for_async(lambda: _failures(store) == 40, "not all of them fail")
            result: int = await asyncio.wait_for(run.step("quick", quick), 60)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return result

    assert asyncio.run(pipeline()) == 1


def _failures(store: CheckpointManager) -> int:
    return len(store.list("r", metadata={"kind": "attempt"}))


async def quick() -> int:
    return 1


class Spinning:
    """A step of plain Python that never ends by itself."""

    def __init__(self, store: CheckpointManager | None = None) -> None:
        """It saves in `store` again and again."""
        self.begun = threading.Event()
        self.ended = threading.Event()
        self.store = store

    def __call__(self) -> None:
        self.begun.set()
        try:
            while True:
                if self.store is not None:
                    self.store.save("beside", "s", {})
                time.sleep(0.001)  # sleep: the step's own code, that leaves the processor to others
        finally:
            self.ended.set()


@pytest.mark.parametrize("saves", [False, True], ids=["plain", "in and out of Kedge"])
def test_a_step_in_a_worker_is_ended(store: CheckpointManager, saves: bool) -> None:
    step = Spinning(store if saves else None)

    @kedge.pipeline
    def spin() -> None:
        try:
            kedge.current_run().step("spin", step)
        finally:
            store.save("beside", "last", {})  # nothing of the store was left locked

    told = list[str]()
    worker = Worker(store, ["q"], {"spin": spin}, grace_s=0, report=lambda run, text: told.append(text))
    handle = kedge.queue("q", store=store).submit(spin)
    canceller = threading.Thread(target=lambda: (step.begun.wait(), handle.cancel()))
    canceller.start()
    worker.serve(until_empty=True)
    canceller.join()
    assert told == ["was cancelled"]
    assert step.ended.is_set()
    assert store.list("beside", limit=1)[0].step == "last"
    with pytest.raises(Cancelled):
        handle.result(0)


def test_a_step_whose_limit_holds_in_a_thread_is_left_at_once(store: CheckpointManager) -> None:
    begun, may_end = threading.Event(), threading.Event()

    @kedge.pipeline
    def hang() -> None:
        kedge.current_run().step("hang", lambda: (begun.set(), may_end.wait()), timeout_s=60, timeout_in="thread")

    told = list[str]()
    worker = Worker(store, ["q"], {"hang": hang}, grace_s=0, report=lambda run, text: told.append(text))
    handle = kedge.queue("q", store=store).submit(hang)
    canceller = threading.Thread(target=lambda: (begun.wait(), handle.cancel()))
    canceller.start()
    with mock.patch.object(attempt, "timed_out", wraps=attempt.timed_out) as limit:
        try:
            worker.serve(until_empty=True)
        finally:
            may_end.set()
    canceller.join()
    assert told == ["was cancelled"]
    assert not limit.called
    with pytest.raises(Cancelled):
        handle.result(0)


@pytest.mark.parametrize("limit_s", [None, 0.5], ids=["cancelled", "late"])
def test_items_in_a_worker_are_ended(store: CheckpointManager, limit_s: float | None) -> None:
    step, items = Spinning(), list[int]()

    @kedge.pipeline(timeout_s=limit_s)  # items that have not begun by then have nothing to end
    def spin() -> None:
        kedge.current_run().map(work, [1, 2], workers=2)

    def work(item: int) -> int:
        if item == 2:
            step()
        items.append(item)
        return item

    worker = Worker(store, ["q"], {"spin": spin}, grace_s=0)
    handle = kedge.queue("q", store=store).submit(spin)
    canceller = threading.Thread(target=lambda: (step.begun.wait(), limit_s or handle.cancel()))
    canceller.start()
    worker.serve(until_empty=True)
    assert step.ended.is_set() == step.begun.is_set()
    step.begun.set()
    canceller.join()
    assert items in ([], [1])
    with pytest.raises(StepTimeout if limit_s else Cancelled):
        handle.result(60)


def test_the_time_limit_of_a_run_ends_a_step_in_a_worker(store: CheckpointManager) -> None:
    step = Spinning()

    @kedge.pipeline(timeout_s=0.5)  # limit: a step that has not begun by then has nothing to end
    def spin() -> None:
        kedge.current_run().step("spin", step)

    handle = kedge.queue("q", store=store).submit(spin)
    Worker(store, ["q"], {"spin": spin}).serve(until_empty=True)
    with pytest.raises(StepTimeout, match=r"took longer than 0\.5 s"):
        handle.result(60)
    assert step.ended.is_set() == step.begun.is_set()


class Busy:
    """Code that a step is in until it may go on."""

    def __init__(self) -> None:
        self.has_begun, self.may_go_on, self.was_cut = threading.Event(), threading.Event(), False

    def __call__(self) -> None:
        self.has_begun.set()
        try:
            while not self.may_go_on.is_set():
                pass
        except BaseException:
            self.was_cut = True
            raise


def in_kedge(busy: Busy, folder: Path) -> None:
    code = (lambda work: work()).__code__.replace(co_filename=interruption.__file__)
    types.FunctionType(code, globals())(busy)


def in_an_import(busy: Busy, folder: Path) -> None:
    """Of a module whose code is not Kedge's. One that is cut off may be one that cannot be imported again."""
    (folder / "slow.py").write_text("busy()\n")
    spec = importlib.util.spec_from_file_location("slow", folder / "slow.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module)["busy"] = busy
    spec.loader.exec_module(module)


def in_a_log_record(busy: Busy, folder: Path) -> None:
    """Its handler has taken its lock, and catches whatever is raised in it."""
    handler = logging.StreamHandler()
    handler.emit = lambda record: busy()  # type: ignore[method-assign]
    handler.handle(logging.makeLogRecord({}))


def in_a_lock(busy: Busy, folder: Path) -> None:
    class Lock:
        def acquire(self) -> None:
            busy()

    Lock().acquire()


@pytest.mark.parametrize("place", [in_kedge, in_an_import, in_a_log_record, in_a_lock])
def test_what_must_not_be_cut_off_in_a_step(place: Callable[[Busy, Path], None], tmp_path: Path) -> None:
    """Kedge may hold a lock, and others need the rest. So the step is ended when it is back in its own code."""
    busy, cut = Busy(), list[str]()
    attempts: dict[int, interruption.Interruptible] = {}

    def own() -> None:
        place(busy, tmp_path)
        while True:
            pass

    def work() -> None:
        with interruption.Interruptible(attempts), pytest.raises(interruption.Interrupted):
            interruption.call(own, (), {})
        cut.append("ended")

    thread = threading.Thread(target=work)
    thread.start()
    busy.has_begun.wait()
    (attempt,) = attempts.values()
    attempt.interrupt()
    was_told = attempt.is_told
    busy.may_go_on.set()
    wait_for(lambda: (attempt.interrupt(), attempt.is_told)[1], "the step does not go on")
    thread.join()
    assert not was_told
    assert not busy.was_cut
    assert cut == ["ended"]
    assert not attempts


def test_a_step_that_has_ended_is_not_looked_for_in_the_next_one() -> None:
    """A worker's thread goes on to another run, which nobody has cancelled."""
    first, second, ended = Busy(), Busy(), list[str]()
    of_one_run: dict[int, interruption.Interruptible] = {}
    of_another: dict[int, interruption.Interruptible] = {}

    def work() -> None:
        for attempts, busy in ((of_one_run, first), (of_another, second)):
            with interruption.Interruptible(attempts):
                interruption.call(busy, (), {})
            ended.append("well")

    thread = threading.Thread(target=work)
    thread.start()
    first.has_begun.wait()
    (attempt,) = of_one_run.values()
    first.may_go_on.set()
    second.has_begun.wait()
    attempt.interrupt()
    second.may_go_on.set()
    thread.join()
    assert not attempt.is_told
    assert ended == ["well", "well"]
