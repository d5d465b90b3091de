"""The demonstration: a real job, really killed, ends as if it had never been interrupted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kedge import CheckpointManager
from kedge.cli import demo_job
from kedge.cli.commands import demo


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEDGE_")}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=environment, timeout=90
    )


def test_the_result_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    result = run("-m", "kedge", "demo", "--fast", "--keep", "kept", "--json", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    account = json.loads(result.stdout)
    assert account["equal"]
    assert account["digest"] == account["expected_digest"]
    assert account["runs"] == 3
    assert [kill["exit_code"] for kill in account["kills"]] == [-9, -9]
    assert {kill["during"] for kill in account["kills"]} <= {"computation", "save"}
    assert len(account["resumed_from"]) == 2
    assert account["lost"] == 0
    with CheckpointManager(tmp_path / "kept", create=False) as manager:
        steps = [checkpoint.step for checkpoint in manager.list("heat")]
    assert steps == [f"step {n}" for n in range(1, account["steps"] + 1)]


def test_it_shows_the_real_commands(tmp_path: Path) -> None:
    result = run("-m", "kedge", "demo", "--fast", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for text in (
        "kill -9",
        "resumes after step",
        "equals a run without interruption",
        "$ kedge list heat",
        "$ kedge show heat",
        "$ kedge diff heat~1 heat",
        " 19 → 20",
    ):
        assert text in result.stdout
    assert os.listdir(tmp_path) == []


def test_it_can_run_again_in_the_same_store(tmp_path: Path) -> None:
    for job in ("heat", "heat-2"):
        result = run("-m", "kedge", "demo", "--fast", "--keep", "kept", "--json", cwd=tmp_path)
        assert json.loads(result.stdout)["job"] == job


def test_a_failing_job_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="exit code 1"):
        list(demo.perform(str(tmp_path / "store"), demo.Account("heat", 3), 0))


def test_the_job_needs_no_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['numpy'] = None; from kedge.cli import demo_job; demo_job.work('store', 'j', 2, 0.0)"
    )
    for _ in range(2):
        result = run("-c", code, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[0])["step"] == 2


def test_a_step_is_the_same_every_time() -> None:
    plate = demo_job.cold_plate()
    for step in range(1, 4):
        plate = demo_job.advance(plate, step)
    again = demo_job.cold_plate()
    for step in range(1, 4):
        again = demo_job.from_bytes(demo_job.to_bytes(demo_job.advance(again, step)))
    assert demo_job.to_bytes(plate) == demo_job.to_bytes(again)
