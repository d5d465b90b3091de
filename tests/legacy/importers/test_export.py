"""Leaving is possible: what is exported in an old layout is what was imported, and goes on from there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings

import kedge
from kedge.cli import cli
from kedge.legacy.importers import bring
from kedge.process.workflow import Workflows

from .writers import artemis, jobs


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "store"
    monkeypatch.setenv("KEDGE_STORE", str(place))
    return place


def run(*words: str) -> Any:
    result = CliRunner().invoke(cli, [*words, "--json"])
    assert result.exit_code == 0, f"{words}\n{result.output}\n{result.exception!r}"
    return json.loads(result.stdout)


def put(folder: Path, name: str, document: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(document))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_jobs_there_and_back(store: Path, tmp_path: Path) -> None:
    written = [jobs.checkpoint("job_9", f"s/{n}", {"n": n, "ü": [None, 1.5]}, n) for n in range(3)]
    for n, document in enumerate(written):
        put(tmp_path / "old", f"{n}.json", document)
    run("import", str(tmp_path / "old"))
    assert run("export", "job_9", str(tmp_path / "new"), "--format", "jobs")["files"] == 3
    found = [read(path) for path in (tmp_path / "new" / "job_9").iterdir()]
    assert sorted(found, key=lambda d: d["timestamp"]) == written
    with kedge.open("memory:") as other:
        assert bring(str(tmp_path / "new"), other).imported == 3
        assert other.restore("job_9") == written[-1]["state"]


def test_into_a_directory_that_has_others(store: Path, tmp_path: Path) -> None:
    for n in range(2):
        put(tmp_path / "old", f"{n}.json", jobs.checkpoint(f"job_{n}", "s", {"n": n}, n))
    put(tmp_path / "old", "card-77.json", artemis.card("card-77", {"plan": artemis.stage("plan", 0)}))
    run("import", str(tmp_path / "old"))
    out = tmp_path / "out"
    run("export", "job_0", str(out), "--format", "jobs")
    run("export", "job_1", str(out), "--format", "jobs")
    run("export", "card-77", str(out), "--format", "artemis")
    (out / "job_0" / "mine.txt").write_text("mine")
    written = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    refused = CliRunner().invoke(cli, ["export", "job_0", str(out), "--format", "jobs"])
    assert refused.exit_code == 5
    (taken,) = (path for path in (out / "job_0").iterdir() if path.suffix == ".json")
    taken.write_text("older")
    run("export", "job_0", str(out), "--format", "jobs", "--force")
    assert len(written) == 4
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == written
    assert {path.name for path in out.iterdir()} == {"job_0", "job_1", "card-77.json"}


@given(jobs.checkpoints())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_checkpoint_there_and_back(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> None:
    from kedge.legacy.importers.export import jobs_files

    folder = tmp_path_factory.mktemp("any")
    put(folder, "a.json", document)
    with kedge.open("memory:") as opened:
        report = bring(str(folder), opened)
        (job,) = report.jobs
        ((_, found),) = jobs_files(opened.list(job), lambda c: opened.load(c.id))
    assert found == {"workflow_version": "1.0", **document}


def test_new_checkpoints_in_the_old_layout(store: Path, tmp_path: Path) -> None:
    with kedge.open(store) as opened:
        made = opened.save("train", "epoch 1", {"loss": 0.5, "tuple": (1, 2)})
    run("export", "train", str(tmp_path / "out"), "--format", "jobs")
    document = read(tmp_path / "out" / "train" / f"{made}.json")
    assert (document["job_id"], document["step_name"], document["workflow_version"]) == ("train", "epoch 1", "1.0")
    assert document["state"] == {"loss": 0.5, "tuple": {"$type": "tuple", "items": [1, 2]}}


def test_executions_there_and_back(store: Path, tmp_path: Path) -> None:
    waiting = jobs.step("publish", "paused", approval_required=True, approval_status="pending")
    document = jobs.execution("c1", [jobs.step("draft"), waiting], state="paused")
    put(tmp_path / "old", "exec_c1_1763461834.json", document)
    run("import", str(tmp_path / "old"))
    run("export", "exec_c1_1763461834", str(tmp_path / "same"), "--format", "jobs")
    assert read(tmp_path / "same" / "exec_c1_1763461834.json") == document
    with kedge.open(store) as opened:
        Workflows(opened).approve_checkpoint("exec_c1_1763461834", "publish", True)
    run("export", "exec_c1_1763461834", str(tmp_path / "later"), "--format", "jobs")
    later = read(tmp_path / "later" / "exec_c1_1763461834.json")
    assert (later["state"], later["checkpoints"][1]["approval_status"]) == ("running", "approved")


def test_cards_there_and_back(store: Path, tmp_path: Path) -> None:
    stages = {"plan": artemis.stage("plan", 0), "review": artemis.stage("review", 1, "failed")}
    document = artemis.card("card-77", stages)
    put(tmp_path / "old", "card-77.json", document)
    run("import", str(tmp_path / "old"))
    run("export", "card-77", str(tmp_path / "same"), "--format", "artemis")
    assert read(tmp_path / "same" / "card-77.json") == document
    with kedge.open(store) as opened, kedge.run("card-77", store=opened) as going:
        going.step("review", lambda: {"ok": True})
        going.step("build", lambda: "text")
    run("export", "card-77", str(tmp_path / "later"), "--format", "artemis")
    later = read(tmp_path / "later" / "card-77.json")
    assert later["completed_stages"] == ["plan", "review", "build"]
    assert (later["failed_stages"], later["status"], later["stages_completed"]) == ([], "completed", 3)
    assert later["stage_checkpoints"]["plan"] == stages["plan"]
    assert later["stage_checkpoints"]["build"]["result"] == {"result": "text"}
    with kedge.open("memory:") as other:  # and forth again
        bring(str(tmp_path / "later"), other)
        with kedge.run("card-77", store=other) as going:
            assert going.step("review", lambda: None) == {"ok": True}


LAYOUTS: dict[str, Any] = {
    "card 7_state.json": artemis.state("card 7", ["plan"]),
    "card 7_checkpoints.json": artemis.attempts("card 7", ("plan", "completed"), ("review", "failed")),
    "checkpoint-1a2b3c4d.json": artemis.results("card 7", {"plan": "completed", "review": "failed"}),
    "card 7_checkpoint.json": artemis.index(0, {"plan": {"of": "plan"}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_of_artemis_there_and_back(store: Path, tmp_path: Path, name: str) -> None:
    """The file that artemis finds, as it was; then with what Kedge has done, and another import goes on from that."""
    put(tmp_path / "old", name, LAYOUTS[name])
    run("import", str(tmp_path / "old"))
    with kedge.open(store) as opened:
        (job,) = (job.name for job in opened.jobs() if not job.name.startswith("llm:"))
    run("export", job, str(tmp_path / "same"), "--format", "artemis")
    assert [path.name for path in (tmp_path / "same").iterdir()] == [name]
    assert read(tmp_path / "same" / name) == LAYOUTS[name]
    with kedge.open(store) as opened, pytest.raises(ZeroDivisionError), kedge.run(job, store=opened) as going:
        going.step("review", lambda: {"ok": True})
        going.step("build", lambda: 1 / 0)
    run("export", job, str(tmp_path / "later"), "--format", "artemis")
    assert [path.name for path in (tmp_path / "later").iterdir()] == [name]
    ran: list[str] = []
    with kedge.open("memory:") as other:
        bring(str(tmp_path / "later"), other)
        with kedge.run(job, store=other) as going:
            assert going.step("plan", lambda: ran.append("plan")) == {"of": "plan"}
            assert going.step("review", lambda: ran.append("review")) == {"ok": True}
            going.step("build", lambda: ran.append("build"))
    assert ran == ["build"]


def test_a_run_of_two_layouts_is_exported_in_both(store: Path, tmp_path: Path) -> None:
    names = ("card 7_state.json", "card 7_checkpoints.json")
    for name in names:
        put(tmp_path / "old", name, LAYOUTS[name])
    run("import", str(tmp_path / "old"))
    with kedge.open(store) as opened:
        (job,) = (job.name for job in opened.jobs() if not job.name.startswith("llm:"))
    run("export", job, str(tmp_path / "out"), "--format", "artemis")
    assert {path.name: read(path) for path in (tmp_path / "out").iterdir()} == {name: LAYOUTS[name] for name in names}


def test_what_the_state_machine_saw_comes_back(store: Path, tmp_path: Path) -> None:
    put(tmp_path / "old", "card 7_state.json", artemis.machine("card 7"))
    run("import", str(tmp_path / "old"))
    with kedge.open(store) as opened:
        (job,) = (job.name for job in opened.jobs())
    run("export", job, str(tmp_path / "out"), "--format", "artemis")
    assert read(tmp_path / "out" / "card 7_state.json") == artemis.machine("card 7")


def test_any_run_as_a_card(store: Path, tmp_path: Path) -> None:
    with kedge.open(store) as opened, kedge.run("nightly", store=opened) as going:
        going.step("load", lambda: [1, 2])
    run("export", "nightly", str(tmp_path / "out"), "--format", "artemis")
    card = read(tmp_path / "out" / "nightly.json")
    assert (card["card_id"], card["completed_stages"], card["status"]) == ("nightly", ["load"], "completed")
    with kedge.open(store) as opened:
        opened.save("no-run", "s", 1)
    refused = CliRunner().invoke(cli, ["export", "no-run", str(tmp_path / "x"), "--format", "artemis"])
    assert refused.exit_code == 3
    assert not (tmp_path / "x").exists()


ODD = ["job 9", "tâche №1", "a#b", "50% off?", "x" * 200, "-dash", ".hidden"]


@pytest.mark.parametrize("name", ODD)
def test_names_that_are_none_of_ours_come_back_as_they_were(store: Path, tmp_path: Path, name: str) -> None:
    document = jobs.checkpoint(name, "s", {"n": 1}) | {"checkpoint_id": f"{name[:150]} s_1763461834_1a2b3c4d"}
    put(tmp_path / "old", "a.json", document)
    put(tmp_path / "old", "b.json", {**jobs.execution("c", []), "execution_id": f"exec_{name}_1"})
    put(tmp_path / "old", "c.json", artemis.card(f"card {name}", {"plan": artemis.stage("plan", 0)}))
    out = tmp_path / "out"
    with kedge.open(store) as opened:
        report = bring(str(tmp_path / "old"), opened)
        for job in sorted(report.jobs - {"llm:cache"}):
            if opened.list(job)[0].metadata.get("kind") == "execution":
                Workflows(opened).pause_execution(job)
    for job in sorted(report.jobs - {"llm:cache"}):
        is_card = "card" in job
        run("export", job, str(out), "--format", "artemis" if is_card else "jobs")
    assert read(out / name / f"{document['checkpoint_id']}.json") == document
    assert read(out / f"exec_{name}_1.json")["state"] == "paused"
    assert read(out / f"card {name}.json")["card_id"] == f"card {name}"


def test_layouts_of_whole_jobs(store: Path, tmp_path: Path) -> None:
    whole = jobs.whole_job("job one")
    state = {
        "metadata": {"job_id": "job two", "workflow_id": "w", "status": "running", "updated_at": "2026-01-02T03:04:05"},
        "inputs": {},
        "outputs": {"a": 1},
        "steps": {},
        "context": {},
    }
    put(tmp_path / "old", "one.json", whole)
    put(tmp_path / "old" / "job two", "state.json", state)
    with kedge.open(store) as opened:
        found = bring(str(tmp_path / "old"), opened).jobs
    for job in found:
        run("export", job, str(tmp_path / "out"), "--format", "jobs")
    assert read(tmp_path / "out" / "job one.json") == whole
    assert read(tmp_path / "out" / "job two" / "state.json") == state
