"""Checkpoints and jobs as table rows: the same everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .tables import Column, print_table
from .text import age, size

if TYPE_CHECKING:
    from kedge.model import Checkpoint, Job


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


def print_checkpoints(checkpoints: Sequence[Checkpoint], *, has_titles: bool = True) -> None:
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
        has_titles=has_titles,
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
