"""torch.distributed.checkpoint, Lightning, Hugging Face's Trainer and Training, with the real packages."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge

pytestmark = [
    pytest.mark.requires("module:torch"),
    pytest.mark.xdist_group("torch"),  # they are slow to import
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture
def torch() -> Any:
    import torch

    return torch


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Any]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


# --- torch.distributed.checkpoint ---


def model_state(torch: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(300, 400), torch.nn.BatchNorm1d(400))
    optimiser = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 300)).sum().backward()
    optimiser.step()
    return {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "epoch": 3, "note": ("tuple", {1, 2})}


def test_dcp_saves_and_loads(torch: Any, store: Any) -> None:
    import torch.distributed.checkpoint as dcp

    from kedge.integrations.torch import KedgeReader, KedgeWriter

    state = model_state(torch)
    writer = KedgeWriter(store, "run")
    dcp.save(state, checkpoint_id="step 1", storage_writer=writer)
    first = store.get(writer.saved)
    assert first.step == "step 1"
    changed = {**state, "epoch": 4}
    dcp.save(changed, checkpoint_id="step 2", storage_writer=writer)
    parts = store.list("run.rank0")
    assert parts[1].stored_bytes < parts[0].stored_bytes / 10  # what did not change is not stored again

    own = model_state(torch, seed=1)
    own["epoch"], own["note"] = 0, None
    dcp.load(own, storage_reader=KedgeReader(store, "run"))
    assert own["epoch"] == 4
    assert own["note"] == ("tuple", {1, 2})
    for key, tensor in state["model"].items():
        assert torch.equal(own["model"][key], tensor)
    dcp.load(own, checkpoint_id="step 1", storage_reader=KedgeReader(store, "run"))
    assert own["epoch"] == 3
    part = {"model": {"0.bias": torch.zeros(400)}}
    dcp.load(part, storage_reader=KedgeReader(store, "run", first.id))
    assert torch.equal(part["model"]["0.bias"], state["model"]["0.bias"])


def test_dcp_saves_in_the_background_and_keeps_the_newest(torch: Any, store: Any) -> None:
    import torch.distributed.checkpoint as dcp

    from kedge.integrations.torch import KedgeReader, KedgeWriter

    writer = KedgeWriter(store, "run", keep_last=2)
    for step in range(4):
        state = {"weight": torch.full((1000,), float(step))}
        dcp.async_save(state, checkpoint_id=f"step {step}", storage_writer=writer).result()
    assert [c.step for c in store.list("run")] == ["step 2", "step 3"]
    assert [c.step for c in store.list("run.rank0")] == ["step 2", "step 3"]
    own = {"weight": torch.zeros(1000)}
    dcp.load(own, storage_reader=KedgeReader(store, "run"))
    assert own["weight"][0] == 3.0


def test_dcp_says_what_is_missing_and_travels(torch: Any, store: Any) -> None:
    import torch.distributed.checkpoint as dcp

    from kedge.integrations.torch import KedgeReader, KedgeWriter

    reader = KedgeReader(store, "nothing")
    with pytest.raises(kedge.NotFound, match="no whole save"):
        reader.read_metadata()
    writer = pickle.loads(pickle.dumps(KedgeWriter(store, "run")))
    dcp.save({"weight": torch.ones(3)}, storage_writer=writer)
    assert store.exists(writer.saved)
    writer.manager.close()


TWO_RANKS = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.tensor import distribute_tensor, Shard, Replicate
from torch.distributed.device_mesh import init_device_mesh
from kedge.integrations.torch import KedgeReader, KedgeWriter

def model(mesh):
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 33), torch.nn.Linear(33, 8))
    fully_shard(net, mesh=mesh)
    return net

def work(rank, store, phase):
    dist.init_process_group("gloo", init_method=f"file://{store}.meeting", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    net = model(mesh)
    whole = torch.arange(40.0).reshape(8, 5)
    state = {"net": net.state_dict(), "rows": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}
    if phase == "save":
        dcp.save(state, checkpoint_id="step 7", storage_writer=KedgeWriter(store, "run"))
        dcp.async_save(state, checkpoint_id="step 8", storage_writer=KedgeWriter(store, "run")).result()
    other = {"net": {k: v.clone().zero_() for k, v in net.state_dict().items()},
             "rows": distribute_tensor(torch.zeros(8, 5), mesh, [Shard(1)]), "step": 0}
    dcp.load(other, storage_reader=KedgeReader(store, "run"))
    assert other["step"] == 7
    assert torch.equal(other["rows"].full_tensor(), whole)
    for key, tensor in net.state_dict().items():
        assert torch.equal(other["net"][key].full_tensor(), tensor.full_tensor()), key
    dist.destroy_process_group()

if __name__ == "__main__":
    import torch.multiprocessing as mp
    torch.set_num_threads(1)
    mp.start_processes(work, (sys.argv[1], "save"), nprocs=2, start_method="fork")
"""


def test_dcp_shards_over_two_ranks(torch: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from kedge.integrations.torch import KedgeReader

    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS)
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    with kedge.open(tmp_path / "store") as store:  # one rank loads what two have saved
        own = {"rows": torch.zeros(8, 5), "step": 0}
        dcp.load(own, storage_reader=KedgeReader(store, "run"))
        assert torch.equal(own["rows"], torch.arange(40.0).reshape(8, 5))
        assert [job.name for job in store.jobs()] == ["run", "run.rank0", "run.rank1"]
        second = [store.list(f"run.rank{rank}")[1] for rank in (0, 1)]
        assert all(part.stored_bytes < 3000 for part in second)  # the second save was the same


# --- Training ---


def test_training_resumes_everything(torch: Any, store: Any) -> None:
    import random

    import numpy as np

    from kedge.integrations.torch import Batches, Training

    def make() -> Any:
        model = torch.nn.Linear(4, 4)
        dataset = torch.utils.data.TensorDataset(torch.arange(40.0).reshape(10, 4))
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Training(store, "run", model=model, optimiser=optimiser, batches=Batches(dataset, 3, seed=5))

    first = make()
    assert first.resume() is None
    iterator = iter(first.parts["batches"])
    next(iterator)
    next(iterator)
    first.step = 2
    first.save_async().result(60)
    expected = [batch[0] for batch in iterator], random.random(), np.random.random(), torch.rand(3)
    second = make()
    resumed = second.resume()
    assert resumed is not None
    assert (resumed.step, second.step) == ("step 2", 2)
    found = [batch[0] for batch in second.parts["batches"]], random.random(), np.random.random(), torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected[0], strict=True))
    assert found[1:3] == expected[1:3]
    assert torch.equal(found[3], expected[3])
    assert torch.equal(first.parts["model"].weight, second.parts["model"].weight)
    assert (second.parts["batches"].epoch, second.parts["batches"].position) == (1, 0)
    assert len(list(second.parts["batches"])) == len(second.parts["batches"]) == 4
    with pytest.raises(kedge.Validation, match="holds"):
        Training(store, "run", model=torch.nn.Linear(4, 4)).resume()
    with pytest.raises(kedge.Validation, match="cannot be part"):
        Training(store, "run", model=3)
    with pytest.raises(kedge.Validation, match="cannot go on"):
        Batches([1, 2, 3], 2).load_state_dict(first.parts["batches"].state_dict())


# --- Lightning ---


@pytest.mark.requires("module:pytorch_lightning")
@pytest.mark.filterwarnings("ignore")
def test_lightning_saves_and_resumes(torch: Any, store: Any, tmp_path: Path) -> None:
    import pytorch_lightning as lightning

    from kedge.integrations.lightning import KedgeCheckpointIO

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)
            self.save_hyperparameters()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    def trainer(epochs: int) -> Any:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        keep = lightning.callbacks.ModelCheckpoint(tmp_path / "out", save_top_k=1, save_last=False)
        return lightning.Trainer(
            max_epochs=epochs, plugins=[KedgeCheckpointIO(store, "run")], callbacks=[keep], **quiet
        )

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 8)), batch_size=8)
    model, first = Model(), trainer(2)
    first.fit(model, data)
    assert [c.metadata["path"] for c in store.list("run")] == [first.checkpoint_callback.best_model_path]
    assert not list((tmp_path / "out").glob("*.ckpt"))
    second, again = trainer(3), Model()
    second.fit(again, data, ckpt_path=first.checkpoint_callback.best_model_path)
    assert second.global_step == 6
    plugin = second.strategy.checkpoint_io
    with pytest.raises(kedge.NotFound):
        plugin.load_checkpoint("nowhere.ckpt")
    newest = store.list("run")[-1].id
    assert torch.equal(plugin.load_checkpoint(newest)["state_dict"]["layer.weight"], again.layer.weight)


# --- Hugging Face ---


@pytest.mark.requires("module:transformers", "module:accelerate")
@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_hugging_face(torch: Any, store: Any, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from kedge.integrations.huggingface import KedgeCallback

    config = GPT2Config(vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    rows = [{"input_ids": [n % 16] * 4, "labels": [n % 16] * 4} for n in range(16)]

    def trainer(steps: int, out: Path, callback: Any) -> Any:
        quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no"}
        saving = {"max_steps": steps, "save_steps": 2, "save_total_limit": 1}
        arguments = TrainingArguments(str(out), per_device_train_batch_size=4, **saving, **quiet)
        return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows, callbacks=[callback])

    callback = KedgeCallback(store, "run")
    assert callback.restore(tmp_path / "a") is None
    trainer(4, tmp_path / "a", callback).train()
    assert [c.metadata["global_step"] for c in store.list("run")] == [2, 4]
    place = callback.restore(tmp_path / "b")
    assert place == str(tmp_path / "b" / "checkpoint-4")
    resumed = trainer(6, tmp_path / "b", callback)
    resumed.train(resume_from_checkpoint=place)
    assert resumed.state.global_step == 6
    assert store.list("run")[-1].step == "checkpoint-6"
