"""A large state: random float32 in 16 arrays, as the weights of a model would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

EXTENT_BYTES = 1 << 20
ARRAYS = 16
CHANGED = 0.05


class State:
    """Random arrays that can be changed as a whole, in some 1 MiB extents, or here and there."""

    def __init__(self, size_bytes: int) -> None:
        self._random = np.random.default_rng(7)
        # Page-aligned as large allocations are, so that the raw disk rate can be taken from the same memory.
        self._words = [aligned(size_bytes // ARRAYS) for _ in range(ARRAYS)]
        for words in self._words:
            words[:] = self._random.integers(0, 1 << 32, words.size, dtype=np.uint32)
        self.arrays = {f"layer{n:02}": words.view(np.float32) for n, words in enumerate(self._words)}
        self.size_bytes = sum(words.nbytes for words in self._words)

    @property
    def tensors(self) -> dict[str, Any]:
        """The same memory as torch tensors."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    @property
    def views(self) -> list[memoryview]:
        return [memoryview(words).cast("B") for words in self._words]

    def change_all(self) -> None:
        mask = np.uint32(self._random.integers(1, 1 << 32))
        for words in self._words:
            words ^= mask

    def change_some(self) -> None:
        """Fill 5 % of all extents with new random numbers."""
        per_array = self._words[0].nbytes // EXTENT_BYTES
        extents = per_array * ARRAYS
        size = EXTENT_BYTES // 4
        for extent in self._random.choice(extents, round(extents * CHANGED), replace=False):
            start = extent % per_array * size
            self._words[extent // per_array][start : start + size] = self._random.integers(
                0, 1 << 32, size, dtype=np.uint32
            )

    def change_scattered(self) -> None:
        """Give 1 % of all elements, anywhere, new random numbers: no extent stays as it was."""
        for words in self._words:
            count = words.size // 100
            places = self._random.integers(0, words.size, count)
            words[places] = self._random.integers(0, 1 << 32, count, dtype=np.uint32)

    def write_files(self, directory: Path) -> None:
        """For peers that know only files."""
        for name, array in self.arrays.items():
            (directory / name).write_bytes(memoryview(array).cast("B"))


def aligned(size_bytes: int) -> np.ndarray:
    raw = np.empty(size_bytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + size_bytes].view(np.uint32)
