"""What waits for a person: approvals of runs and of workflows, in one list."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, Checkpoint
from kedge.pipeline.approval import APPROVAL, Approval, PendingApproval
from kedge.process.workflow import Workflows

_LONG = 4000
_DECISIONS = 50


@dataclass(frozen=True, slots=True)
class Asked:
    approval: PendingApproval
    address: str
    of: str  # the run, or the execution as people call it
    about: str = ""  # what it was given, as JSON


def asked(store: CheckpointManager, pending: Iterable[PendingApproval]) -> list[Asked]:
    """Approvals that nobody has decided yet, with what people need to decide."""
    return [_asked(store, approval) for approval in pending]


def _asked(store: CheckpointManager, approval: PendingApproval) -> Asked:
    job = quote(approval.job, safe="")
    if approval.kind != "execution":
        return Asked(approval, f"/runs/{job}", approval.job)
    execution = Workflows(store).get_execution(approval.job)
    given = next(
        (step["input_data"] for step in execution["checkpoints"] if step["checkpoint_id"] == approval.id), None
    )
    name = f"{execution['workflow_name']} {execution['correlation_id']}"
    return Asked(approval, f"/executions/{job}", name, as_json(given) if given else "")


@dataclass(frozen=True, slots=True)
class Decided:
    name: str
    approved: bool
    actor: str
    comment: str
    at: datetime


def decided(store: CheckpointManager, run: str) -> list[Decided]:
    """What people decided about a run, newest last."""
    messages = store.list(run + INBOX_SUFFIX, metadata={"kind": APPROVAL}, limit=_DECISIONS)
    return [_decision(message, store.load(message.id)) for message in messages]


def _decision(message: Checkpoint, state: Any) -> Decided:
    decision = Approval(**state["value"])
    name = str(message.metadata.get("name", ""))
    return Decided(name, decision.approved, decision.actor, decision.comment, message.created_at)


def as_json(value: object) -> str:
    """On one line if that is short."""
    line = json.dumps(value, ensure_ascii=False, default=str)
    return line if len(line) <= 100 else json.dumps(value, indent=2, ensure_ascii=False, default=str)[:_LONG]
