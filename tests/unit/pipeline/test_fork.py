"""Forks: a new run from some step of another one, with other arguments or other code; and the two compared."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, Conflict
from kedge.pipeline.approval import find_approvals
from kedge.pipeline.comparison import compare_runs
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import RECOVERY
from kedge.pipeline.fork import fork, fork_of, forked_command, plan_fork, plan_forks
from kedge.pipeline.history import children_of, find_run, find_runs
from tests.waiting import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


calls: list[str] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    calls.clear()


def note(name: str, value: Any = None) -> Any:
    calls.append(name)
    return value


@kedge.pipeline
def shop(number: int, factor: int = 1) -> list[Any]:
    run = kedge.current_run()
    run.step("read", note, "read", 7)
    items = run.map(lambda item: note(f"item {item}", item), [1, 2], name="items", workers=1)
    try:
        run.step("charge", fail, "charge")
    except ValueError:
        run.step("release", note, "release")
    with run.stage("end"):
        product = run.step("multiply", note, f"multiply by {factor}", number * factor)
        return [*items, run.step("publish", note, "publish", product)]


def fail(name: str) -> None:
    note(name)
    raise ValueError("declined")


def serve(store: CheckpointManager) -> None:
    Worker(store, ["q"], {"shop": shop}).serve(until_empty=True)


BEFORE = ["read", "items", "charge", "release"]


def test_a_fork_reuses_what_was_finished_before_its_step(store: CheckpointManager) -> None:
    queue = kedge.queue("q", store=store)
    first = queue.submit(shop, 3, key="first")
    serve(store)
    assert first.result(0) == [1, 2, 3]
    plan = plan_fork(store, "first", "end", new_key="second", arguments={"number": 5, "factor": 10})
    assert (plan.reused, plan.again) == (BEFORE, ["end/multiply", "end/publish"])
    assert plan.queue == "q"
    assert store.list("second") == []  # a plan changes nothing
    calls.clear()
    fork(store, plan)
    fork(store, plan)  # once
    serve(store)
    fork(store, plan)
    serve(store)
    assert queue.handle("second").result(0) == [1, 2, 50]
    assert calls == ["multiply by 10", "publish"]
    assert first.result(0) == [1, 2, 3]
    assert fork_of(store, "second") == ("first", "end")
    assert fork_of(store, "first") is None
    verdicts = {step.path: (step.verdict, step.reason) for step in compare_runs(store, "first", "second")}
    assert verdicts["read"] == ("same", "same result")
    assert verdicts["items"] == ("same", "2 items")
    assert verdicts["charge"] == ("same", "failed in the first and the second")
    assert verdicts["end/multiply"] == ("different", "different inputs: name, value; different result")
    with pytest.raises(Conflict, match="is no fork"):
        fork(store, plan_fork(store, "second", "end", new_key="first"))
    with pytest.raises(kedge.IdempotencyConflict):
        fork(store, plan_fork(store, "first", "release", new_key="second"))
    with pytest.raises(kedge.NotFound, match="no step nowhere"):
        plan_fork(store, "first", "nowhere")
    store.save("other", "step", {})
    with pytest.raises(Conflict, match="is no fork"):
        fork(store, plan_fork(store, "first", "end", new_key="other"))


def test_an_argument_that_the_pipeline_never_had_is_refused_before_there_is_a_fork(store: CheckpointManager) -> None:
    queue = kedge.queue("q", store=store)
    queue.submit(shop, 3, key="first")
    serve(store)
    with pytest.raises(kedge.Validation, match="no parameter nmber"):
        plan_fork(store, "first", "end", arguments={"nmber": 5})
    assert plan_fork(store, "first", "end", new_arguments={"nmber": 5}).arguments == {"nmber": 5}
    shop.at("direct", store=store)(3)
    with pytest.raises(kedge.Validation, match="no parameter nmber"):
        plan_fork(store, "direct", "end", arguments={"nmber": 5})

    @kedge.pipeline
    def takes_any(**options: Any) -> None:
        kedge.current_run().step("step", lambda: None)

    queue.submit(takes_any, key="any")
    Worker(store, ["q"], {"takes_any": takes_any}).serve(until_empty=True)
    assert plan_fork(store, "any", "step", arguments={"anything": 5}).arguments == {"anything": 5}


def test_many_runs_are_forked_by_what_they_are(store: CheckpointManager) -> None:
    queue = kedge.queue("q", store=store)
    for key in ("a-1", "a-2", "b-1"):
        queue.submit(shop, 3, key=key)
    serve(store)
    with kedge.run("a-3", store=store) as run:
        run.step("other", lambda: None)

    def planned(**chosen: str) -> list[str]:
        return [plan.run for plan in plan_forks(store, "end", **chosen)]

    assert planned(prefix="a-") == ["a-1", "a-2"]
    assert planned(pipeline="shop") == ["a-1", "a-2", "b-1"]
    assert planned(status="failed") == []
    for plan in plan_forks(store, "end", prefix="a-", arguments={"factor": 10}):
        fork(store, plan)
    serve(store)
    assert planned(prefix="a-") == ["a-1", "a-2"]  # no forks
    (made,) = plan_forks(store, "end", prefix="a-1", arguments={"factor": 10})
    assert queue.handle(made.fork).result(0) == [1, 2, 30]


def test_runs_are_chosen_by_the_page_and_not_one_by_one(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        about = {"kind": "run", "status": "completed", "pipeline": "shop" if number == 7 else "other"}
        store.save(f"run-{number:03}", "run completed", {}, tags={"kind": "run"}, metadata=about)
    asked: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(store.catalogue, name)

        def ask(*args: Any, **options: Any) -> Any:
            asked.append(name)
            return method(*args, **options)

        return ask

    for name in ("find", "get", "jobs", "job", "list", "list_stored", "newest", "read"):
        monkeypatch.setattr(store.catalogue, name, counted(name))
    assert [run.key for run in find_runs(store, pipeline="shop", status="completed")] == ["run-007"]
    assert list(plan_forks(store, "end", pipeline="shop")) == []
    assert find_approvals(store) == []
    assert len(asked) <= 30
    asked.clear()
    assert len(list(find_runs(store, limit=10))) == 10
    assert len(asked) <= 2
    queue = kedge.queue("q", store=store)
    for number in range(20):
        queue.submit(shop, number, key=f"a-{number}")
    serve(store)
    asked.clear()
    assert len(list(plan_forks(store, "end", prefix="a-"))) == 20
    assert len(asked) <= 20 * 4 + 5  # whether it is a fork, its steps, what it was called with


class Killed(BaseException):
    """Nothing that is done for errors is done for a kill."""


def dying(monkeypatch: pytest.MonkeyPatch, store: CheckpointManager, count: int, *, is_late: bool) -> None:
    """The process dies at its write number `count`: just before it, or just behind it."""
    left = [count]

    def guarded(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] < 0 and not is_late:
                raise Killed
            result = write(*args, **kwargs)
            if left[0] < 0:
                raise Killed
            return result

        return call

    monkeypatch.setattr(store, "save_request", guarded(store.save_request))
    monkeypatch.setattr(store.store, "branch", guarded(store.store.branch))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_fork_that_was_killed_between_any_two_writes_is_made_by_the_same_call_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    with kedge.open(tmp_path / "store") as store:
        kedge.queue("q", store=store).submit(shop, 3, key="first")
        serve(store)
        deaths = 0
        while True:
            plan = plan_fork(store, "first", "end", new_key=f"fork-{deaths}", arguments={"factor": 2})
            with monkeypatch.context() as patched:
                dying(patched, store, deaths, is_late=is_late)
                try:
                    fork(store, plan)
                except Killed:
                    deaths += 1
                else:
                    break
            calls.clear()
            serve(store)
            fork(store, plan)
            serve(store)
            assert kedge.queue("q", store=store).handle(plan.fork).result(0) == [1, 2, 6]
            assert calls == ["multiply by 2", "publish"]
    assert deaths >= 7  # marker, read, items (in one record or more), charge, release, status, entry


def test_a_fork_of_a_program_is_started_by_its_command(store: CheckpointManager) -> None:
    def command(*words: str, **arguments: Any) -> list[str]:
        return list(forked_command(["python", *words], "old", "new", arguments))

    assert command("job.py", "old") == ["python", "job.py", "new"]
    assert command("job.py") == []
    assert command("job.py", "old", n=1) == []
    run = ["-m", "kedge", "run", "job.py:main"]
    assert command(*run) == ["python", *run, "--id", "new"]
    assert command(*run, "--id", "old", "--arg", "n=1", "--arg=m=2", n=3) == [
        "python", *run, "--arg", "m=2", "--id", "new", "--arg", "n=3",
    ]  # fmt: skip


def test_a_fork_of_a_run_in_a_program_is_entered_under_its_key(store: CheckpointManager) -> None:
    """With changed code: the step from which it forks runs, though nothing else says that it has changed."""

    def program(key: str, text: str) -> str:
        with kedge.run(key, store=store, progress=False) as run:
            run.step("read", note, "read")
            return str(run.step("write", lambda: note("write", text), inputs=None))

    program("first", "old code")
    plan = plan_fork(store, "first", "write", new_key="second")
    assert plan.command == ()
    fork(store, plan)
    assert find_run(store, "second").status == "paused"
    assert program("second", "new code") == "new code"
    assert calls == ["read", "write", "write"]
    assert find_run(store, "second").sessions == 2


def test_a_fork_keeps_the_children_that_were_started_before_its_step(store: CheckpointManager) -> None:
    @kedge.pipeline
    def child() -> str:
        return str(note("child", "done"))

    def parent(key: str) -> str:
        with kedge.run(key, store=store, progress=False) as run:
            answer = run.result(kedge.start(child))
            return str(run.step("publish", note, "publish", answer))

    parent("first")
    wait_for(lambda: not len(kedge.queue(RECOVERY, store=store)), "the child does not end")
    fork(store, plan_fork(store, "first", "publish", new_key="second"))
    assert parent("second") == "done"
    assert calls == ["child", "publish", "publish"]
    assert children_of(store, "second") == children_of(store, "first")
