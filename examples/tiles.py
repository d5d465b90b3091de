"""A raster is processed in tiles: smoothed, measured, put together again. Kill it anywhere and start it again.

    python examples/tiles.py --store tiles-store

Each tile is kept when it is done, by the process that did it; `kedge runs show tiles` says how far it is.
Needs numpy.
"""

import argparse
import hashlib
import time
from functools import partial

import numpy as np

import kedge

SIZE, TILE, MARGIN = 768, 128, 4


def terrain(seed: int) -> np.ndarray:
    """A made-up height map, the same for the same seed."""
    noise = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 6, SIZE), np.linspace(0, 6, SIZE))
    return (np.sin(x) * np.cos(y) + 0.1 * noise.standard_normal((SIZE, SIZE))).astype(np.float32)


def tiles() -> list[tuple[int, int]]:
    return [(row, column) for row in range(0, SIZE, TILE) for column in range(0, SIZE, TILE)]


def tile_id(tile: tuple[int, int]) -> str:
    return f"tile_{tile[0] // TILE}_{tile[1] // TILE}"


def smooth(heights: np.ndarray, pause_s: float, tile: tuple[int, int]) -> np.ndarray:
    """One tile, smoothed with what surrounds it."""
    time.sleep(pause_s)
    rows = np.clip(np.arange(tile[0] - MARGIN, tile[0] + TILE + MARGIN), 0, SIZE - 1)
    columns = np.clip(np.arange(tile[1] - MARGIN, tile[1] + TILE + MARGIN), 0, SIZE - 1)
    window = heights[np.ix_(rows, columns)]
    total = sum(window[dy : dy + TILE, dx : dx + TILE] for dy in range(2 * MARGIN + 1) for dx in range(2 * MARGIN + 1))
    return total / (2 * MARGIN + 1) ** 2


def assemble(done: list[np.ndarray]) -> np.ndarray:
    whole = np.empty((SIZE, SIZE), np.float32)
    for (row, column), tile in zip(tiles(), done, strict=True):
        whole[row : row + TILE, column : column + TILE] = tile
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="tiles-store")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.05, help="seconds each tile takes longer")
    parser.add_argument("--processes", action="store_true", help="work in processes instead of threads")
    chosen = parser.parse_args()
    with kedge.run("tiles", store=chosen.store, version=chosen.seed) as run:
        heights = run.step("terrain", terrain, chosen.seed)
        with run.stage("tiles"):
            done = run.map(
                partial(smooth, heights, chosen.pause),
                tiles(),
                key=tile_id,
                workers=2,
                executor="process" if chosen.processes else "thread",
            )
        whole = run.step("assemble", assemble, done)
    print(f"{len(done)} tiles, from {whole.min():.3f} to {whole.max():.3f}, {hashlib.sha256(whole).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
