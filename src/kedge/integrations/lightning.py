"""Lightning: `Trainer(plugins=[KedgeCheckpointIO("my-store", "run-7")])` (docs/tensors.md).

Lightning names checkpoints by paths. Here a path is only a name: it is kept with the checkpoint, nothing is written
there, and `ckpt_path=` takes a path as Lightning gave it, or the ID of a checkpoint.
"""

from __future__ import annotations

import os
from typing import Any

try:
    from lightning.fabric.plugins import CheckpointIO
except ImportError:
    from lightning_fabric.plugins import CheckpointIO

from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint


class KedgeCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Lightning's checkpoints as checkpoints of a job: only what changed is stored, loading is verified."""

    def __init__(self, store: str | os.PathLike[str] | CheckpointManager, job: str) -> None:
        self._is_owner = not isinstance(store, CheckpointManager)
        self.manager = store if isinstance(store, CheckpointManager) else CheckpointManager(store)
        self.job = job

    def save_checkpoint(
        self, checkpoint: dict[str, object], path: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        """Durable when it returns. A path that is used again means its newest checkpoint from then on."""
        name = os.fspath(path)
        self.manager.save(self.job, os.path.basename(name) or name, checkpoint, metadata={"path": name})

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Data only, whatever `weights_only` says: a checkpoint here holds nothing else."""
        device = map_location if isinstance(map_location, str) or hasattr(map_location, "index") else None
        state: Any = self.manager.load(self._find(os.fspath(path))[-1].id, device=device)
        return dict(state)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        for checkpoint in self._find(os.fspath(path)):
            self.manager.delete(self.job, checkpoint.id)

    def _find(self, name: str) -> list[Checkpoint]:
        checkpoints = self.manager.list(self.job, metadata={"path": name})
        if not checkpoints:
            checkpoints = [checkpoint for checkpoint in self.manager.walk(self.job) if checkpoint.id == name]
        if not checkpoints:
            raise NotFound(f"job {self.job} has no checkpoint {name}", hint=f"kedge list {self.job}")
        return checkpoints

    def teardown(self) -> None:
        if self._is_owner:
            self.manager.close()
