"""What the API does, on stores made by the library itself."""

from __future__ import annotations

import asyncio
import json
import mmap
import re
from contextlib import ExitStack
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request as HttpRequest

import kedge
from kedge.process.workflow import Workflows
from kedge.server import create_app
from kedge.server.limits import Limits
from kedge.server.uploads import Upload, receive
from tests.server.conftest import client_of, listening
from tests.waiting import wait_for

V1 = "/api/v1"


def save(client: TestClient, job: str = "j", prefix: str = "", **body: Any) -> dict[str, Any]:
    answer = client.post(f"{prefix}{V1}/jobs/{job}/checkpoints", json={"step": "s", "state": {"n": 1}, **body})
    assert answer.status_code == 201, answer.text
    return answer.json()  # type: ignore[no-any-return]


def test_save_and_read_back(client: TestClient, store: kedge.CheckpointManager) -> None:
    state = {"a": [1, 2.5, None, True, "ü"], "deep": {"b": {"c": 7}}, "big": 10**40}
    saved = save(client, state=state, tags={"kind": "best"}, metadata={"loss": 0.5}, pin=True, level="stage")
    assert store.load(saved["id"]) == state
    assert (saved["tags"], saved["pinned"], saved["level"]) == ({"kind": "best"}, True, "stage")
    assert client.get(f"{V1}/checkpoints/{saved['id']}").json() == saved
    assert client.get(f"{V1}/checkpoints/{saved['id']}/state").json()["state"] == state
    part = client.get(f"{V1}/checkpoints/{saved['id']}/state", params={"path": "deep/b"}).json()
    assert part == {"checkpoint": saved["id"], "path": "deep/b", "state": {"c": 7}}
    assert client.get(f"{V1}/checkpoints/{saved['id']}/state", params={"path": "deep/x"}).status_code == 404


def test_an_idempotency_key(client: TestClient, store: kedge.CheckpointManager) -> None:
    def post(state: object) -> Any:
        return client.post(
            f"{V1}/jobs/j/checkpoints", json={"step": "s", "state": state}, headers={"Idempotency-Key": "k-1"}
        )

    first, again, other = post({"n": 1}), post({"n": 1}), post({"n": 2})
    assert first.status_code == again.status_code == 201
    assert first.json() == again.json()
    assert (other.status_code, other.json()["code"]) == (409, "idempotency_conflict")
    assert len(store.list("j")) == 1


def test_multipart_brings_buffers(client: TestClient, store: kedge.CheckpointManager) -> None:
    weights = np.arange(600_000, dtype="<f4").reshape(600, 1000)
    state = {"w": {"$part": "weights", "dtype": "<f4", "shape": [600, 1000]}, "blob": {"$part": "blob"}, "n": 1}
    files = {
        "checkpoint": (None, json.dumps({"step": "train", "state": state}), "application/json"),
        "weights": ("w.bin", weights.tobytes()),
        "blob": ("b.bin", b"\x00\xff" * 10),
    }
    answer = client.post(f"{V1}/jobs/j/checkpoints", files=files)
    assert answer.status_code == 201, answer.text
    loaded: Any = store.load(answer.json()["id"])
    assert (loaded["w"] == weights).all()
    assert (loaded["blob"], loaded["n"]) == (b"\x00\xff" * 10, 1)
    here = f"{V1}/checkpoints/{answer.json()['id']}"
    assert client.get(f"{here}/download", params={"path": "w"}).content == weights.tobytes()
    assert client.get(f"{here}/download", params={"path": "w", "format": "npy"}).content[:6] == b"\x93NUMPY"
    assert client.get(f"{here}/state").json()["state"]["w"]["shape"] == [600, 1000]


def test_a_large_part_is_never_copied_as_a_whole() -> None:
    """It lies in a file, and the buffer that is saved is that file's memory, whether it becomes bytes or an array."""
    size = 4 << 20
    wish = b'{"step": "s", "state": {"w": {"$part": "w"}, "a": {"$part": "a", "dtype": "|u1", "shape": [4194304]}}}'
    parts = {"checkpoint": wish, "w": b"w" * size, "a": b"a" * size}
    with ExitStack() as stack:
        files = {}
        for name, data in parts.items():
            file = stack.enter_context(SpooledTemporaryFile(max_size=1 << 20))
            file.write(data)
            files[name] = UploadFile(file, filename=name)  # type: ignore[arg-type]
        files["checkpoint"].file.seek(0)
        _, encoded = Upload(b"", FormData(files), Limits()).open(stack)
        for buffer in encoded.buffers:
            assert isinstance(buffer, memoryview)
            assert buffer.nbytes == size
            owner = buffer.obj
            while isinstance(owner, np.ndarray):
                owner = owner.base
            owner = owner.obj if isinstance(owner, memoryview) else owner
            assert isinstance(owner, mmap.mmap)
        assert [bytes(buffer[:1]) for buffer in encoded.buffers if isinstance(buffer, memoryview)] == [b"w", b"a"]


def test_many_parts_are_not_held_in_memory() -> None:
    """Each lies in a file, the smaller ones too: a thousand of them may come at once."""
    sizes = {f"p{n}": 100_000 + n for n in range(20)}
    wish = {"step": "s", "state": {name: {"$part": name} for name in sizes}}
    form = 'Content-Disposition: form-data; name="{}"'
    parts = [f"{form.format('checkpoint')}\r\n\r\n{json.dumps(wish)}".encode()]
    parts += [f'{form.format(name)}; filename="f"\r\n\r\n'.encode() + bytes(size) for name, size in sizes.items()]
    body = b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + b"--b--\r\n"
    headers = [(b"content-type", b"multipart/form-data; boundary=b")]
    scope = {"type": "http", "headers": headers, "kedge.headers": dict(headers)}

    async def whole() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    upload = asyncio.run(receive(HttpRequest(scope, whole), Limits()))
    with ExitStack() as stack:
        _, encoded = upload.open(stack)
        assert [buffer.nbytes for buffer in encoded.buffers if isinstance(buffer, memoryview)] == [*sizes.values()]
        assert all(isinstance(getattr(buffer, "obj", None), mmap.mmap) for buffer in encoded.buffers)
    asyncio.run(upload.close())


@pytest.mark.parametrize(
    ("state", "parts"),
    [
        ({"$part": "missing"}, {}),
        ({"$part": "a", "dtype": "<f4", "shape": [3]}, {"a": b"1234"}),
        ({"$part": "a", "dtype": "O", "shape": [1]}, {"a": b"12345678"}),
        ({"$part": "a", "dtype": "<f4", "shape": [-1]}, {"a": b"1234"}),
        ({"$part": "a", "more": 1}, {"a": b"1234"}),
        ({}, {"unused": b"1"}),
    ],
)
def test_multipart_that_does_not_fit(
    client: TestClient, store: kedge.CheckpointManager, state: object, parts: dict[str, bytes]
) -> None:
    files: dict[str, Any] = {"checkpoint": (None, json.dumps({"step": "s", "state": state}), "application/json")}
    files |= {name: ("f", data) for name, data in parts.items()}
    answer = client.post(f"{V1}/jobs/j/checkpoints", files=files)
    assert answer.status_code == 422, answer.text
    assert store.list("j") == []


def test_pages_by_cursor(client: TestClient, store: kedge.CheckpointManager) -> None:
    ids = [store.save("j", f"s{n}", n, tags={"odd": str(n % 2)}, metadata={"n": n}) for n in range(7)]

    def all_of(url: str, key: str, **params: Any) -> list[Any]:
        found, cursor = [], None
        while True:
            page = client.get(url, params={**params, **({"cursor": cursor} if cursor else {})}).json()
            found += page[key]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    url = f"{V1}/jobs/j/checkpoints"
    assert [c["id"] for c in all_of(url, "checkpoints", limit=3)] == ids[::-1]
    assert [c["id"] for c in all_of(url, "checkpoints", limit=3, order="oldest")] == ids
    assert [c["id"] for c in all_of(url, "checkpoints", limit=2, tag="odd=1")] == ids[1::2][::-1]
    assert [c["id"] for c in all_of(url, "checkpoints", metadata="n=4")] == [ids[4]]
    for n in range(5):
        store.save(f"k{n}", "s", 1)
    assert [j["name"] for j in all_of(f"{V1}/jobs", "jobs", limit=2, prefix="k")] == [f"k{n}" for n in range(5)]
    assert len(all_of(f"{V1}/audit", "events", limit=4)) == 12
    assert client.get(url, params={"curser": "1"}).status_code == 422


def test_changes(client: TestClient, store: kedge.CheckpointManager) -> None:
    one = save(client, tags={"a": "1", "b": "2"})["id"]
    here = f"{V1}/checkpoints/{one}"
    tagged = client.patch(f"{here}/tags", json={"tags": {"a": None, "c": "3"}}).json()
    assert tagged["tags"] == {"b": "2", "c": "3"}
    assert client.put(f"{here}/pin", json={}).json()["pinned"]
    assert client.delete(here).status_code == 409
    assert client.put(f"{here}/status", json={"status": "archived"}).json()["status"] == "archived"
    branched = client.post(f"{here}/branch", json={"job": "other"}).json()
    assert (branched["job"], branched["parent"]) == ("other", one)
    assert client.post(f"{V1}/jobs/j/copy", json={"to": "copy"}).json() == {"job": "copy", "checkpoints": 1}
    client.put(f"{here}/pin", json={"pinned": False})
    assert client.delete(here).status_code == 204
    assert client.delete(here).status_code == 404
    assert store.list("j") == []


def test_diff(client: TestClient) -> None:
    old, new = save(client, state={"a": 1, "b": 2})["id"], save(client, state={"a": 1, "b": 3, "c": 4})["id"]
    found = client.get(f"{V1}/diff", params={"old": old, "new": new}).json()
    assert (found["same"], found["added"], found["changed"], found["removed"]) == (False, 1, 1, 0)
    assert {change["path"] for change in found["changes"]} == {"b", "c"}


def test_retention_is_planned_then_applied(client: TestClient, store: kedge.CheckpointManager) -> None:
    ids = [store.save("j", "s", n) for n in range(5)]
    wish = {"job": "j", "policy": {"keep_last": 2}}
    planned = client.post(f"{V1}/retention/plan", json=wish).json()
    assert ([c["id"] for c in planned["delete"]], planned["applied"]) == (ids[:3], False)
    assert len(store.list("j")) == 5
    applied = client.post(f"{V1}/retention/apply", json=wish).json()
    assert ([c["id"] for c in applied["delete"]], applied["applied"]) == (ids[:3], True)
    assert [c.id for c in store.list("j")] == ids[3:]
    assert client.put(f"{V1}/jobs/j/retention", json={"policy": {"keep_last": 1}}).json()["retention"] == {
        "keep_last": 1
    }
    assert client.put(f"{V1}/jobs/none/retention", json={"policy": None}).status_code == 404


def test_runs_steps_items_attempts(client: TestClient, store: kedge.CheckpointManager) -> None:
    def flaky(n: int) -> int:
        if n == 3:
            raise ValueError("three")
        return n

    with pytest.raises(ValueError, match="three"), kedge.run("nightly", store=store) as run:
        run.step("one", lambda: 1)
        run.log("half way")
        run.map(flaky, range(5), key=str, workers=1, name="tiles")
    runs = client.get(f"{V1}/runs").json()["runs"]
    assert [(r["key"], r["status"]) for r in runs] == [("nightly", "failed")]
    assert client.get(f"{V1}/runs", params={"status": "completed"}).json()["runs"] == []
    detail = client.get(f"{V1}/runs/nightly").json()
    assert {s["path"]: s["verdict"] for s in detail["steps"]}["one"] == "ran"
    assert [line["text"] for line in detail["log"]] == ["half way"]
    batches = client.get(f"{V1}/runs/nightly/items").json()["batches"]
    failed = [failure for batch in batches for failure in batch["failed"]]
    assert [(f["key"], f["attempts"]) for f in failed] == [("3", 1)]
    assert client.get(f"{V1}/runs/nightly/attempts").status_code == 200
    assert client.post(f"{V1}/runs/nightly/signals", json={"name": "go", "value": {"a": 1}}).status_code == 201
    assert client.post(f"{V1}/runs/nightly/cancel").json() == {"run": "nightly", "cancelled": True}
    for missing in ("runs/none", "runs/none/items", "runs/none/attempts"):
        assert client.get(f"{V1}/{missing}").status_code == 404


def test_approvals_are_decided_once(client: TestClient, store: kedge.CheckpointManager) -> None:
    with pytest.raises(kedge.Paused), kedge.run("release", store=store) as run:
        run.approval("publish", prompt="Go live?", wait_s=0)
    workflows = Workflows(store)
    execution = workflows.start_workflow_execution("c-1", "flow")
    workflows.create_checkpoint(execution, "review", "agent", {"x": 1}, approval_required=True)
    waiting = client.get(f"{V1}/approvals").json()["approvals"]
    assert {(a["run"], a["name"], a["kind"]) for a in waiting} == {
        ("release", "publish", "run"),
        (execution, "review", "execution"),
    }
    for run_key, name in (("release", "publish"), (execution, "review")):
        wish = {"run": run_key, "name": name, "approved": True, "comment": "fine"}
        assert client.post(f"{V1}/approvals", json=wish).json()["approved"]
        assert client.post(f"{V1}/approvals", json={**wish, "approved": False}).status_code == 409
    assert client.post(f"{V1}/approvals", json={**wish, "run": "nobody"}).status_code == 404
    assert client.get(f"{V1}/executions/{execution}").json()["execution"]["state"] == "running"


def test_executions(client: TestClient) -> None:
    started = client.post(f"{V1}/executions", json={"correlation_id": "c", "workflow_name": "w"}).json()
    here = f"{V1}/executions/{started['execution_id']}"
    assert client.post(f"{here}/checkpoints", json={"checkpoint_name": "a", "agent_id": "x"}).status_code == 201
    assert client.post(f"{here}/end", json={}).status_code == 409
    assert client.post(f"{here}/complete", json={"checkpoint": "a", "output_data": [1]}).json() == {"changed": True}
    assert client.post(f"{here}/pause").json() == {"changed": True}
    assert client.post(f"{here}/resume").json() == {"changed": True}
    assert client.post(f"{here}/end").json() == {"changed": True}
    listed = client.get(f"{V1}/executions", params={"state": "completed"}).json()["executions"]
    assert [(e["execution_id"], e["completed_checkpoints"]) for e in listed] == [(started["execution_id"], 1)]
    assert len(client.get(here).json()["history"]) == 6
    assert client.get(f"{V1}/executions/exec_none").status_code == 404


def _task(client: TestClient, task_id: str) -> Any:
    return client.get(f"{V1}/tasks/{task_id}").json()


def test_verify_and_gc_in_the_background(client: TestClient, store: kedge.CheckpointManager) -> None:
    saved = store.save("j", "s", {"a": np.random.default_rng(0).bytes(400_000)})
    store.delete("j", saved)
    for kind in ("verify", "gc"):
        task = client.post(f"{V1}/{kind}").json()
        assert task["status"] == "running"
        wait_for(lambda task=task: _task(client, task["id"])["status"] != "running", "it does not end")
        task = _task(client, task["id"])
        assert task["status"] == "completed", task
    assert task["result"]["bytes_freed"] > 300_000
    assert [t["kind"] for t in client.get(f"{V1}/tasks").json()["tasks"]] == ["gc", "verify"]
    assert client.get(f"{V1}/stats").json()["packs"] <= 1  # with the record of the gc itself
    assert store.jobs() == []  # tasks are kept elsewhere, and j has nothing left


def test_leases(client: TestClient, store: kedge.CheckpointManager) -> None:
    lease = client.post(f"{V1}/jobs/j/lease", json={"holder": "me", "ttl_s": 30}).json()
    assert client.post(f"{V1}/jobs/j/lease", json={"holder": "you"}).status_code == 409
    assert client.post(f"{V1}/jobs/j/checkpoints", json={"step": "s", "state": 1}).status_code == 409
    assert save(client, lease=lease["token"])["seq"] == 1
    assert client.put(f"{V1}/jobs/j/lease", json={"token": lease["token"]}).status_code == 204
    assert client.delete(f"{V1}/jobs/j/lease", params={"token": lease["token"]}).status_code == 204
    assert client.put(f"{V1}/jobs/j/lease", json={"token": lease["token"]}).status_code == 409
    assert save(client)["seq"] == 2
    assert "kedge_lease_conflicts_total 3.0" in client.get("/metrics").text


def test_money_and_containers(client: TestClient, store: kedge.CheckpointManager) -> None:
    bill = {"paid": 1, "found": 2, "spent": "0.5", "saved": "1.25", "model": "small-1"}
    store.save("llm:calls", "call", None, metadata=bill)
    store.save("container:web", "frozen", {"state": 1})
    found = client.get(f"{V1}/llm/stats").json()
    assert (found["total"]["spent"], found["groups"][0]["key"]) == ("0.5", {"model": "small-1"})
    assert [c["job"] for c in client.get(f"{V1}/containers").json()["checkpoints"]] == ["container:web"]
    assert 'kedge_llm_saved_dollars{namespace="default"} 1.25' in client.get("/metrics").text


def test_the_audit_log_is_proved(client: TestClient, store: kedge.CheckpointManager, place: Path) -> None:
    import sqlite3

    for n in range(3):
        store.save("j", "s", n)
    before = client.get(f"{V1}/audit/verify").json()
    assert (before["ok"], before["entries"]) == (True, 3)
    with sqlite3.connect(place / "index.sqlite") as db:
        db.execute("UPDATE event SET actor = 'nobody' WHERE id = 2")
    assert client.get(f"{V1}/audit/verify").json()["broken_at"] == 2


def test_events_resume_where_they_broke(client: TestClient, store: kedge.CheckpointManager) -> None:
    ids = [store.save("j", "s", n) for n in range(3)]

    def first(count: int, **headers: str) -> list[dict[str, str]]:
        """The first events of a stream that began behind event 0; the service stops it."""
        found: list[dict[str, str]] = []
        with client.stream("GET", f"{V1}/events", params={"after": 0}, headers=headers) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            entry: dict[str, str] = {}
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name:
                    entry[name] = value
                elif entry.get("data"):
                    found.append(entry)
                    entry = {}
                if len(found) == count:
                    client.app.state.service.is_draining = True  # type: ignore[attr-defined]
                    break
        client.app.state.service.is_draining = False  # type: ignore[attr-defined]
        return found

    events = first(3)
    assert [json.loads(e["data"])["checkpoint"] for e in events] == ids
    assert {e["event"] for e in events} == {"save"}
    rest = first(2, **{"Last-Event-ID": events[0]["id"]})
    assert [e["id"] for e in rest] == [e["id"] for e in events[1:]]
    assert client.get(f"{V1}/events", headers={"Last-Event-ID": "x"}).status_code == 422
    newest = int(events[-1]["id"])
    (void,) = first(1, **{"Last-Event-ID": str(newest + 7)})  # of a store that was there before this one
    assert (void["event"], int(void["id"])) == ("reset", newest)
    assert json.loads(void["data"])["detail"] == {"asked": newest + 7}


def test_an_address_that_nobody_has_is_a_page_for_who_reads_pages(store: kedge.CheckpointManager) -> None:
    browser = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    with client_of(create_app(store, root_path="/below")) as client:
        shown = client.get("/nope", headers=browser)
        assert (shown.status_code, shown.headers["content-type"]) == (404, "text/html; charset=utf-8")
        assert 'href="/below/"' in shown.text
        assert shown.headers["x-request-id"] in shown.text
        for path, headers in (("/nope", {}), ("/api/v1/nope", browser)):
            told = client.get(path, headers=headers)
            assert (told.status_code, told.json()["code"]) == (404, "not_found")


def test_what_a_page_remembers_is_of_its_own_store() -> None:
    with kedge.open("memory:") as one, kedge.open("memory:") as other:
        workflows = Workflows(one)
        workflows.create_checkpoint(workflows.start_workflow_execution("w", "w"), "s", "a", approval_required=True)
        one.save("j", "s", np.random.default_rng(0).bytes(50_000))
        other.save("j", "s", 1)
        with client_of(create_app(one)) as client, client_of(create_app(other)) as stranger:
            assert "1 waiting" in client.get("/storage").text
            told = stranger.get("/storage").text
    assert "1 waiting" not in told
    added, stored = (re.search(f'data-label="{label}">([^<]+)<', told) for label in ("Added", "Stored"))
    assert added
    assert stored
    assert added[1] == stored[1]


def test_health_metrics_and_headers(client: TestClient, store: kedge.CheckpointManager) -> None:
    save(client)
    assert client.get("/healthz").json() == client.get("/readyz").json() == {"status": "ok"}
    numbers = client.get("/metrics").text
    assert 'kedge_saves_total{namespace="default"} 1.0' in numbers
    assert 'kedge_http_requests_total{method="POST",route="/api/v1/jobs/{job}/checkpoints",status="201"}' in numbers
    assert 'kedge_llm_saved_dollars{namespace="default"} 0.0' in numbers
    answer = client.get("/healthz", headers={"X-Request-ID": "abc-12345"})
    assert answer.headers["x-request-id"] == "abc-12345"
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy
    assert client.get("/healthz", headers={"X-Request-ID": "a\tb"}).headers["x-request-id"] != "a\tb"


def test_problems_say_what_and_what_to_do(client: TestClient, place: Path) -> None:
    answer = client.get(f"{V1}/checkpoints/nothing_1_00000000")
    body = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert body.keys() == {"type", "title", "status", "detail", "code", "hint", "request_id"}
    assert (body["code"], body["request_id"]) == ("not_found", answer.headers["x-request-id"])
    (place / "index.sqlite").rename(place / "moved")
    broken = client.post(f"{V1}/jobs/j/checkpoints", json={"step": "s", "state": 1})
    assert broken.status_code == 503
    assert str(place) not in broken.text
    assert "Traceback" not in broken.text


def test_mounted_under_a_prefix(store: kedge.CheckpointManager) -> None:
    from fastapi import FastAPI

    outer = FastAPI()
    inner = create_app(store)
    outer.mount("/checkpoints", inner)
    with client_of(outer) as client:
        assert client.get("/checkpoints/api/v1/jobs").status_code == 200
        assert client.get("/checkpoints/api/checkpoints/none").json().keys() == {"detail"}
        assert client.get("/checkpoints/api/v1/jobs", params={"limitt": 1}).status_code == 422
        assert client.get("/checkpoints/openapi.json").json()["servers"] == [{"url": "/checkpoints"}]
        assert save(client, prefix="/checkpoints")["seq"] == 1


def test_spans_when_telemetry_is_configured(store: kedge.CheckpointManager) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with client_of(create_app(store, telemetry={"tracer_provider": provider})) as client:
        client.get(f"{V1}/jobs")
    names = [span.name for span in exporter.get_finished_spans()]
    assert any("/api/v1/jobs" in name for name in names), names


def test_limits_of_size(store: kedge.CheckpointManager) -> None:
    limits = Limits(body_bytes=20_000, json_bytes=5_000, header_bytes=4_000)
    with client_of(create_app(store, limits=limits)) as client:
        url = f"{V1}/jobs/j/checkpoints"
        assert client.post(url, json={"step": "s", "state": "x" * 6_000}).status_code == 413
        assert client.post(url, json={"step": "s", "state": "x" * 30_000}).status_code == 413

        def pieces() -> Any:
            for _ in range(40):
                yield b"x" * 1_000

        streamed = client.post(url, content=pieces(), headers={"content-type": "application/json"})
        assert streamed.status_code == 413
        parts = {"checkpoint": (None, '{"step": "s"}', "application/json"), "state": ("s", b"x" * 30_000)}
        assert client.post(url, files=parts).status_code == 413  # type: ignore[arg-type]
        unsized = {"content-type": "multipart/form-data; boundary=b"}  # nobody says beforehand how much will come
        assert client.post(url, content=pieces(), headers=unsized).status_code == 413
        assert client.get(f"{V1}/jobs", headers={"X-Much": "x" * 5_000}).status_code == 431
    assert store.list("j") == []


def test_a_page_without_its_script_says_so(client: TestClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kedge.server.page import templates

    monkeypatch.setattr(templates, "STATIC", tmp_path)
    templates._mark.cache_clear()
    try:
        shown = client.get("/", headers={"Accept": "text/html"}).text
    finally:
        templates._mark.cache_clear()
    assert "./dev assets" in shown
    assert "htmx.min.js" not in shown


def test_head_answers_as_get_does_without_a_body(client: TestClient, store: kedge.CheckpointManager) -> None:
    saved = save(client)
    addresses = [f"{V1}/jobs", f"{V1}/checkpoints/{saved['id']}", f"{V1}/checkpoints/none_1_00000000", "/", "/healthz"]
    for address in addresses:
        got, head = client.get(address), client.head(address)
        assert (head.status_code, head.content) == (got.status_code, b""), address
        for name in ("content-type", "content-length"):
            assert head.headers[name] == got.headers[name], address
    assert client.head(f"{V1}/gc").status_code == 405


def test_head_on_a_stream_ends(store: kedge.CheckpointManager) -> None:
    with listening(create_app(store)) as url:
        answer = httpx.head(f"{url}{V1}/events", headers={"Accept": "text/event-stream"}, timeout=60)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert httpx.get(f"{url}/metrics", timeout=60).status_code == 200


def test_a_wrong_name_is_called_one(client: TestClient) -> None:
    refused = client.post("/api/v1/jobs/tr%20x/checkpoints", json={"step": "s", "state": 1})
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_name")
    assert "'tr x' is not a valid job" in refused.json()["detail"]


def test_the_document_says_what_a_tag_may_hold(client: TestClient, store: kedge.CheckpointManager) -> None:
    here = f"/api/v1/checkpoints/{store.save('train', 'one', {})}/tags"
    response = client.patch(here, json={"tags": {"kind": "a\0b"}})
    assert response.status_code == 422
    assert response.json()["errors"]  # found by the schema, so the OpenAPI document has it
