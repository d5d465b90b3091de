"""Checkpoints, jobs, events and plans as JSON: the same for the command line, the service and its client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from .model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus, Event, Job

if TYPE_CHECKING:
    from .care.retention import Plan

Document = dict[str, object]


def checkpoint_json(checkpoint: Checkpoint) -> Document:
    return {
        "id": checkpoint.id,
        "job": checkpoint.job,
        "seq": checkpoint.seq,
        "step": checkpoint.step,
        "level": str(checkpoint.level),
        "parent": checkpoint.parent,
        "created_at": checkpoint.created_at.isoformat(),
        "status": str(checkpoint.status),
        "size_bytes": checkpoint.size_bytes,
        "stored_bytes": checkpoint.stored_bytes,
        "digest": checkpoint.digest,
        "codec": checkpoint.codec,
        "schema_version": checkpoint.schema_version,
        "tags": dict(checkpoint.tags),
        "pinned": checkpoint.is_pinned,
        "metadata": dict(checkpoint.metadata),
    }


def checkpoint_from_json(document: Mapping[str, Any]) -> Checkpoint:
    fields = dict(document)
    return Checkpoint(
        id=CheckpointId(fields.pop("id")),
        level=CheckpointLevel(fields.pop("level")),
        created_at=datetime.fromisoformat(fields.pop("created_at")),
        status=CheckpointStatus(fields.pop("status")),
        is_pinned=fields.pop("pinned"),
        **fields,
    )


def job_json(job: Job) -> Document:
    return {
        "name": job.name,
        "checkpoints": job.checkpoints,
        "last_seq": job.last_seq,
        "size_bytes": job.size_bytes,
        "stored_bytes": job.stored_bytes,
        "created_at": job.created_at.isoformat(),
        "updated_at": job.updated_at.isoformat(),
        "retention": None if job.retention is None else json.loads(job.retention),
    }


def job_from_json(document: Mapping[str, Any]) -> Job:
    fields = dict(document)
    retention = fields.pop("retention")
    return Job(
        created_at=datetime.fromisoformat(fields.pop("created_at")),
        updated_at=datetime.fromisoformat(fields.pop("updated_at")),
        retention=None if retention is None else json.dumps(retention, separators=(",", ":")),
        **fields,
    )


def event_json(event: Event) -> Document:
    return {
        "id": event.id,
        "at": event.at.isoformat(),
        "actor": event.actor,
        "action": event.action,
        "job": event.job,
        "checkpoint": event.checkpoint,
        "detail": json.loads(event.detail),
        "chain": event.chain,
    }


def event_from_json(document: Mapping[str, Any]) -> Event:
    fields = dict(document)
    return Event(
        at=datetime.fromisoformat(fields.pop("at")),
        detail=json.dumps(fields.pop("detail"), separators=(",", ":"), ensure_ascii=False),
        **fields,
    )


def plan_json(plan: Plan, *, is_applied: bool) -> Document:
    return {
        "job": plan.job,
        "policy": json.loads(plan.policy.to_json()),
        "applied": is_applied,
        "delete": [checkpoint_json(c) for c in plan.delete],
        "keep": [{**checkpoint_json(kept.checkpoint), "reasons": list(kept.reasons)} for kept in plan.keep],
        "frees_bytes": plan.frees_bytes,
    }
