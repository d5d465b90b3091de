"""What waits for a person: approvals of runs and of workflows, in one list."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.pipeline.history import find_run, find_runs
from kedge.pipeline.wait import decide, decision_of
from kedge.process.workflow import Workflows

MOST_JOBS = 2000  # that are looked at for the list
_MOST = 200  # executions
_LONG = 4000


@dataclass(frozen=True, slots=True)
class Asked:
    key: str  # run or execution
    name: str
    id: str  # what `answer` wants
    prompt: str
    since: datetime
    expires: str
    address: str
    about: str = ""  # what it was given, as JSON


def asked(store: CheckpointManager, run: str | None = None) -> list[Asked]:
    """Approvals nobody has decided yet, of one run or of all."""
    runs = find_runs(store, most_jobs=MOST_JOBS) if run is None else [find_run(store, run)]
    found = [
        Asked(
            each.key,
            str(wait["name"]),
            str(wait["name"]),
            str(wait.get("prompt", "")),
            each.updated_at,
            "",
            f"/runs/{each.key}",
        )
        for each in runs
        for wait in each.waiting
        if wait.get("for") == "approval" and decision_of(store, each.key, str(wait["name"])) is None
    ]
    return found if run is not None else [*found, *_of_workflows(store)]


def _of_workflows(store: CheckpointManager) -> Iterator[Asked]:
    workflows = Workflows(store)
    for status in workflows.list_executions("paused", limit=_MOST, most_jobs=MOST_JOBS):
        execution = workflows.get_execution(status["execution_id"])
        for checkpoint in execution["checkpoints"]:
            if checkpoint["approval_status"] == "pending":
                key = execution["execution_id"]
                prompt = f"{execution['workflow_name']}: {checkpoint['agent_id']} wants to go on"
                given = checkpoint["input_data"]
                yield Asked(
                    key,
                    checkpoint["checkpoint_name"],
                    checkpoint["checkpoint_id"],
                    prompt,
                    datetime.fromisoformat(checkpoint["started_at"]),
                    checkpoint["approval_expires_at"] or "",
                    f"/jobs/{key}",
                    _as_json(given)[:_LONG] if given else "",
                )


def _as_json(value: object) -> str:
    """On one line if that is short."""
    line = json.dumps(value, ensure_ascii=False, default=str)
    return line if len(line) <= 100 else json.dumps(value, indent=2, ensure_ascii=False, default=str)


def settle(store: CheckpointManager, key: str, name: str, approved: bool, comment: str) -> None:
    """Decide, for good; Conflict when somebody has."""
    newest = store.list(key, limit=1)
    if not newest:
        raise NotFound(f"there is no run {key}", hint="the list of approvals shows what waits")
    if newest[0].metadata.get("kind") == "execution":
        Workflows(store).approve_checkpoint(key, name, approved, actor=store.actor, comment=comment)
    else:
        decide(store, key, name, approved, actor=store.actor, comment=comment)
