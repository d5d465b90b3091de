"""A real GPU, where there is one (CI has none): what test_torch_types shows with main memory in its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kedge

pytestmark = pytest.mark.requires("module:torch")


@pytest.fixture
def torch() -> Any:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")  # skip: hardware that CI does not have
    return torch


def same(a: Any, b: Any, torch: Any) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    dense = [tensor.detach().to_dense().cpu().contiguous() for tensor in (a, b)]
    assert torch.equal(*(tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor for tensor in dense))


def test_states_on_a_gpu(torch: Any, tmp_path: Path) -> None:
    weight = torch.randn(2000, 3000, device="cuda").bfloat16()
    state = {
        "weight": weight,
        "tied": weight.T,
        "row": weight[5],
        "small": torch.randn(100, device="cuda"),
        "step": torch.tensor(3, device="cuda"),
        "eight": torch.randn(1 << 20, device="cuda").to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 3, device="cuda"),
        "turned": torch.randn(512, 512, device="cuda").T,
        "sparse": torch.eye(50, device="cuda").to_sparse(),
        "parameter": torch.nn.Parameter(torch.randn(300, 300, device="cuda")),
        "host": torch.arange(500_000),
    }
    with kedge.open(tmp_path / "store") as store:
        first = store.save("job", "one", state)
        second = store.save_async("job", "two", state).result()
        assert store.get(second).stored_bytes < 20_000
        for options in ({}, {"device": "cuda"}, {"device": "cuda:0"}, {"mapped": True}):
            for saved in (first, second):
                loaded: Any = store.load(saved, **options)  # type: ignore[arg-type]
                for name, tensor in state.items():
                    same(tensor, loaded[name], torch)
                    assert loaded[name].is_cuda == ("device" in options)
                loaded["weight"][5, 5] = 7
                assert loaded["tied"][5, 5] == loaded["row"][5] == 7
        own = {
            name: torch.zeros_like(state[name]) for name in ("weight", "small", "eight", "parameter", "host", "step")
        }
        store.load(first, into=own)
        for name, tensor in own.items():
            same(tensor, state[name], torch)


def test_training_on_a_gpu(torch: Any, tmp_path: Path) -> None:
    from kedge.integrations.torch import Training

    model = torch.nn.Sequential(torch.nn.Linear(800, 800), torch.nn.Dropout(0.3)).cuda()
    optimiser = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimiser.zero_grad()
        model(torch.randn(8, 800, device="cuda")).pow(2).sum().backward()
        optimiser.step()

    with kedge.open(tmp_path / "store") as store:
        training = Training(store, "run", model=model, optimiser=optimiser)
        step()
        training.save_async()
        step()
        after = [parameter.detach().clone() for parameter in model.parameters()]
        assert training.resume() is not None
        step()
        assert all(torch.equal(a, b) for a, b in zip(after, model.parameters(), strict=True))
