"""A state in the memory of a GPU: how long training stands still, when it is durable, how fast it comes back."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kedge

from . import peers
from .harness import GIB, Bench, Missing, Row, drop_cache, log

TENSORS = 64
EXTENT_BYTES = 1 << 20
CHANGED = 0.05
_READERS = 8


class GpuState:
    """Random float32 on a device, changed as a whole or in 5 % of its 1 MiB extents."""

    def __init__(self, size_bytes: int) -> None:
        self.torch = peers.torch()
        if not self.torch.cuda.is_available() and "KEDGE_BENCH_CPU" not in os.environ:
            raise Missing("no GPU here")
        self.device = "cuda" if self.torch.cuda.is_available() else "cpu"
        self.tensors = {f"layer{n:02}": self._random(size_bytes // TENSORS) for n in range(TENSORS)}

    def _random(self, size_bytes: int) -> Any:
        limits = -(1 << 31), (1 << 31) - 1
        words = self.torch.randint(*limits, (size_bytes // 4,), dtype=self.torch.int32, device=self.device)
        return words.view(self.torch.float32)

    def change_all(self) -> None:
        for tensor in self.tensors.values():
            tensor.view(self.torch.int32).bitwise_xor_(int(self.torch.randint(1, 1 << 30, ())))
        self.wait()

    def change_some(self) -> None:
        for tensor in self.tensors.values():
            extents = tensor.view(self.torch.int32).view(-1, EXTENT_BYTES // 4)
            chosen = self.torch.randperm(len(extents))[: max(1, round(len(extents) * CHANGED))]
            extents[chosen.to(self.device)] ^= int(self.torch.randint(1, 1 << 30, ()))
        self.wait()

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def _clock(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def run(bench: Bench) -> list[Row]:
    size = GIB // 4 if bench.quick else 8 * GIB
    state = GpuState(size)
    rounds = min(bench.rounds, 3)
    place = bench.fresh("gpu")
    rows = _saves(state, place, rounds)
    rows += _loads(state, place, rounds)
    return rows


def _saves(state: GpuState, place: Path, rounds: int) -> list[Row]:
    stalls, durable, changed_stalls, changed, plain = [], [], [], [], []
    first = 0.0
    with kedge.open(place / "store") as store:
        for n in range(rounds + 1):  # the first makes and locks the memory to copy into
            state.change_all()
            start = time.perf_counter()
            pending = store.save_async("training", f"step {n}", state.tensors)
            stall = time.perf_counter() - start
            pending.result()
            done = time.perf_counter() - start
            log(f"  all new: stall {stall:.3f} s, durable after {done:.2f} s")
            if n == 0:
                first = stall
            else:
                stalls.append(stall)
                durable.append(done)
            state.change_some()
            start = time.perf_counter()
            pending = store.save_async("training", f"step {n}, 5 %", state.tensors)
            stall = time.perf_counter() - start
            pending.result()
            done = time.perf_counter() - start
            log(f"  5 % new: stall {stall:.3f} s, durable after {done:.2f} s")
            if n:
                changed_stalls.append(stall)
                changed.append(done)
            store.cleanup("training", keep_last=1)
            store.gc()
        state.change_all()
        plain.append(_clock(lambda: store.save("training", "last", state.tensors)))
        store.cleanup("training", keep_last=1)
        store.gc()
    torch, archive = state.torch, place / "peer.pt"
    saved = [_clock(lambda: peers.torch_save(state.tensors, archive))]
    stalled, written = _dcp(state, place)
    staged = _dcp_staged(state, place)
    drop_cache(archive)
    log(f"  torch.save {saved[0]:.1f} s; dcp.async_save stall {stalled[0]:.1f} s, durable {written[0]:.1f} s")
    del torch
    return [
        Row("save_async stall, 8 GiB", stalls, "dcp.async_save", stalled, 0.25, "limit"),
        Row("save_async stall, 8 GiB", stalls, "with DefaultStager", staged, 0.25, "limit"),
        Row("the first one (memory is made)", [first], "dcp.async_save", stalled),
        Row("durable after", durable, "torch.save + fsync", saved, 5.0, "limit"),
        Row("durable after", durable, "dcp.async_save", written),
        Row("5 % changed: stall", changed_stalls, "dcp.async_save", stalled, 0.25, "limit"),
        Row("5 % changed: durable after", changed, "torch.save + fsync", saved, 1.0, "limit"),
        Row("save, 8 GiB", plain, "torch.save + fsync", saved),
    ]


def _dcp(state: GpuState, place: Path) -> tuple[list[float], list[float]]:
    import torch.distributed.checkpoint as dcp

    target = place / "dcp"
    start = time.perf_counter()
    future = dcp.async_save(dict(state.tensors), checkpoint_id=str(target), no_dist=True)
    stall = time.perf_counter() - start
    future.result()
    done = time.perf_counter() - start
    shutil.rmtree(target)
    return [stall], [done]


def _dcp_staged(state: GpuState, place: Path) -> list[float]:
    """Until the state may change again; pinned, at its best. torch 2.11 fails at the second call, which is told."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    is_cuda = state.device == "cuda"
    options = StagingOptions(
        use_pinned_memory=is_cuda, use_shared_memory=True, use_async_staging=is_cuda, use_non_blocking_copy=is_cuda
    )
    stager, target = DefaultStager(options), place / "staged"
    stalls: list[float] = []
    for n in (1, 2):
        try:
            start = time.perf_counter()
            response: Any = dcp.async_save(
                dict(state.tensors), checkpoint_id=str(target), no_dist=True, async_stager=stager
            )
            if hasattr(response, "staging_completion"):
                response.staging_completion.result()
            stalls.append(time.perf_counter() - start)
            getattr(response, "upload_completion", response).result()
            log(f"  dcp.async_save with DefaultStager, call {n}: stall {stalls[-1]:.2f} s")
        except Exception as error:  # noqa: BLE001 - the peer's own, whatever it is
            log(f"  dcp.async_save with DefaultStager, call {n}: {type(error).__name__}: {error}")
        shutil.rmtree(target, ignore_errors=True)
    stager.close()
    return stalls


def _fast_load(path: Path, device: str) -> Callable[[], object]:
    """fastsafetensors, without GPUDirect Storage, which needs a driver of its own."""
    try:
        from fastsafetensors import SafeTensorsFileLoader, SingleGroup
    except ImportError:
        raise Missing("fastsafetensors is not installed") from None

    def load() -> object:
        loader = SafeTensorsFileLoader(SingleGroup(), f"{device}:0" if device == "cuda" else device, nogds=True)
        loader.add_filenames({0: [str(path)]})
        copied = loader.copy_files_to_device()
        return loader, copied, {name: copied.get_tensor(name) for name in loader.get_keys()}

    return load


def _prefetched(path: Path, load: Callable[[], object]) -> Callable[[], object]:
    """The same load, while threads read the file into the page cache in front of it."""

    def read(start: int) -> None:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            left, buffer = size // _READERS + 1, bytearray(1 << 22)
            while left > 0 and (count := file.readinto(buffer)):
                left -= count

    def both() -> object:
        with ThreadPoolExecutor(_READERS) as pool:
            readers = [pool.submit(read, n * (size // _READERS)) for n in range(_READERS)]
            result = load()
            for reader in readers:
                reader.result()
        return result

    size = path.stat().st_size
    return both


def _loads(state: GpuState, place: Path, rounds: int) -> list[Row]:
    torch, archive, tensors = state.torch, place / "peer.pt", place / "peer.safetensors"
    from safetensors.torch import load_file, save_file

    fresh, existing, theirs, safe = [], [], [], []
    own = {name: torch.empty_like(tensor) for name, tensor in state.tensors.items()}
    save_file(dict(state.tensors), tensors)

    def cold() -> None:
        os.sync()
        for path in (place / "store", archive, tensors):
            drop_cache(path)

    with kedge.open(place / "store") as store:
        newest = store.list("training")[-1].id
        for _ in range(rounds):
            cold()
            loaded: Any = None
            start = time.perf_counter()
            loaded = store.load(newest, device=state.device)
            state.wait()
            fresh.append(time.perf_counter() - start)
            for name, tensor in state.tensors.items():
                assert torch.equal(tensor.view(torch.int32), loaded[name].view(torch.int32)), name
            del loaded
            cold()
            existing.append(_clock(lambda: (store.load(newest, into=own), state.wait())))
            log(f"  cold: onto the GPU {fresh[-1]:.2f} s, into tensors there {existing[-1]:.2f} s")
    for name, tensor in state.tensors.items():
        assert torch.equal(tensor.view(torch.int32), own[name].view(torch.int32)), name
    cold()
    theirs.append(_clock(lambda: (torch.load(archive, map_location=state.device), state.wait())))
    cold()
    safe.append(_clock(lambda: (load_file(tensors, device=state.device), state.wait())))
    cold()
    ahead = [_clock(lambda: (_prefetched(tensors, lambda: load_file(tensors, device=state.device))(), state.wait()))]
    log(f"  torch.load {theirs[-1]:.2f} s, safetensors {safe[-1]:.2f} s, with prefetch {ahead[-1]:.2f} s")
    what = "verified cold load onto the GPU"
    try:
        fast_load = _fast_load(tensors, state.device)
        cold()
        fast = Row(what, fresh, "fastsafetensors", [_clock(lambda: (fast_load(), state.wait()))])
    except Missing as missing:
        fast = Row(f"{what}, fastsafetensors", skipped=str(missing))
    return [
        Row(what, fresh, "torch.load", theirs, 4.5, "limit"),
        Row(what, fresh, "safetensors", safe),
        Row(what, fresh, "safetensors with prefetch", ahead),
        fast,
        Row("the same into tensors there", existing, "torch.load", theirs, 4.5, "limit"),
    ]
