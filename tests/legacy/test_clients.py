"""Programs as clients of the old systems wrote them; only their import lines differ."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.legacy import arch, artemis, core, jobs, unified
from kedge.legacy.importers import Verdict, bring

from .importers.writers import artemis as old_cards
from .importers.writers import geo as old_geo
from .importers.writers import jobs as old_jobs

# --- artemis ---

STAGES = ["architecture", "development", "review"]


def pipeline(folder: Path, crash_at: str | None = None) -> tuple[list[str], artemis.CheckpointManager]:
    """A pipeline of artemis: resumes if it can, asks the cache before it asks the model."""
    manager = artemis.CheckpointManager(card_id="CARD-123", checkpoint_dir=folder, verbose=False)
    asked = []
    if manager.can_resume():
        manager.resume()
    else:
        manager.create_checkpoint(total_stages=len(STAGES), execution_context={"branch": "main"})
    while stage := manager.get_next_stage(STAGES):
        manager.set_current_stage(stage)
        prompt = f"do {stage}"
        answer = manager.get_cached_llm_response(stage, prompt)
        if answer is None:
            asked.append(stage)
            answer = f"did {stage}"
        began = datetime.now()  # noqa: DTZ005 - as it was written
        if stage == crash_at:
            manager.save_stage_checkpoint(
                stage, "failed", None, [], [{"prompt": prompt, "response": answer}], "crashed", began, began
            )
            return asked, manager
        manager.save_stage_checkpoint(
            stage_name=stage,
            status="completed",
            result={"text": answer},
            artifacts=[f"{stage}.md"],
            llm_responses=[{"prompt": prompt, "response": answer}],
            start_time=began,
            end_time=began + timedelta(seconds=30),
        )
    manager.mark_completed()
    return asked, manager


def test_an_artemis_pipeline_crashes_and_resumes(tmp_path: Path) -> None:
    asked, first = pipeline(tmp_path, crash_at="review")
    assert asked == STAGES
    assert first.get_progress() == {
        "progress_percent": 66.67,
        "stages_completed": 2,
        "total_stages": 3,
        "current_stage": "review",
        "elapsed_seconds": pytest.approx(0, abs=60),
        "estimated_remaining_seconds": 30.0,
    }
    asked, second = pipeline(tmp_path)
    assert asked == []  # the answer to the stage that crashed was paid for
    checkpoint = second.checkpoint
    assert checkpoint is not None
    assert (checkpoint.status, checkpoint.completed_stages) == (artemis.CheckpointStatus.COMPLETED, STAGES)
    assert checkpoint.failed_stages == []
    assert checkpoint.stage_checkpoints["review"].retry_count == 1
    assert second.cache_manager.get_cache_stats()["cached_responses"] == 3
    assert not second.can_resume()
    assert artemis.PipelineCheckpoint.from_dict(json.loads(json.dumps(checkpoint.to_dict()))) == checkpoint
    second.clear_checkpoint()
    assert not second.repository.exists("CARD-123")


def test_artemis_states_and_refusals(tmp_path: Path) -> None:
    manager = artemis.CheckpointManager("c/../1", tmp_path, verbose=False)
    with pytest.raises(ValueError):
        manager.save_stage_checkpoint("a", "completed")
    assert manager.resume() is None
    manager.create_checkpoint(0)
    assert manager.get_progress()["progress_percent"] == 0.0
    with pytest.raises(kedge.UnsupportedType, match="state"):
        manager.save_stage_checkpoint("a", "completed", {"socket": object()})
    assert manager.get_next_stage(["a"]) == "a"  # what could not be saved changed nothing
    manager.save_stage_checkpoint("a", "skipped")
    manager.mark_failed("no money")
    again = artemis.CheckpointManager("c/../1", tmp_path, verbose=False)
    for count in (1, 2):  # failed and resumed ones resume, again and again
        assert again.can_resume()
        found = again.resume()
        assert found is not None
        assert (found.resume_count, found.metadata["failure_reason"]) == (count, "no money")
    assert again.get_next_stage(["a", "b"]) == "a"  # only completed ones are passed over, as it always was
    assert again.repository.list_all() == ["c/../1"]
    assert artemis.create_checkpoint_repository("filesystem", checkpoint_dir=tmp_path).exists("c/../1")
    assert [p.name for p in tmp_path.iterdir()] == [".kedge"]
    assert artemis.LLMCacheKeyGenerator.generate_cache_key("c", "s", "p") == "c:s:148de9c5a7a44d19"
    assert not artemis.CheckpointValidator.validate_checkpoint_data({"card_id": 1})


def test_an_imported_card_goes_on_under_the_old_name_and_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARTEMIS_CHECKPOINT_DIR", str(tmp_path))
    document = old_cards.card("CARD-123", {"architecture": old_cards.stage("architecture", 0)})
    (tmp_path / "CARD-123.json").write_text(json.dumps(document))
    repository = artemis.FilesystemCheckpointRepository()
    assert bring(str(tmp_path), repository.store).present == 3  # the first opening imports what lies there
    loaded = repository.load("CARD-123")
    assert loaded is not None
    assert loaded.to_dict() == document
    manager = artemis.CheckpointManager("CARD-123", verbose=False)
    assert manager.resume()
    assert manager.get_cached_llm_response("architecture", "do architecture")["response"] == "did architecture"
    assert manager.get_next_stage(STAGES) == "development"
    manager.save_stage_checkpoint("development", "completed", {"n": 1})
    with kedge.run("CARD-123", store=repository.store) as run:
        assert run.step("development", lambda: None) == {"n": 1}
        run.step("review", lambda: {"n": 2})
    found = repository.load("CARD-123")
    assert found is not None
    assert found.completed_stages == ["architecture", "development", "review"]


def test_a_card_saved_through_the_old_names_is_not_overwritten_by_its_old_file(tmp_path: Path) -> None:
    document = old_cards.card("c", {"a": old_cards.stage("a", 0)})
    (tmp_path / "c.json").write_text(json.dumps(document))
    manager = artemis.CheckpointManager("c", tmp_path, verbose=False)
    manager.resume()
    manager.save_stage_checkpoint("b", "completed", {"n": 2})
    (tmp_path / "c.json").write_text(json.dumps({**document, "status": "paused"}))
    report = bring(str(tmp_path), manager.repository.store)
    assert (report.imported, report.counts[Verdict.SKIPPED]) == (0, 1)
    loaded = artemis.CheckpointManager("c", tmp_path, verbose=False).resume()
    assert loaded is not None
    assert loaded.completed_stages == ["a", "b"]


def test_answers_keep_stage_cost_and_all_of_their_keys(tmp_path: Path) -> None:
    entry = {"prompt": "p", "content": "c", "model": "m", "tokens_input": 3, "tokens_output": 4, "cost": 0.25}
    stages = {
        name: old_cards.stage(name, place, "failed", llm_responses=[{**entry, "content": name}])
        for place, name in enumerate(("a", "b"))
    }
    (tmp_path / "c.json").write_text(json.dumps(old_cards.card("c", stages)))
    manager = artemis.CheckpointManager("c", tmp_path, verbose=False)
    manager.resume()
    assert manager.get_cached_llm_response("b", "p") == {**entry, "content": "b"}
    store = manager.repository.store
    with kedge.run("c", store=store) as run:
        for name in ("a", "b"):
            with run.stage(name):
                answer = run.llm("ask", lambda **_: "paid", model="m", messages=[{"role": "user", "content": "p"}])
                assert answer == {**entry, "content": name}
    (saved,) = [c for c in store.list("llm:cache") if c.metadata["legacy"]["stage"] == "a"]  # type: ignore[index]
    assert saved.metadata["cost"] == "0.25"
    assert saved.metadata["tokens"] == {"input": 3, "output": 4, "cache_read": 0, "cache_write": 0}


def test_old_files_are_imported_once_and_later_changes_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def opened() -> tuple[int, str]:
        with jobs.CheckpointManager(tmp_path) as manager:
            return len(manager.list("job_9")), capsys.readouterr().err

    old_jobs.write(tmp_path, old_jobs.checkpoint("job_9", "a", {"n": 1}, 0))
    assert opened() == (1, f"kedge: {tmp_path}: 1 checkpoints of old files imported\n")
    assert opened() == (1, "")
    old_jobs.write(tmp_path, old_jobs.checkpoint("job_9", "b", {"n": 2}, 1))
    count, said = opened()
    assert (count, "changed since" in said, f"kedge import {tmp_path}" in said) == (1, True, True)
    (tmp_path / ".kedge-imported").unlink()  # as after a crash in the middle of the first import
    assert opened()[0] == 2


# --- jobs ---


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[jobs.CheckpointManager]:
    with jobs.CheckpointManager(storage_path=tmp_path / "checkpoints") as opened:
        yield opened


def test_a_job_is_saved_listed_restored_and_cleaned(manager: jobs.CheckpointManager) -> None:
    ids = [manager.save("job/123 ü", f"step/{n}", {"value": n}) for n in range(7)]
    listed = manager.list("job/123 ü")
    assert [c.checkpoint_id for c in listed] == ids
    assert {(c.step_name, c.workflow_version) for c in listed} == {(f"step/{n}", "1.0") for n in range(7)}
    assert all(datetime.fromisoformat(c.timestamp) for c in listed)
    assert manager.restore("job/123 ü", ids[3]) == {"value": 3}
    assert manager.cleanup("job/123 ü", keep_last=3) == 4
    assert manager.delete("job/123 ü", ids[-1]) is True
    assert manager.delete("job/123 ü", ids[-1]) is False
    assert len(manager.list("job/123 ü")) == 2
    assert manager.get_latest_checkpoint("job/123 ü") == ids[5]
    assert manager.cleanup_job("job/123 ü") == 2
    assert manager.list("job/123 ü") == []
    assert manager.get_latest_checkpoint("nobody") is None
    with pytest.raises(FileNotFoundError):
        manager.restore("job/123 ü", ids[0])
    with pytest.raises(FileNotFoundError):
        manager.restore("nobody", "../../etc/passwd")


def test_jobs_live_beside_their_old_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = old_jobs.checkpoint("job 9", "outline", {"n": 1})
    old_jobs.write(tmp_path / "checkpoints", document)
    with jobs.CheckpointManager() as manager:
        assert bring("checkpoints", manager.store).present == 1  # the first opening imports what lies there
        assert manager.restore("job 9", document["checkpoint_id"]) == {"n": 1}
        manager.save("job 9", "draft", {"n": 2})
        assert [c.step_name for c in manager.list("job 9")] == ["outline", "draft"]


def test_a_workflow_with_an_approval(manager: jobs.CheckpointManager) -> None:
    asked: list[tuple[str, str]] = []
    manager.register_approval_callback(lambda execution_id, step: asked.append((execution_id, step.checkpoint_name)))
    done: list[jobs.CheckpointState] = []
    manager.register_checkpoint_callback("draft", lambda step: done.append(step.state))
    first = manager.start_workflow_execution("corr", "blog", {"topic": "tea"})
    assert (first.state, first.global_data, first.checkpoints) == ("running", {"topic": "tea"}, [])
    name = first.execution_id
    assert manager.start_workflow_execution("corr", "blog").execution_id != name
    with pytest.raises(ValueError):
        manager.create_checkpoint("exec_nobody_1", "draft", "writer", {})
    created = manager.create_checkpoint(name, "draft", "writer", {"words": 3})
    assert (created.state, created.input_data) == (jobs.CheckpointState.ACTIVE, {"words": 3})
    assert jobs.CheckpointExecution.from_dict(created.to_dict()) == created
    assert manager.complete_checkpoint(name, "draft", {"text": "…"}) is True
    waiting = manager.create_checkpoint(name, "publish", "editor", {}, approval_required=True)
    assert (waiting.state, waiting.approval_status) == (jobs.CheckpointState.PAUSED, "pending")
    assert asked == [(name, "publish")]
    assert done == [jobs.CheckpointState.COMPLETED]
    status = manager.get_execution_status(name)
    assert status is not None
    assert (status["state"], status["pending_approvals"], status["completed_checkpoints"]) == ("paused", 1, 1)
    with pytest.raises(kedge.Conflict):
        manager.resume_execution(name)  # it used to go on without an answer
    assert manager.approve_checkpoint(name, "draft", True) is False  # it needs none
    assert manager.approve_checkpoint(name, "publish", True) is True
    assert manager.complete_checkpoint(name, "publish", {}) is True
    assert manager.pause_execution(name, "publish") is True
    assert manager.resume_execution(name) is True
    assert [c["state"] for c in manager.get_checkpoint_history(name)] == [jobs.CheckpointState.COMPLETED] * 2
    assert len(manager.list_executions("running")) == 2
    assert manager.cleanup_old_executions(30) is None  # type: ignore[func-returns-value]


def test_what_is_unknown_is_answered_as_it_was(manager: jobs.CheckpointManager) -> None:
    unknown = "exec_nobody_1"
    assert manager.get_execution_status(unknown) is None
    assert manager.get_checkpoint_history(unknown) == []
    assert manager.complete_checkpoint(unknown, "a", {}) is False
    assert manager.pause_execution(unknown, "a") is False
    assert manager.resume_execution(unknown) is False
    assert manager.approve_checkpoint(unknown, "a", True) is False
    assert manager.list("nobody") == []
    assert manager.get_latest_checkpoint("nobody") is None
    assert manager.delete("nobody", "a_1_2") is False
    name = manager.start_workflow_execution("c", "w").execution_id
    assert manager.complete_checkpoint(name, "never created", {}) is False


# --- unified ---


def test_the_unified_manager(tmp_path: Path) -> None:
    manager = unified.UnifiedCheckpointManager(unified.StorageConfig(base_path=tmp_path / "c"))
    data = {"grid": [1, 2, 3]}
    root = manager.save("merge run", data, "pipeline", tags={"kind": "nightly"}, description="start")
    child = manager.save("merge run", {"grid": []}, unified.CheckpointLevel.STEP, parent_id=root)
    assert data == {"grid": [1, 2, 3]}
    found = manager.load(root)
    assert (found.data, found.level, found.metadata.tags) == (data, "pipeline", {"kind": "nightly"})
    assert found.metadata.child_checkpoint_ids == [child]
    assert found.is_valid()
    assert not found.is_stale()
    latest = manager.load_latest("merge run")
    assert latest is not None
    assert (latest.checkpoint_id, latest.parent_id) == (child, root)
    assert [c.checkpoint_id for c in manager.list(process_name="merge run", tags={"kind": "nightly"})] == [root]
    assert manager.list(unified.CheckpointFilter(level="substep")) == []
    assert manager.resume_from(root) == data
    assert manager.delete(child)
    assert not manager.delete(child)
    with pytest.raises(unified.CheckpointError):
        manager.load(child)
    assert manager.load_latest("nobody") is None
    registry = unified.CheckpointRegistry(manager.storage)
    assert registry.parent_of(root) is None


def test_unified_storage() -> None:
    storage = unified.StorageBackendFactory().create(unified.StorageConfig(unified.StorageBackend.MEMORY))
    old = datetime.now() - timedelta(days=30)  # noqa: DTZ005 - as it was written
    made: list[unified.CheckpointData] = []
    for n in range(4):
        data = unified.CheckpointData(
            "",
            unified.CheckpointLevel.STEP,
            data={"n": n},
            metadata=unified.CheckpointMetadata("p"),
            created_at=old + timedelta(days=n * 9),
            parent_id=made[0].checkpoint_id if n == 3 else None,
        )
        assert storage.save(data).endswith(data.checkpoint_id)
        made.append(data)
    assert unified.CheckpointData.from_dict(json.loads(json.dumps(made[0].to_dict()))) == made[0]
    assert made[3].metadata.parent_checkpoint_id == made[0].checkpoint_id
    assert storage.load(made[1].checkpoint_id).data == {"n": 1}
    assert storage.load(made[1].checkpoint_id).created_at == made[1].created_at
    assert storage.cleanup(max_age_days=7) == 2  # not the newest, nor its parent
    assert [c.checkpoint_id for c in storage.list()] == [made[0].checkpoint_id, made[3].checkpoint_id]
    assert storage.get_stats()["backend_type"] == "memory"
    with pytest.raises(unified.StorageBackendError, match="base_path"):
        unified.CheckpointStorage(unified.StorageConfig(unified.StorageBackend.FILE))


def test_unified_values() -> None:
    parsed = unified.parse_checkpoint_id(unified.generate_checkpoint_id("chk", unified.CheckpointLevel.STEP))
    assert (parsed["prefix"], parsed["level"], type(parsed["timestamp"])) == ("chk", "step", datetime)
    assert unified.parse_checkpoint_id("../x") == {"original_id": "../x", "prefix": "../x"}
    assert unified.StorageConfig("database").validate() == ["Database storage requires database_url"]  # type: ignore[arg-type]
    validator = unified.DefaultCheckpointValidator()
    checksum = validator.calculate_checksum({"b": 1, "a": [2]})
    assert checksum == validator.calculate_checksum({"a": [2], "b": 1})
    data = unified.CheckpointData("c", unified.CheckpointLevel.STEP, data={"a": [2], "b": 1})
    assert validator.validate(data)
    assert not data.is_valid()  # it is only created
    data.metadata.checksum = checksum
    assert validator.verify_integrity(data)
    data.data["b"] = 2
    with pytest.raises(unified.CheckpointValidationError):
        validator.validate(data)
    policy = unified.CheckpointPolicy(interval_items=10)
    assert policy.should_checkpoint_by_items(15, 5)
    assert not policy.should_checkpoint_by_items(14, 5)
    assert policy.should_checkpoint_by_time(0)
    assert policy.should_checkpoint_by_memory(500)


class Tiles(unified.SimpleCheckpointableProcess):
    """A processor of geo."""

    @unified.checkpoint_on_interval(items=2, seconds=300)
    def work(self, tile: int) -> None:
        if tile == 5:
            raise OSError("no tile 5")
        self.set_state("done", [*self.get_state_value("done", []), tile])
        self.update_progress(len(self.get_state_value("done")), 9)


def test_a_process_goes_on(tmp_path: Path) -> None:
    manager = unified.UnifiedCheckpointManager(unified.StorageConfig(base_path=tmp_path / "s"))

    def process() -> Tiles:
        made = Tiles(process_id="tiles", checkpoint_policy=unified.CheckpointPolicy(interval_items=100))
        made.set_checkpoint_manager(manager)
        return made

    first = process()
    assert first.load_checkpoint() is None
    with pytest.raises(OSError):
        for tile in range(9):
            first.work(tile)
    again = process()
    loaded = again.load_checkpoint()
    assert loaded is not None
    assert again.can_resume_from(loaded)
    assert again.get_state_value("done") == [0, 1, 2, 3]
    assert (again.get_progress()["items_processed"], again.get_progress_percentage()) == (
        4,
        pytest.approx(44.4, abs=0.1),
    )
    assert again.get_checkpoint_info()["current_checkpoint_id"] == loaded.checkpoint_id
    assert again.cleanup_checkpoints() == 0
    assert Tiles().save_checkpoint() is None  # there is no manager


def test_any_class_can_save_itself() -> None:
    @unified.make_checkpointable(unified.CheckpointPolicy(interval_items=7))
    class Plain:
        def __init__(self, name: str) -> None:
            self.name = name

    made: Any = Plain("x")
    assert (made.name, made.checkpoint_interval, type(made).__name__) == ("x", 7, "Plain")


def test_the_manager_of_a_place_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = unified.StorageConfig(base_path=tmp_path / "c")
    assert unified.get_checkpoint_manager(config) is unified.get_checkpoint_manager({"base_path": tmp_path / "c"})
    unified.get_checkpoint_manager(config).save("p", {"x": 1})


# --- geo's core manager ---


@dataclass
class Info:
    name: str
    path: Path


@pytest.fixture
def core_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[core.CheckpointManager]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(core.CheckpointManager, "_instance", None)
    manager = core.get_checkpoint_manager()
    yield manager
    manager.store.close()


def test_core_checkpoints_by_ids_of_the_callers(core_manager: core.CheckpointManager) -> None:
    assert core.CheckpointManager() is core_manager
    core_manager.save_checkpoint("../run", {"x": 1, "gone": 2}, level="pipeline")
    where = core_manager.save_checkpoint("../run", {"x": 3}, level="pipeline", metadata={"processor_name": "p"})
    assert where.endswith("run")
    assert core_manager.load_checkpoint("../run") == {"x": 3}  # nothing of the one before
    core_manager.save_checkpoint("child", {"infos": [Info("a", Path("/b"))]}, level="phase", parent_id="../run")
    assert core_manager.load_checkpoint("child")["infos"][0]["name"] == "a"
    assert [about.checkpoint_id for about in core_manager.list_checkpoints()] == ["child", "../run"]
    assert [about.parent_id for about in core_manager.list_checkpoints(level="phase")] == ["../run"]
    assert [about.level for about in core_manager.list_checkpoints(processor_name="p")] == ["pipeline"]
    info = core_manager.get_checkpoint_info("child")
    assert info is not None
    assert (info.parent_id, info.file_size_bytes > 0, info.to_dict()["level"]) == ("../run", True, "phase")
    assert core_manager.validate_checkpoint("child")
    assert not core_manager.validate_checkpoint("nobody")
    assert core_manager.get_checkpoint_info("nobody") is None
    with pytest.raises(ValueError, match="not found"):
        core_manager.load_checkpoint("nobody")
    with pytest.raises(kedge.UnsupportedType):
        core_manager.save_checkpoint("bad", {"x": object()})
    core_manager.save_checkpoint("large", {"x": list(range(300_000))})
    large = core_manager.get_checkpoint_info("large")
    assert large is not None
    assert (large.compression_type, large.file_size_bytes < 900_000) == ("zstd", True)
    assert core_manager.delete_checkpoint("large")
    core_manager.configure_retention(max_checkpoints=1)
    assert core_manager.cleanup_old_checkpoints() == 0  # the newest of each level stays
    assert core_manager.delete_checkpoint("../run")
    assert not core_manager.delete_checkpoint("../run")
    core_manager.stop()


def test_core_goes_on_from_its_old_files(
    core_manager: core.CheckpointManager, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old_geo.core(tmp_path / "old", "9f0c_merge_1753401600", {"done": [1]})
    core_manager.store.close()
    core_manager.set_checkpoint_directory(tmp_path / "old")
    assert "1 checkpoints of old files imported" in capsys.readouterr().err
    assert core_manager.load_checkpoint("9f0c_merge_1753401600") == {"done": [1]}
    (about,) = core_manager.list_checkpoints()
    assert (about.checkpoint_id, about.parent_id) == ("9f0c_merge_1753401600", "9f0c")
    core_manager.save_checkpoint("9f0c_merge_1753401600", {"done": [1, 2]})
    assert core_manager.load_checkpoint("9f0c_merge_1753401600") == {"done": [1, 2]}


# --- arch ---


def test_files_of_a_container(tmp_path: Path) -> None:
    upper, dump, new = tmp_path / "fs", tmp_path / "dump", tmp_path / "new"
    (upper / "etc").mkdir(parents=True)
    (upper / "etc" / "conf").write_text("x = 1")
    os.link(upper / "etc" / "conf", upper / "etc" / "same")
    os.symlink("/etc/passwd", upper / "link")
    os.setxattr(upper / "etc" / "conf", "user.note", b"\xff1")
    dump.mkdir()
    handler = arch.CheckpointHandler()
    assert handler.validate_checkpoint(dump) is False
    (dump / "dump.log").write_text("(00.1) Dumping finished successfully\n")
    assert handler.validate_checkpoint(dump) is True
    assert handler.save_checkpoint_file(tmp_path / "nowhere", dump) is False
    assert handler.save_checkpoint_file(upper, dump) is True
    (upper / "etc" / "conf").write_text("x = 2")
    assert handler.save_checkpoint_file(upper, dump) is True
    assert sorted(os.listdir(dump)) == ["container_files.tar", "dump.log"]
    assert handler.restore_checkpoint_file(tmp_path / "nowhere", upper) is False
    assert handler.restore_checkpoint_file(dump, new) is False
    (new / "etc").mkdir(parents=True)
    (new / "etc" / "stale").touch()
    assert handler.restore_checkpoint_file(dump, new) is True
    assert sorted(os.listdir(new / "etc")) == ["conf", "same"]
    assert (new / "etc" / "conf").read_text() == "x = 2"
    assert (new / "etc" / "same").stat().st_nlink == 2
    assert os.getxattr(new / "etc" / "conf", "user.note") == b"\xff1"
    assert os.readlink(new / "link") == "/etc/passwd"
    (dump / "dump.log").write_text("(00.1) Dumping finished successfully\n(00.2) Error: no\n")
    assert arch.validate_checkpoint(dump) is False


def test_a_cut_tar_of_files_changes_nothing(tmp_path: Path) -> None:
    upper, dump = tmp_path / "fs", tmp_path / "dump"
    upper.mkdir()
    (upper / "conf").write_text("x = 1")
    assert arch.save_checkpoint_file(upper, dump)
    tar = dump / "container_files.tar"
    content = tar.read_bytes()
    (upper / "conf").write_text("x = 2")
    for size in range(len(content)):
        tar.write_bytes(content[:size])
        with pytest.raises(kedge.CheckpointError):
            arch.restore_checkpoint_file(dump, upper)
        assert os.listdir(upper) == ["conf"]
        assert (upper / "conf").read_text() == "x = 2"


def test_rolling_back_and_cleaning_up(tmp_path: Path) -> None:
    (tmp_path / "upper").mkdir()
    arch.rollback_restore_file(tmp_path / "upper")
    arch.rollback_restore_file(tmp_path / "upper")
    (tmp_path / "dump").mkdir()
    assert [arch.cleanup_checkpoint(path) for path in (tmp_path / "dump", tmp_path / "dump", "")] == [
        True,
        False,
        False,
    ]
