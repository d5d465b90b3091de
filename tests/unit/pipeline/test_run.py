"""Runs, stages and steps in one process: what is run, reused, refused and recorded."""

import asyncio
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, Conflict, Retry, StepTimeout, Validation
from kedge.index.sqlite.index import SqliteIndex
from kedge.pipeline.cancellation import cancel
from kedge.pipeline.history import explain, find_run, find_runs
from tests.pipeline_work import LocalErrors, Unpicklable, die, fail_unpicklably, hang, own_pid
from tests.waiting import wait_for

AT_ONCE = Retry(times=5, delay_s=0)


@pytest.fixture
def store() -> Iterator[CheckpointManager]:
    with kedge.open("memory:") as opened:
        yield opened


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any] = lambda *args, **kwargs: (args, kwargs)) -> None:
        self.calls = 0
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.function(*args, **kwargs)


def test_a_finished_step_returns_its_result_and_does_not_run(store: CheckpointManager) -> None:
    work = Counted(lambda x: {"tuple": (x, 2.5), "bytes": b"b"})
    for _ in range(3):
        with kedge.run("nightly", store=store) as run:
            assert run.step("work", work, 1) == {"tuple": (1, 2.5), "bytes": b"b"}
    assert work.calls == 1
    assert find_run(store, "nightly").sessions == 3
    assert find_run(store, "nightly").status == "completed"


@pytest.mark.parametrize(("order", "finds", "pages"), [(1, 1, 4), (-1, 200, 200)], ids=["as before", "backwards"])
def test_finished_steps_are_read_by_the_page(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch, order: int, finds: int, pages: int
) -> None:
    """Each page follows the one before, and no step is looked for by itself; whatever is asked for, it is found."""
    work = Counted(lambda number: number)
    catalogue, calls = store.catalogue, Counter[bool]()
    find = catalogue.find

    def counted(job: str, keys: Sequence[str] | range) -> object:
        calls[isinstance(keys, range)] += 1
        return find(job, keys)

    for session in range(2):
        with kedge.run("nightly", store=store) as run:
            if session:
                monkeypatch.setattr(catalogue, "find", counted)
            for number in range(200)[:: order if session else 1]:
                assert run.step(f"step {number}", work, number) == number
    assert work.calls == 200
    assert calls[False] <= finds
    assert 0 < calls[True] <= pages


@pytest.mark.parametrize("key", [None, "0b" * 32])
def test_a_run_whose_last_answer_was_lost_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    """Its last save gave the lease back, durably: when it is saved once more, nobody has lost anything."""
    confirm, lost = SqliteIndex._confirm, list[str]()

    def fail_once(file: SqliteIndex) -> None:
        confirm(file)
        if lost:
            raise kedge.StorageError(lost.pop(), hint="")

    monkeypatch.setattr(SqliteIndex, "_confirm", fail_once)
    with kedge.open(tmp_path / "store", key=key) as store:
        with kedge.run("r", store=store) as run:
            run.step("work", abs, -1)
            lost.append("the answer to the commit")
        assert not lost
        assert find_run(store, "r").status == "completed"
        assert [each.step for each in store.list("r")].count("run completed") == 1


def test_a_failed_run_goes_on_where_it_failed(store: CheckpointManager) -> None:
    first, broken = Counted(lambda: 1), Counted(lambda x: x / 0)
    with pytest.raises(ZeroDivisionError) as caught, kedge.run("r", store=store) as run:
        run.step("first", first)
        run.step("second", broken, 4)
    assert any("step second of run r" in note for note in caught.value.__notes__)
    assert find_run(store, "r").status == "failed"
    assert "ZeroDivisionError" in find_run(store, "r").error
    with kedge.run("r", store=store) as run:
        assert run.step("first", first) == 1
        assert run.step("second", lambda x: x + 1, 4) == 5
    assert first.calls == 1


@pytest.mark.parametrize(("code", "status"), [(1, "failed"), ("no input", "failed"), (0, "paused"), (None, "paused")])
def test_a_program_that_leaves_by_sys_exit_says_how_it_ended(
    store: CheckpointManager, capsys: pytest.CaptureFixture[str], code: str | int | None, status: str
) -> None:
    with pytest.raises(SystemExit), kedge.run("r", store=store) as run:
        run.step("first", int)
        sys.exit(code)
    assert find_run(store, "r").status == status
    assert "to resume it" in capsys.readouterr().err


def test_what_is_no_function_and_what_is_no_version_are_refused(store: CheckpointManager) -> None:
    with pytest.raises(kedge.Validation, match="version="):
        kedge.run("r", store=store, version=object())  # type: ignore[arg-type]
    with kedge.run("r", store=store) as run:
        with pytest.raises(kedge.Validation, match="cannot be called"):
            run.step("a", 5)  # type: ignore[arg-type]
        assert run.step("a", int) == 0


def test_a_changed_input_or_version_runs_again_with_all_that_consumed_it(store: CheckpointManager) -> None:
    load, clean, other = Counted(lambda x: [x]), Counted(lambda rows: rows * 2), Counted(lambda: 0)

    def pipeline(day: int, version: str | None = None) -> list[int]:
        with kedge.run("r", store=store) as run:
            run.step("other", other)
            rows = run.step("load", load, day, version=version)
            return run.step("clean", clean, rows=rows)  # type: ignore[no-any-return]

    assert pipeline(1) == [1, 1]
    assert pipeline(2) == [2, 2]
    assert (load.calls, clean.calls, other.calls) == (2, 2, 1)
    why = {e.path: (e.verdict, e.reason) for e in explain(store, "r")}
    assert why["load"][0] == "ran"
    assert why["clean"] == ("ran", "changed: rows")
    assert why["other"][0] == "reused"
    assert pipeline(2, "b") == [2, 2]
    assert (load.calls, clean.calls) == (3, 2)  # the same rows again: nothing to clean
    assert {e.path: e.reason for e in explain(store, "r")}["load"] == "version none became 'b'"
    assert pipeline(1) == [1, 1]  # and back: nothing is lost
    assert (load.calls, clean.calls) == (3, 2)


def test_the_version_of_a_run_is_that_of_all_its_steps(store: CheckpointManager) -> None:
    work = Counted(lambda: 1)
    for version in ("1", "1", "2"):
        with kedge.run("r", store=store, version=version) as run:
            run.step("work", work)
    assert work.calls == 2


def test_reordered_code_still_matches(store: CheckpointManager) -> None:
    a, b = Counted(lambda: "a"), Counted(lambda: "b")
    with kedge.run("r", store=store) as run:
        assert run.step("a", a) + run.step("b", b) == "ab"
    with kedge.run("r", store=store) as run:
        assert run.step("b", b) + run.step("a", a) == "ba"
    assert (a.calls, b.calls) == (1, 1)


def test_nesting_is_the_level(store: CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:

        def outer() -> int:
            return run.step("inner", lambda: 1) + 1  # type: ignore[no-any-return]

        with run.stage("a"), run.stage("b"):
            assert run.step("outer", outer) == 2
    levels = {c.step: str(c.level) for c in store.list("r")}
    assert levels["a/b/outer"] == "step"
    assert levels["a/b/outer/inner"] == "substep"
    assert levels["a/b"] == levels["a"] == "stage"
    assert levels["run completed"] == "pipeline"
    with pytest.raises(Validation, match="inside step"), kedge.run("s", store=store) as run:
        run.step("x", lambda: run.stage("y").__enter__())


def test_a_step_cut_in_the_middle_keeps_its_finished_substeps(store: CheckpointManager) -> None:
    inner, attempts = Counted(lambda: 1), Counted()
    with kedge.run("r", store=store) as run:

        def outer() -> int:
            value = run.step("inner", inner)
            attempts()
            if attempts.calls == 1:
                raise OSError("first time")
            return value + 1  # type: ignore[no-any-return]

        assert run.step("outer", outer, retries=AT_ONCE) == 2
    assert (inner.calls, attempts.calls) == (1, 2)


def test_the_owner_of_a_new_run_does_not_ask_for_steps_that_nobody_can_have_saved(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease keeps all others from saving (I5). Whoever continues a run asks."""
    asked: list[str] = []
    ask = CheckpointManager.load_by_key
    monkeypatch.setattr(
        CheckpointManager, "load_by_key", lambda self, job, key: asked.append(key) or ask(self, job, key)
    )
    work = Counted()
    for expected in (0, 1):
        with kedge.run("new", store=store) as run:
            run.step("a", work, 1)
            run.step("b", work, 2)
        assert len(asked) == expected  # b is read ahead
    assert work.calls == 2


def test_a_step_whose_saving_failed_is_looked_for_before_it_runs_again(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been committed all the same."""
    inner, save, lost = Counted(lambda: 1), CheckpointManager.save, list[str]()

    def save_and_lose(self: CheckpointManager, job: str, step: str, *args: Any, **options: Any) -> Any:
        saved = save(self, job, step, *args, **options)
        if step == "outer/inner" and not lost:
            lost.append(saved)
            raise OSError("the answer was lost")
        return saved

    monkeypatch.setattr(CheckpointManager, "save", save_and_lose)
    with kedge.run("r", store=store) as run:
        assert run.step("outer", lambda: run.step("inner", inner), retries=AT_ONCE) == 1
    assert (inner.calls, len(lost)) == (1, 1)


def test_retries_wait_longer_each_time_and_are_recorded(store: CheckpointManager) -> None:
    moments: list[float] = []

    def flaky() -> str:
        moments.append(time.monotonic())
        if len(moments) < 4:
            raise ConnectionError(f"try {len(moments)}")
        return "done"

    with kedge.run("r", store=store) as run:
        assert run.step("flaky", flaky, retries=Retry(times=3, delay_s=0.02, jitter=0)) == "done"
    waits = [b - a for a, b in pairwise(moments)]
    assert waits[0] >= 0.02
    assert waits[2] >= 0.08
    attempts = [c for c in store.list("r") if c.metadata.get("kind") == "attempt"]
    assert [c.metadata["error"] for c in attempts] == [f"ConnectionError: try {n}" for n in (1, 2, 3)]
    state: Any = store.load(attempts[0].id)
    assert "in flaky" in state["traceback"]
    (result,) = [c for c in store.list("r") if c.metadata.get("kind") == "step"]
    assert result.metadata["attempts"] == 4


def test_exceptions_have_rules_of_their_own(store: CheckpointManager) -> None:
    retry = Retry(times=3, delay_s=0, rules={LookupError: 1, KeyError: 0})
    for error, calls in ((KeyError, 1), (IndexError, 2), (OSError, 4)):

        def fail(error: type[Exception] = error) -> None:
            raise error("no")

        work = Counted(fail)
        with pytest.raises(error), kedge.run(f"r-{calls}", store=store) as run:
            run.step("work", work, retries=retry)
        assert work.calls == calls


@pytest.mark.parametrize(
    "nonsense",
    [
        {"times": -1}, {"times": 1.5}, {"times": True}, {"delay_s": -1}, {"delay_s": float("nan")}, {"factor": 0.5},
        {"jitter": 2}, {"max_delay_s": "x"}, {"rules": {"KeyError": 1}}, {"rules": {KeyError: -1}},
    ],
)  # fmt: skip
def test_nonsense_in_policies_is_refused_at_construction(nonsense: dict[str, Any]) -> None:
    with pytest.raises(Validation):
        Retry(**nonsense)


def test_nonsense_in_options_is_refused_before_anything_runs(store: CheckpointManager) -> None:
    work = Counted()
    for options in ({"retries": -1}, {"timeout_s": 0}, {"timeout_s": "1"}, {"timeout_in": "wish"}, {"version": 1.5}):
        with pytest.raises(Validation), kedge.run("r", store=store) as run:
            run.step("work", work, **options)
    with pytest.raises(Validation):
        kedge.step(retries=-1)
    with pytest.raises(Validation):
        kedge.run("r", grace_s=-1)
    for key in ("", "a b", "../x", "x" * 127, "r:inbox"):
        with pytest.raises(Validation):
            kedge.run(key)
    assert work.calls == 0


def test_two_steps_with_one_path_are_refused(store: CheckpointManager) -> None:
    with pytest.raises(Validation, match="two steps with the path a/x"), kedge.run("r", store=store) as run:
        with run.stage("a"):
            run.step("x", lambda: 1)
        run.step("x", lambda: 2)
        with run.stage("a"):
            run.step("x", lambda: 3)


def test_a_result_that_cannot_be_kept_is_named_before_anything_is_marked_done(store: CheckpointManager) -> None:
    work = Counted(lambda: {"model": [1, object()]})
    for _ in range(2):
        with pytest.raises(kedge.UnsupportedType) as caught, kedge.run("r", store=store) as run:
            run.step("train", work)
        assert "step train" in str(caught.value)
        assert 'result["model"][1]' in str(caught.value)
    assert work.calls == 2


def test_inputs_that_cannot_be_encoded_are_named_and_can_be_replaced(store: CheckpointManager) -> None:
    connection, work = threading.Lock(), Counted(lambda *_: 1)
    with kedge.run("r", store=store) as run:
        with pytest.raises(kedge.UnsupportedType, match="step query, input argument 2"):
            run.step("query", work, 1, connection)
        assert run.step("query again", work, 1, connection, inputs=[1]) == 1
    assert work.calls == 1


def test_partials_are_opened_and_a_methods_own_object_is_no_input(store: CheckpointManager) -> None:
    class Thing:
        calls = 0

        def work(self, x: int) -> int:
            self.calls += 1
            return x

    work, thing = Counted(lambda x, y=0: x + y), Thing()
    for more, expected in ((1, 11), (1, 11), (2, 12)):
        with kedge.run("r", store=store) as run:
            assert run.step("partial", partial(work, 10, y=more)) == expected
            assert run.step("method", thing.work, 5) == 5
    assert (work.calls, thing.calls) == (2, 1)


def test_inputs_are_shown_as_they_were_given(store: CheckpointManager) -> None:
    with kedge.run("r", store=store) as run:
        run.step("clear", lambda numbers: numbers.clear(), [1, 2])
        with pytest.raises(ZeroDivisionError):
            run.step("fail", lambda numbers: numbers.clear() or 1 / 0, [3])
    given = {record.step: record.metadata["given"] for record in store.list("r") if "given" in record.metadata}
    assert given == {"clear": {"numbers": "[1, 2]"}, "fail": {"numbers": "[3]"}}


def test_inputs_are_shown_without_credentials(store: CheckpointManager) -> None:
    def fetch(url: str, count: int, secret_key: str, options: dict[str, Any], texts: list[str]) -> None:
        pass

    options = {"Authorization": "hunter2", "deep": {"api-keys": ["hunter2"]}, "passwords": ["hunter2"], "plain": 7}
    texts = ["host=db password='hunter2 hunter2' dbname=x", "https://h/?sig=hunter2&page=2", "Bearer hunter2"]
    with kedge.run("r", store=store) as run:
        run.step("fetch", fetch, "postgresql://me:hunter2@db/x", 3, "hunter2", options, texts)
        run.llm(
            "ask", lambda **_: "hi", model="m", messages=[{"role": "user", "content": "hello"}],
            extra_headers={"x-token": "hunter2"}, tools=[{"headers": {"any": "hunter2"}}],
        )  # fmt: skip
        with pytest.raises(ZeroDivisionError):
            run.step("fail", lambda password: 1 / 0, password="hunter2")
    records = store.list("r")
    assert "hunter2" not in str([record.metadata for record in records])
    given: Any = next(record.metadata["given"] for record in records if record.step == "fetch")
    assert (given["url"], given["count"]) == ("'postgresql://…@db/x'", "3")
    assert "'plain': 7" in given["options"]
    assert "page=2" in given["texts"]
    asked: Any = next(record.metadata["given"] for record in records if record.step == "ask")
    assert "hello" in asked["messages"]


def test_one_owner_at_a_time_and_a_stale_one_is_refused(store: CheckpointManager) -> None:
    with kedge.run("r", store=store, signals=False) as run:
        with pytest.raises(Conflict, match="run r has another owner"), kedge.run("r", store=store):
            raise AssertionError("entered")
        assert run.step("mine", lambda: 1) == 1
    stale = kedge.run("r", store=store, signals=False)
    with pytest.raises(kedge.LeaseLost), stale:
        store.break_lease(stale.lease)  # as if it had been suspended for longer than its lease
        with kedge.run("r", store=store, signals=False) as run:
            assert run.step("x", lambda: "theirs") == "theirs"
        stale.step("y", lambda: "mine", retries=AT_ONCE)
    assert not [c for c in store.list("r") if c.step == "y"]
    assert find_run(store, "r").status == "completed"  # not overwritten by the stale one


@pytest.mark.parametrize("suspended_s", [pytest.param(0, marks=pytest.mark.mutant), 31])
def test_a_run_that_was_suspended_finds_what_the_next_owner_has_done(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch, suspended_s: int
) -> None:
    """Its first session looks for no steps while nobody can have taken its lease. One whose clock stands still does."""
    clock = [0.0]
    monkeypatch.setattr("kedge.pipeline.session.boot_clock_s", lambda: clock[0])
    charge = Counted(lambda: "paid")
    with pytest.raises(kedge.LeaseLost), kedge.run("r", store=store) as stale:
        store.break_lease(stale.lease)
        with kedge.run("r", store=store) as run:
            run.step("charge", charge)
        clock[0] += suspended_s
        assert stale.step("charge", charge) == "paid"
    assert charge.calls == (1 if suspended_s else 2)


def test_a_key_belongs_to_one_pipeline_and_a_job_that_is_no_run_is_left_alone(store: CheckpointManager) -> None:
    @kedge.pipeline
    def a() -> int:
        return 1

    @kedge.pipeline
    def b() -> int:
        return 2

    assert a.at("k", store=store)() == 1
    with pytest.raises(Conflict, match="belongs to pipeline a, not to b"):
        b.at("k", store=store)()
    store.save("plain", "step", {})
    with pytest.raises(Conflict, match="not a run"), kedge.run("plain", store=store):
        pass
    assert store.save("plain", "step", {})  # and its lease was given back


def test_decorated_functions(store: CheckpointManager) -> None:
    calls: list[object] = []

    @kedge.step(retries=AT_ONCE, version=1)
    def double(x: int) -> int:
        calls.append(x)
        return 2 * x

    @kedge.step(name="fetch {url}")
    def fetch(url: str, depth: int = 1) -> str:
        calls.append(url)
        return url.upper()

    @kedge.step(cache=False)
    def always() -> None:
        calls.append("always")

    @kedge.pipeline(version="7", store=store)
    def nightly(day: int) -> object:
        always()
        with kedge.current_run().stage("s"):
            return double(day), [fetch(url) for url in ("a", "b")]

    assert double(4) == 8  # outside a run: an ordinary function
    calls.clear()
    assert nightly(1) == nightly(1) == (2, ["A", "B"])
    assert calls == ["always", 1, "a", "b", "always"]
    assert nightly.key_of(1) != nightly.key_of(2)
    assert {run.key for run in find_runs(store)} == {nightly.key_of(1)}
    with pytest.raises(Conflict, match="no run here"):
        kedge.current_run()


def test_async_steps_and_pipelines(store: CheckpointManager) -> None:
    calls: list[object] = []

    @kedge.step(retries=AT_ONCE, name="fetch {x}")
    async def fetch(x: int) -> int:
        calls.append(x)
        await asyncio.sleep(0)  # sleep: a round of the loop
        if calls.count(x) < 2:
            raise OSError
        return x * x

    @kedge.pipeline(store=store)
    async def crawl() -> list[int]:
        run = kedge.current_run()
        with run.stage("all"):
            squares = await asyncio.gather(*(fetch(x) for x in range(4)))
        return [*squares, await run.step("plain", asyncio.sleep, 0, 7)]  # sleep: a coroutine function not of ours

    assert asyncio.run(crawl()) == [0, 1, 4, 9, 7]
    assert asyncio.run(crawl()) == [0, 1, 4, 9, 7]
    assert sorted(calls) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_an_async_step_is_cancelled_when_its_time_is_over(store: CheckpointManager) -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    async def own() -> None:
        raise TimeoutError("of its own")

    async def main() -> None:
        async with kedge.run("r", store=store, signals=False) as run:
            with pytest.raises(StepTimeout, match=r"step slow took longer than 0.05 s"):
                await run.step("slow", slow, timeout_s=0.05)  # limit: it is reached
            with pytest.raises(TimeoutError, match="of its own"):
                await run.step("own", own, timeout_s=60)

    asyncio.run(main())
    assert ended == ["cancelled"]


def test_a_time_limit_kills_the_process_of_the_step(store: CheckpointManager, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    with kedge.run("r", store=store) as run:
        assert run.step("quick", own_pid, timeout_s=60) != os.getpid()
        for seconds in (1, 4, 16, 64):  # on a busy machine its process may not even have started
            with pytest.raises(StepTimeout):
                run.step(f"slow {seconds}", hang, str(file), timeout_s=seconds)
            if file.exists():
                break
        wait_for(lambda: not Path("/proc", file.read_text()).exists(), "the process goes on")
        with pytest.raises(kedge.WorkerDied, match="exit code 3"):
            run.step("crash", die, timeout_s=60)
        with pytest.raises(Validation, match="a process of its own"):
            run.step("lambda", lambda: 1, timeout_s=60)


def test_a_thread_that_is_over_time_is_left_behind(store: CheckpointManager) -> None:
    done = threading.Event()
    with kedge.run("r", store=store) as run:
        with pytest.raises(StepTimeout):
            run.step("slow", done.wait, 30, timeout_s=0.05, timeout_in="thread")  # limit: it is reached
        done.set()
        assert run.step("inner", lambda: run.step("x", lambda: 3), timeout_s=60, timeout_in="thread") == 3


def test_a_damaged_result_is_named_and_runs_again_when_deleted(tmp_path: Path) -> None:
    work = Counted(lambda: os.urandom(300_000))
    with kedge.open(tmp_path / "store") as store:
        with kedge.run("r", store=store) as run:
            run.step("work", work)
        (pack,) = (tmp_path / "store" / "packs").iterdir()
        pack.write_bytes(pack.read_bytes()[:-200_000] + bytes(200_000))
    with kedge.open(tmp_path / "store") as store:
        damaged = pytest.raises(kedge.Corrupted, match="the result of step work of run r")
        with damaged, kedge.run("r", store=store) as run:
            run.step("work", work)
        (found,) = [c for c in store.list("r") if c.metadata.get("kind") == "step"]
        store.delete("r", found.id)
        with kedge.run("r", store=store) as run:
            assert len(run.step("work", work)) == 300_000
    assert work.calls == 2


def test_damaged_results_of_a_map_are_named_and_run_again_when_deleted(tmp_path: Path) -> None:
    work = Counted(lambda item: os.urandom(300_000))
    with kedge.open(tmp_path / "store") as store, kedge.run("r", store=store) as run:
        run.map(work, [1], name="many")
    (pack,) = (tmp_path / "store" / "packs").iterdir()
    pack.write_bytes(pack.read_bytes()[:-200_000] + bytes(200_000))
    with kedge.open(tmp_path / "store") as store:
        caught = pytest.raises(kedge.Corrupted, match="results of map many of run r are damaged")
        with caught as damaged, kedge.run("r", store=store) as run:
            run.map(work, [1], name="many")
        (found,) = [c for c in store.list("r") if c.metadata.get("kind") == "items"]
        assert f"kedge delete r {found.id}" in damaged.value.hint
        store.delete("r", found.id)
        with kedge.run("r", store=store) as run:
            assert len(run.map(work, [1], name="many")[0]) == 300_000
    assert work.calls == 2


def test_a_cancelled_run_stops_before_its_next_step_and_stays_so(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["kedge.pipeline.session"], "INBOX_EVERY_S", 0)
    with pytest.raises(kedge.Cancelled), kedge.run("r", store=store) as run:
        run.step("one", lambda: 1)
        assert not cancel(store, "r")  # its owner is at work
        run.step("two", lambda: 2)
    assert find_run(store, "r").status == "cancelled"
    with pytest.raises(kedge.Cancelled), kedge.run("r", store=store):
        pass
    with pytest.raises(ZeroDivisionError), kedge.run("q", store=store):
        raise ZeroDivisionError
    assert cancel(store, "q")
    assert find_run(store, "q").status == "cancelled"


def test_steps_of_many_threads(store: CheckpointManager) -> None:
    work = Counted(lambda x: x)
    for _ in range(2):
        with kedge.run("r", store=store) as run:
            threads = [threading.Thread(target=run.step, args=(f"s{n}", work, n)) for n in range(20)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert work.calls == 20


def test_a_run_outside_its_block_does_nothing(store: CheckpointManager) -> None:
    run = kedge.run("r", store=store)
    with pytest.raises(Conflict, match="not entered"):
        run.step("x", lambda: 1)
    with run, pytest.raises(Conflict, match="entered already"):
        run.__enter__()
    with pytest.raises(Conflict, match="not entered"):
        run.step("x", lambda: 1)


def test_the_error_of_a_step_with_a_time_limit_is_the_real_one(tmp_path: Path) -> None:
    """Many exceptions cannot be unpickled: they cross as data, with class, text and what of them is plain data."""
    with kedge.run("r", store=tmp_path / "store") as run:
        with pytest.raises(Unpicklable, match="needs two arguments") as caught:
            run.step("fail", fail_unpicklably, 7, timeout_s=60)
        assert caught.value.first == 7
        assert "in fail_unpicklably" in str(caught.value.__cause__)
        log = tmp_path / "log"
        retry = Retry(times=0, delay_s=0, rules={OSError: 2})
        with pytest.raises(kedge.StepFailed, match="Busy: not now"):
            run.step("busy", LocalErrors.fail, str(log), timeout_s=60, retries=retry)
        assert len(log.read_text().split()) == 3  # its class is found here under no name: rules go by names


def test_a_hint_names_what_the_caller_wrote() -> None:
    with pytest.raises(Validation, match="retries must be a whole number"):
        kedge.step(retries=-1)
