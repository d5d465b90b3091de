"""What the service keeps of its own work: it goes with gc, as everything that nobody needs any more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server import tasks
from kedge.server.tokens import ACCESS
from tests.waiting import bytes_below, wait_for

V1 = "/api/v1"


def collect_garbage(client: TestClient) -> str:
    """One gc to its end; its ID."""
    task = client.post(f"{V1}/gc").json()
    wait_for(lambda: client.get(f"{V1}/tasks/{task['id']}").json()["status"] == "completed", "gc does not end")
    return str(task["id"])


def test_gc_keeps_the_newest_tasks_alone(
    client: TestClient, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "_LISTED", 3)
    done = [collect_garbage(client) for _ in range(6)]
    assert [task["id"] for task in client.get(f"{V1}/tasks").json()["tasks"]] == done[:-4:-1]
    with kedge.open(store.url, namespace=ACCESS) as own:
        wait_for(lambda: len(own.jobs("task.")) == 3, "old tasks stay")


def test_gc_gives_back_what_its_own_records_took(client: TestClient, store: kedge.CheckpointManager) -> None:
    """Records of tasks are copied to packs like everything else; only the gc of their namespace removes those."""
    packs = Path(store.url) / "packs"
    with kedge.open(store.url, namespace=ACCESS) as own:
        for n in range(5):
            own.save("task.old", "running", {"n": n, "log": os.urandom(100_000)})
        own.delete_job("task.old")
    before = bytes_below(packs, "*.pack")
    assert before > 400_000
    collect_garbage(client)
    wait_for(lambda: bytes_below(packs, "*.pack") < before / 4, "the packs of tasks stay")


def test_garbage_counted_beside_a_gc_is_counted_again(client: TestClient, store: kedge.CheckpointManager) -> None:
    """A pack that is being written, such as by the gc of the task's own records, looks like garbage until it is named.

    The page hears of a gc once, at its end: what it counts then would stay for good.
    """

    def counted() -> str:
        store.delete("job", store.save("job", "step", os.urandom(100_000)))
        return client.get("/storage/garbage", headers={"hx-request": "true"}).text

    assert "1 piece nobody needs" in counted()
    assert "data-hx-get" not in counted()  # nothing is at work: this is what there is
    collect_garbage(client)
    assert "1 piece nobody needs" in (beside := counted())
    assert 'data-hx-get="/storage/garbage"' in beside
    collect_garbage(client)
    wait_for(
        lambda: "everything is needed" in client.get("/storage/garbage", headers={"hx-request": "true"}).text,
        "the count stays wrong",
    )
