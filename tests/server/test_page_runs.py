"""The page of a run that started others."""

from __future__ import annotations

from fastapi.testclient import TestClient

import kedge


@kedge.pipeline
def child(n: int) -> int:
    return 2 * n


def test_a_run_leads_to_the_runs_it_started_and_back(client: TestClient, store: kedge.CheckpointManager) -> None:
    with kedge.run("parent", store=store, progress=False, signals=False) as run:
        handles = [kedge.start(child, n, key=f"child-{n}") for n in range(2)]
        assert [run.result(handle) for handle in handles] == [0, 2]
    page = client.get("/runs/parent").text
    started = page[page.index('id="children"') :]
    assert started.index("/runs/child-0") < started.index("/runs/child-1")
    assert started.count("status-completed") == 2
    assert '<a href="/runs/parent" title="The run that started it">' in client.get("/runs/child-1").text
    assert 'id="children"' not in client.get("/runs/child-1").text
