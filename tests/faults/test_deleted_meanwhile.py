"""What lists checkpoints and then reads each of them leaves out, or looks for again, what is deleted in between."""

from __future__ import annotations

import json
import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
from click.testing import CliRunner

import kedge
from kedge import CheckpointManager
from kedge.cli import cli
from kedge.diff.outline import open_state
from kedge.llm.cache import JOB, Cache
from kedge.llm.keys import Request
from kedge.llm.nearest import describe_nearest
from kedge.pipeline import schedules
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import schedule_job
from kedge.pipeline.fork import fork, plan_fork
from kedge.process.workflow import Workflows
from kedge.server.metrics import Metrics
from kedge.server.tasks import Tasks
from tests.parts import library
from tests.torture.races import Background, gate_after

pytestmark = pytest.mark.faults


@pytest.fixture(params=["directory", "memory:"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open("memory:" if request.param == "memory:" else tmp_path / "store") as opened:
        yield opened


def after_a_list(
    store: CheckpointManager, happens: Callable[[], object], call: Callable[..., Any], *args: object
) -> Any:
    """What `call` answers when this happens just after the store has told it of a checkpoint."""
    is_done = False

    def telling(method: str) -> Any:
        real = getattr(store.catalogue, method)

        def tell(*args: object, **kwargs: object) -> object:
            nonlocal is_done
            answer = real(*args, **kwargs)
            if answer and not is_done:
                is_done = True
                happens()
            return answer

        return mock.patch.object(store.catalogue, method, tell)

    with telling("list"), telling("list_stored"):
        answer = call(*args)
    assert is_done
    return answer


@pytest.mark.parametrize(("method", "gone"), [("read", "source"), ("get", "parent"), ("get", "source")])
def test_a_thread_is_copied(store: CheckpointManager, method: str, gone: str) -> None:
    """A checkpoint is deleted when it was read, or the copy of its parent when that was just seen."""
    library("langgraph")
    from kedge.integrations.langgraph import KedgeSaver, names
    from tests.unit.integrations.langgraph.test_saver import CONFIG, loaded, put

    copy: Any = {"configurable": {"thread_id": "copy", "checkpoint_ns": ""}}
    with KedgeSaver(store) as saver:
        first = put(saver, {"x": b"1" * 100_000})
        if method == "get":
            put(saver, {"x": b"2" * 100_000}, first)
        with gate_after(store.catalogue, method) as gate:
            copying = Background(saver.copy_thread, "t", "copy")
            gate.wait_until_reached()
            job = names.job_of("copy" if gone == "parent" else "t", "")
            doomed = store.list(job)[0 if gone == "parent" else -1]
            assert store.delete(job, doomed.id)
            store.gc()
            gate.open()
            copying.result()
        copies = store.list(names.job_of("copy", ""))
        if method == "read":
            assert copies == []
        else:
            assert [checkpoint.parent for checkpoint in copies] == [None]
            assert loaded(saver, copy) == {"x": (b"2" if gone == "parent" else b"1") * 100_000}
        saver.copy_thread("t", "copy")  # whatever is left
        assert {c.id.partition("@")[0] for c in store.list(names.job_of("t", ""))} <= {
            c.id.partition("@")[0] for c in store.list(names.job_of("copy", ""))
        }
    assert CONFIG["configurable"]["thread_id"] == "t"
    assert store.verify(deep=True).is_ok


@kedge.pipeline
def three_steps() -> int:
    run = kedge.current_run()
    return int(run.step("first", lambda: 1)) + int(run.step("second", lambda: 2)) + int(run.step("third", lambda: 3))


def test_a_run_is_forked(store: CheckpointManager) -> None:
    """A step whose record is gone runs again."""
    queue = kedge.queue("q", store=store)
    queue.submit(three_steps, key="run")
    Worker(store, ["q"], {"three_steps": three_steps}).serve(until_empty=True)
    plan = plan_fork(store, "run", "third", new_key="fork")
    (first, *_) = [c for c in store.list("run") if c.metadata.get("path") == ["first"]]
    with gate_after(store.catalogue, "find") as gate:
        forking = Background(fork, store, plan)
        gate.wait_until_reached()
        assert store.delete("run", first.id)
        store.gc()
        gate.open()
        forking.result()
    Worker(store, ["q"], {"three_steps": three_steps}).serve(until_empty=True)
    assert queue.handle("fork").result(0) == 6


@pytest.mark.parametrize("form", ["dir", "zip", "json"])
def test_a_job_is_exported(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url, target = str(tmp_path / "store"), tmp_path / "exported"
    with kedge.open(url) as store:
        ids = [store.save("job", "step", {"n": n, "big": bytes([n]) * 100_000}) for n in range(3)]

    def delete_second(store: Any, checkpoint_id: str) -> Any:
        with kedge.open(url) as other:
            other.delete("job", ids[1])
        return open_state(store, checkpoint_id)

    monkeypatch.setattr("kedge.cli.commands.export.open_state", delete_second)
    words = ["--json", "--store", url, "export", "job", str(target), "--format", form]
    answer = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert answer.exit_code == 0
    assert json.loads(answer.stdout)["checkpoints"] == [ids[0], ids[2]]
    if form == "zip":
        with zipfile.ZipFile(target) as archive:
            archive.extractall(tmp_path / "unpacked")
        target = tmp_path / "unpacked"
    listing = target if form == "json" else target / "checkpoints.json"
    assert [entry["id"] for entry in json.loads(listing.read_text())["checkpoints"]] == [ids[0], ids[2]]
    if form != "json":
        assert sorted(os.listdir(target)) == ["000001", "000003", "README.txt", "checkpoints.json"]


def test_cached_responses_are_exported_and_compared(store: CheckpointManager) -> None:
    for n in range(2):
        store.save(
            JOB,
            "m",
            {"request": json.dumps({"model": "m", "n": n}), "answer": {"text": "yes"}},
            metadata={"model": "m"},
        )
    cache = Cache.of(store)
    newest = store.list(JOB)[-1].id
    missed = after_a_list(
        store, lambda: store.delete(JOB, newest), describe_nearest, cache, Request("POST", "u", {"n": 3})
    )
    assert store.list(JOB)[0].id in str(missed)
    oldest = store.list(JOB)[0].id
    assert after_a_list(store, lambda: store.delete(JOB, oldest), lambda: [*cache.load(cache.entries())]) == []


def test_schedules_are_backfilled(store: CheckpointManager) -> None:
    """A worker replaces the record of a schedule whenever it is due."""
    queue = kedge.queue("q", store=store)
    schedules.schedule(queue, "s", three_steps, every_s=3600)

    def fire() -> None:
        schedules.schedule(queue, "s", three_steps, every_s=3600)  # replaces the record, as a worker does

    moments = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, 2, tzinfo=UTC)
    keys = after_a_list(store, fire, schedules.backfill, store, "q", "s", *moments)
    assert len(keys) == 2
    assert len(store.list(schedule_job("q"))) == 1


def test_executions_are_listed(store: CheckpointManager) -> None:
    workflows = Workflows(store)
    gone, stays = (workflows.start_workflow_execution(name, "blog") for name in ("a", "b"))
    with gate_after(store.catalogue, "newest") as gate:
        listing = Background(workflows.list_executions)
        gate.wait_until_reached()
        store.delete_job(gone)
        gate.open()
        assert [entry["execution_id"] for entry in listing.result()] == [stays]


def test_a_task_is_told_while_it_saves_its_progress(store: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its newest record replaces the one before."""
    monkeypatch.setattr("kedge.server.tasks._SAVE_EVERY_S", 0)
    begun: SimpleQueue[Callable[[int, int], None]] = SimpleQueue()
    finish = threading.Event()

    def work(_: CheckpointManager, report: Callable[[int, int], None]) -> dict[str, Any]:
        begun.put(report)
        assert finish.wait(60)
        return {}

    tasks = Tasks(lambda: store, Metrics())
    task = tasks.start("verify", store, work)
    report = begun.get(timeout=60)
    try:
        assert after_a_list(store, lambda: report(1, 2), tasks.get, task["id"], store.namespace)["id"] == task["id"]
        assert after_a_list(store, lambda: report(2, 2), tasks.all, store.namespace)[0]["id"] == task["id"]
    finally:
        finish.set()
        tasks.close()


def test_the_newest_of_a_job_is_loaded(store: CheckpointManager) -> None:
    """By the name of the job, beside a saver that keeps only the newest."""
    before = store.save("job", "step", 1)

    def go_on() -> None:
        store.save("job", "step", 2)
        store.delete("job", before)

    assert after_a_list(store, go_on, store.load, "job") == 2


def test_sessions_are_listed(store: CheckpointManager) -> None:
    library("google.adk")
    import asyncio

    from kedge.integrations.adk import KedgeSessionService

    service = KedgeSessionService(store)
    owner = {"app_name": "shop", "user_id": "u"}

    def make(session: str) -> None:
        asyncio.run(service.create_session(**owner, session_id=session))

    make("a")
    make("b")
    listed = after_a_list(
        store,
        lambda: asyncio.run(service.delete_session(**owner, session_id="a")),
        lambda: asyncio.run(service.list_sessions(**owner)),
    )
    assert [session.id for session in listed.sessions] == ["b"]
