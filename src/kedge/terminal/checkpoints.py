"""Checkpoints as table rows, the same in all commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .tables import Column, print_table
from .text import age, size

if TYPE_CHECKING:
    from kedge.model import Checkpoint


def notes(checkpoint: Checkpoint) -> str:
    """Return the notes on a checkpoint: damage, pin, tags."""
    special = [str(checkpoint.status)] if checkpoint.status in ("corrupted", "archived") else []
    if checkpoint.is_pinned:
        special.append("pinned")
    return " ".join([*special, *(f"{name}={value}" for name, value in checkpoint.tags.items())])


NUMBER: Column[Checkpoint] = Column("#", lambda c: str(c.seq), ">", "dim", is_whole=True)
ID: Column[Checkpoint] = Column("ID", lambda c: c.id, look="id", is_whole=True)
STEP: Column[Checkpoint] = Column("STEP", lambda c: c.step, drop=2, least=8)
_LEVEL: Column[Checkpoint] = Column("LEVEL", lambda c: str(c.level), drop=5, least=5)
_REST: tuple[Column[Checkpoint], ...] = (
    Column("AGE", lambda c: age(c.created_at), ">", drop=1, least=13, is_whole=True),
    Column("SIZE", lambda c: size(c.size_bytes), ">", is_whole=True, drop=3),
    Column("ADDED", lambda c: size(c.stored_bytes), ">", "dim", is_whole=True, drop=6),
    Column("NOTES", notes, look="warn", drop=4),
)


def print_checkpoints(checkpoints: Sequence[Checkpoint], *, has_titles: bool = True) -> None:
    """Print number, ID, and as much of the rest as fits. The level is shown only if levels differ."""
    levels = [_LEVEL] if len({checkpoint.level for checkpoint in checkpoints}) > 1 else []
    print_table((NUMBER, ID, STEP, *levels, *_REST), checkpoints, has_titles=has_titles)
