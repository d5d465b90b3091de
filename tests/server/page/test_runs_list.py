"""The list of runs and executions: the ones that changed last, by status, page by page."""

from __future__ import annotations

import html
import re
from contextlib import suppress

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.process.workflow import Workflows
from kedge.server.page import runs


def shown(page: str) -> list[str]:
    return re.findall(r'<td class="name"><a href="/(?:runs|executions)/([^"]+)"', page)


def older(page: str) -> str | None:
    link = re.search(r'href="([^"]+)">Older</a>', page)
    return "/runs" + html.unescape(link[1]) if link else None


def run(store: kedge.CheckpointManager, key: str, error: Exception | None = None) -> None:
    with suppress(ValueError), kedge.run(key, store=store, progress=False):
        if error is not None:
            raise error


def test_the_newest_come_first_and_pages_hold_each_once(
    client: TestClient, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_RUNS", 4)
    keys = [f"run-{n}" for n in (3, 1, 4, 0, 5, 9, 2, 6)]
    for key in keys:
        store.save(f"job-of-{key}", "one", {})
        run(store, key)
    execution = Workflows(store).start_workflow_execution("order-7", "refund")
    pages, address = [], "/runs"
    while address:
        page = client.get(address).text
        pages.append(shown(page))
        address = older(page) or ""
    assert [name for page in pages for name in page] == [*keys[:-4:-1], execution, *keys[-4::-1]]
    run(store, "run-4")
    assert shown(client.get("/runs").text)[0] == "run-4"


def test_they_are_chosen_by_status(client: TestClient, store: kedge.CheckpointManager) -> None:
    run(store, "good")
    run(store, "bad", ValueError("no"))
    assert shown(client.get("/runs?status=failed").text) == ["bad"]
    assert shown(client.get("/runs?status=completed&prefix=go").text) == ["good"]
    assert "No run is running" in client.get("/runs?status=running").text
    assert client.get("/runs?status=odd").status_code == 422
    assert client.get("/runs?before=odd").status_code == 422


def test_a_page_of_many_is_small(client: TestClient, store: kedge.CheckpointManager) -> None:
    for n in range(60):
        run(store, f"nightly-training-of-the-large-model-{n:04d}", ValueError("x" * 200) if n % 5 == 0 else None)
    page = client.get("/runs").text
    assert len(shown(page)) == 50
    assert len(page) <= 50_000
