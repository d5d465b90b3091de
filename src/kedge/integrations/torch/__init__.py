"""PyTorch (docs/tensors.md).

    training = Training("my-store", "run-7", model=model, optimiser=optimiser, batches=batches)
    training.resume()                                     # everything, random numbers included
    dcp.save(state, storage_writer=KedgeWriter("my-store", "run-7"))        # torch.distributed.checkpoint

Lightning's CheckpointIO and the callback for Hugging Face's Trainer are in `lightning` and `huggingface` beside this.
"""

from kedge.errors import missing_extra

try:
    from .dcp import KedgeReader, KedgeWriter
    from .training import Batches, Training
except ModuleNotFoundError as error:
    raise missing_extra("kedge.integrations.torch", "torch", error) from error

__all__ = ["Batches", "KedgeReader", "KedgeWriter", "Training"]
