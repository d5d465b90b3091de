"""Every old format comes over as it was, again adds nothing, and goes on with the new API."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import kedge
from kedge.legacy.importers import Options, Report, Verdict, bring, look
from kedge.legacy.importers.common import salvage
from kedge.llm.bills import totals
from kedge.pipeline.history import explain, find_run
from kedge.process.workflow import Workflows

from .writers import artemis, geo, jobs


@pytest.fixture
def store() -> Iterator[kedge.CheckpointManager]:
    with kedge.open("memory:") as opened:
        yield opened


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    return folder


def put(folder: Path, name: str, document: Any) -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()}


def bring_twice(folder: Path, store: kedge.CheckpointManager, **options: Any) -> Report:
    """What every import must hold to: the plan is right, the source is untouched, and again adds nothing."""
    chosen = Options(**options)
    before = snapshot(folder)
    plan = look(str(folder), chosen)
    report = bring(str(folder), store, chosen)
    assert report.imported == plan.imported
    again = bring(str(folder), store, chosen)
    assert (again.imported, again.present) == (0, report.imported)
    assert snapshot(folder) == before
    return report


def reasons(report: Report, verdict: Verdict) -> list[str]:
    return [f"{finding.source}: {finding.reason}" for finding in report.of(verdict)]


def never(*_: object) -> Any:
    raise AssertionError("this was done before")


# --- artemis ---


def test_a_card_goes_on_at_its_next_stage(old: Path, store: kedge.CheckpointManager) -> None:
    stages = {"architecture": artemis.stage("architecture", 0), "review": artemis.stage("review", 1, "failed")}
    document = artemis.card("card-77", stages)
    put(old, "card-77.json", document)
    report = bring_twice(old, store)
    assert report.by_format == {"artemis": 5}  # two stages, two answers of models, and the card
    assert store.load("checkpoint-card-77-1761178645") == document
    about = store.get("checkpoint-card-77-1761178645")
    assert about.created_at == datetime.fromisoformat(document["updated_at"]).astimezone(UTC)
    assert find_run(store, "card-77").progress == {"done": 1, "total": 3}
    with kedge.run("card-77", store=store) as run:
        assert run.step("architecture", never, "whatever", now=1) == {"of": "architecture"}
        assert run.step("review", lambda: "reviewed") == "reviewed"
        assert run.step("development", lambda: "built") == "built"
    verdicts = {e.path: e.verdict for e in explain(store, "card-77")}
    assert verdicts == {"architecture": "reused", "review": "ran", "development": "ran"}
    with kedge.run("card-77", store=store) as run:  # and again, as any run
        assert run.step("architecture", never) == {"of": "architecture"}
        assert run.step("development", never) == "built"
    with kedge.run("card-77", store=store) as run:
        assert run.step("architecture", lambda: "anew", version=2) == "anew"


def test_answers_of_models_are_not_paid_again(old: Path, store: kedge.CheckpointManager) -> None:
    put(old, "c.json", artemis.card("c", {"review": artemis.stage("review", 0, "failed")}))
    bring_twice(old, store)

    def ask(prompt: str, **options: Any) -> Any:
        return run.llm(
            f"ask {prompt} {options}", call, model="m", messages=[{"role": "user", "content": prompt}], **options
        )

    def call(**_: Any) -> str:
        return "paid"

    with kedge.run("c", store=store) as run, run.stage("review"):
        assert ask("do review") == "did review"
        assert ask("do review", temperature=1) == "did review"
        assert ask("do more") == "paid"
        assert ask("do review", mode="refresh") == "paid"
        assert ask("do review", version=2) == "paid"
    with kedge.run("another", store=store) as run:
        assert ask("do review", top_p=1) == "paid"  # the prompt was one of that card
    assert kedge.llm.Cache.of(store).counters["hits"] == 2


def test_a_card_that_was_continued_here_is_left_alone(old: Path, store: kedge.CheckpointManager) -> None:
    document = artemis.card("c", {"a": artemis.stage("a", 0)})
    put(old, "c.json", document)
    bring(str(old), store)
    put(old, "c.json", {**document, "status": "paused"})
    assert bring(str(old), store).imported == 1  # the old system went on
    with kedge.run("c", store=store) as run:
        run.step("b", lambda: 1)
    put(old, "c.json", {**document, "status": "failed"})
    report = bring(str(old), store)
    assert report.imported == 0
    assert "checkpoints of its own" in reasons(report, Verdict.SKIPPED)[0]


def test_all_forms_of_artemis_in_one_directory(old: Path, store: kedge.CheckpointManager) -> None:
    put(old, "one.json", artemis.card("one", {"a": artemis.stage("a", 0), "b": artemis.stage("b", 1, "skipped")}))
    put(old, "two_checkpoint.json", artemis.index(1, {"PlanStage": {"success": True}, "BuildStage": {"success": True}}))
    put(old, "none_checkpoint.json", artemis.index(-1, {}))
    put(old, "checkpoint-1a2b3c4d.json", artemis.results("three", {"a": "completed", "b": "failed", "c": "pending"}))
    put(old, "four_state.json", artemis.state("four", ["a", "b"]))
    put(old, "four_checkpoints.json", artemis.attempts("four", ("a", "completed"), ("b", "failed"), ("b", "completed")))
    put(old, "five_checkpoints.json", artemis.attempts("five", ("a", "completed"), ("b", "started")))
    artemis.write_sqlite(
        old / "cards.db", [artemis.state("six", ["a"])], artemis.attempts("six", ("a", "completed"), ("b", "failed"))
    )
    report = bring_twice(old, store)
    assert not report.of(Verdict.CORRUPTED)
    done = {}
    for card in ("one", "two", "none", "three", "four", "five", "six"):
        with kedge.run(card, store=store) as run:
            done[card] = [
                name for name in ("a", "b", "c", "PlanStage", "BuildStage") if run.step(name, lambda: "ran") != "ran"
            ]
    assert done == {
        "one": ["a", "b"],
        "two": ["PlanStage", "BuildStage"],
        "none": [],
        "three": ["a"],
        "four": ["a", "b"],
        "five": ["a"],
        "six": ["a"],
    }


@given(artemis.cards())
@settings(max_examples=25)
def test_any_card(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("cards")
    put(folder, "card.json", document)
    with kedge.open("memory:") as store:
        report = bring_twice(folder, store)
        assert not report.of(Verdict.CORRUPTED)
        assert not report.of(Verdict.SKIPPED)
        (job,) = report.jobs - {"llm:cache"}
        newest = store.list(job, tags={"kind": "run"}, limit=1)[0]
        assert store.load(newest.id) == document


def test_a_cut_card_keeps_its_whole_stages(old: Path, store: kedge.CheckpointManager) -> None:
    stages = {"a": artemis.stage("a", 0), "b": artemis.stage("b", 1)}
    text = json.dumps(artemis.card("c", stages))
    put(old, "c.json", text[: text.index('"duration_seconds": 45.0', text.index('"b": {')) + 10])
    report = bring_twice(old, store)
    assert "cut off" in reasons(report, Verdict.CORRUPTED)[0]
    with kedge.run("c", store=store) as run:
        assert run.step("a", never) == {"of": "a"}


# --- jobs ---


def test_checkpoints_of_jobs(old: Path, store: kedge.CheckpointManager) -> None:
    written = [jobs.checkpoint("job_9", f"s{n}", {"n": n, "text": "ü"}, n) for n in range(12)]
    for document in reversed(written):
        jobs.write(old, document)
    report = bring_twice(old, store)
    assert report.by_format == {"jobs": 12}
    assert [c.id for c in store.list("job_9")] == [d["checkpoint_id"] for d in written]  # s10 after s9
    assert [c.timestamp for c in store.list("job_9")] == [d["timestamp"] for d in written]
    assert store.restore("job_9", written[3]["checkpoint_id"]) == {"n": 3, "text": "ü"}
    assert store.get(written[0]["checkpoint_id"]).workflow_version == "1.0"


@given(jobs.checkpoints())
@settings(max_examples=25)
def test_any_checkpoint_of_a_job(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> None:
    folder = tmp_path_factory.mktemp("jobs")
    put(folder, "any.json", document)
    with kedge.open("memory:") as store:
        report = bring_twice(folder, store)
        (job,) = report.jobs
        (checkpoint,) = store.list(job)
        assert store.load(checkpoint.id) == document["state"]


def test_prefix_and_the_same_id_in_two_jobs(old: Path, store: kedge.CheckpointManager) -> None:
    one, two = jobs.checkpoint("a", "s", 1), jobs.checkpoint("b", "s", 2)
    jobs.write(old, one)
    jobs.write(old, two)
    report = bring_twice(old, store, job_prefix="old-")
    assert sorted(report.jobs) == ["old-a", "old-b"]
    assert store.restore("old-a") == 1
    assert store.restore("old-b") == 2
    assert "belongs to another checkpoint" in reasons(report, Verdict.LOSSY)[0]


def test_an_execution_goes_on_with_its_approval(old: Path, store: kedge.CheckpointManager) -> None:
    waiting = jobs.step("publish", "paused", approval_required=True, approval_status="pending")
    put(old, "exec_c1_1763461834.json", jobs.execution("c1", [jobs.step("draft"), waiting], state="paused"))
    bring_twice(old, store)
    flows = Workflows(store)
    name = "exec_c1_1763461834"
    status = flows.get_execution_status(name)
    assert (status["state"], status["current_checkpoint"], status["pending_approvals"]) == ("paused", "publish", 1)
    with pytest.raises(kedge.Conflict):
        flows.resume_execution(name)
    with pytest.raises(kedge.Conflict):
        flows.complete_checkpoint(name, "publish", {})
    assert flows.approve_checkpoint(name, "publish", True, actor="ada")
    assert flows.complete_checkpoint(name, "publish", {"url": "…"})
    assert flows.complete_execution(name)
    assert [e["execution_id"] for e in flows.list_executions("completed")] == [name]


@pytest.mark.parametrize("state", ["running", "paused"])
def test_a_truncated_execution(old: Path, store: kedge.CheckpointManager, state: str) -> None:
    document = jobs.execution("c1", [jobs.step("draft", "active"), jobs.step("publish")], state=state)
    put(old, "exec_c1_1763461834.json", jobs.truncated(document))
    report = bring_twice(old, store)
    kept = ("checkpoints[0] draft",) if state == "running" else ("checkpoints[0] draft", "checkpoints[1] publish")
    assert report.of(Verdict.CORRUPTED)[0].paths == kept
    flows = Workflows(store)
    if state == "paused":  # somebody was waited for: nothing goes on without a decision
        flows.approve_checkpoint("exec_c1_1763461834", "publish", True)
    assert flows.complete_checkpoint("exec_c1_1763461834", "draft", {})


def test_a_truncated_checkpoint_is_kept_apart(old: Path, store: kedge.CheckpointManager) -> None:
    path = jobs.write(old, jobs.checkpoint("job", "s", {"a": 1, "b": [1, 2, 3]}))
    text = path.read_text()
    path.write_text(text[: text.index("3\n") - 5])
    report = bring_twice(old, store)
    assert "job:salvaged" in reasons(report, Verdict.CORRUPTED)[0]
    assert store.list("job") == []
    assert store.restore("job:salvaged") == {"a": 1, "b": [1, 2]}


def test_whole_jobs(old: Path, store: kedge.CheckpointManager) -> None:
    put(old, "job_3.json", jobs.whole_job("job_3"))
    bring_twice(old, store)
    assert store.restore("job_3") == jobs.whole_job("job_3")["state"]


# --- geo ---


def test_core_checkpoints(old: Path, store: kedge.CheckpointManager) -> None:
    state = {"completed_phases": ["load"], "grid": np.arange(6.0).reshape(2, 3), "at": datetime(2025, 1, 1, tzinfo=UTC)}
    forms = [(0, True, True), (2, False, False), (3, False, True), (5, True, False)]
    for n, (protocol, compressed, is_v1) in enumerate(forms):
        name, at = f"9f0c_resampling_175340160{n}", geo.EPOCH + n
        geo.core(old, name, state, is_v1=is_v1, protocol=protocol, compressed=compressed, timestamp=at)
    geo.core(
        old, "9f0c_merge_1753401700", {"x": 1}, level="phase", timestamp=geo.EPOCH + 100, metadata={"phase": "merge"}
    )
    geo.core(old, "gone_1", {"x": 1}, status="deleted")
    report = bring_twice(old, store)
    assert report.by_format == {"geo-core": 5}
    assert "deleted" in reasons(report, Verdict.SKIPPED)[0]
    for n in range(len(forms)):
        found: Any = store.load(f"9f0c_resampling_175340160{n}")
        assert (found["grid"] == state["grid"]).all()
        assert {**found, "grid": 0} == {**state, "grid": 0}
    resampling, *_, merge = store.list("9f0c")
    assert resampling.created_at.timestamp() == geo.EPOCH
    assert (resampling.level, merge.level, merge.step) == ("pipeline", "stage", "merge")


def test_core_without_a_registry_and_with_damage(old: Path, store: kedge.CheckpointManager) -> None:
    geo.core(old, "e_a_1753401600", {"x": [1, 2]}, register=False)
    geo.core(old, "e_b_1753401601", {"x": 1, "y": 2}, register=False, timestamp=geo.EPOCH + 1)
    (old / "e_b_1753401601" / "y.pkl.gz").write_bytes(b"\x1f\x8bnonsense")
    geo.core(old, "e_c_1753401602", {"x": 1}, register=False, checksum="0" * 64)
    put(old, "registry.json", '{"e_a_1753401600": {"checkpoint_id": ')
    report = bring_twice(old, store)
    assert [c.id for c in store.list("9f0c")] == ["e_a_1753401600"]
    damaged = "\n".join(reasons(report, Verdict.CORRUPTED))
    assert "registry.json" in damaged
    assert "y.pkl.gz: " in damaged
    assert damaged.count("checksum does not fit") == 2
    assert [store.load(c.id) for c in store.list("9f0c:salvaged")] == [{"x": 1}, {"x": 1}]


class Resample(kedge.CheckpointableProcess):
    def get_state(self) -> Any:
        return self.inside

    def restore_state(self, state: Any) -> None:
        self.inside = state


def test_processor_memory_goes_on(old: Path, store: kedge.CheckpointManager) -> None:
    state = {
        "processor_state": {"class": "Resample", "config": {}, "items_processed": 1, "progress_node_id": None},
        "processed_items": ["a", "b"],
        "failed_items": ["c"],
    }
    geo.core(old, "Resample_1753401600", state, level="step", parent_id=None, metadata={"processor": "Resample"})
    report = bring_twice(old, store)
    assert report.by_format == {"geo-memory": 1}
    with Resample(process_id="Resample", store=store) as process:
        assert process.inside == state
        assert process.items_done == 3
        process.update_progress(1)
    assert store.list("Resample")[-1].metadata["items_done"] == 4


def test_an_experiment_resumes_its_stages(old: Path, store: kedge.CheckpointManager) -> None:
    geo.stage(old, "6b1e", "data_load", 1)
    geo.stage(old, "6b1e", "resample", 2)
    geo.stage(old, "6b1e", "merge", 3, stage_results={"merge": {"success": False, "error": "no space"}})
    geo.stage(old, "6b1e", "analysis_som", 4, stage_results={"analysis_som": {"success": True, "map": "<Som object>"}})
    report = bring_twice(old, store)
    lossy = report.of(Verdict.LOSSY)
    assert ("shared_data.merged_dataset",) in [finding.paths for finding in lossy]
    with kedge.run("6b1e", store=store) as run:
        assert run.step("data_load", never)["metrics"] == {"n": 2}
        assert run.step("resample", never)["success"]
        assert run.step("merge", lambda: "merged") == "merged"
        assert run.step("analysis_som", lambda: "again") == "again"


def test_old_stage_files(old: Path, store: kedge.CheckpointManager) -> None:
    put(
        old,
        "checkpoint_load.json",
        {"stage": "load", "timestamp": "2025-01-01T00:00:00", "elapsed_time": 3.5, "data": {"n": 1}},
    )
    bring_twice(old, store)
    with kedge.run("old", store=store) as run:
        assert run.step("load", never) == {"n": 1}


def test_a_tile_job_goes_on_with_the_rest(old: Path, store: kedge.CheckpointManager) -> None:
    tiles = [f"tile_{row}_{col}" for row in range(3) for col in range(3)]
    (old / "land_1753401600.pkl").write_bytes(geo.tiles(tiles[:3], protocol=0))
    later = {
        "timestamp": geo.EPOCH + 60,
        "completed_tiles": tiles[3:5],  # it forgot the first three
        "failed_tiles": [tiles[5]],
        "total_tiles": 9,
        "processing_parameters": {},
        "tile_progress": {tiles[5]: {"status": "failed", "error_message": "clouds"}},
    }
    (old / "land_1753401660.pkl").write_bytes(pickle.dumps(later, 5))
    bring_twice(old, store)
    assert find_run(store, "land").progress == {"done": 5, "total": 9}
    worked = []
    with kedge.run("land", store=store) as run:
        run.map(worked.append, tiles, name="tiles", key=str)
    assert sorted(worked) == tiles[5:]


def test_analysis_chunks_are_one_growing_state(old: Path, store: kedge.CheckpointManager) -> None:
    for place in range(3):
        name, data = geo.chunk("run7", "som", place, 5, {"sum": list(range(place + 1))})
        (old / f"{name}.pkl").write_bytes(data)
        put(old, f"{name}.json", {"checkpoint_id": name, "analysis_method": "som", "chunk_idx": place})
    assert not bring_twice(old, store).findings

    class Analysis(kedge.CheckpointableProcess):
        def get_state(self) -> Any:
            return None

        def restore_state(self, state: Any) -> None:
            self.next_chunk, self.state = state["chunk_idx"] + 1, state["analysis_state"]

    analysis = Analysis(process_id="run7_som", store=store)
    analysis.load_checkpoint()
    assert (analysis.next_chunk, analysis.state) == (3, {"sum": [0, 1, 2]})
    assert analysis.get_progress_percentage() == 60.0


@pytest.mark.xdist_group("postgres")
def test_rows_of_a_database(old: Path, store: kedge.CheckpointManager, postgres: Any) -> None:
    import psycopg

    url = postgres.empty_database()
    root = old / "checkpoints"
    checksums = {
        name: geo.core(root, name, {"x": name}, register=False)["checksum"] for name in ("p_1", "s_2", "t_3", "loop")
    }
    with psycopg.connect(url) as db:
        db.execute("DROP TABLE IF EXISTS pipeline_checkpoints CASCADE")
        db.execute(geo.TABLE)
        for name, level, path in (
            ("p_1", "pipeline", "/data/checkpoints/p_1"),
            ("s_2", "phase", "checkpoints/s_2"),
            ("t_3", "step", "checkpoints/t_3"),
            ("loop", "step", "checkpoints/loop"),
            ("out", "step", "../../etc"),
            ("far", "step", "/etc"),
        ):
            db.execute(
                "INSERT INTO pipeline_checkpoints (checkpoint_id, level, processor_name, file_path, file_size_bytes, "
                "validation_checksum, created_at) VALUES (%s, %s, 'Merger', %s, 1, %s, '2025-07-25T12:00:00Z')",
                (name, level, path, checksums.get(name)),
            )
        for child, parent in (("s_2", "p_1"), ("p_1", None), ("t_3", "s_2"), ("loop", "loop")):
            db.execute("UPDATE pipeline_checkpoints SET parent_id = %s WHERE checkpoint_id = %s", (parent, child))
    try:
        options = Options(files=str(old))
        report = bring(url, store, options)
        assert report.by_format == {"geo-db": 4}
        assert (bring(url, store, options).imported, len(report.of(Verdict.SKIPPED))) == (0, 2)
        found = {c.id: c for c in store.list("Merger")}
        assert (found["s_2"].parent, found["s_2"].level, found["t_3"].parent) == ("p_1", "stage", "s_2")
        assert found["loop"].parent is None
        assert found["p_1"].timestamp == "2025-07-25T12:00:00+00:00"
        assert store.load("t_3") == {"x": "t_3"}
    finally:
        with psycopg.connect(url) as db:
            db.execute("DROP TABLE pipeline_checkpoints CASCADE")


# --- any of them ---


def test_formats_mixed_in_one_directory(old: Path, store: kedge.CheckpointManager) -> None:
    put(old, "card.json", artemis.card("card", {"a": artemis.stage("a", 0)}))
    jobs.write(old, jobs.checkpoint("job", "s", 1))
    put(old, "exec_c1_1.json", jobs.execution("c1", [jobs.step("draft")]))
    geo.core(old, "9f0c_x_1753401600", {"x": 1})
    geo.stage(old, "6b1e", "merge", 3)
    (old / "land.pkl").write_bytes(geo.tiles(["tile_0_0"]))
    put(old, "other.json", {"some": "thing"})
    (old / "notes.txt").write_text("hello")
    report = bring_twice(old, store)
    assert report.by_format == {"artemis": 3, "jobs": 2, "geo-core": 1, "geo-stages": 2, "geo-tiles": 2}
    assert [f.source for f in report.of(Verdict.SKIPPED)] == ["notes.txt", "other.json"]
    assert not report.of(Verdict.CORRUPTED)


def test_only_one_format_is_wanted(old: Path, store: kedge.CheckpointManager) -> None:
    put(old, "card.json", artemis.card("card", {}))
    jobs.write(old, jobs.checkpoint("job", "s", 1))
    assert bring(str(old), store, Options(form="jobs")).by_format == {"jobs": 1}


def test_any_json(old: Path, store: kedge.CheckpointManager) -> None:
    put(old, "a.json", {"some": "thing"})
    (old / "sub").mkdir()
    put(old / "sub", "b.json", [1, 2])
    bring_twice(old, store, form="json-dir")
    assert store.restore("old") == {"some": "thing"}
    assert store.restore("sub") == [1, 2]


def test_an_interrupted_import_goes_on(old: Path, store: kedge.CheckpointManager) -> None:
    for n in range(600):
        jobs.write(old, jobs.checkpoint("job", "s", n, n))
    seen = 0

    def interrupt(done: int, total: int) -> None:
        nonlocal seen
        seen = done
        if done == 550:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bring(str(old), store, progress=interrupt)
    kept = len(store.list("job"))
    assert 0 < kept < 600
    report = bring(str(old), store)
    assert (report.imported, report.present) == (600 - kept, kept)
    assert [store.load(c.id) for c in store.list("job")] == list(range(600))


def test_salvage_gives_a_prefix() -> None:
    text = json.dumps({"a": [1, {"b": "x,}]"}, None], "c": {"d": 1.5, "e": 'é"\\'}, "f": True})
    for cut in range(len(text)):
        found = salvage(text[:cut]).value
        assert found is None or isinstance(found, dict)
    assert salvage(text[:-1]).value == {"a": [1, {"b": "x,}]"}, None], "c": {"d": 1.5, "e": 'é"\\'}}
    assert salvage('{"a": 12').value == {}
    assert salvage('{"a": [1, 2').value == {"a": [1]}


def test_local_times(old: Path, store: kedge.CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        put(old, "c.json", artemis.card("c", {}, updated_at="2025-10-23T12:00:00"))
        bring(str(old), store)
        assert store.list("c")[0].timestamp == "2025-10-23T03:00:00+00:00"
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
        os.environ.pop("TZ", None)


def test_a_checkpoint_whose_metadata_is_cut(old: Path, store: kedge.CheckpointManager) -> None:
    geo.core(old, "9f0c_a_1753401600", {"x": 1}, register=False, metadata={"phase": "a", "deep": {"n": [1]}})
    geo.core(old, "9f0c_b_1753401600", {"x": 2}, register=False)
    (old / "9f0c_b_1753401600" / "metadata.json").write_text('{"checkpoint_id": "9f0c_b_17')
    report = bring_twice(old, store)
    assert store.get("9f0c_a_1753401600").metadata["legacy"]["metadata"] == {"phase": "a", "deep": {"n": [1]}}  # type: ignore[index]
    assert "metadata.json: JSON ends" in reasons(report, Verdict.CORRUPTED)[0]
    assert store.restore("9f0c:salvaged") == {"x": 2}


def test_files_that_are_just_being_written(old: Path, store: kedge.CheckpointManager) -> None:
    text = json.dumps(artemis.card("c", {"a": artemis.stage("a", 0)}))
    path = put(old, "c.json", text[:-40])
    report = bring(str(old), store, Options(is_watching=True))
    assert report.imported == 0
    assert "may still be written" in reasons(report, Verdict.SKIPPED)[0]
    os.utime(path, (1, 1))
    assert bring(str(old), store, Options(is_watching=True)).of(Verdict.CORRUPTED)


def test_only_processors_are_wanted(old: Path, store: kedge.CheckpointManager) -> None:
    geo.core(old, "9f0c_a_1753401600", {"x": 1})
    state = {"processor_state": {}, "processed_items": ["a"]}
    geo.core(old, "P_1753401600", state, level="step", parent_id=None, metadata={"processor": "P"})
    assert bring(str(old), store, Options(form="geo-memory")).by_format == {"geo-memory": 1}


def test_into_an_encrypted_store(old: Path, tmp_path: Path) -> None:
    jobs.write(old, jobs.checkpoint("job", "secret-step", {"n": "very secret text"}))
    put(old, "c.json", artemis.card("c", {"a": artemis.stage("a", 0, result={"x": "very secret text" * 9000})}))
    key = bytes(range(32))
    with kedge.open(tmp_path / "store", key=key, encrypt_names=True) as store:
        bring_twice(old, store)
        assert store.restore("job") == {"n": "very secret text"}
        assert store.verify().is_ok
        legacy: Any = store.list("job")[0].metadata["legacy"]
        assert legacy["id"] == "secret-step_1763461834_00000000"
    written = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert b"very secret" not in written
    assert b"secret-step" not in written


# --- what was lost silently ---


def test_errors_in_sqlite_stay_text_and_attempts_need_no_state(old: Path, store: kedge.CheckpointManager) -> None:
    state = artemis.state("one", ["a"], status="failed", error='{"code": 7}')
    attempts = artemis.attempts("one", ("a", "completed")) + artemis.attempts("two", ("b", "failed"))
    attempts[-1]["error"] = "[Errno 2] gone"
    artemis.write_sqlite(old / "artemis.db", [state], attempts)
    bring_twice(old, store)
    assert store.list("one", tags={"kind": "run"})[-1].metadata["error"] == '{"code": 7}'
    assert [c.metadata.get("error") for c in store.list("two")] == ["[Errno 2] gone", None]


def test_a_truncated_execution_waits_for_what_it_waited_for(old: Path, store: kedge.CheckpointManager) -> None:
    waiting = jobs.step("publish", "paused", approval_required=True, approval_status="pending")
    document = jobs.execution("c1", [jobs.step("draft"), waiting], state="paused")
    put(old, "exec_c1_1763461834.json", jobs.truncated(document))
    bring_twice(old, store)
    execution = Workflows(store).get_execution("exec_c1_1763461834")
    pending = [s["checkpoint_name"] for s in execution["checkpoints"] if s["approval_status"] == "pending"]
    assert (execution["state"], pending) == ("paused", ["publish"])


def test_core_reads_what_is_listed_and_keeps_parents(old: Path, store: kedge.CheckpointManager) -> None:
    geo.core(old, "run_1753401600", {"x": 1, "gone": 1}, parent_id=None, level="pipeline", metadata={})
    geo.core(old, "child", {"x": 3}, parent_id="run_1753401600", level="step", metadata={}, timestamp=geo.EPOCH - 5)
    folder = old / "run_1753401600"
    (folder / "x.pkl").write_bytes(pickle.dumps(2))  # saved again, not compressed; the files of the first save stayed
    about = json.loads((folder / "metadata.json").read_text())
    about |= {"data_files": ["run_1753401600/x.pkl"], "checksum": geo.checksum(folder)}
    (folder / "metadata.json").write_text(json.dumps(about))
    registry = json.loads((old / "registry.json").read_text())
    (old / "registry.json").write_text(json.dumps(registry | {"run_1753401600": about}))
    report = bring_twice(old, store)
    assert store.load("run_1753401600") == {"x": 2}
    assert "gone.pkl.gz" in report.of(Verdict.SKIPPED)[0].paths
    child = store.get("child")
    assert (child.parent, child.job) == ("run_1753401600", store.get("run_1753401600").job)
    assert not report.of(Verdict.LOSSY)


def test_costs_and_the_state_machine_of_a_card(old: Path, store: kedge.CheckpointManager) -> None:
    put(old, "artemis_costs_c.json", [artemis.call("c", "plan", 0.25), artemis.call("c", "build", 0.5)])
    put(old, "c_state.json", artemis.machine("c"))
    put(old, "c.json", artemis.card("c", {"plan": artemis.stage("plan", 0)}))
    assert not bring_twice(old, store).findings
    bills = totals(store, run="c", by=("step",))
    assert {step: bill.spent for (step,), bill in bills.items()} == {"plan": Decimal("0.25"), "build": Decimal("0.5")}
    assert store.restore("c:state-machine")["active_stage"] == "build"
    with kedge.run("c", store=store) as run:
        assert run.step("plan", never) == {"of": "plan"}  # the machine, which has no results, does not hide it
