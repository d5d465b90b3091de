"""Searches and queues, whatever is stored: bounded, and never in the way of each other."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server.page import search


def test_a_search_reads_a_bounded_number_and_goes_on(
    client: TestClient, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LOOK_JOBS", 4)
    monkeypatch.setattr(search, "_LOOK_CHECKPOINTS", 6)
    for n in range(6):
        for k in range(3):
            store.save(f"job{n}", f"step {k}", k, metadata={"colour": f"Blue-{n}"})
    page = client.get("/search", params={"q": "BLUE-"}).text
    assert "4 jobs and 6 checkpoints" in page
    assert "there may be more" in page
    assert "after=job3" in page
    rest = client.get("/search", params={"q": "blue-", "after": "job3"}).text
    assert "2 jobs and 6 checkpoints" in rest
    assert "Search the next jobs" not in rest


@pytest.mark.parametrize(
    "query", ["q=%00", "q=*%25_", "kind=other", "since=never", "sort=1", "tag=%3D", "tag=a%3D%3Cb", "after=.."]
)
def test_whatever_is_searched_for_no_search_breaks(
    client: TestClient, store: kedge.CheckpointManager, query: str
) -> None:
    store.save("j", "s", 1, tags={"a": "<b"}, metadata={"deep": [{"x": "y"}] * 3})
    assert client.get(f"/search?{query}").status_code in (200, 422)


def test_forged_entries_break_no_page(client: TestClient, store: kedge.CheckpointManager) -> None:
    store.save("queue:forged", "s", 1, metadata={"run": 7}, tags={"state": "dead"})
    store.save("queue:forged:schedules", "s", 1, metadata={"schedule": "none", "due_at": 1e300})
    store.save("queue:a:schedules:schedules", "s", 1)
    answer = client.get("/queues")
    assert answer.status_code == 200
    assert "forged" in answer.text
