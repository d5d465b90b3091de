"""Packs that are not files here: neighbours are read together, and what arrives changed is asked for again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kedge import CheckpointManager, Corrupted
from kedge.blobs.memory import MemoryBlobs
from kedge.store.chunk_reader import RUN_BYTES
from kedge.store.local import LocalStore


class Elsewhere(MemoryBlobs):
    """Counts what is asked for, and changes a bit of so many answers."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []
        self.flips = 0

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        super().read_into(pack, offset, target)
        self.asked.append(target.nbytes)
        if self.flips:
            self.flips -= 1
            target[target.nbytes // 2] ^= 1


@contextmanager
def opened(blobs: MemoryBlobs, **options: Any) -> Iterator[CheckpointManager]:
    with CheckpointManager("memory:", **options) as manager:
        store = manager.store
        manager.store = LocalStore(store.index, blobs, store.vault)
        try:
            yield manager
        finally:
            manager.store.close()
            manager.store = store


def state() -> dict[str, Any]:
    draw = np.random.default_rng(1)
    return {
        "random": draw.integers(0, 256, 20 << 20, dtype="u1"),
        "zstd": np.arange(3 << 20, dtype="i8"),
        "zeros": np.zeros(5 << 20),
    }


def is_same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_neighbours_are_asked_for_together_in_bounded_pieces() -> None:
    with opened(blobs := Elsewhere()) as manager:
        saved = manager.save("job", "step", state())
        blobs.asked.clear()
        assert is_same(manager.load(saved), state())
    assert len(blobs.asked) <= 8  # of 44 chunks that are not zeros
    assert max(blobs.asked) <= RUN_BYTES


def test_what_arrives_changed_is_asked_for_again() -> None:
    with opened(blobs := Elsewhere()) as manager:
        saved = manager.save("job", "step", state())
        small = manager.save("small", "step", {"one": np.random.default_rng(2).integers(0, 256, 300_000, dtype="u1")})
        for flips in (1, 2):  # of three, all may meet the same chunk
            blobs.flips = flips
            assert is_same(manager.load(saved), state())
        blobs.flips = 1
        manager.load(small)
        assert blobs.flips == 0
        blobs.flips = 10**9
        with pytest.raises(Corrupted):
            manager.load(saved)
        with pytest.raises(Corrupted):
            manager.load(small)


def test_a_pack_that_is_gone_is_told() -> None:
    with opened(blobs := Elsewhere()) as manager:
        saved = manager.save("job", "step", state())
        blobs._packs.clear()
        with pytest.raises(Corrupted):
            manager.load(saved)
