"""`run.map`: items run once, by threads, processes and other executors; failures, deaths, limits, order, memory."""

import itertools
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kedge
from kedge import CheckpointManager, Retry, Validation
from kedge.pipeline.approval import pending_approvals
from kedge.pipeline.digests import DigestSet
from kedge.pipeline.history import explain, find_run
from kedge.pipeline.items import maps_of
from kedge.pipeline.origin import command_of
from tests.pipeline_work import Noted, Unpicklable, die_at_7, double, fail_on_odd, fail_unpicklably, hang_at_3, text
from tests.waiting import LIMITS_S, wait_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def executors() -> Iterator[Any]:
    yield "thread"
    yield "process"
    with ThreadPoolExecutor(2) as threads:
        yield threads
    with ProcessPoolExecutor(2, mp_context=get_context("forkserver")) as processes:
        yield processes


def test_items_are_run_once_by_any_executor(store: CheckpointManager, tmp_path: Path) -> None:
    for number, executor in enumerate(executors()):
        work = Noted(tmp_path / f"log{number}", double)
        for count in (50, 60):
            with kedge.run(f"r{number}", store=store) as run:
                assert run.map(work, range(count), name="m", executor=executor, workers=2) == [
                    2 * n for n in range(count)
                ]
        assert sorted(work.calls(), key=int) == [str(n) for n in range(60)]


def test_an_item_is_known_by_its_content_or_key(store: CheckpointManager, tmp_path: Path) -> None:
    work = Noted(tmp_path / "log", double)

    def mapped(items: list[Any], **options: Any) -> Any:
        with kedge.run("r", store=store) as run:
            return run.map(work, items, name="m", **options)

    assert mapped(["b", "a", "b"]) == ["bb", "aa", "bb"]
    assert mapped(["new", "b", "b", "b", "a"]) == ["newnew", "bb", "bb", "bb", "aa"]
    assert sorted(work.calls()) == ["a", "b", "b", "b", "new"]
    with kedge.run("keyed", store=store) as run:
        assert run.map(work, ["x"], name="m", key=lambda item: 1) == ["xx"]
    with kedge.run("keyed", store=store) as run:
        assert run.map(work, ["y"], name="m", key=lambda item: 1) == ["xx"]  # the key is all that counts
        with pytest.raises(Validation, match="has the key 1 of an earlier one"):
            run.map(work, ["x", "y"], name="m2", key=lambda item: 1)
        with pytest.raises(kedge.UnsupportedType, match="map m3, item 0"):
            run.map(work, [object()], name="m3")
        assert run.map(work, ["z"], name="m4", version=1) == ["zz"]
    with kedge.run("keyed", store=store) as run:
        assert run.map(work, ["z"], name="m4", version=2) == ["zz"]
    assert work.calls().count("z") == 2


def test_a_map_that_stopped_goes_on_with_the_rest(store: CheckpointManager, tmp_path: Path) -> None:
    is_broken = True

    def sometimes(item: int) -> int:
        if item == 30 and is_broken:
            raise OSError("disk")
        return item

    work = Noted(tmp_path / "log", sometimes)
    with pytest.raises(OSError, match="disk") as caught, kedge.run("r", store=store) as run:
        run.map(work, range(50), name="m", workers=1, key=str)
    assert "item 30 of map m of run r" in caught.value.__notes__[0]
    is_broken = False
    with kedge.run("r", store=store) as run:
        assert run.map(work, range(50), name="m", workers=1, key=str) == list(range(50))
    assert work.calls().count("30") == 2
    assert len(work.calls()) == 51
    (found,) = explain(store, "r")
    assert (found.verdict, found.reason) == ("map", "50 items done")


def test_a_run_that_is_to_pause_begins_no_other_item(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a worker was given together."""
    monkeypatch.setattr("kedge.pipeline.map.CHUNK_S", 600)
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 30:
            run.stop("enough")

    with suppress(SystemExit), kedge.run("r", store=store, signals=False) as run:
        run.map(work, range(100), workers=1)
    assert begun == list(range(31))
    assert find_run(store, "r").status == "paused"


def test_items_before_one_that_pauses_the_run_are_not_run_again(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.pipeline.map.CHUNK_S", 600)
    monkeypatch.setattr("kedge.pipeline.worker.BATCH_S", 600)
    begun: list[int] = []

    def approve(number: int) -> int:
        if number == 30:  # behind others of its chunk
            kedge.current_run().approval("go", wait_s=0)
        begun.append(number)
        return number

    for _ in range(2):
        with suppress(SystemExit), kedge.run("r", store=store, signals=False) as run:
            assert run.map(approve, range(40), workers=1) == list(range(40))
        for asked in pending_approvals(store, "r"):
            kedge.decide(store, "r", asked.name, True)
    assert sorted(begun) == list(range(40))


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_failures_are_collected_up_to_a_threshold(store: CheckpointManager, executor: str) -> None:
    with kedge.run("r", store=store) as run:
        out = run.map(fail_on_odd, range(6), executor=executor, on_error="collect", workers=2)
        assert out[::2] == [0, 2, 4]
        assert [(e.key[:3] != "", e.error) for e in out[1::2]] == [(True, f"ValueError: odd: {n}") for n in (1, 3, 5)]
        assert isinstance(out[1], kedge.ItemError)
        assert "fail_on_odd" in out[1].traceback
        assert len(run.map(fail_on_odd, range(6), name="3", executor=executor, on_error=3)) == 6
        for on_error in (2, 0.0, "stop"):
            with pytest.raises(ValueError, match="odd"):
                run.map(fail_on_odd, range(6), name=f"{on_error}", executor=executor, on_error=on_error)
        assert len(run.map(fail_on_odd, range(6), name="half", executor=executor, on_error=0.5)) == 6
        with pytest.raises(Unpicklable, match="needs two arguments") as caught:
            run.map(fail_unpicklably, [1], executor="process")
        assert caught.value.first == 1


def test_a_worker_that_dies_fails_only_its_item(store: CheckpointManager, tmp_path: Path) -> None:
    work = Noted(tmp_path / "log", die_at_7)
    with kedge.run("r", store=store) as run:
        out = run.map(work, range(40), name="m", executor="process", workers=2, on_error="collect", key=str)
    assert "WorkerDied" in out[7].error
    assert [o for o in out if not isinstance(o, kedge.ItemError)] == [n for n in range(40) if n != 7]
    with pytest.raises(kedge.WorkerDied, match="signal 9"), kedge.run("r", store=store) as run:
        run.map(work, range(40), name="m", executor="process", workers=2, key=str)


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_an_item_has_a_time_limit(store: CheckpointManager, executor: str) -> None:
    for limit_s in LIMITS_S:
        with kedge.run(f"r-{limit_s}", store=store) as run:
            out = run.map(hang_at_3, range(6), executor=executor, timeout_s=limit_s, on_error="collect", workers=2)
        assert "StepTimeout" in out[3].error
        if (done := [o for o in out if not isinstance(o, kedge.ItemError)]) == [0, 1, 2, 4, 5]:
            break
    assert done == [0, 1, 2, 4, 5]


def test_items_are_retried(store: CheckpointManager) -> None:
    seen: list[int] = []

    def flaky(item: int) -> int:
        seen.append(item)
        if seen.count(item) < 3:
            raise OSError
        return item

    with kedge.run("r", store=store) as run:
        assert run.map(flaky, range(5), retries=Retry(times=2, delay_s=0)) == list(range(5))
    assert len(seen) == 15


def test_steps_inside_items(store: CheckpointManager) -> None:
    inner: list[int] = []

    def work(item: int) -> int:
        def note() -> int:
            inner.append(item)
            return item

        value: int = run.step("inner", note)
        if item == 2 and inner.count(2) == 1 and run.session == 1:
            raise OSError
        return value

    with pytest.raises(OSError), kedge.run("r", store=store) as run:
        run.map(work, range(4), key=str, workers=1)
    with kedge.run("r", store=store) as run:
        assert run.map(work, range(4), key=str, workers=1) == [0, 1, 2, 3]
    assert sorted(inner) == [0, 1, 2, 3]


def test_a_function_may_change_what_it_returned(store: CheckpointManager) -> None:
    small, large = [0], np.zeros(100_000)

    def reuse(item: int) -> Any:
        small[0] = item
        return small

    def fill(item: int) -> Any:
        large[:] = item
        return large

    for session in (1, 2):
        with kedge.run("r", store=store) as run:
            assert list(run.map(reuse, range(20), workers=1, collect=False)) == [[n] for n in range(20)]
            found = [array[7] for array in run.map(fill, range(4), workers=1, collect=False)]
            assert (session, found) == (session, [0, 1, 2, 3])


def test_order_and_results_on_demand(store: CheckpointManager) -> None:
    has_result = threading.Event()

    def items() -> Iterator[int]:
        yield from range(4)
        has_result.set()  # more than four are asked for only when one of those is done
        yield 4

    def slow_first(item: int) -> int:
        assert item or has_result.wait(60)
        return item

    with kedge.run("r", store=store) as run:
        out = run.map(slow_first, items(), workers=2, order="completed")
        assert out[0] != 0
        assert sorted(out) == [0, 1, 2, 3, 4]
        lazy = run.map(text, iter(range(30)), collect=False)
        assert len(lazy) == 30
        assert sorted(lazy, key=int) == [str(n) for n in range(30)]
        assert sorted(run.map(text, [5, 6], name="text 2", collect=False)) == ["5", "6"]
        assert run.map(text, [], name="empty") == []


def test_slow_items_are_durable_one_by_one_and_quick_ones_share_commits(store: CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:
        run.map(lambda _: time.sleep(0.06), range(4), name="slow", workers=1)  # sleep: at least a batch
        run.map(lambda n: n, range(3000), name="quick", workers=1)
    batches = store.list("r", level="substep")
    assert len([c for c in batches if c.step == "slow"]) == 4
    assert len([c for c in batches if c.step == "quick"]) < 300


def test_a_map_of_which_every_item_failed_is_explained(store: CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:
        run.map(fail_on_odd, [1, 3], name="m", on_error="collect")
    assert [(step.path, step.verdict, step.reason) for step in explain(store, "r")] == [
        ("m", "map", "0 items done, 2 failed")
    ]


def test_nonsense_is_refused_before_anything_runs(store: CheckpointManager) -> None:
    calls: list[int] = []

    async def coroutine(item: int) -> None: ...

    with kedge.run("r", store=store) as run:
        for options in (
            {"workers": 0}, {"workers": 1.5}, {"executor": "magic"}, {"order": "random"}, {"on_error": "ignore"},
            {"on_error": -1}, {"on_error": 1.5}, {"on_error": True}, {"retries": -1}, {"timeout_s": -1},
        ):  # fmt: skip
            with pytest.raises(Validation):
                run.map(calls.append, [1], **options)  # type: ignore[arg-type]
        with pytest.raises(Validation, match="coroutine function"):
            run.map(coroutine, [1])
        with pytest.raises(Validation, match="other processes"):
            run.map(lambda _: calls.append(1), [1], executor="process")
    with kedge.open("memory:") as memory, kedge.run("r", store=memory) as run:
        with pytest.raises(Validation, match="in memory"):
            run.map(double, [1], executor="process")
        processes = ProcessPoolExecutor(1, mp_context=get_context("forkserver"))
        with processes, pytest.raises(kedge.Conflict, match="in memory"):
            run.map(double, [1], name="m", executor=processes)
    assert calls == []


def test_a_result_that_cannot_be_kept_fails_its_item(store: CheckpointManager) -> None:
    with pytest.raises(kedge.UnsupportedType) as caught, kedge.run("r", store=store) as run:
        run.map(lambda n: {"x": threading.Lock()} if n == 2 else n, range(4), key=str, workers=1, name="m")
    assert "item 2 of map m" in caught.value.__notes__[0]
    assert find_run(store, "r").status == "failed"


def durable_items(store: CheckpointManager) -> int:
    return sum(int(str(c.metadata["items"])) for c in store.list("r") if c.metadata.get("kind") == "items")


def check_slow_item(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch, patience_s: float) -> None:
    """Items are handed out in chunks of about a tenth of a second; one of them may take an hour all the same."""
    monkeypatch.setattr("kedge.pipeline.worker.BATCH_S", 3600)  # results wait for the end of their chunk
    slow: list[int] = []

    def work(number: int) -> int:
        if not slow and durable_items(store) < number:  # what was done before it waits
            slow.append(number)
            wait_for(lambda: durable_items(store) == number, "results wait for a slow item", patience_s)
        return number

    with kedge.run("r", store=store) as run:
        assert run.map(work, range(300), workers=1) == list(range(300))
    assert slow
    assert durable_items(store) == 300


def test_what_is_done_does_not_wait_for_a_slow_item_behind_it(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_slow_item(store, monkeypatch, patience_s=60)


@pytest.mark.mutant
def test_results_that_wait_are_noticed(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.pipeline.worker.Batch.flush_behind", lambda batch: None)
    with pytest.raises(AssertionError, match="results wait for a slow item"):
        check_slow_item(store, monkeypatch, patience_s=1)


def test_a_stale_owner_is_refused_in_the_middle_of_a_map(store: CheckpointManager) -> None:
    def lose(item: int) -> int:
        if item == 10:
            store.break_lease(run.lease)
        return item

    with pytest.raises(kedge.LeaseLost), kedge.run("r", store=store) as run:
        run.map(lose, range(10**9), workers=1)


def test_memory_does_not_grow_with_the_items(store: CheckpointManager) -> None:
    def peak(count: int) -> int:
        with kedge.run(f"r{count}", store=store) as run:
            tracemalloc.start()
            run.map(abs, itertools.chain(range(count)), workers=1, collect=False)
            top = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return top

    small, large = peak(1_000), peak(20_000)
    assert large - small < 2_000_000  # 16 bytes for each item, its chunks, and nothing else


def test_digest_sets() -> None:
    digests = [os.urandom(16) for _ in range(5000)] + [bytes(16), b"\1" * 16, bytes(15) + b"\1"]
    found = DigestSet()
    assert [found.add(d) for d in digests] == [True] * len(digests)
    assert [found.add(d) for d in digests] == [False] * len(digests)
    assert len(found) == len(digests)
    assert os.urandom(16) not in found
    across = DigestSet()  # what lies across two neighbours is not in it
    across.add(bytes(15) + b"\7")
    across.add(bytes(14) + b"\7\0")
    assert bytes(13) + b"\7\0\0" not in across


def test_steps_inside_items_that_are_done_are_not_stale(store: CheckpointManager) -> None:
    def work(number: int) -> int:
        return int(kedge.current_run().step("inner", double, number))

    for count, gone in ((2, False), (3, False), (3, True)):
        with kedge.run("r", store=store) as run:
            if not gone:
                run.map(work, range(count), key=str, name="m", workers=1)
    verdicts = {step.path: step.verdict for step in explain(store, "r")}
    assert verdicts == {"m/0/inner": "stale", "m/1/inner": "stale", "m/2/inner": "stale", "m": "map"}
    with kedge.run("again", store=store) as run:
        run.map(work, range(2), key=str, name="m", workers=1)
    with kedge.run("again", store=store) as run:
        run.map(work, range(3), key=str, name="m", workers=1)
    verdicts = {step.path: step.verdict for step in explain(store, "again")}
    assert verdicts == {"m/0/inner": "reused", "m/1/inner": "reused", "m/2/inner": "ran", "m": "map"}


def test_what_failed_and_was_done_later_has_not_failed(store: CheckpointManager) -> None:
    broken = {"2", "5", "7"}

    def work(n: int) -> int:
        if str(n) in broken:
            raise ValueError(f"no {n}")
        return n

    def run_all() -> None:
        with kedge.run("r", store=store, progress=False) as run:
            run.map(work, range(40), name="named", key=str, on_error="collect")
            run.map(work, range(10), name="unnamed", on_error="collect")

    run_all()
    assert [(each.path, each.done, len(each.failed)) for each in maps_of(store, "r")] == [
        ("named", 37, 3),
        ("unnamed", 7, 3),
    ]
    assert command_of(store, "r")[0]  # completed, but there is something to run again
    broken -= {"2", "7"}
    run_all()
    named, unnamed = maps_of(store, "r")
    assert (named.done, [item.error for item in named.failed.values()]) == (39, ["ValueError: no 5"])
    assert (unnamed.done, [item.error for item in unnamed.failed.values()]) == (9, ["ValueError: no 5"])
    broken.clear()
    run_all()
    assert [len(each.failed) for each in maps_of(store, "r")] == [0, 0]
    with pytest.raises(kedge.CheckpointError, match="already completed"):
        command_of(store, "r")


def test_items_and_keys_that_are_none_are_refused(store: CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:
        with pytest.raises(kedge.Validation, match="map m: its items"):
            run.map(abs, 5, name="m")  # type: ignore[arg-type]
        with pytest.raises(kedge.Validation, match="map m: key"):
            run.map(abs, [5], name="m", key="id")  # type: ignore[arg-type]
        assert run.map(abs, [5], name="m") == [5]  # nothing was claimed
