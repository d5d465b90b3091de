"""The short way of the two requests that come most: it answers what the long way answers, or leaves it to that one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server import create_app
from kedge.server.hot import SMALL_BYTES, Hot
from kedge.server.tokens import ACCESS, Tokens
from tests.server.conftest import client_of, listening

V1 = "/api/v1"
SAVE = f"{V1}/jobs/j/checkpoints"
JSON = {"content-type": "application/json"}
LONG = {"namespace": "default"}  # a query: such a request goes the long way
OWN = {"id", "seq", "created_at", "request_id"}  # differ from one request to the next


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each request so far was answered the short way."""
    taken: list[bool] = []
    real = Hot.answer

    async def answer(self: Hot, *args: Any) -> Any:
        try:
            rest = await real(self, *args)
        except kedge.CheckpointError:
            taken.append(True)
            raise
        taken.append(rest is None)
        return rest

    monkeypatch.setattr(Hot, "answer", answer)
    return taken


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
def test_saves_are_answered_alike(client: TestClient, short: list[bool], body: bytes, status: int) -> None:
    answers = [client.post(SAVE, content=body, headers=JSON, params=params) for params in ({}, LONG)]
    assert told(answers[0]) == told(answers[1])
    assert answers[0].status_code == status
    assert short[0] or status == 422  # what is no save at all may be explained by the long way
    assert not short[1]


@pytest.mark.parametrize("name", ["", "none_1_00000000", "a b", "..", "%2e%2e%2fx", "x" * 200])
def test_looks_are_answered_alike(
    client: TestClient, store: kedge.CheckpointManager, short: list[bool], name: str
) -> None:
    url = f"{V1}/checkpoints/{name or store.save('j', 's', 1, tags={'a': 'b'})}"
    short_answer, long_answer = client.get(url), client.get(url, params=LONG)
    assert told(short_answer) == told(long_answer)
    assert short == [not name, False]


def test_keys_and_leases(client: TestClient, store: kedge.CheckpointManager, short: list[bool]) -> None:
    def post(state: object, **headers: str) -> Any:
        return client.post(SAVE, json={"step": "s", "state": state}, headers=headers)

    key = {"Idempotency-Key": "k-1"}
    first, again, other = post(1, **key), post(1, **key), post(2, **key)
    assert (first.status_code, again.json(), other.status_code) == (201, first.json(), 409)
    with store.lease("j"):
        assert post(3).status_code == 409
    assert short == [True] * 4
    assert post(1, **{"Idempotency-Key": "x" * 257}).status_code == 422
    assert "kedge_lease_conflicts_total 1.0" in client.get("/metrics").text
    assert [store.load(c.id) for c in store.list("j")] == [1]


def test_what_goes_the_long_way(client: TestClient, short: list[bool]) -> None:
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
    assert short == [False] * 9


def test_a_header_that_comes_twice_is_no_way_in(client: TestClient, short: list[bool]) -> None:
    """Which of two is meant, one place decides."""
    twice = [("Authorization", "Bearer kd_wrong"), ("Authorization", "Bearer kd_wrong")]
    assert client.get(f"{V1}/checkpoints/x", headers=twice).status_code == 401
    assert short == [False]


def test_rules_hold_on_the_short_way(place: Path, make_token: Callable[..., str], short: list[bool]) -> None:
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
        assert any(short)
        assert client.post(SAVE, json={"step": "s"}, headers=auth(several)).status_code == 422
        assert client.post(SAVE, json={"step": "s"}).status_code == 401
        assert client.get(look).status_code == 401
        del short[:]
        Tokens(manager).revoke("write-default")
        client.app.state.service.tokens._known.clear()  # type: ignore[attr-defined]
        assert client.post(SAVE, json={"step": "s"}, headers=auth(texts["write", "default"])).status_code == 401
        assert short == [False]
    with kedge.open(place) as own, kedge.open(place, namespace="other") as other:
        assert {event.actor for event in own.events()} == {"write-default", "admin-default"}
        assert {event.actor for event in other.events()} == {"write-other", "admin-other"}


def test_many_savers_share_commits_and_not_their_mistakes(
    tmp_path: Path, short: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = kedge.CheckpointManager.save_many

    def save_many(self: Any, saves: Any) -> Any:
        sizes.append(len(saves))
        return real(self, saves)

    monkeypatch.setattr(kedge.CheckpointManager, "save_many", save_many)
    with listening(create_app(tmp_path / "store")) as url, ThreadPoolExecutor(12) as threads:
        httpx.get(f"{url}{V1}/jobs")

        def work(n: int) -> list[int]:
            with httpx.Client(base_url=url) as client:
                bodies = [
                    {"step": "s", "state": [n, k], **({"parent": "no_1_0"} if k % 3 == 2 else {})} for k in range(9)
                ]
                return [client.post(f"{V1}/jobs/j{n % 2}/checkpoints", json=body).status_code for body in bodies]

        assert list(threads.map(work, range(12))) == [[201, 201, 404] * 3] * 12
    assert sum(sizes) > 54  # once a second somebody finds out the long way whether there are tokens
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

    for name in ("get", "save_many", "save_encoded"):
        monkeypatch.setattr(kedge.CheckpointManager, name, fail)
    for query in ({}, LONG):
        looked = client.get(f"{V1}/checkpoints/x", params=query)
        saved = client.post(SAVE, json={"step": "s", "state": 1}, params=query)
        for answer in (looked, saved):
            assert (answer.status_code, answer.json()["code"]) == (500, "unexpected")
            assert answer.json()["request_id"] == answer.headers["x-request-id"]
            assert "/a/path" not in answer.text
            assert "nosniff" in answer.headers["x-content-type-options"]
    assert caplog.text.count("unexpected: ZeroDivisionError") == 4
    numbers = client.get("/metrics").text
    assert 'route="/api/v1/jobs/{job}/checkpoints",status="500"} 2.0' in numbers
