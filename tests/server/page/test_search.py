"""Searches and queues, whatever is stored: bounded, and never in the way of each other."""

from __future__ import annotations

import html
import re

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.pipeline.heartbeat import Heartbeat
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
    assert "after=job1" in page, "two jobs of those were not looked at"
    page = client.get("/search", params={"q": "blue-", "after": "job3"}).text
    assert "2 jobs and 6 checkpoints" in page
    assert "Search the next jobs" not in page


def all_hits(store: kedge.CheckpointManager, **options: object) -> tuple[set[str], set[str], int]:
    """The names of jobs, and the jobs of checkpoints, that looks one after the other find; how many they were."""
    wanted = search.Wanted(**{"words": (), "kind": "", "status": "", "tag": "", "since": None, **options})  # type: ignore[arg-type]
    jobs: set[str] = set()
    checkpoints: set[str] = set()
    after: str | None = None
    for looks in range(1, 100):
        hits = search.find(store, wanted, "updated", after, deep=False)
        jobs |= {hit.job.name for hit in hits.jobs}
        checkpoints |= {checkpoint.job for checkpoint in hits.checkpoints}
        if (after := hits.after) is None:
            return jobs, checkpoints, looks
    raise AssertionError("a look goes on where it began")


def test_looks_one_after_the_other_find_everything(
    store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LOOK_JOBS", 8)
    monkeypatch.setattr(search, "_LOOK_ABOUT", 3)
    monkeypatch.setattr(search, "_LOOK_CHECKPOINTS", 4)
    names = {f"job{n:02}" for n in range(20)}
    for name in sorted(names, reverse=True):
        for _ in range(3):
            store.save(name, "step", 1, tags={"colour": "blue"})
    store.save("llm:x", "step", 1, tags={"colour": "blue"})
    assert all_hits(store, kind="job")[0] == names
    assert all_hits(store, words=["job"])[0] == names
    assert all_hits(store, words=["blue"])[1] == names
    assert all_hits(store, tag="colour=blue")[1] == names
    assert all_hits(store, kind="job", words=["blue"])[1] == names
    assert all_hits(store, kind="run", words=["blue"])[:2] == (set(), set())
    assert all_hits(store, status="failed")[:2] == (set(), set())


def found_by_looks(client: TestClient, address: str) -> tuple[set[str], int, str]:
    """The IDs of the checkpoints that a look and those behind it find; how many there were, and the last page."""
    found: set[str] = set()
    for looks in range(1, 100):
        page = client.get(address).text
        found |= set(re.findall(r'href="/checkpoints/([^"]+)"', page))
        following = re.search(r'href="(/search\?[^"]+)">Search', page)
        if following is None:
            return found, looks, page
        address = html.unescape(following[1])
    raise AssertionError("a look goes on where it began")


def test_older_checkpoints_are_searched_once_all_jobs_were(
    client: TestClient, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_OF_EACH", 3)
    monkeypatch.setattr(search, "_LOOK_JOBS", 3)
    monkeypatch.setattr(search, "_LOOK_CHECKPOINTS", 7)
    saved: dict[str, list[str]] = {}
    for job, count in (("a:b", 20), ("c", 1), ("d", 3), ("e", 4), ("f", 2), ("g", 11)):
        for n in range(count):
            colour = "blue" if n % 5 == 0 else "red"
            identity = store.save(job, f"s{n}", n, metadata={"hue": colour}, tags={"colour": colour} if n % 2 else None)
            saved.setdefault(f"{colour}{n % 2}", []).append(identity)
    found, looks, page = found_by_looks(client, "/search?q=blue")
    assert found == {*saved["blue0"], *saved["blue1"]}
    assert looks > 6, "each look reads a bounded number"
    assert "Looked at 6 jobs" in page
    assert found_by_looks(client, "/search?q=blue&kind=job")[0] == found
    assert found_by_looks(client, "/search?q=blue&kind=run")[0] == set()
    assert found_by_looks(client, "/search?tag=colour=blue")[0] == set(saved["blue1"])
    assert found_by_looks(client, "/search?tag=colour&q=red&since=day")[0] == set(saved["red1"])
    assert found_by_looks(client, "/search?q=purple")[0] == set()
    assert "Nothing found" in found_by_looks(client, "/search?q=purple")[2]


def test_a_search_says_how_many_hits_it_does_not_show(
    client: TestClient, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_SHOWN", 2)
    for n in range(3):
        store.save("j", f"blue {n}", 1)
    assert "3 found, 2 shown" in client.get("/search?q=blue").text


@pytest.mark.parametrize(
    "query",
    [
        "q=%00",
        "q=*%25_",
        "kind=other",
        "since=never",
        "sort=1",
        "tag=%3D",
        "tag=a%3D%3Cb",
        "after=..",
        "q=x&older=j:9",
        "q=x&older=:0",
        "q=x&older=j:-1",
        "q=x&older='--:7",
    ],
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
    store.save("queue:recovery:workers", "s", 1, metadata={"owner": 7}, tags={"seen_at": "now"})
    Heartbeat(store, ["forged"], 3).beat()
    answer = client.get("/queues")
    assert answer.status_code == 200
    assert "0/3" in answer.text
    assert "forged" in answer.text


def test_a_look_that_found_nothing_is_followed_by_the_next(
    client: TestClient, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_LOOK_JOBS", 2)
    for n in range(5):
        store.save(f"job{n}", "step", n, metadata={"colour": "Blue" if n == 4 else "red"})
    address, looks = "/search?q=blue", 0
    while True:
        page, looks = client.get(address).text, looks + 1
        following = re.search(r'data-hx-get="([^"]+)" data-hx-trigger="load', page)
        if following is None:
            break
        assert "found nothing yet" in page
        address = html.unescape(following[1])
    assert looks == 3
    assert "Looked at 5 jobs" in page
    assert '<span class="quiet why"><bdi>colour: Blue</bdi></span>' in page
    assert "why" not in client.get("/search?q=step").text.partition("found-checkpoints")[2]  # the step says it
