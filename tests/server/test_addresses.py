"""Addresses of the page, what they carry, and what the service says of itself."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.errors import NoSpace
from kedge.pipeline.approval import decide
from kedge.process.workflow import Workflows
from kedge.server import create_app
from kedge.server.protocol import BoundedHttp
from kedge.server.service import Service
from tests.server.conftest import client_of, listening
from tests.waiting import wait_for


@pytest.mark.parametrize("sent", ["", "/kedge"])  # a proxy that takes the prefix off, and one that does not
def test_a_path_prefix_behind_any_proxy(store: kedge.CheckpointManager, sent: str) -> None:
    saved = store.save("j", "s", 1)
    with client_of(create_app(store, root_path="/kedge")) as client:
        page = client.get(f"{sent}/").text
        assert 'href="/kedge/jobs/j"' in page
        for kind in ("page.css", "page.js", "events.js", "icon.svg"):
            [address] = {part.split('"')[0] for part in page.split('"') if part.startswith(f"/kedge/static/{kind}")}
            assert client.get(sent + address.removeprefix("/kedge")).status_code == 200, kind
        assert client.get(f"{sent}/api/v1/checkpoints/{saved}").json()["job"] == "j"  # a direct route
        assert client.get(f"{sent}/api/v1/jobs").json()["jobs"][0]["name"] == "j"
        assert client.get(f"{sent}/nowhere").status_code == 404


def sign_in(client: TestClient, token: str, wanted: str = "") -> Any:
    origin = {"origin": str(client.base_url)}
    return client.post("/login", data={"token": token, "next": wanted}, headers=origin, follow_redirects=False)


def test_signing_in_leads_to_the_whole_address(place: Path, make_token: Callable[..., str]) -> None:
    token = make_token("a", "read")
    with client_of(create_app(place)) as client:
        sent = client.get("/runs?prefix=a%20b&x=1", follow_redirects=False)
        assert sent.headers["location"] == "/login?next=/runs%3Fprefix%3Da%2520b%26x%3D1"
        form = client.get(sent.headers["location"]).text
        assert 'value="/runs?prefix=a%20b&amp;x=1"' in form
        assert sign_in(client, token, "/runs?prefix=a%20b&x=1").headers["location"] == "/runs?prefix=a%20b&x=1"
        for elsewhere in ("//evil.example", "https://evil.example", "/\\evil.example"):
            assert sign_in(client, token, elsewhere).headers["location"] == "/"


def test_an_address_says_which_namespace(place: Path, make_token: Callable[..., str]) -> None:
    for namespace in ("one", "two"):
        with kedge.open(place, namespace=namespace) as store:
            store.save("job", "s", 1)
            store.save(f"only-{namespace}", "s", 1)
    token = make_token("a", "write", "one", "two")
    with client_of(create_app(place, namespace="one")) as client:
        sign_in(client, token)
        assert client.get("/?prefix=o", follow_redirects=False).headers["location"] == "/?prefix=o&namespace=one"
        assert "only-two" in client.get("/?namespace=two").text
        # a part of a page, and a form on it, belong to what the page shows, whatever another tab has chosen
        here = {"hx-request": "true", "hx-current-url": f"{client.base_url}/?namespace=two"}
        assert "only-two" in client.get("/", headers=here).text
        form = {"referer": f"{client.base_url}/jobs/job?namespace=two", "origin": str(client.base_url)}
        client.post("/jobs/job/copy", data={"new_job": "copied"}, headers=form)
        elsewhere = {"hx-request": "true", "hx-current-url": "http://evil.example/?namespace=two"}
        assert "only-two" not in client.get("/", headers=elsewhere).text
    with kedge.open(place, namespace="two") as store:
        assert store.jobs("copied")
    with kedge.open(place, namespace="one") as store:
        assert not store.jobs("copied")
    one = make_token("b", "read", "one")
    with client_of(create_app(place, namespace="one")) as client:
        sign_in(client, one)
        assert client.get("/", follow_redirects=False).status_code == 200
        assert "only-two" not in client.get("/?namespace=two").text


def test_all_arrays_in_one_file(client: TestClient, store: kedge.CheckpointManager) -> None:
    big = np.arange(600_000, dtype="f4").reshape(2, -1)
    state = {"model": {"w": big, "f": np.asfortranarray(np.ones((3, 4), "i8"))}, "b": [np.array([True, False])], "n": 1}
    path = f"/api/v1/checkpoints/{store.save('j', 's', state)}/download"
    answer = client.get(path, params={"format": "npz"})
    assert '.npz"; filename*=' in answer.headers["content-disposition"]
    loaded = np.load(io.BytesIO(answer.content))
    assert sorted(loaded) == ["b/0", "model/f", "model/w"]
    assert (loaded["model/w"] == big).all()
    assert (loaded["model/f"] == state["model"]["f"]).all()  # type: ignore[index]
    refused = client.get(path, params={"format": "safetensors"})
    assert (refused.status_code, "model/f" in refused.text) == (422, True)
    parts = client.get(path, params={"format": "safetensors", "path": "model/w"}).content
    size = int.from_bytes(parts[:8], "little")
    entry = {"dtype": "F32", "shape": [2, 300000], "data_offsets": [0, 2400000]}
    assert json.loads(parts[8 : 8 + size]) == {"model/w": entry}
    assert (np.frombuffer(parts[8 + size :], "f4").reshape(2, -1) == big).all()
    assert client.get(path, params={"format": "npz", "path": "n"}).status_code == 404
    raw = client.get(path, params={"path": "model/w"})
    assert raw.content == big.tobytes()
    assert "Arrays, as .npz" in client.get(path.removeprefix("/api/v1").removesuffix("/download")).text


def test_ready_means_that_saves_work(
    client: TestClient, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client.get("/readyz").status_code == 200
    service = client.app.state.service  # type: ignore[attr-defined]

    def refuse(*_: object, **__: object) -> Any:
        raise NoSpace("the disk is full", hint="make room")

    with monkeypatch.context() as patch:
        patch.setattr(store.store, "save_many", refuse)
        assert client.post("/api/v1/jobs/j/checkpoints", json={"step": "s", "state": 1}).status_code == 507
        assert client.get("/readyz").status_code == 507
    assert client.post("/api/v1/jobs/j/checkpoints", json={"step": "s", "state": 1}).status_code == 201
    assert client.get("/readyz").status_code == 200
    monkeypatch.setattr(Service, "check_writable", refuse)  # nobody saved, but nobody could
    assert client.get("/readyz").status_code == 507
    assert isinstance(service, Service)


def test_the_document_is_of_the_version_it_says(client: TestClient) -> None:
    document = client.get("/openapi.json")
    assert document.json()["openapi"].startswith("3.1")
    assert "itemSchema" not in document.text


def test_a_page_of_a_run_follows_that_run(client: TestClient, store: kedge.CheckpointManager) -> None:
    with kedge.run("nightly", store=store) as run:
        run.step("one", lambda: 1)
    assert 'data-live-job="nightly"' in client.get("/runs/nightly").text


def test_who_does_not_read_is_dropped(store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedHttp, "read_s", 0.2)
    saved = store.save("j", "s", np.random.default_rng(1).bytes(64 << 20))
    with listening(create_app(store), http=BoundedHttp) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"GET /api/v1/checkpoints/{saved}/download HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

            def is_dropped() -> bool:
                try:
                    connection.send(b"x")
                except OSError:
                    return True
                return False

            wait_for(is_dropped, "a caller that reads nothing keeps its connection")


def test_an_execution_and_its_decisions_are_shown(client: TestClient, store: kedge.CheckpointManager) -> None:
    workflows = Workflows(store)
    execution = workflows.start_workflow_execution("order-7", "orders", {"sum": 7})
    workflows.create_checkpoint(execution, "pay", "agent-1", {"amount": 7}, approval_required=True)
    assert f"/executions/{execution}" in client.get("/runs").text
    assert f"/executions/{execution}" in client.get("/approvals").text
    page = client.get(f"/executions/{execution}").text
    assert all(text in page for text in ("orders", "paused", "pay", "pending", "agent-1", "Approve"))
    decide(store, execution, "pay", True, actor="somebody", comment="fine")
    workflows.complete_checkpoint(execution, "pay", {"receipt": "abc"})
    page = client.get(f"/executions/{execution}").text
    assert "approved by somebody: fine" in page
    assert "receipt" in page
    assert client.get("/executions/none").status_code == 404
