"""A training run that stops anywhere and goes on as if it had not."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kedge.errors import NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.store.background import PendingSave

_RANDOM, _STEP = "random", "step"


class Training:
    """The parts of a training run under one job, saved and restored together.

    Parts are whatever has `state_dict` and `load_state_dict`: model, optimiser, scheduler, scaler, Batches. `step`
    counts what the caller counts. The random generators of Python, numpy and torch, CUDA's included, are saved too,
    so that a resumed run computes the same numbers.
    """

    def __init__(self, store: str | os.PathLike[str] | CheckpointManager, job: str, **parts: Any) -> None:
        for name, part in parts.items():
            if name in (_RANDOM, _STEP) or not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise Validation(
                    f"{name}={type(part).__name__} cannot be part of a training run",
                    hint='use objects with state_dict and load_state_dict, under names other than "random" and "step"',
                )
        self.manager = store if isinstance(store, CheckpointManager) else CheckpointManager(store)
        self.job = job
        self.parts = parts
        self.step = 0
        self._pending: PendingSave[Any] | None = None

    def state(self) -> dict[str, Any]:
        """All of it now; tensors are those of the parts themselves, not copies."""
        own = {name: part.state_dict() for name, part in self.parts.items()}
        return {_STEP: self.step, _RANDOM: random_state(), **own}

    def save(self, **options: Any) -> str:
        """Make it durable; the options are those of CheckpointManager.save."""
        return self.manager.save(self.job, f"step {self.step}", self.state(), **options)

    def save_async(self, **options: Any) -> PendingSave[Any]:
        """Copy it, go on training, and have it durable later."""
        self._pending = self.manager.save_async(self.job, f"step {self.step}", self.state(), **options)
        return self._pending

    def resume(self, checkpoint_id: str | None = None) -> Checkpoint | None:
        """Restore the newest checkpoint of the job, or the one that is named; None when there is none yet.

        Waits for this object's own save_async first.
        """
        if self._pending is not None:
            self._pending.result()
        if checkpoint_id is None:
            latest = self.manager.load_latest(self.job, device=self._device())
            if latest is None:
                return None
            checkpoint, state = latest
        else:
            checkpoint = self.manager.get(checkpoint_id)
            if checkpoint.job != self.job:
                raise NotFound(f"checkpoint {checkpoint_id} is not one of job {self.job}", hint="kedge list JOB")
            state = self.manager.load(checkpoint_id, device=self._device())
        self._restore(checkpoint, state)
        return checkpoint

    def _restore(self, checkpoint: Checkpoint, state: Any) -> None:
        expected = {_STEP, _RANDOM, *self.parts}
        if not isinstance(state, dict) or state.keys() != expected:
            there = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise Validation(
                f"checkpoint {checkpoint.id} holds {there}, this run has {sorted(expected)}",
                hint="give Training the parts it was saved with, or load the checkpoint yourself",
            )
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.step = state[_STEP]
        set_random_state(state[_RANDOM])

    def _device(self) -> str | None:
        """Where the first module is, if that is an accelerator: its tensors go there without a detour."""
        modules = (part for part in self.parts.values() if isinstance(part, torch.nn.Module))
        first = next((tensor for module in modules for tensor in module.parameters()), None)
        return None if first is None or first.device.type in ("cpu", "meta") else str(first.device)


def random_state() -> dict[str, object]:
    """The state of every random generator that training uses."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy as np

        state["numpy"] = np.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"].cpu())
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])


class Batches:
    """A DataLoader that knows how far it is: `for batch in batches` goes over the rest of the epoch.

    The order of an epoch depends on the seed and its number alone. What was seen already is skipped, not loaded.
    `options` are those of DataLoader, workers and all: only batches that were handed out count.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        **options: object,
    ) -> None:
        self._dataset = dataset
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._options = options
        self.epoch = 0
        self.position = 0

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        count = len(self._dataset)
        return count // self._batch_size if self._drop_last else -(-count // self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        left = self._order()[self.position :]
        # Its own generator: the one of all would move on with every resumption, and the numbers with it.
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        loader = torch.utils.data.DataLoader(self._dataset, batch_sampler=left, generator=generator, **self._options)
        for batch in loader:
            self.position += 1
            if self.position == len(self):
                self.epoch, self.position = self.epoch + 1, 0
            yield batch

    def _order(self) -> list[Sequence[int]]:
        count = len(self._dataset)
        generator = torch.Generator().manual_seed((self._seed << 32) + self.epoch)
        order = torch.randperm(count, generator=generator).tolist() if self._shuffle else list(range(count))
        starts = range(0, len(self) * self._batch_size, self._batch_size)
        return [order[start : start + self._batch_size] for start in starts]

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed, "epoch": self.epoch, "position": self.position, "batch_size": self._batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if (state["seed"], state["batch_size"]) != (self._seed, self._batch_size):
            raise Validation(
                f"batches of {state['batch_size']} with seed {state['seed']} cannot go on as batches of "
                f"{self._batch_size} with seed {self._seed}",
                hint="use the same batch size and seed, or leave Batches out of the run",
            )
        self.epoch, self.position = state["epoch"], state["position"]
