"""Whatever is sent: the right code, nothing changed, nothing told that is nobody's business."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from starlette.routing import Mount

import kedge
from kedge.server import create_app

V1 = "/api/v1"
SAVE = f"{V1}/jobs/j/checkpoints"
JSON = {"content-type": "application/json"}

TRAVERSALS = ["../", "../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "a\0b\n"]


@pytest.fixture
def before(store: kedge.CheckpointManager) -> int:
    store.save("kept", "s", {"n": 1})
    return len(store.events())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b'{"step": "s", "state": NaN}', 422),
        (b'{"step": "s", "state": 1e999}', 422),
        (b'{"step": "s", "state": {"a": 1, "a": 2}}', 422),
        (b'{"step": "s", "state": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 422),
        (b'{"step": "s", "state": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}", 422),
        (b'{"step": "\xff", "state": 1}', 422),
        (b'{"step": "\\ud800", "state": 1}', 422),
        (b'{"step": "", "state": 1}', 422),
        (b'{"step": 3, "state": 1}', 422),
        (b'{"step": "s", "state": 1, "level": "galaxy"}', 422),
        (b'{"step": "s", "state": 1, "tags": {"a b": "c"}}', 422),
        (b'{"step": "s", "state": 1, "tags": {"a": 1}}', 422),
        (b'{"step": "s", "state": 1, "pin": "yes"}', 422),
        (b'{"step": "s", "state": 1, "unknown": 1}', 422),
        (b'{"step": "s", "state": 1, "parent": "none_1_00000000"}', 404),
        (b'{"step": "s", "state": 1, "parent": "../x"}', 422),
        (json.dumps({"step": "s", "metadata": {"x": "y" * 70_000}}).encode(), 422),
    ],
)
def test_bodies(client: TestClient, store: kedge.CheckpointManager, before: int, body: bytes, status: int) -> None:
    answer = client.post(SAVE, content=body, headers=JSON)
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/problem+json"
    assert "Traceback" not in answer.text
    assert len(store.events()) == before


def test_other_media_types(client: TestClient, store: kedge.CheckpointManager, before: int) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/xml", ""):
        assert client.post(SAVE, content=b'{"step": "s"}', headers={"content-type": kind}).status_code == 415
    broken = {"content-type": "multipart/form-data; boundary=x"}
    assert client.post(SAVE, content=b"--x\r\nbroken", headers=broken).status_code in (400, 422)
    assert client.post(SAVE, content=b"", headers={"content-type": "multipart/form-data"}).status_code in (400, 422)
    assert len(store.events()) == before


@pytest.mark.parametrize("text", TRAVERSALS)
def test_traversal_in_every_parameter(
    client: TestClient, store: kedge.CheckpointManager, before: int, text: str, place: Path
) -> None:
    from urllib.parse import quote

    sent = quote(text, safe="")
    app = create_app("memory:")
    routes = [r for r in iter_route_contexts(app.routes) if not isinstance(r.original_route, Mount)]
    for route in routes:
        path = str(route.path)
        if "{" not in path or not path.startswith("/api"):
            continue
        for name in ("checkpoint_id", "job", "key", "execution_id", "task_id"):
            path = path.replace("{" + name + "}", sent)
        for method in route.methods or ():
            answer = client.request(method, path, json={} if method not in ("GET", "DELETE") else None)
            assert 400 <= answer.status_code < 500, (method, path, answer.text)
    saved = store.list("kept")[0].id
    for parameter in ("path",):
        for route_path in ("state", "download"):
            answer = client.get(f"{V1}/checkpoints/{saved}/{route_path}", params={parameter: text})
            assert answer.status_code in (404, 422), answer.text
    for url in (f"{V1}/jobs?cursor={sent}", f"{V1}/diff?old={sent}&new={sent}", f"{V1}/jobs?namespace={sent}"):
        assert client.get(url).status_code == 422
    assert len(store.events()) == before
    assert {each.name for each in place.parent.iterdir()} == {"store"}


def test_an_address_with_a_slash_too_many_is_none(client: TestClient, before: int) -> None:
    """No redirect: what was a parameter must not become another address."""
    for url in ("/api/v1/jobs/", "/api/v1/runs/..%2f", "/api/v1/checkpoints/a%2f", "/api/v1//jobs", "/healthz/"):
        answer = client.get(url, follow_redirects=False)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), url
        assert answer.headers["content-type"] == "application/problem+json"


def test_hostile_names_come_back_as_text(client: TestClient) -> None:
    step = "<script>alert(1)</script> \u202e \x1b[31m"
    saved = client.post(SAVE, json={"step": step, "state": {step: step}}).json()
    assert saved["step"] == step
    answer = client.get(f"{V1}/checkpoints/{saved['id']}/state")
    assert answer.json()["state"] == {step: step}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    attached = client.get(f"{V1}/checkpoints/{saved['id']}/download", params={"format": "json"})
    assert attached.headers["content-disposition"].startswith("attachment")


def test_many_at_once_are_told_to_come_back(store: kedge.CheckpointManager) -> None:
    """Beyond the limit: 503 with Retry-After, at once."""
    from kedge.server.limits import Limits
    from tests.server.conftest import client_of

    with client_of(create_app(store, limits=Limits(concurrent=0))) as client:
        answer = client.get(f"{V1}/jobs")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


def test_headers_nobody_expects(client: TestClient, store: kedge.CheckpointManager, before: int) -> None:
    headers: list[dict[str, Any]] = [
        {"Idempotency-Key": "x" * 300},
        {"Authorization": "Basic abc"},
        {"Authorization": "Bearer"},
        {"Content-Length": "-1"},
    ]
    for each in headers:
        answer = client.post(SAVE, content=b'{"step": "s"}', headers={**JSON, **each})
        assert 400 <= answer.status_code < 500, each
    assert len(store.events()) == before


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/runs/r?session=9007199254740991&start=9007199254740991&before=0", 200),
        ("/runs/r?from=-1e10&to=1e10", 200),
        ("/runs/r?from=5&to=1", 200),
        ("/runs/r?from=nan&to=1", 422),
        ("/runs/r?from=1e400&to=1e401", 422),
        ("/runs/r?start=99999999999999999999", 422),
        ("/runs/r?level=loud", 422),
        ("/runs/r/item?map=m&number=0&count=9007199254740991", 200),
        ("/runs/r/item?map=m&item=%2399999999999999999999", 200),
        ("/runs/r/item?map=m&item=%00", 404),
        ("/runs/r/item?map=../m&item=1", 404),
        ("/runs/r/step?path=%00", 404),
        ("/activity?before=0&action=-&actor=%00", 200),
    ],
)
def test_odd_addresses_of_pages(client: TestClient, store: kedge.CheckpointManager, address: str, status: int) -> None:
    with kedge.run("r", store=store, progress=False, signals=False) as run:
        run.map(lambda n: 1 / (n - 3), range(5), name="m", on_error="collect")
        run.log("x")
    answer = client.get(address, headers={"accept": "text/html"})
    assert answer.status_code == status


@pytest.mark.parametrize(
    "value", [b"", b"null", b"http://[", b"http://\xe9", b"http://a:b:c", b"\xff\xfe", b"%ff;=,\t"]
)
@pytest.mark.parametrize(
    "name",
    ["origin", "referer", "hx-current-url", "cookie", "authorization", "x-request-id", "idempotency-key", "accept"],
)
def test_headers(client: TestClient, store: kedge.CheckpointManager, before: int, name: str, value: bytes) -> None:
    """Browsers send the addresses of pages as they are, and anybody else sends anything."""
    headers = [(name.encode(), value), (b"hx-request", b"true")]
    for method, address in (("GET", "/"), ("GET", f"{V1}/jobs"), ("POST", "/views"), ("POST", f"{V1}/jobs/kept/copy")):
        answer = client.request(method, address, headers=headers, data={} if method == "POST" else None)
        assert answer.status_code < 500, (method, address, answer.text[:300])
        assert method == "GET" or answer.status_code >= 400
    assert len(store.events()) == before
