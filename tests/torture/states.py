"""States that can be made again from (kind, seed), so that a test only has to remember those two."""

from __future__ import annotations

import functools
import random

import numpy as np

MIB = 1 << 20

# inline: one index row; packed: one chunk in a pack; tree: a large tree of small values; arrays: shared chunks.
# Besides these: shared, two of a few blobs of 70 KiB.
KINDS = ("small", "inline", "packed", "tree", "arrays")

_POOL = 12  # distinct 1 MiB chunks that all "arrays" states are put together from: reuse is the rule


@functools.cache
def _chunk(n: int) -> bytes:
    return random.Random(f"chunk {n}").randbytes(MIB)


@functools.cache
def _blob(n: int) -> bytes:
    return random.Random(f"blob {n}").randbytes(70 * 1024)


def make(kind: str, seed: int) -> dict[str, object]:
    """The state of this kind and seed: always the same, never the same for two seeds."""
    draw = random.Random(f"{kind} {seed}")
    state: dict[str, object] = {"kind": kind, "seed": seed}
    if kind == "small":
        state["text"] = f"step {seed} ✓"
        state["numbers"] = [draw.random() for _ in range(seed % 40)]
    elif kind == "inline":
        state["blob"] = draw.randbytes(20_000)
    elif kind == "packed":
        state["blob"] = draw.randbytes(100 * 1024)
    elif kind == "shared":
        state["blobs"] = [_blob(n) for n in sorted(draw.sample(range(_POOL), 2))]
    elif kind == "tree":
        state["rows"] = [{"row": n, "value": draw.randrange(10**9)} for n in range(6_000)]
    elif kind == "arrays":
        chunks = [_chunk(draw.randrange(_POOL)) for _ in range(draw.randint(2, 4))]
        state["weights"] = np.frombuffer(b"".join(chunks), dtype=np.float32)
        state["bias"] = np.full(1000, seed, dtype=np.int64)
    else:
        raise ValueError(kind)
    return state


def same(a: object, b: object) -> bool:
    """Equal in value and type, arrays included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        assert isinstance(b, dict)
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        assert isinstance(b, list | tuple)
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b
