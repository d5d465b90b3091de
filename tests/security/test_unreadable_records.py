"""Records that nobody but an attacker writes: each is shown as what it is, and breaks no page but its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fastapi.testclient import TestClient

import kedge
from kedge.cli.app import cli
from kedge.server import create_app
from tests.server.conftest import client_of

WRONG: list[Any] = [None, "\u202e<script>nonsense", -1, ["x", []], {"a": {"b": []}}]

# The names that pages and commands look for in records of each kind; whoever can save may write anything there.
FIELDS = {
    "run": ["status", "session", "version", "pipeline", "waiting", "progress", "error", "owner", "ran", "reused"],
    "step": ["path", "session", "seconds", "attempts", "inputs", "llm", "version"],
    "attempt": ["path", "session", "error", "attempt"],
    "items": ["path", "session", "items", "failed", "keys"],
    "log": ["text", "path"],
    "approval": ["path", "name", "prompt", "asked_at", "deadline", "approved", "actor", "comment"],
    "decision": ["path", "name", "approved", "actor", "comment"],
    "wait": ["path", "name", "for", "until", "prompt"],
    "message": ["name", "value"],
    "llm": ["model", "url", "tokens", "cost", "sample"],
    "charge": ["model", "run", "step", "tokens", "cost", "calls"],
    "container": ["id", "name", "status", "moment", "pod", "size"],
}
STATES: list[Any] = [
    None,
    7,
    "text",
    [],
    {},
    {"ran": 5, "reused": None},
    {"failed": [1, {}]},
    {"state": "x", "checkpoints": 3},
]


def plant(store: kedge.CheckpointManager) -> list[str]:
    """One job for each wrong field, each after a record of a run, so that it is a run; and all that are none."""
    jobs = []
    states = itertools.cycle(STATES)
    for kind, fields in FIELDS.items():
        for number, (name, value) in enumerate(itertools.product(fields, WRONG)):
            job = f"{kind}-{name}-{number}"
            sound = {"kind": "run", "status": "paused", "session": 1, "version": ""}
            if kind != "run":
                store.save(job, "run", {"ran": [], "reused": []}, tags={"kind": "run"}, metadata=sound)
            about = {**(sound if kind == "run" else {"kind": kind, "path": ["a"], "session": 1}), name: value}
            store.save(job, "s", next(states), tags={"kind": kind}, metadata=about)
            jobs.append(job)
    for number, state in enumerate(STATES):
        for prefix in ("exec_", "llm:", "inbox:", "container:", "thread:"):
            store.save(f"{prefix}{number}", "s", state, tags={"kind": "execution"}, metadata={"kind": "execution"})
            jobs.append(f"{prefix}{number}")
        for job in ("llm:cache", "llm:calls", "llm:flights"):
            about = {"kind": "llm", "model": "m", "run": "run-status-0", "step": "a"}
            store.save(job, "s", state, tags={"run": "run-status-0"}, metadata=about)
    return jobs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("records") / "store"


@pytest.fixture(scope="module")
def jobs(place: Path) -> list[str]:
    with kedge.open(place) as store:
        return plant(store)


@pytest.fixture(scope="module")
def client(place: Path, jobs: list[str]) -> Iterator[TestClient]:
    with client_of(create_app(place)) as client:
        yield client


SHARED = [
    "/", "/runs", "/approvals", "/models", "/storage", "/activity", "/api/v1/jobs", "/api/v1/runs?limit=500",
    "/api/v1/approvals?limit=500", "/api/v1/executions", "/api/v1/llm/costs", "/api/v1/stats", "/metrics",
    "/api/v1/containers",
]  # fmt: skip


@pytest.mark.parametrize("path", SHARED)
def test_pages_that_show_all(client: TestClient, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code in (200, 404), answer.text[:300]


@pytest.mark.parametrize("kind", [*FIELDS, "exec_", "llm:", "inbox:", "container:", "thread:"])
def test_pages_of_one(client: TestClient, jobs: list[str], kind: str) -> None:
    failures = []
    for job in (job for job in jobs if job.startswith(kind)):
        for path in (
            f"/jobs/{job}",
            f"/runs/{job}",
            f"/api/v1/runs/{job}",
            f"/api/v1/executions/{job}",
            f"/api/v1/runs/{job}/items",
            f"/api/v1/runs/{job}/attempts",
        ):
            answer = client.get(path)
            if answer.status_code >= 500:
                failures.append((path, answer.status_code))
    assert failures == []


@pytest.mark.parametrize(
    "words",
    [["runs", "list"], ["jobs"], ["runs", "executions"], ["llm", "stats"], ["stats"]],
    ids=" ".join,
)
def test_commands_that_show_all(place: Path, jobs: list[str], words: list[str]) -> None:
    done = CliRunner().invoke(cli, [*words, "--store", str(place)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception


@pytest.mark.parametrize("kind", FIELDS)
def test_commands_that_show_one(place: Path, jobs: list[str], kind: str) -> None:
    failures = []
    for job in (job for job in jobs if job.startswith(kind)):
        for words in (["runs", "show", job], ["runs", "explain", job]):
            done = CliRunner().invoke(cli, [*words, "--store", str(place)])
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                failures.append((words, repr(done.exception)))
    assert failures == []


def test_an_unreadable_run_says_so_and_can_be_deleted(tmp_path: Path) -> None:
    with kedge.open(tmp_path / "store") as store:
        bad = store.save("odd", "s", None, tags={"kind": "run"}, metadata={"kind": "run", "status": "nonsense"})
        with client_of(create_app(store)) as client:
            [run] = client.get("/api/v1/runs").json()["runs"]
            assert (run["key"], run["status"]) == ("odd", "unreadable")
            assert client.get("/api/v1/runs?status=unreadable").json()["runs"] == [run]
            assert "unreadable" in client.get("/runs").text
            assert client.delete(f"/api/v1/checkpoints/{bad}").status_code == 204
            assert client.get("/api/v1/runs").json()["runs"] == []
