"""Workers seen from outside: each says that it is there, and its runs say who is at them."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import kedge
from kedge import CheckpointManager
from kedge.pipeline import heartbeat
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import workers_job
from kedge.pipeline.heartbeat import Heartbeat, find_workers
from kedge.pipeline.owner import this_process
from tests.waiting import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def test_a_worker_is_listed_with_its_runs_until_it_ends(store: CheckpointManager) -> None:
    may_end = threading.Event()

    @kedge.pipeline
    def work() -> None:
        may_end.wait()

    handle = kedge.queue("q", store=store).submit(work)
    worker = Worker(store, ["q"], {"work": work}, concurrency=4)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        wait_for(lambda: handle.status == "running", "the run does not begin")
        (found,) = find_workers(store)
        assert (found.status, found.concurrency, found.queues) == ("alive", 4, ["q"])
        assert (found.host, found.pid) == (this_process()["host"], this_process()["pid"])
        assert [(run.key, run.pipeline, run.queue) for run in found.runs] == [("work", "work", "q")]
        assert found.started_at <= found.runs[0].since
        assert find_workers(store, "other") == []
    finally:
        may_end.set()
        worker.stop("enough")
        thread.join()
    assert find_workers(store) == []


def test_a_worker_that_says_nothing_is_silent_then_forgotten(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.0)
    mine = Heartbeat(store, ["q"], 1)
    mine.beat()
    mine.beat()  # no second record
    (record,) = store.list(workers_job())
    store.tag(record.id, seen_at=f"{int(record.created_at.timestamp()) - 100}")
    assert [worker.status for worker in find_workers(store)] == ["silent"]
    store.tag(record.id, seen_at=f"{int(record.created_at.timestamp()) - 4000}")
    other = Heartbeat(store, ["q"], 2)
    other.beat()
    assert [worker.concurrency for worker in find_workers(store)] == [2]
    mine.beat()  # it was only suspended
    assert [worker.concurrency for worker in find_workers(store)] == [2, 1]
    mine.end()
    other.end()
    assert find_workers(store) == []


def test_a_worker_whose_process_is_gone_and_forged_records(store: CheckpointManager) -> None:
    owner = {**this_process(), "pid": 2**22 + 1}
    about = {"kind": "worker", "owner": owner, "queues": ["q"], "concurrency": 1}
    store.save(workers_job(), "worker", {}, metadata=about, tags={"seen_at": "1700000000"})
    for forged in ({}, {"owner": 7}, {"queues": ["a b"]}, {"queues": [7]}, {"concurrency": "many"}):
        metadata = {**about, **forged} if forged else {}
        store.save(workers_job(), "worker", {}, metadata=metadata, tags={"seen_at": "1700000000"})
    store.save(workers_job(), "worker", {}, metadata=about, tags={"seen_at": "9" * 30})
    assert [worker.status for worker in find_workers(store)] == ["gone"]
