"""Old names that work: client code of the systems Kedge replaces runs with only its import line changed.

Thin adapters; nothing in Kedge knows them. docs/coming-from.md maps each name to the new one.
A directory given to one of them may hold old files too: the store is in `.kedge` inside it, beside them.
"""

from __future__ import annotations

import os

from kedge.manager import CheckpointManager


def store_in(directory: str | os.PathLike[str]) -> str:
    """Where the store of an old checkpoint directory is; URLs and stores are what they are."""
    place = os.fspath(directory)
    if ":" in place or os.path.exists(os.path.join(place, "kedge-store")):
        return place
    os.makedirs(place, exist_ok=True)
    return os.path.join(place, ".kedge")


def open_in(directory: str | os.PathLike[str] | CheckpointManager) -> CheckpointManager:
    return directory if isinstance(directory, CheckpointManager) else CheckpointManager(store_in(directory))
