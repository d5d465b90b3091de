"""Executions, their checkpoints, and approvals that are decided once."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner

import kedge
from kedge import CheckpointManager, Conflict, NotFound, Validation
from kedge.cli import cli
from kedge.pipeline import pending_approvals
from kedge.process.workflow import Workflows
from tests.waiting import wait_for


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def workflows(store: CheckpointManager) -> Workflows:
    return Workflows(store)


def test_the_life_of_an_execution(workflows: Workflows, store: CheckpointManager) -> None:
    told: list[Any] = []
    workflows.register_checkpoint_callback("outline", lambda who, c: told.append((who, c["state"])))
    execution = workflows.start_workflow_execution("order 7/x", "blog", {"topic": "seas"})
    assert execution.startswith("exec_order-7-x_")
    assert workflows.start_workflow_execution("order 7/x", "blog") != execution
    made = workflows.create_checkpoint(execution, "outline", "agent-1", {"words": 100})
    assert made["state"] == "active"
    assert workflows.complete_checkpoint(execution, "outline", {"text": "…"}) is True
    assert workflows.complete_checkpoint(execution, "outline", {"text": "other"}) is False
    assert told == [(execution, "active"), (execution, "completed")]
    assert workflows.complete_execution(execution) is True
    status = workflows.get_execution_status(execution)
    assert status["completed_at"] is not None
    assert {k: v for k, v in status.items() if not k.endswith("_at")} == {
        "execution_id": execution, "correlation_id": "order 7/x", "workflow_name": "blog", "state": "completed",
        "current_checkpoint": "outline", "total_checkpoints": 1, "completed_checkpoints": 1, "failed_checkpoints": 0,
        "pending_approvals": 0,
    }  # fmt: skip
    changes = [change["change"] for change in workflows.get_checkpoint_history(execution)]
    assert changes == ["start", "create outline", "complete outline", "end completed"]
    assert Workflows(store).get_execution(execution)["checkpoints"][0]["output_data"] == {"text": "…"}
    with pytest.raises(Conflict):
        workflows.create_checkpoint(execution, "more", "agent-1")


def test_an_approval_blocks_and_is_decided_once(workflows: Workflows) -> None:
    asked: list[str] = []
    workflows.register_approval_callback(lambda _, c: asked.append(c["checkpoint_name"]))
    execution = workflows.start_workflow_execution("c", "release")
    workflows.create_checkpoint(execution, "publish", "agent", approval_required=True)
    assert asked == ["publish"]
    assert workflows.get_execution_status(execution)["state"] == "paused"
    assert workflows.get_execution_status(execution)["pending_approvals"] == 1
    for refused in (
        lambda: workflows.resume_execution(execution),
        lambda: workflows.complete_checkpoint(execution, "publish", {}),
        lambda: workflows.create_checkpoint(execution, "next", "agent"),
        lambda: workflows.complete_execution(execution),
    ):
        with pytest.raises(Conflict):
            refused()
    with pytest.raises(Validation, match="is not a decision"):
        workflows.approve_checkpoint(execution, "publish", "no")  # type: ignore[arg-type]
    assert workflows.approve_checkpoint(execution, "publish", True, actor="ada", comment="fine") is True
    with pytest.raises(Conflict, match="was approved by ada"):
        workflows.approve_checkpoint(execution, "publish", False, actor="bob")
    assert workflows.get_execution_status(execution)["state"] == "running"
    assert workflows.complete_checkpoint(execution, "publish", {})
    done = workflows.get_execution(execution)["checkpoints"][0]
    assert (done["approval_actor"], done["approval_comment"]) == ("ada", "fine")


@pytest.mark.parametrize(("rule", "execution_state", "state"), [
    ("fail", "failed", "failed"), ("skip", "running", "skipped"), ("pause", "paused", "paused"),
])  # fmt: skip
def test_a_denial_follows_the_rule(workflows: Workflows, rule: str, execution_state: str, state: str) -> None:
    execution = workflows.start_workflow_execution("c", "release")
    workflows.create_checkpoint(execution, "go", "agent", approval_required=True, on_denied=rule)
    assert workflows.approve_checkpoint(execution, "go", False) is False
    found = workflows.get_execution(execution)
    assert (found["state"], found["checkpoints"][0]["state"]) == (execution_state, state)
    for refused in (workflows.complete_checkpoint, workflows.approve_checkpoint):
        with pytest.raises(Conflict):
            refused(execution, "go", True)
    if rule != "skip":
        with pytest.raises(Conflict):
            workflows.resume_execution(execution)


def test_an_approval_does_not_revive_what_has_ended(workflows: Workflows, store: CheckpointManager) -> None:
    execution = workflows.start_workflow_execution("c", "release")
    workflows.create_checkpoint(execution, "go", "agent", approval_required=True)
    assert len(pending_approvals(store, execution)) == 1
    workflows.complete_execution(execution, success=False)
    assert pending_approvals(store, execution) == []
    with pytest.raises(Conflict):
        workflows.approve_checkpoint(execution, "go", True)
    with pytest.raises(NotFound):
        kedge.decide(store, execution, "go", True)
    assert workflows.get_execution_status(execution)["state"] == "failed"


def test_an_approval_expires(workflows: Workflows) -> None:
    execution = workflows.start_workflow_execution("c", "release")
    workflows.create_checkpoint(execution, "go", "agent", approval_required=True, expires_s=0.05)
    waits = workflows.start_workflow_execution("c", "release")
    workflows.create_checkpoint(waits, "go", "agent", approval_required=True, expires_s=3600)
    wait_for(lambda: bool(workflows.list_executions("failed")), "it never expires")
    assert [e["execution_id"] for e in workflows.list_executions("failed")] == [execution]
    assert [e["execution_id"] for e in workflows.list_executions("paused")] == [waits]
    with pytest.raises(Conflict, match="was denied by expiry"):
        workflows.approve_checkpoint(execution, "go", True)


def test_of_many_deciders_one_decides(workflows: Workflows, store: CheckpointManager) -> None:
    execution = workflows.start_workflow_execution("c", "release")
    workflows.create_checkpoint(execution, "go", "agent", approval_required=True)
    outcomes: list[str] = []

    def decide(name: str) -> None:
        try:
            Workflows(store).approve_checkpoint(execution, "go", True, actor=name)
            outcomes.append(name)
        except Conflict:
            outcomes.append("refused")

    threads = [threading.Thread(target=decide, args=(f"t{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 7
    assert len(outcomes) == 8


@pytest.mark.mutant
def test_decisions_without_one_key_would_be_seen(
    workflows: Workflows, store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.pipeline.approval._decision_key", lambda _: uuid4().hex)
    with pytest.raises(AssertionError):
        test_of_many_deciders_one_decides(workflows, store)


def test_a_decision_is_followed_though_its_maker_was_killed(
    workflows: Workflows, store: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the decision, which is durable, and the change of the execution."""
    execution = workflows.start_workflow_execution("c", "release")
    workflows.create_checkpoint(execution, "go", "agent", approval_required=True)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Workflows, "_change", killed)
        with pytest.raises(KeyboardInterrupt):
            workflows.approve_checkpoint(execution, "go", False, actor="ada")
    with pytest.raises(Conflict, match="was denied by ada"):
        workflows.approve_checkpoint(execution, "go", True)
    assert [e["execution_id"] for e in workflows.list_executions("failed")] == [execution]


def test_the_same_name_twice_and_failures(workflows: Workflows) -> None:
    execution = workflows.start_workflow_execution("c", "w")
    first = workflows.create_checkpoint(execution, "draft", "a")
    second = workflows.create_checkpoint(execution, "draft", "b")
    assert first["checkpoint_id"] != second["checkpoint_id"]
    assert workflows.complete_checkpoint(execution, first["checkpoint_id"], 1)
    assert workflows.pause_execution(execution)
    assert not workflows.pause_execution(execution)
    with pytest.raises(Conflict):
        workflows.complete_checkpoint(execution, "draft", 2)
    assert workflows.resume_execution(execution)
    assert not workflows.resume_execution(execution)
    assert workflows.complete_checkpoint(execution, "draft", "broke", success=False)
    states = [
        (c["state"], c["output_data"], c["error_details"]) for c in workflows.get_execution(execution)["checkpoints"]
    ]
    assert states == [("completed", 1, None), ("failed", None, "broke")]
    assert workflows.get_execution_status(execution)["state"] == "failed"


def test_what_is_unknown_or_nonsense(workflows: Workflows, store: CheckpointManager) -> None:
    for call in (
        lambda: workflows.create_checkpoint("exec_x_1_0", "a", "b"),
        lambda: workflows.get_execution_status("exec_x_1_0"),
        lambda: workflows.get_checkpoint_history("exec_x_1_0"),
    ):
        with pytest.raises(ValueError, match="not found"):
            call()
    assert not store.jobs()
    execution = workflows.start_workflow_execution("../..", "w")
    with pytest.raises(NotFound):
        workflows.complete_checkpoint(execution, "missing", 1)
    with pytest.raises(Validation):
        workflows.create_checkpoint(execution, "a", "b", on_denied="explode")
    with pytest.raises(Validation):
        workflows.create_checkpoint(execution, "a", "b", approval_required=True, expires_s=-1)
    with pytest.raises(Validation):
        workflows.list_executions("asleep")
    with pytest.raises(Validation):
        workflows.cleanup_old_executions(-1)
    with pytest.raises(kedge.UnsupportedType):
        workflows.create_checkpoint(execution, "a", "b", object())
    assert workflows.get_execution(execution)["checkpoints"] == []


def test_executions_are_listed_page_by_page(workflows: Workflows, store: CheckpointManager) -> None:
    ids = sorted(workflows.start_workflow_execution(f"c{n}", "w") for n in range(5))
    workflows.complete_execution(ids[0])

    def listed(state: str | None = None, **options: Any) -> list[str]:
        return [e["execution_id"] for e in workflows.list_executions(state, **options)]

    assert [listed(limit=2), listed(limit=2, after=ids[1]), listed(after=ids[3])] == [ids[:2], ids[2:4], ids[4:]]
    assert listed("running", limit=2) == ids[1:3]
    assert listed("running", most_jobs=2) == ids[1:2]
    with pytest.raises(kedge.Validation):
        listed(limit=0)
    words = ["runs", "executions", "--state", "running", "--limit", "2", "--after", ids[1], "--store", store.url]
    shown = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)["executions"]
    assert [e["execution_id"] for e in shown] == ids[2:4]
    assert CliRunner().invoke(cli, words).stdout.splitlines()[1].split() == [ids[2], "running", "w", "0/0"]


def test_cleanup_leaves_what_has_not_ended(workflows: Workflows) -> None:
    ended, running = (workflows.start_workflow_execution("c", "w") for _ in range(2))
    workflows.complete_execution(ended)
    assert workflows.cleanup_old_executions() == 0
    assert workflows.cleanup_old_executions(0) == 1
    assert [e["execution_id"] for e in workflows.list_executions()] == [running]


def test_decided_from_the_command_line(workflows: Workflows, store: CheckpointManager) -> None:
    execution = workflows.start_workflow_execution("c", "w")
    workflows.create_checkpoint(execution, "go", "agent", approval_required=True)
    words = ["approve", execution, "--by", "ada", "--store", store.url, "--json"]
    done = CliRunner().invoke(cli, words)
    assert json.loads(done.stdout)["approval"] == "go"
    assert workflows.get_execution_status(execution)["state"] == "running"
    assert CliRunner().invoke(cli, [*words, "--deny"]).exit_code == 4
    assert CliRunner().invoke(cli, ["approve", execution, "go", "--deny", "--store", store.url]).exit_code == 5


@pytest.mark.parametrize("options", [[], ["--deny"]])
def test_what_follows_a_decision_about_an_execution_is_no_command_for_runs(
    workflows: Workflows, store: CheckpointManager, options: list[str]
) -> None:
    execution = workflows.start_workflow_execution("c", "w")
    workflows.create_checkpoint(execution, "go", "agent", approval_required=True)
    said = CliRunner().invoke(cli, ["approve", execution, *options, "--store", store.url]).stdout
    assert "kedge runs executions" in said
    assert "runs resume" not in said
    assert "another key" not in said
