"""What the page remembers of runs: read again when a run has changed, and never more than so much."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server.page import run_records
from kedge.server.page.run_records import RunMemory


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    keys: list[str] = []
    original = run_records.steps_of

    def counted(store: kedge.CheckpointManager, key: str) -> Any:
        keys.append(key)
        return original(store, key)

    monkeypatch.setattr(run_records, "steps_of", counted)
    return keys


def work(store: kedge.CheckpointManager, key: str, *steps: str) -> None:
    with kedge.run(key, store=store, progress=False) as run:
        for step in steps:
            run.step(step, lambda: 1)


def test_a_run_is_read_again_when_it_has_changed(
    client: TestClient, store: kedge.CheckpointManager, reads: list[str]
) -> None:
    work(store, "nightly", "one")
    for address in ("/runs/nightly", "/runs/nightly", "/runs/nightly/step?path=one"):
        assert "one" in client.get(address).text
    assert reads == ["nightly"]
    work(store, "nightly", "one", "two")
    assert "path=two" in client.get("/runs/nightly").text
    assert reads == ["nightly", "nightly"]
    step = next(record for record in store.list("nightly") if record.step == "two")
    store.delete("nightly", step.id)
    assert "path=two" not in client.get("/runs/nightly").text


def test_a_run_of_the_same_name_is_another_one(store: kedge.CheckpointManager, reads: list[str]) -> None:
    memory = RunMemory()
    work(store, "nightly", "one")
    memory.records(store, "nightly")
    store.delete_job("nightly")
    work(store, "nightly", "two")
    assert [*memory.records(store, "nightly").steps] == [("two",)]


def test_only_so_many_records_are_remembered(
    store: kedge.CheckpointManager, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_records, "_MOST_RECORDS", 8)
    memory = RunMemory()
    work(store, "one", "a")  # three records each: begun, a step, ended
    work(store, "two", "a")
    work(store, "large", *map(str, range(9)))
    for key in ("one", "two", "one", "two", "large", "large", "two"):
        memory.records(store, key)
    assert reads == ["one", "two", "large", "large", "two"]
