"""Tensors in a store: shared memory, sparse layouts, accelerators (played by main memory), into, mapped, async."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ormsgpack
import pytest

import kedge
from kedge import codec
from kedge.codec import TypeSummary
from kedge.errors import Corrupted, Validation

pytestmark = pytest.mark.requires("module:torch")


@pytest.fixture
def torch() -> Any:
    import torch

    return torch


@pytest.fixture(params=[None, bytes(range(32))], ids=["plain", "encrypted"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    with kedge.open(tmp_path / "store", key=request.param) as opened:
        yield opened


def round_trip(state: Any) -> Any:
    encoded = codec.encode(state, out_of_band_bytes=64)
    codec.outline(encoded.tree)
    buffers = [bytearray(buffer) for buffer in encoded.buffers]
    return codec.decode(encoded.tree, lambda n: buffers[n])


class TestSharing:
    def test_tied_weights_are_stored_once_and_stay_tied(self, torch: Any, store: Any) -> None:
        weight = torch.randn(700, 1000)
        tied = {"embed": weight, "head": weight, "other": torch.randn(10)}
        stored = store.get(store.save("job", "one", tied)).stored_bytes
        assert stored < 1.1 * weight.nbytes
        loaded = store.load(store.list("job")[0].id)
        assert torch.equal(loaded["head"], weight)
        loaded["embed"][5, 5] = 7.0
        assert loaded["head"][5, 5] == 7.0

    def test_views_keep_their_strides_and_types(self, torch: Any) -> None:
        base = torch.arange(240, dtype=torch.float32).reshape(2, 3, 40)
        state = {
            "base": base,
            "column": base[:, 1, ::3],
            "turned": base.permute(2, 0, 1),
            "bytes": base.view(torch.uint8)[1:, 2],
            "parameter": torch.nn.Parameter(base[0]),
            "scalar": base[1, 1, 1],
            "expanded": base[0, 0, :1].expand(50),
        }
        loaded = round_trip(state)
        for name, tensor in state.items():
            assert type(loaded[name]) is type(tensor)
            assert (loaded[name].dtype, loaded[name].requires_grad) == (tensor.dtype, tensor.requires_grad)
            assert loaded[name].stride() == tensor.stride()
            assert torch.equal(loaded[name], tensor)
        loaded["base"].zero_()
        assert all(not bool(loaded[name].any()) for name in state)

    def test_what_does_not_overlap_is_kept_apart(self, torch: Any) -> None:
        base = torch.arange(2_000_000)
        encoded = codec.encode([base[:1000], base[-1000:]])
        assert sum(map(len, encoded.buffers)) == 16_000

    def test_temporary_tensors_are_not_taken_for_each_other(self, torch: Any) -> None:
        class Lazy:
            def __init__(self, value: int) -> None:
                self.value = value

        kedge.register(
            "tests.Lazy",
            encode=lambda lazy: torch.full((100,), lazy.value),
            decode=lambda tensor: Lazy(int(tensor[0])),
        )(Lazy)
        tied = torch.zeros(100)
        loaded = round_trip([tied, *(Lazy(n) for n in range(20)), tied])
        assert [lazy.value for lazy in loaded[1:-1]] == list(range(20))

    def test_it_is_loaded_into_the_callers_tensors(self, torch: Any, store: Any) -> None:
        weight = torch.randn(300, 1000)
        saved = store.save("job", "one", {"a": weight, "b": weight.T, "c": weight[3]})
        own = torch.zeros(300, 1000)
        mine = {"a": own, "c": own[3]}
        loaded = store.load(saved, into=mine)
        assert loaded["a"] is own
        assert torch.equal(own, weight)

    def test_an_outline_shows_the_memory(self, torch: Any) -> None:
        weight = torch.zeros(100)
        outline: Any = codec.outline(codec.encode([weight, weight]).tree)
        assert isinstance(outline[0], TypeSummary)
        assert outline[0].fields["memory"].size_bytes == 400

    def test_hostile(self) -> None:
        def tensor(*view: object) -> bytes:
            payload = ormsgpack.packb(["Tensor", "float32", [4], False, 0, *view])
            return ormsgpack.packb(ormsgpack.Ext(34, payload))

        codec.decode(tensor([1], 0, 16), lambda n: bytearray(16))
        for view in (([1], 4, 16), ([2], 0, 16), ([-1], 0, 16), ([1, 1], 0, 16), ([1], 2, 32), ([1], -4, 16), ([1], 0)):
            with pytest.raises(Corrupted):
                codec.decode(tensor(*view), lambda n: bytearray(16))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
class TestSparse:
    def test_every_layout(self, torch: Any) -> None:
        dense = torch.zeros(6, 8)
        dense[1, 2], dense[5, 7] = 3.0, -1.0
        made = [
            dense.to_sparse(),
            dense.to_sparse_csr(),
            dense.to_sparse_csc(),
            dense.to_sparse_bsr((2, 2)),
            dense.to_sparse_bsc((3, 4)),
            torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,)),
            torch.sparse_coo_tensor([[1]], torch.ones(1, 40), (3, 40)).requires_grad_(),
        ]
        for tensor, loaded in zip(made, round_trip(made), strict=True):
            assert (loaded.layout, loaded.shape, loaded.requires_grad) == (
                tensor.layout,
                tensor.shape,
                tensor.requires_grad,
            )
            assert torch.equal(loaded.to_dense(), tensor.to_dense())
            if tensor.layout is torch.sparse_coo:
                assert loaded.is_coalesced() == tensor.is_coalesced()

    def test_wrong_indices_are_refused(self, torch: Any) -> None:
        sparse = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (2,))
        encoded = codec.encode(sparse)
        assert encoded.tree.count(b"\x01" + bytes(7)) == 1
        with pytest.raises(Corrupted, match="sparse tensor"):
            codec.decode(encoded.tree.replace(b"\x01" + bytes(7), b"\x01" * 8), bytearray)


@pytest.fixture
def remote(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Main memory in the part of an accelerator: every copy goes the way it would go there."""
    from kedge.codec import torch_types

    monkeypatch.setattr(torch_types, "is_remote", lambda tensor: True)


def states(torch: Any) -> Any:
    weight = torch.randn(600, 1000).bfloat16()
    return {
        "model": {"weight": weight, "tied": weight.T, "bias": torch.randn(1000), "eight": torch.ones(2_000_000).char()},
        "optimiser": {"moment": torch.randn(1_300_000), "step": torch.tensor(3), "empty": torch.zeros(0, 4)},
        "sparse": torch.eye(5).to_sparse(),
        "epoch": 3,
        "bytes": bytes(100_000),
    }


def same(a: Any, b: Any, torch: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key], torch)
    elif isinstance(a, torch.Tensor):
        assert a.dtype is b.dtype
        assert torch.equal(a.to_dense(), b.to_dense())
    else:
        assert a == b


@pytest.mark.usefixtures("remote")
class TestDevice:
    def test_saved_from_it_and_loaded_onto_it(self, torch: Any, store: Any) -> None:
        state = states(torch)
        first = store.save("job", "one", state)
        same(state, store.load(first), torch)
        loaded = store.load(first, device="cpu")
        same(state, loaded, torch)
        loaded["model"]["weight"][0, 0] = 9.0
        assert loaded["model"]["tied"][0, 0] == 9.0
        part = store.load(first, only="model/*i*", device=torch.device("cpu"))
        assert part.keys() == {"model"}
        assert torch.equal(part["model"]["weight"], state["model"]["weight"])

    def test_only_what_changed_is_stored(self, torch: Any, store: Any) -> None:
        state = states(torch)
        store.save("job", "one", state)
        state["optimiser"]["moment"][5] = 1.0
        assert store.get(store.save("job", "two", state)).stored_bytes < 2_000_000

    def test_staged(self, torch: Any, store: Any) -> None:
        state = states(torch)
        for value in (1.0, 2.0, 3.0):
            state["model"]["weight"].fill_(value)
            state["optimiser"]["moment"].fill_(value)
            pending = store.save_async("job", f"{value}", state)
            state["model"]["weight"].fill_(-1.0)
            loaded = store.load(pending.result(60))
            assert loaded["model"]["tied"].eq(value).all()
            assert loaded["optimiser"]["moment"].eq(value).all()

    def test_filled_in_place(self, torch: Any, store: Any) -> None:
        state = states(torch)
        saved = store.save("job", "one", state)
        own = {"model": {k: torch.zeros_like(v) for k, v in state["model"].items() if k != "tied"}}
        own["optimiser"] = {k: torch.zeros_like(v) for k, v in state["optimiser"].items()}
        loaded = store.load(saved, into=own)
        assert loaded["optimiser"]["moment"] is own["optimiser"]["moment"]
        same(state["optimiser"], own["optimiser"], torch)
        assert torch.equal(own["model"]["weight"], state["model"]["weight"])
        assert torch.equal(own["model"]["eight"], state["model"]["eight"])

    def test_what_its_stream_has_queued_comes_first(
        self, torch: Any, store: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Threads copy on streams of their own, which do not wait for the stream that computes the tensor."""
        tensor = torch.zeros(2_000_000)

        class Event:
            """A kernel that is still queued: it runs when a stream waits for it."""

            def __init__(self, value: float) -> None:
                self.value = value

        class Stream:
            def record_event(self) -> Event:
                return Event(value)

            def wait_event(self, event: Event) -> None:
                with lock:
                    if event.value not in done:
                        done.append(event.value)
                        tensor.fill_(event.value)

            def synchronize(self) -> None:
                """Nothing is copied later than it is asked for."""

        lock, done = threading.Lock(), list[float]()
        monkeypatch.setattr("kedge.codec.torch_memory._stream_of", lambda tensor: Stream())
        value = 1.0
        saved = store.save("job", "one", {"t": tensor})
        assert store.load(saved)["t"].eq(1.0).all()
        value = 2.0
        pending = store.save_async("job", "two", {"t": tensor})
        assert store.load(pending.result(60))["t"].eq(2.0).all()
        value = 3.0
        store.load(saved, into={"t": tensor})
        assert (done, float(tensor[0]), float(tensor[-1])) == ([1.0, 2.0, 3.0], 1.0, 1.0)

    def test_damage_is_found(self, torch: Any, store: Any, tmp_path: Path) -> None:
        saved = store.save("job", "one", states(torch))
        for pack in tmp_path.rglob("*.pack"):
            data = bytearray(pack.read_bytes())
            data[len(data) // 2] ^= 1
            pack.write_bytes(data)
        for options in ({"device": "cpu"}, {"into": {"optimiser": {"moment": torch.zeros(1_300_000)}}}):
            with pytest.raises(Corrupted):
                store.load(saved, **options)


def test_devices_that_do_not_exist(torch: Any, store: Any) -> None:
    saved = store.save("job", "one", {"t": torch.zeros(3)})
    for device in ("gpu", "meta", 3.5, "cuda:77"):
        with pytest.raises(Validation, match="device"):
            store.load(saved, device=device)
    with pytest.raises(Validation, match="excludes"):
        store.load(saved, device="cpu", into={"t": torch.zeros(3)})
    with pytest.raises(Validation, match="excludes"):
        store.load(saved, device="cpu", mapped=True)


def test_mapped_tensors_are_private_copies(torch: Any, store: Any) -> None:
    tensor = torch.randn(1_000_000)
    saved = store.save("job", "one", {"t": tensor})
    mapped = store.load(saved, mapped=True)
    assert torch.equal(mapped["t"], tensor)
    mapped["t"][:] = 0.0
    assert torch.equal(store.load(saved, mapped=True)["t"], tensor)
    assert store.verify().is_ok


def test_the_whole_of_training_comes_back(torch: Any, store: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(20, 30), torch.nn.Linear(30, 30), torch.nn.Linear(30, 20))
        model[2].weight = model[0].weight
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(model: Any, optimiser: Any) -> None:
        optimiser.zero_grad()
        model(torch.randint(0, 20, (8,))).logsumexp(1).sum().backward()
        optimiser.step()

    model, optimiser = make()
    step(model, optimiser)
    state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "rng": torch.get_rng_state()}
    saved = store.save("job", "one", state)
    step(model, optimiser)
    again, other = make()
    loaded = store.load(saved)
    again.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optimiser"])
    torch.set_rng_state(loaded["rng"])
    step(again, other)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
