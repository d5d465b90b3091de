"""The 21 behaviours of the older jobs service, under their names."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import kedge
from kedge.server import create_app

URL = "/api/checkpoints"
FIELDS = {"checkpoint_id", "job_id", "step_name", "timestamp", "workflow_version", "workflow_name", "metadata"}


class Runner:
    def __init__(self, answer: object = True) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer = answer

    def resume_job(self, job_id: str, state: object) -> object:
        self.calls.append((job_id, state))
        return self.answer


def client_of(app: Any) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1:7420", client=("127.0.0.1", 50000))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as manager:
        yield manager


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def client(store: kedge.CheckpointManager, runner: Runner) -> Iterator[TestClient]:
    with client_of(create_app(store, runner)) as client:
        yield client


def saved(store: kedge.CheckpointManager, count: int, job: str = "job_9") -> list[str]:
    return [
        store.save(job, f"step {n}", {"current_step": n, "values": [n] * n}, metadata={"workflow_name": "blog"})
        for n in range(count)
    ]


def test_list_of_five_with_metadata_and_total(client: TestClient, store: kedge.CheckpointManager) -> None:
    ids = saved(store, 5)
    answer = client.get(URL, params={"job_id": "job_9"})
    assert answer.status_code == 200
    body = answer.json()
    assert body.keys() == {"job_id", "checkpoints", "total", "timestamp"}
    assert (body["job_id"], body["total"]) == ("job_9", 5)
    assert [each["checkpoint_id"] for each in body["checkpoints"]] == ids
    assert all(each.keys() == FIELDS for each in body["checkpoints"])
    first = body["checkpoints"][0]
    assert (first["step_name"], first["workflow_version"], first["workflow_name"]) == ("step 0", "1.0", "blog")


def test_list_is_empty_for_an_unknown_job(client: TestClient) -> None:
    answer = client.get(URL, params={"job_id": "nobody"})
    assert answer.status_code == 200
    assert (answer.json()["checkpoints"], answer.json()["total"]) == ([], 0)


def test_list_without_job_id_is_422(client: TestClient) -> None:
    answer = client.get(URL)
    assert answer.status_code == 422
    assert answer.json().keys() == {"detail"}


def test_get_with_state(client: TestClient, store: kedge.CheckpointManager) -> None:
    ids = saved(store, 3)
    body = client.get(f"{URL}/{ids[2]}").json()
    assert body.keys() == FIELDS | {"state_snapshot"}
    assert body["state_snapshot"] == {"current_step": 2, "values": [2, 2]}


def test_get_of_an_unknown_one_is_404(client: TestClient) -> None:
    for unknown in ("step_1_00000000", "a b", "x" * 300):
        answer = client.get(f"{URL}/{unknown}")
        assert answer.status_code == 404
        assert answer.json().keys() == {"detail"}
        assert "not found" in answer.json()["detail"]


def test_restore_answers_restored(client: TestClient, store: kedge.CheckpointManager, runner: Runner) -> None:
    (one,) = saved(store, 1)
    answer = client.post(f"{URL}/{one}/restore", json={"resume": False})
    assert answer.status_code == 200
    body = answer.json()
    assert body.keys() == {"checkpoint_id", "job_id", "state", "job_status", "message", "timestamp"}
    assert (body["job_status"], body["job_id"], body["state"]) == (
        "restored",
        "job_9",
        {"current_step": 0, "values": []},
    )
    assert runner.calls == []


def test_restore_and_resume_calls_the_runner_once(
    client: TestClient, store: kedge.CheckpointManager, runner: Runner
) -> None:
    ids = saved(store, 2)
    answer = client.post(f"{URL}/{ids[1]}/restore", json={"resume": True})
    assert (answer.status_code, answer.json()["job_status"]) == (200, "resumed")
    assert runner.calls == [("job_9", {"current_step": 1, "values": [1]})]


def test_resume_defaults_to_false(client: TestClient, store: kedge.CheckpointManager, runner: Runner) -> None:
    (one,) = saved(store, 1)
    for body in ({}, {"json": {}}):
        answer = client.post(f"{URL}/{one}/restore", **body)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["job_status"]) == (200, "restored")
    assert runner.calls == []


def test_restore_of_an_unknown_one_is_404(client: TestClient, runner: Runner) -> None:
    answer = client.post(f"{URL}/step_1_00000000/restore", json={"resume": True})
    assert answer.status_code == 404
    assert "not found" in answer.json()["detail"]
    assert runner.calls == []


def test_delete_is_204_and_gone_from_the_list(client: TestClient, store: kedge.CheckpointManager) -> None:
    ids = saved(store, 3)
    answer = client.delete(f"{URL}/{ids[1]}")
    assert (answer.status_code, answer.content) == (204, b"")
    left = client.get(URL, params={"job_id": "job_9"}).json()
    assert [each["checkpoint_id"] for each in left["checkpoints"]] == [ids[0], ids[2]]


def test_delete_of_an_unknown_one_is_404(client: TestClient) -> None:
    answer = client.delete(f"{URL}/step_1_00000000")
    assert answer.status_code == 404
    assert "not found" in answer.json()["detail"]


@pytest.mark.parametrize(("keep", "deleted", "kept"), [(3, 2, 3), (10, 0, 5)])
def test_cleanup_keeps_the_newest(
    client: TestClient, store: kedge.CheckpointManager, keep: int, deleted: int, kept: int
) -> None:
    ids = saved(store, 5)
    answer = client.post(f"{URL}/cleanup", json={"job_id": "job_9", "keep_last": keep})
    assert answer.status_code == 200
    body = answer.json()
    assert body.keys() == {"job_id", "deleted_count", "kept_count", "timestamp"}
    assert (body["deleted_count"], body["kept_count"]) == (deleted, kept)
    assert [c.id for c in store.list("job_9")] == ids[-kept:]


@pytest.mark.parametrize("keep", [0, 101])
def test_cleanup_refuses_keep_last_outside_1_to_100(
    client: TestClient, store: kedge.CheckpointManager, keep: int
) -> None:
    saved(store, 2)
    answer = client.post(f"{URL}/cleanup", json={"job_id": "job_9", "keep_last": keep})
    assert answer.status_code == 422
    assert len(store.list("job_9")) == 2


def test_cleanup_without_job_id_is_422(client: TestClient) -> None:
    assert client.post(f"{URL}/cleanup", json={"keep_last": 3}).status_code == 422


def test_cleanup_keeps_ten_by_default(client: TestClient, store: kedge.CheckpointManager) -> None:
    saved(store, 15)
    body = client.post(f"{URL}/cleanup", json={"job_id": "job_9"}).json()
    assert (body["deleted_count"], body["kept_count"]) == (5, 10)


def test_a_service_without_a_store_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with client_of(create_app()) as client:
        assert client.get(URL, params={"job_id": "job_9"}).json()["total"] == 0
    assert (tmp_path / ".kedge" / "kedge-store").is_file()


def test_ten_concurrent_reads_succeed(client: TestClient, store: kedge.CheckpointManager) -> None:
    ids = saved(store, 3)
    with ThreadPoolExecutor(10) as threads:
        answers = list(threads.map(lambda n: client.get(f"{URL}/{ids[n % 3]}"), range(10)))
    assert [answer.status_code for answer in answers] == [200] * 10
    assert [answer.json()["state_snapshot"]["current_step"] for answer in answers] == [n % 3 for n in range(10)]


def test_lifecycle(client: TestClient, store: kedge.CheckpointManager) -> None:
    ids = saved(store, 7)
    assert client.get(URL, params={"job_id": "job_9"}).json()["total"] == 7
    assert client.get(f"{URL}/{ids[3]}").json()["state_snapshot"]["current_step"] == 3
    assert client.post(f"{URL}/{ids[3]}/restore").json()["state"]["current_step"] == 3
    assert client.post(f"{URL}/cleanup", json={"job_id": "job_9", "keep_last": 3}).json()["deleted_count"] == 4
    assert client.delete(f"{URL}/{ids[6]}").status_code == 204
    assert client.get(URL, params={"job_id": "job_9"}).json()["total"] == 2


def test_lifecycle_restore_with_resume_calls_the_runner(
    client: TestClient, store: kedge.CheckpointManager, runner: Runner
) -> None:
    ids = saved(store, 2)
    client.post(f"{URL}/{ids[0]}/restore", json={"resume": True})
    assert [job for job, _ in runner.calls] == ["job_9"]


# Beyond the 21: what the older service got wrong.


def test_a_runner_that_takes_only_the_job_works(store: kedge.CheckpointManager) -> None:
    class Older:
        calls: list[str] = []  # noqa: RUF012

        def resume_job(self, job_id: str) -> None:
            self.calls.append(job_id)

    (one,) = saved(store, 1)
    with client_of(create_app(store, Older())) as client:
        assert client.post(f"{URL}/{one}/restore", json={"resume": True}).json()["job_status"] == "resumed"
    assert Older.calls == ["job_9"]


def test_a_refusal_of_the_runner_is_reported(store: kedge.CheckpointManager) -> None:
    runner = Runner(answer=False)
    (one,) = saved(store, 1)
    with client_of(create_app(store, runner)) as client:
        answer = client.post(f"{URL}/{one}/restore", json={"resume": True})
    assert answer.status_code == 409
    assert "refused" in answer.json()["detail"]
    assert len(runner.calls) == 1


def test_a_failure_of_the_runner_is_reported_without_its_text(store: kedge.CheckpointManager) -> None:
    class Broken:
        def resume_job(self, job_id: str, state: object) -> None:
            raise RuntimeError("/secret/path")

    (one,) = saved(store, 1)
    with client_of(create_app(store, Broken())) as client:
        answer = client.post(f"{URL}/{one}/restore", json={"resume": True})
    assert answer.status_code == 502
    assert "secret" not in answer.text


def test_damaged_data_is_400(client: TestClient, store: kedge.CheckpointManager, tmp_path: Path) -> None:
    import sqlite3

    (one,) = saved(store, 1)
    with sqlite3.connect(tmp_path / "store" / "index.sqlite") as db:
        db.execute("UPDATE checkpoint SET manifest = X'00' || manifest")
    for answer in (client.post(f"{URL}/{one}/restore"), client.get(f"{URL}/{one}")):
        assert answer.status_code == 400
        assert answer.json().keys() == {"detail"}
