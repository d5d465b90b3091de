"""Values that a run gives out while it is at work: once each, in order, for readers anywhere."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, Retry
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import DEAD, DELAYED
from kedge.pipeline.history import find_run
from tests.waiting import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def test_values_come_once_each_though_the_run_is_resumed(store: CheckpointManager) -> None:
    breaks = [True]

    def work() -> None:
        with kedge.run("r", store=store) as run:
            for number in range(4):
                run.emit("pages", {"page": number})
                run.emit("other", number)
                if number == 2 and breaks:
                    breaks.pop()
                    raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        work()
    assert list(kedge.follow(store, "r", "pages")) == [{"page": number} for number in range(3)]
    work()
    assert list(kedge.follow(store, "r", "pages")) == [{"page": number} for number in range(4)]
    assert list(kedge.follow(store, "r", "other")) == [0, 1, 2, 3]
    assert list(kedge.follow(store, "r", "unknown")) == []


def test_a_reader_follows_a_run_at_work(store: CheckpointManager) -> None:
    values: list[Any] = []

    def read() -> None:
        for value in kedge.follow(store, "r", "numbers"):
            values.append(value)  # noqa: PERF402 - others look at it meanwhile

    reader = threading.Thread(target=read)
    reader.start()  # before the run begins
    with kedge.run("r", store=store) as run:
        for number in range(3):
            run.emit("numbers", number)
            wait_for(lambda: len(values) > number, "the reader does not follow")  # noqa: B023
    reader.join()
    assert values == [0, 1, 2]


def test_a_reader_waits_for_the_next_attempt_of_a_queue(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    @kedge.pipeline
    def fails() -> None:
        kedge.current_run().emit("numbers", 1)
        raise ValueError("no")

    queue = kedge.queue("q", store=store)
    for key, retries in (("again", 1), ("dead", 0)):
        queue.submit(fails, key=key, retries=retries)
    later = Retry(delay_s=3600, max_delay_s=3600)
    worker = Worker(store, ["q"], {"fails": fails}, backoff=later)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    wait_for(lambda: {entry.state for entry in queue.entries()} == {DELAYED, DEAD}, "not both of them fail")
    worker.stop("enough")
    thread.join()
    assert find_run(store, "again").status == find_run(store, "dead").status == "failed"
    waits: list[int] = []

    def events(*args: Any, wait_s: float = 0, **options: Any) -> Any:
        if wait_s:
            waits.append(1)
            queue.handle("again").cancel()
        return look(*args, **options)

    look = store.events
    monkeypatch.setattr(store, "events", events)
    assert list(kedge.follow(store, "dead", "numbers")) == [1]
    assert not waits
    assert list(kedge.follow(store, "again", "numbers")) == [1]
    assert waits


def test_names_are_parsed(store: CheckpointManager) -> None:
    with kedge.run("r", store=store) as run, pytest.raises(kedge.Validation):
        run.emit("", 1)
    with pytest.raises(kedge.Validation):
        next(kedge.follow(store, "r", ""))
