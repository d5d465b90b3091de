"""PyTorch (docs/tensors.md).

    training = Training("my-store", "run-7", model=model, optimiser=optimiser, batches=batches)
    training.resume()                                     # everything, random numbers included
    dcp.save(state, storage_writer=KedgeWriter("my-store", "run-7"))        # torch.distributed.checkpoint

Lightning's CheckpointIO and the callback for Hugging Face's Trainer are in `lightning` and `huggingface` beside this.
"""

from .dcp import KedgeReader, KedgeWriter
from .training import Batches, Training

__all__ = ["Batches", "KedgeReader", "KedgeWriter", "Training"]
