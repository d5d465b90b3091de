"""Runs in the background, children with a history of their own, and waiting for another run."""

import asyncio
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, Conflict, Validation
from kedge.model import RunStatus
from kedge.pipeline import background
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import RECOVERY, RUNNING
from kedge.pipeline.history import children_of, find_run
from kedge.pipeline.origin import command_of
from kedge.pipeline.session import Session
from tests.waiting import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def entries(store: CheckpointManager) -> list[str]:
    return [entry.key for entry in kedge.queue(RECOVERY, store=store).entries()]


def settled(store: CheckpointManager) -> None:
    wait_for(lambda: not entries(store), "entries stay")


def test_a_run_in_the_background_has_a_handle(store: CheckpointManager) -> None:
    may_end = threading.Event()

    @kedge.pipeline
    def square(number: int, key: str = "") -> int:
        may_end.wait()
        return kedge.current_run().step("square", lambda: number**2)  # type: ignore[no-any-return]

    handle = kedge.start(square, 3, store=store)
    wait_for(lambda: handle.status == "running", "it does not begin")
    assert entries(store) == [handle.key]
    assert kedge.start(square, 3, store=store).key == handle.key  # the same call is the same run
    with pytest.raises(kedge.StepTimeout):
        handle.result(0)
    may_end.set()
    assert handle.result() == 9
    assert asyncio.run(_awaited(handle)) == 9
    settled(store)
    assert kedge.start(square, 3, store=store).result(0) == 9
    assert find_run(store, handle.key).sessions == 1
    with pytest.raises(Validation, match="key= is an option here"):
        kedge.start(square, 3, key="k", store=store)
    with pytest.raises(Validation, match="missing a required argument"):
        kedge.start(square, store=store)


def test_a_key_stands_for_one_call(store: CheckpointManager) -> None:
    may_end = threading.Event()

    @kedge.pipeline
    def square(number: int) -> int:
        may_end.wait(60)
        return number**2

    handle = kedge.start(square, 3, key="k", store=store)
    with pytest.raises(kedge.Conflict, match="other arguments"):
        kedge.start(square, 4, key="k", store=store)
    may_end.set()
    assert handle.result() == 9
    settled(store)
    with pytest.raises(kedge.Conflict, match="other arguments"):
        kedge.start(square, 4, key="k", store=store)  # it has ended
    assert kedge.start(square, 3, key="k", store=store).result(0) == 9


async def _awaited(handle: kedge.Handle) -> Any:
    return await handle


def test_a_failure_is_raised_by_the_handle_and_tried_again_when_it_is_started_again(store: CheckpointManager) -> None:
    works = False

    @kedge.pipeline
    async def fragile() -> str:
        if not works:
            raise ValueError("no luck")
        return "done"

    handle = kedge.start(fragile, store=store)
    settled(store)
    with pytest.raises(ValueError, match="no luck"):
        handle.result()
    works = True
    assert kedge.start(fragile, store=store).result() == "done"
    settled(store)


def test_an_outage_of_the_store_is_waited_for(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_OUTAGE", kedge.Retry(times=1, delay_s=0, jitter=0))
    calls: list[int] = []

    @kedge.pipeline
    def work(outages: int) -> str:
        calls.append(outages)
        if len(calls) <= outages:
            raise kedge.Unavailable("no database")
        return "done"

    assert kedge.start(work, 1, store=store).result() == "done"
    calls.clear()
    with pytest.raises(kedge.Unavailable):
        kedge.start(work, 2, store=store).result()
    settled(store)


def test_a_run_whose_end_could_not_be_recorded_is_continued_by_a_worker(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk takes no record, but deletes: the entry is all that tells of the run then."""
    monkeypatch.setattr(background, "_OUTAGE", kedge.Retry(times=1, delay_s=0, jitter=0))
    record, is_full = Session.record, True

    def refuse(session: Session, status: RunStatus, **options: Any) -> None:
        if is_full and status is not RunStatus.RUNNING:
            raise kedge.NoSpace("the disk is full")
        record(session, status, **options)

    monkeypatch.setattr(Session, "record", refuse)

    @kedge.pipeline
    def work() -> str:
        return "done"

    handle = kedge.start(work, store=store)
    (thread,) = [each for each in threading.enumerate() if each.name == f"kedge-run-{handle.key}"] or [None]
    if thread is not None:
        thread.join()
    assert entries(store) == [handle.key]
    is_full = False
    Worker(store, [RECOVERY], {work.name: work}).serve(until_empty=True)
    assert handle.result() == "done"
    settled(store)


def test_a_run_whose_store_is_closed_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    may_go_on = threading.Event()

    @kedge.pipeline
    def work() -> None:
        may_go_on.wait()
        kedge.current_run().step("step", lambda: None)

    before = threading.enumerate()
    with kedge.open(tmp_path / "closed") as store:
        handle = kedge.start(work, store=store)
        wait_for(lambda: handle.status == "running", "it does not begin")
    may_go_on.set()
    for thread in threading.enumerate():
        if thread not in before and thread.name.startswith("kedge-run"):
            thread.join()
    said = capsys.readouterr().err
    assert said.startswith("kedge: run work: ")
    assert "is closed; if it has not ended, a worker continues it" in said


def test_a_cancelled_run_stops_between_steps(store: CheckpointManager) -> None:
    @kedge.pipeline
    def steps() -> None:
        for number in itertools.count():
            kedge.current_run().step(f"step {number}", abs, -1)

    handle = kedge.start(steps, store=store)
    wait_for(lambda: handle.status == "running", "it does not begin")
    handle.cancel()
    with pytest.raises(kedge.Cancelled):
        handle.result()
    settled(store)


def test_children_have_a_history_of_their_own(store: CheckpointManager) -> None:
    calls: list[str] = []

    @kedge.pipeline
    def child(name: str) -> str:
        return kedge.current_run().step("work", lambda: calls.append(name) or name.upper())  # type: ignore[no-any-return]

    @kedge.pipeline
    def parent() -> list[str]:
        run = kedge.current_run()
        handles = [kedge.start(child, name) for name in ("a", "b", "a")]
        return [run.result(handle) for handle in handles[:2]]

    for _ in range(2):  # a resumed parent comes to the same children
        assert parent.at("p", store=store)() == ["A", "B"]
    settled(store)
    keys = children_of(store, "p")
    assert len(keys) == 2
    assert [find_run(store, key).parent for key in keys] == ["p", "p"]
    assert sorted(calls) == ["a", "b"]
    with pytest.raises(Conflict, match="was started by run p") as refused:
        command_of(store, find_failed(store, child))
    assert "kedge runs resume p" in str(refused.value)


def find_failed(store: CheckpointManager, pipeline: Any) -> str:
    """The key of a child that failed."""
    with kedge.run("p", store=store, progress=False) as run:

        @kedge.pipeline
        def fails() -> None:
            raise ValueError("no")

        handle = kedge.start(fails)
        with pytest.raises(ValueError, match="no"):
            handle.result()
        run.step("go on", abs, -1)
    settled(store)
    return handle.key


def test_a_handled_failure_of_a_child_is_kept_and_another_is_tried_again(store: CheckpointManager) -> None:
    calls: list[str] = []

    @kedge.pipeline
    def child() -> str:
        calls.append("child")
        if len(calls) == 1:
            raise ValueError("declined")
        return "charged"

    def parent(key: str, *, handles: bool) -> str:
        with kedge.run(key, store=store, progress=False) as run:
            handle = kedge.start(child)
            if not handles:
                return str(run.result(handle))
            try:
                return str(run.result(handle))
            except ValueError:
                return str(run.step("release", lambda: "released"))

    with pytest.raises(ValueError, match="declined"):
        parent("unhandled", handles=False)
    settled(store)
    assert parent("unhandled", handles=False) == "charged"
    settled(store)
    calls.clear()
    for _ in range(2):
        assert parent("handled", handles=True) == "released"
        settled(store)
    assert calls == ["child"]


def test_waiting_for_another_run_pauses_and_goes_on(store: CheckpointManager) -> None:
    queue = kedge.queue("q", store=store)

    @kedge.pipeline
    def child() -> str:
        return "done"

    def parent() -> str:
        with kedge.run("p", store=store, progress=False) as run:
            handle = queue.submit(child)
            return str(run.result(handle, wait_s=0))

    with pytest.raises(kedge.Paused):
        parent()
    assert [wait["for"] for wait in find_run(store, "p").waiting] == ["run"]
    Worker(store, ["q"], {"child": child}).serve(until_empty=True)
    assert parent() == "done"
    store.delete("child", store.list("child", tags={"kind": "run"})[-1].id)
    assert parent() == "done"  # what was answered stays answered


def test_what_cannot_be_waited_for_is_named(store: CheckpointManager) -> None:
    with kedge.run("outer", store=store, progress=False) as run:
        with pytest.raises(kedge.Validation, match=r"takes a handle \(got 'key'\)"):
            run.result("key")  # type: ignore[arg-type]
        with pytest.raises(kedge.Conflict, match="run outer is running, and in no queue"):
            run.result(kedge.queue("q", store=store).handle("outer"))


def test_children_pause_with_their_parent(store: CheckpointManager) -> None:
    may_go = threading.Event()

    @kedge.pipeline
    def child() -> str:
        may_go.wait()
        return kedge.current_run().step("late", lambda: "late")  # type: ignore[no-any-return]

    with pytest.raises(kedge.Paused), kedge.run("p", store=store, progress=False) as run:
        handle = kedge.start(child)
        wait_for(lambda: handle.status == "running", "it does not begin")
        run.stop("SIGTERM")
        run.begin()
    may_go.set()
    wait_for(lambda: handle.status == "paused", "the child does not pause")
    wait_for(lambda: [e.state for e in kedge.queue(RECOVERY, store=store).entries()] == ["ready"], "it is lost")

    def is_continued() -> bool:
        Worker(store, [RECOVERY], {"child": child}).serve(until_empty=True)
        return handle.status == "completed"

    wait_for(is_continued, "no worker continues it")
    assert handle.result(0) == "late"
    settled(store)


PROGRAM = """
    import os, sys, threading
    import kedge

    @kedge.pipeline
    def child(folder):
        run = kedge.current_run()
        run.step("first", lambda: open(f"{folder}/first", "a").write("x"))
        if not os.path.exists(f"{folder}/go"):
            open(f"{folder}/here", "w").close()
            threading.Event().wait()  # until it is killed
        run.step("second", lambda: open(f"{folder}/second", "a").write("x"))
        return "done"

    @kedge.pipeline
    def parent(folder):
        return kedge.current_run().result(kedge.start(child, folder))

    if __name__ == "__main__":
        print(parent.at("p", store=sys.argv[1])(sys.argv[2]))
"""


@pytest.mark.parametrize("by", ["worker", "parent"])
def test_a_child_whose_process_was_killed_is_taken_over(tmp_path: Path, by: str) -> None:
    """Its finished step does not run again; the parent's wait survives, too."""
    program = tmp_path / "family.py"
    program.write_text(textwrap.dedent(PROGRAM))
    words = [sys.executable, str(program), str(tmp_path / "store"), str(tmp_path)]
    with subprocess.Popen(words) as process:
        wait_for((tmp_path / "here").exists, "the child does not come to its second step")
        process.send_signal(signal.SIGKILL)
    (tmp_path / "go").touch()
    with kedge.open(tmp_path / "store") as store:
        (entry,) = kedge.queue(RECOVERY, store=store).entries()
        assert entry.state == RUNNING
        if by == "worker":
            serve = [sys.executable, "-m", "kedge", "worker", str(program), "--lease", "1"]
            with subprocess.Popen([*serve, "--store", str(tmp_path / "store")]) as worker:
                wait_for(lambda: not entries(store), "no worker takes it over")
                worker.terminate()
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
    assert (tmp_path / "first").read_text() == "x"
    assert (tmp_path / "second").read_text() == "x"
    with kedge.open(tmp_path / "store") as store:
        assert entries(store) == []
        assert [find_run(store, key).parent for key in children_of(store, "p")] == ["p"]
