"""Hugging Face's Trainer: `Trainer(…, callbacks=[KedgeCallback("my-store", "run-7")])` (docs/tensors.md).

The Trainer writes a directory per checkpoint, in its own formats. The callback keeps each in the store, deduplicated
and verified, so that `save_total_limit=1` on the local disk loses nothing and a run goes on where it was on another
machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from kedge.errors import Corrupted
from kedge.files import Tree
from kedge.manager import CheckpointManager

_FILES = "files"


class KedgeCallback(TrainerCallback):  # type: ignore[misc]
    """Saves what the Trainer has saved. `trainer.train(resume_from_checkpoint=callback.restore(output_dir))`."""

    def __init__(self, store: str | os.PathLike[str] | CheckpointManager, job: str) -> None:
        self.manager = store if isinstance(store, CheckpointManager) else CheckpointManager(store)
        self.job = job

    def on_save(self, args: Any, state: Any, control: object, **kwargs: object) -> None:
        """Called by the Trainer after each of its saves; durable when it returns."""
        if not state.is_world_process_zero:
            return
        name = f"checkpoint-{state.global_step}"
        state_to_save = {"step": state.global_step, "epoch": state.epoch, _FILES: Tree(Path(args.output_dir) / name)}
        self.manager.save(self.job, name, state_to_save, metadata={"global_step": state.global_step})

    def restore(self, output_dir: str | os.PathLike[str], checkpoint_id: str | None = None) -> str | None:
        """Write the newest checkpoint, or the one that is named, below `output_dir`; None when there is none yet.

        Files that stand there under the same names are replaced.
        """
        if checkpoint_id is None:
            latest = self.manager.load_latest(self.job)
            if latest is None:
                return None
            checkpoint, state = latest
        else:
            checkpoint, state = self.manager.get(checkpoint_id), self.manager.load(checkpoint_id)
        if not isinstance(state, dict) or not isinstance(state.get(_FILES), Tree):
            raise Corrupted(f"checkpoint {checkpoint.id} was not saved by KedgeCallback", hint="name another one")
        target = Path(output_dir) / f"checkpoint-{int(state['step'])}"
        state[_FILES].write_to(target, overwrite=True)
        return str(target)
