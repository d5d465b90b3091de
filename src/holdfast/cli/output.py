"""Checkpoints as JSON and as table rows: the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .tables import Column, print_table
from .text import age, size

if TYPE_CHECKING:
    from holdfast.model import Checkpoint, Event, Job


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, object]:
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


def job_json(job: Job) -> dict[str, object]:
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


def event_json(event: Event) -> dict[str, object]:
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


def notes(checkpoint: Checkpoint) -> str:
    """What is special about a checkpoint: damage, pin, tags."""
    special = [str(checkpoint.status)] if checkpoint.status in ("corrupted", "archived") else []
    if checkpoint.is_pinned:
        special.append("pinned")
    return " ".join([*special, *(f"{name}={value}" for name, value in checkpoint.tags.items())])


_CHECKPOINTS = (
    Column("#", ">", "dim", is_whole=True),
    Column("ID", look="id", is_whole=True),
    Column("STEP", drop=2, least=8),
    Column("LEVEL", drop=5, least=5),
    Column("AGE", ">", drop=1, least=13, is_whole=True),
    Column("SIZE", ">", is_whole=True, drop=3),
    Column("ADDED", ">", "dim", is_whole=True, drop=6),
    Column("NOTES", look="warn", drop=4),
)


def print_checkpoints(checkpoints: Sequence[Checkpoint]) -> None:
    """Number, ID, and as much of the rest as fits. The level is shown only where levels differ."""
    levels = {checkpoint.level for checkpoint in checkpoints}
    print_table(
        _CHECKPOINTS,
        [
            (
                str(c.seq),
                c.id,
                c.step,
                str(c.level) if len(levels) > 1 else "",
                age(c.created_at),
                size(c.size_bytes),
                size(c.stored_bytes),
                notes(c),
            )
            for c in checkpoints
        ],
    )


def print_jobs(jobs: Iterable[Job]) -> None:
    print_table(
        (
            Column("JOB", look="id", is_whole=True),
            Column("CHECKPOINTS", ">", is_whole=True),
            Column("SIZE", ">", is_whole=True),
            Column("ADDED", ">", "dim", is_whole=True, drop=2),
            Column("LAST SAVE", ">", is_whole=True, drop=1),
            Column("POLICY", look="dim", drop=3),
        ),
        [
            (
                job.name,
                f"{job.checkpoints:,}",
                size(job.size_bytes),
                size(job.stored_bytes),
                age(job.updated_at),
                "yes" if job.retention else "",
            )
            for job in jobs
        ],
    )
