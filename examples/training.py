"""A training run that may be killed at any moment and ends with the same bits as one that was not.

    python examples/training.py                  trains, saves every few steps, prints a digest of the model
    python examples/training.py --store DIR      kill it, start it again: it continues

The model has dropout and a shuffled dataset, so that the random generators and the place in the data matter.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path

import torch

from kedge.integrations.torch import Batches, Training


def make(store: str | Path) -> Training:
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4))
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimiser, step_size=20, gamma=0.9)
    inputs = torch.randn(500, 16)
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :4].argmax(1))
    return Training(
        store, "training", model=model, optimiser=optimiser, scheduler=scheduler, batches=Batches(dataset, 32)
    )


def train(store: str | Path, steps: int) -> str:
    """Train, or continue training, up to `steps`; return a digest of the model."""
    training = make(store)
    with training.manager:
        if checkpoint := training.resume():
            print(f"continuing after {checkpoint.step}", flush=True)
        model, optimiser = training.parts["model"], training.parts["optimiser"]
        while training.step < steps:
            for inputs, labels in training.parts["batches"]:
                optimiser.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs), labels).backward()
                optimiser.step()
                training.parts["scheduler"].step()
                training.step += 1
                if training.step % 3 == 0:
                    training.save_async()  # copied now, durable later; a failure comes up at the next one
                if training.step == steps:
                    break
        training.save()
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="training-store")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print(train(options.store, options.steps))
