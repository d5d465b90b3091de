"""Values that a run gives out while it is at work: once each, in order, for readers anywhere."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager
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


def test_names_are_parsed(store: CheckpointManager) -> None:
    with kedge.run("r", store=store) as run, pytest.raises(kedge.Validation):
        run.emit("", 1)
    with pytest.raises(kedge.Validation):
        next(kedge.follow(store, "r", ""))
