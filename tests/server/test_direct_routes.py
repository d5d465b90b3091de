"""The two requests that come most, on routes that read their parameters themselves: answered as FastAPI would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from fastapi.routing import request_response
from fastapi.testclient import TestClient

import kedge
from kedge.server import create_app
from kedge.server.batches import Batches
from kedge.server.route import DirectRoute
from kedge.server.routes import checkpoints, saves
from kedge.server.tokens import ACCESS, Tokens
from kedge.server.uploads import SMALL_BYTES
from tests.server.conftest import client_of, listening
from tests.waiting import wait_for

V1 = "/api/v1"
SAVE = f"{V1}/jobs/j/checkpoints"
JSON = {"content-type": "application/json"}
OWN = {"id", "seq", "created_at", "request_id"}  # differ from one request to the next


@contextmanager
def by_fastapi() -> Iterator[None]:
    """Direct routes called by the framework, which reads their parameters."""
    routes = [route for module in (checkpoints, saves) for route in module.router.routes]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(DirectRoute, "takes", return_value=False))
        for route in routes:
            if isinstance(route, DirectRoute):
                stack.enter_context(mock.patch.object(route, "app", request_response(route.get_route_handler())))
        yield


@pytest.fixture
def client(store: kedge.CheckpointManager) -> Iterator[TestClient]:
    with client_of(create_app(store)) as client:
        client.get(f"{V1}/jobs")  # whether there are tokens is known from now on
        yield client


def told(answer: httpx.Response) -> tuple[int, dict[str, str], Any]:
    body = answer.json()
    headers = {name: value for name, value in answer.headers.items() if name not in ("x-request-id", "content-length")}
    return answer.status_code, headers, {name: value for name, value in body.items() if name not in OWN}


BODIES: list[tuple[bytes, int]] = [
    (b'{"step": "s", "state": {"a": [1, 2.5, null, true, "\\u00fc"]}}', 201),
    (b'{"step": "s", "level": "stage", "tags": {"a": "b"}, "metadata": {"x": 1}, "pin": true}', 201),
    (b'{"step": "s", "schema_version": "2", "parent": null, "lease": null}', 201),
    (b'{"step": "s", "lease": 7}', 409),
    (b'{"step": "s", "parent": "none_1_00000000"}', 404),
    (b'{"step": "s", "unknown": 1}', 422),
    (b'{"step": "s", "state": NaN}', 422),
    (b'{"step": "\xff"}', 422),
    (b"{", 422),
    (b"", 422),
]


@pytest.mark.parametrize(("body", "status"), BODIES)
def test_saves_are_answered_alike(client: TestClient, body: bytes, status: int) -> None:
    answer = client.post(SAVE, content=body, headers=JSON)
    with by_fastapi():
        other = client.post(SAVE, content=body, headers=JSON)
    assert told(answer) == told(other)
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("url", "headers", "status"),
    [
        (f"{V1}/jobs/-x/checkpoints", {}, 422),
        (f"{SAVE}?namespace=-x", {"Idempotency-Key": ""}, 422),
        (f"{SAVE}?namespace=other", {}, 403),
        (f"{SAVE}?namespace=default", {}, 201),
        (f"{SAVE}?namespce=default", {}, 422),
        (SAVE, {"Idempotency-Key": "x" * 257}, 422),
        (SAVE, {"Authorization": "Bearer kd_wrong"}, 401),
        (SAVE, {"Origin": "http://evil.example"}, 403),
        (SAVE, {"content-type": "text/plain"}, 415),
    ],
)
def test_parameters_are_judged_alike(client: TestClient, url: str, headers: dict[str, str], status: int) -> None:
    answer = client.post(url, content=b'{"step": "s"}', headers={**JSON, **headers})
    with by_fastapi():
        other = client.post(url, content=b'{"step": "s"}', headers={**JSON, **headers})
    assert told(answer) == told(other)
    assert answer.status_code == status


@pytest.mark.parametrize("name", ["", "none_1_00000000", "a b", "..", "%2e%2e%2fx", "x" * 200])
def test_metadata_is_answered_alike(client: TestClient, store: kedge.CheckpointManager, name: str) -> None:
    url = f"{V1}/checkpoints/{name or store.save('j', 's', 1, tags={'a': 'b'})}"
    answer = client.get(url)
    with by_fastapi():
        assert told(client.get(url)) == told(answer)


def test_keys_and_leases(client: TestClient, store: kedge.CheckpointManager) -> None:
    def post(state: object, **headers: str) -> Any:
        return client.post(SAVE, json={"step": "s", "state": state}, headers=headers)

    key = {"Idempotency-Key": "k-1"}
    first, again, other = post(1, **key), post(1, **key), post(2, **key)
    assert (first.status_code, again.json(), other.status_code) == (201, first.json(), 409)
    with store.lease("j"):
        assert post(3).status_code == 409
    assert post(1, **{"Idempotency-Key": "x" * 257}).status_code == 422
    assert "kedge_lease_conflicts_total 1.0" in client.get("/metrics").text
    assert [store.load(c.id) for c in store.list("j")] == [1]


def test_unusual_requests(client: TestClient) -> None:
    large = {"step": "s", "state": "x" * SMALL_BYTES}
    small = {"step": "s", "state": 1}
    statuses = [
        client.post(SAVE, json=large).status_code,
        client.post(SAVE, json=small, headers={"Cookie": "a=b"}).status_code,
        client.post(SAVE, json=small, headers={"Origin": "http://evil.example"}).status_code,
        client.post(SAVE, json=small, headers={"X-Forwarded-For": "10.0.0.1"}).status_code,
        client.post(SAVE, json=small, headers={"Authorization": "Bearer kd_wrong"}).status_code,
        client.post(SAVE, json=small, headers={"Authorization": "Basic x"}).status_code,
        client.post(SAVE, content=iter([b'{"step": ', b'"s"}']), headers=JSON).status_code,
        client.post(SAVE, content=b"{}", headers={"content-type": "text/plain"}).status_code,
        client.post(f"{SAVE}/", json=small).status_code,
    ]
    assert statuses == [201, 201, 403, 403, 401, 401, 201, 415, 404]


def test_a_header_that_comes_twice_is_no_way_in(client: TestClient) -> None:
    """Which of two is meant, one place decides."""
    twice = [("Authorization", "Bearer kd_wrong"), ("Authorization", "Bearer kd_wrong")]
    assert client.get(f"{V1}/checkpoints/x", headers=twice).status_code == 401


def test_rules_hold(place: Path, make_token: Callable[..., str]) -> None:
    """Every scope × own and other namespace, without a query."""
    texts = {(s, n): make_token(f"{s}-{n}", s, n) for s in ("read", "write", "admin") for n in ("default", "other")}
    several = make_token("several", "write", "a", "b")

    def auth(text: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {text}"}

    with client_of(create_app(place)) as client, kedge.open(place, namespace=ACCESS) as manager:
        saved = client.post(SAVE, json={"step": "s", "state": 1}, headers=auth(texts["admin", "default"])).json()
        look = f"{V1}/checkpoints/{saved['id']}"
        for (scope, space), text in texts.items():
            for _ in range(2):  # known from memory the second time
                assert client.get(look, headers=auth(text)).status_code == (200 if space == "default" else 404)
                may_save = client.post(SAVE, json={"step": "s"}, headers=auth(text)).status_code
                assert may_save == (403 if scope == "read" else 201)
        assert client.post(SAVE, json={"step": "s"}, headers=auth(several)).status_code == 422
        assert client.post(SAVE, json={"step": "s"}).status_code == 401
        assert client.get(look).status_code == 401
        Tokens(manager).revoke("write-default")
        client.app.state.service.tokens._known.clear()  # type: ignore[attr-defined]
        assert client.post(SAVE, json={"step": "s"}, headers=auth(texts["write", "default"])).status_code == 401
    with kedge.open(place) as own, kedge.open(place, namespace="other") as other:
        assert {event.actor for event in own.events()} == {"write-default", "admin-default"}
        assert {event.actor for event in other.events()} == {"write-other", "admin-other"}


def test_many_savers_share_commits_and_not_their_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    asked: list[object] = []
    real, ask = kedge.CheckpointManager.save_many, Batches.ask

    def save_many(self: Any, saves: Any) -> Any:
        if not sizes:
            wait_for(lambda: len(asked) >= 12, "not all of them ask at once")
        sizes.append(len(saves))
        return real(self, saves)

    async def counted(self: Any, item: Any) -> Any:
        asked.append(item)
        return await ask(self, item)

    monkeypatch.setattr(Batches, "ask", counted)
    monkeypatch.setattr(kedge.CheckpointManager, "save_many", save_many)
    with listening(create_app(tmp_path / "store")) as url, ThreadPoolExecutor(12) as threads:
        httpx.get(f"{url}{V1}/jobs", timeout=60)

        def is_wrong(n: int, k: int) -> bool:
            return (n + k) % 3 == 2  # so that some of those that ask at once are

        def work(n: int) -> list[int]:
            with httpx.Client(base_url=url, timeout=60) as client:
                bodies = [
                    {"step": "s", "state": [n, k], **({"parent": "no_1_0"} if is_wrong(n, k) else {})} for k in range(9)
                ]
                return [client.post(f"{V1}/jobs/j{n % 2}/checkpoints", json=body).status_code for body in bodies]

        expected = [[404 if is_wrong(n, k) else 201 for k in range(9)] for n in range(12)]
        assert list(threads.map(work, range(12))) == expected
    assert sum(sizes) == 108
    assert max(sizes) > 1
    with kedge.open(tmp_path / "store") as store:
        assert [len(store.list(job)) for job in ("j0", "j1")] == [36, 36]
        assert store.verify().is_ok
        assert store.audit().broken_at is None


def test_traced_requests_get_their_spans(store: kedge.CheckpointManager) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with client_of(create_app(store, telemetry={"tracer_provider": provider})) as client:
        client.get(f"{V1}/jobs")
        client.post(SAVE, json={"step": "s"})
    names = [span.name for span in exporter.get_finished_spans()]
    assert "POST /api/v1/jobs/{job}/checkpoints" in names, names


def test_a_defect_is_answered_counted_and_found_by_its_id(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("/a/path")

    for name in ("get", "save_many"):
        monkeypatch.setattr(kedge.CheckpointManager, name, fail)
    for size in (1, SMALL_BYTES):
        looked = client.get(f"{V1}/checkpoints/x")
        saved = client.post(SAVE, json={"step": "s", "state": "x" * size})
        for answer in (looked, saved):
            assert (answer.status_code, answer.json()["code"]) == (500, "unexpected")
            assert answer.json()["request_id"] == answer.headers["x-request-id"]
            assert "/a/path" not in answer.text
            assert "nosniff" in answer.headers["x-content-type-options"]
    assert caplog.text.count("unexpected: ZeroDivisionError") == 4
    numbers = client.get("/metrics").text
    assert 'route="/api/v1/jobs/{job}/checkpoints",status="500"} 2.0' in numbers
