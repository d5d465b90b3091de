"""What operations may cost: memory in proportion to what is asked for, no matter how it was saved."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import holdfast


def peak_of(call: Callable[[], object]) -> tuple[int, object]:
    """The most memory `call` held at once, and what it returned."""
    tracemalloc.start()
    try:
        result = call()
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_many_arrays_load_in_little_more_memory_than_they_take(tmp_path: Path) -> None:
    import numpy as np

    # Buffers that do not end where chunks do, so that they share them and lie across their borders.
    state = {f"layer{n}": np.random.default_rng(n).random(2_500 + n % 7) for n in range(1500)}
    size_bytes = sum(array.nbytes for array in state.values())
    with holdfast.open(tmp_path) as manager:
        saved = manager.save("train", "epoch", state)
        peak, loaded = peak_of(lambda: manager.load(saved))
    assert isinstance(loaded, dict)
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
    assert all(array.flags.writeable for array in loaded.values())
    assert peak < 1.3 * size_bytes + (6 << 20)  # beside the data: a chunk for each worker
