"""Large states: 1 GiB of random float32 in 16 arrays, as the weights of a model would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kedge

from . import peers
from .harness import Bench, Missing, Row, disk_bytes, drop_cache, fill_cache, interleave, log, mib, timed
from .state import State

HISTORY = 10


@contextmanager
def fresh_store(bench: Bench, name: str) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(bench.fresh(name) / "store") as manager:
        yield manager


def full_save(bench: Bench) -> list[Row]:
    """A first save of everything, into a new store."""
    state = State(bench.state_bytes)
    raw, archive = bench.workspace / "raw", bench.workspace / "state.pt"

    def ours() -> float:
        state.change_all()
        with fresh_store(bench, "full") as manager:
            return timed(lambda: manager.save("train", "epoch", state.arrays), memory=2 * state.size_bytes)

    def torch() -> float:
        state.change_all()
        archive.unlink(missing_ok=True)
        return timed(lambda: peers.torch_save(state.tensors, archive), memory=2 * state.size_bytes)

    def disk() -> float:
        raw.unlink(missing_ok=True)
        peers.reserve(raw, state.size_bytes)
        return timed(lambda: peers.write_direct(raw, state.views), memory=2 * state.size_bytes)

    sides = {"kedge": ours, "disk": disk}
    missing = _add(sides, "torch", torch, peers.torch)
    samples = interleave(bench.rounds, sides)
    work = f"{mib(state.size_bytes)} of arrays, full save"
    return [
        Row(work, samples["kedge"], "torch.save + fsync", samples["torch"], target=1.4, best=True)
        if not missing
        else Row(work, skipped=missing),
        Row(work, samples["kedge"], "O_DIRECT, no work", samples["disk"], target=0.85),
    ]


def changed_save(bench: Bench) -> list[Row]:
    """The same state again with 5 % of its 1 MiB extents changed, and what ten such checkpoints take on disk."""
    state = State(bench.state_bytes)
    files = bench.fresh("files")
    archive = bench.workspace / "state.pt"
    state.write_files(files)
    sizes: list[int] = []
    with fresh_store(bench, "changed") as manager:
        manager.save("train", "epoch", state.arrays)
        sizes.append(disk_bytes(bench.workspace / "changed"))

        def ours() -> float:
            state.change_some()
            cost = timed(lambda: manager.save("train", "epoch", state.arrays), memory=2 * state.size_bytes)
            sizes.append(disk_bytes(bench.workspace / "changed"))
            state.write_files(files)
            return cost

        sides: dict[str, Callable[[], float]] = {"kedge": ours}
        missing = {
            "torch": _add(
                sides,
                "torch",
                lambda: timed(lambda: peers.torch_save(state.tensors, archive), memory=2 * state.size_bytes),
                peers.torch,
            )
        }
        for name, peer in (("restic", peers.Restic), ("borg", peers.Borg)):
            try:
                repository = peer(bench.fresh(name))
            except Missing as reason:
                missing[name] = str(reason)
                continue
            repository.backup(files)
            sides[name] = lambda repository=repository: timed(
                lambda: repository.backup(files), memory=2 * state.size_bytes
            )
        samples = interleave(bench.rounds, sides)
        while len(sizes) < HISTORY:
            ours()
    rows = []
    for name, title, target, best in (
        ("torch", "torch.save + fsync", 4.5, True),
        ("restic", "restic", 12.0, False),
        ("borg", "borg", 7.0, False),
    ):
        work = "same, 5 % changed"
        if name in samples:
            rows.append(Row(work, samples["kedge"], title, samples[name], target=target, best=best))
        else:
            rows.append(Row(work, skipped=missing[name]))
    one, ten = float(sizes[0]), float(sizes[HISTORY - 1])
    rows.append(Row("ten of them on disk", [ten], "one", [one], target=1.9, kind="share", show=mib))
    return rows


def scattered_save(bench: Bench) -> list[Row]:
    """The same state again with 1 % of its elements changed, everywhere: what no grid of chunks makes smaller."""
    state = State(bench.state_bytes)
    files = bench.fresh("files")
    archive = bench.workspace / "state.pt"
    with fresh_store(bench, "scattered") as manager:
        manager.save("train", "epoch", state.arrays)

        def ours() -> float:
            state.change_scattered()
            cost = timed(lambda: manager.save("train", "epoch", state.arrays), memory=2 * state.size_bytes)
            state.write_files(files)
            return cost

        def torch() -> float:
            return timed(lambda: peers.torch_save(state.tensors, archive), memory=2 * state.size_bytes)

        sides: dict[str, Callable[[], float]] = {"kedge": ours}
        titles = {"torch": "torch.save + fsync", "borg": "borg"}
        missing = {"torch": _add(sides, "torch", torch, peers.torch)}
        try:
            borg = peers.Borg(bench.fresh("borg"))
            sides["borg"] = lambda: timed(lambda: borg.backup(files), memory=2 * state.size_bytes)
        except Missing as reason:
            missing["borg"] = str(reason)
        samples = interleave(bench.rounds, sides)
    work = "same, 1 % of all elements changed, scattered"
    return [
        Row(work, samples["kedge"], title, samples[name]) if name in samples else Row(work, skipped=missing[name])
        for name, title in titles.items()
    ]


def load(bench: Bench) -> list[Row]:
    """Verified loads against torch.load, which does not verify; files out of the page cache, then in it."""
    torch = peers.torch()
    state = State(bench.state_bytes)
    archive = bench.workspace / "state.pt"
    peers.torch_save(state.tensors, archive)
    store = bench.workspace / "load"
    rows = []
    with fresh_store(bench, "load") as manager:
        saved = manager.save("train", "epoch", state.arrays)
        for cache, prepare in (("cold", drop_cache), ("warm", fill_cache)):

            def ours(into: object, prepare: Callable[[Path], None] = prepare) -> float:
                prepare(store)
                return timed(lambda: manager.load(saved, into=into), memory=2 * state.size_bytes)

            def theirs(prepare: Callable[[Path], None] = prepare) -> float:
                prepare(archive)
                return timed(lambda: torch.load(archive), memory=2 * state.size_bytes)

            log(f"  {cache}")
            samples = interleave(
                bench.rounds,
                {"existing": lambda: ours(state.arrays), "torch": theirs, "fresh": lambda: ours(None)},
            )
            for name, target in (("existing", 1.2), ("fresh", 0.7)):
                where = "into existing arrays" if name == "existing" else "into fresh memory"
                rows.append(
                    Row(f"verified load {where}, {cache}", samples[name], "torch.load", samples["torch"], target)
                )
    return rows


def async_stall(bench: Bench) -> list[Row]:
    """How long the caller waits until it may change the state again."""
    peers.torch()
    state = State(bench.state_bytes)
    archive = bench.workspace / "state.pt"
    first: list[float] = []

    def stall(manager: kedge.CheckpointManager) -> float:
        state.change_all()
        pending = []
        cost = timed(
            lambda: pending.append(manager.save_async("train", "epoch", state.arrays)), memory=2 * state.size_bytes
        )
        pending[0].result()
        return cost

    def ours() -> float:
        with fresh_store(bench, "async") as manager:
            first.append(stall(manager))
            return stall(manager)

    def torch() -> float:
        archive.unlink(missing_ok=True)
        return timed(lambda: peers.torch_save(state.tensors, archive), memory=2 * state.size_bytes)

    samples = interleave(bench.rounds, {"kedge": ours, "torch": torch})
    rows = []
    for name, stalls in (("first", first), ("steady", samples["kedge"])):
        rows.append(
            Row(f"save_async stall, {name}", stalls, "torch.save + fsync", samples["torch"], 0.125, "share", best=True)
        )
    return rows


def _add(
    sides: dict[str, Callable[[], float]], name: str, side: Callable[[], float], need: Callable[[], object]
) -> str:
    """Add a side whose peer may be missing; answers why it is."""
    try:
        need()
    except Missing as reason:
        return str(reason)
    sides[name] = side
    return ""
