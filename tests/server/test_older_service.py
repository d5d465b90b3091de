"""The older jobs service under its own names, and the names of jobs and checkpoints that it took."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from kedge.legacy.jobs import CheckpointManager
from kedge.server import older_service

URL = "/api/checkpoints"


class Executor:
    def __init__(self) -> None:
        self.resumed: list[tuple[object, ...]] = []

    def resume_job(self, *arguments: object) -> None:
        self.resumed.append(arguments)


@pytest.fixture
def executor() -> Executor:
    return Executor()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    with CheckpointManager(storage_path=tmp_path / "checkpoints") as opened:
        yield opened
    older_service.set_checkpoint_manager(None)
    older_service.set_executor(None)


@pytest.fixture
def client(manager: CheckpointManager, executor: Executor) -> TestClient:
    app = older_service.create_app(executor=executor)
    older_service.set_checkpoint_manager(manager)  # as that service did: after the application is made
    return TestClient(app, base_url="http://127.0.0.1:7420", client=("127.0.0.1", 50000))


def test_a_restore_with_resume_calls_the_executor_by_the_job_alone(
    client: TestClient, manager: CheckpointManager, executor: Executor
) -> None:
    saved = manager.save("job one", "step", {"n": 1})
    answer: Any = client.post(f"{URL}/{saved}/restore", json={"resume": True}).json()
    assert (answer["job_status"], answer["state"]) == ("resumed", {"n": 1})
    assert executor.resumed == [("job one",)]


def test_other_machines_are_refused(client: TestClient, manager: CheckpointManager) -> None:
    far = TestClient(client.app, base_url="http://127.0.0.1:7420", client=("203.0.113.7", 50000))
    assert far.get(URL, params={"job_id": "x"}).status_code == 403


def test_its_routes_in_an_application_of_somebody_else(manager: CheckpointManager, executor: Executor) -> None:
    app = FastAPI()
    app.get("/api/batch")(lambda: "theirs")
    older_service.set_checkpoint_manager(manager)
    older_service.set_executor(executor)
    app.include_router(older_service.router)
    client = TestClient(app, base_url="http://127.0.0.1:7420", client=("127.0.0.1", 50000))
    saved = manager.save("job", "step", {"n": 1})
    assert client.get(URL, params={"job_id": "job"}).json()["total"] == 1
    assert client.post(f"{URL}/{saved}/restore", json={"resume": True}).json()["job_status"] == "resumed"
    assert executor.resumed == [("job",)]
    assert client.delete(f"{URL}/{saved}").status_code == 204
    assert client.get(f"{URL}/{saved}").status_code == 404
    assert client.get("/api/batch").json() == "theirs"
    assert client.get("/api/v1/jobs").status_code == 404
    far = TestClient(app, base_url="http://127.0.0.1:7420", client=("203.0.113.7", 50000))
    assert far.get(URL, params={"job_id": "job"}).status_code == 403


@pytest.mark.parametrize("name", ["job 9", "tâche №1", "a#b", "50% off?", "x" * 200])
def test_names_that_it_took(tmp_path: Path, executor: Executor, name: str) -> None:
    own_id = f"{name[:150]} outline_1763461834_1a2b3c4d"
    document = {
        "checkpoint_id": own_id, "job_id": name, "step_name": "outline", "state": {"n": 1},
        "timestamp": "2025-11-18T10:30:34.123456+00:00", "workflow_version": "1.0",
    }  # fmt: skip
    folder = tmp_path / "checkpoints" / name
    folder.mkdir(parents=True)
    (folder / f"{own_id}.json").write_text(json.dumps(document))
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        older_service.set_checkpoint_manager(manager)
        app = older_service.create_app(executor)
        client = TestClient(app, base_url="http://127.0.0.1:7420", client=("127.0.0.1", 50000))
        manager.save(name, "draft", {"n": 2})
        listed: Any = client.get(URL, params={"job_id": name}).json()
        assert [c["step_name"] for c in listed["checkpoints"]] == ["outline", "draft"]
        assert (listed["checkpoints"][0]["checkpoint_id"], listed["checkpoints"][0]["job_id"]) == (own_id, name)
        path = f"{URL}/{quote(own_id, safe='')}"
        assert client.get(path).json()["state_snapshot"] == {"n": 1}
        assert client.post(f"{path}/restore", json={"resume": True}).json()["job_id"] == name
        assert executor.resumed == [(name,)]
        cleaned: Any = client.post(f"{URL}/cleanup", json={"job_id": name, "keep_last": 1}).json()
        assert (cleaned["job_id"], cleaned["deleted_count"], cleaned["kept_count"]) == (name, 1, 1)
        assert client.delete(path).status_code == 404
    older_service.set_checkpoint_manager(None)
