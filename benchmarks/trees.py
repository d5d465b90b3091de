"""A directory with 20,000 small files and 512 MiB of large ones: its first backup, and one with nothing changed."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

import kedge

from . import peers
from .harness import GIB, Bench, Missing, Row, interleave, log, timed

SMALL_FILES = 20_000
LARGE_FILES = 8
WORDS = ["state", "step", "epoch", "loss", "tile", "weight", "result", "error", "retry", "cache", "value", "chunk"]


def run(bench: Bench) -> list[Row]:
    if not hasattr(kedge, "Tree"):
        raise Missing("kedge.Tree does not exist yet")
    small, large_bytes = (SMALL_FILES // 8, GIB // 16) if bench.quick else (SMALL_FILES, GIB // 2)
    source = bench.fresh("tree-source")
    write_tree(source, small, large_bytes)
    log(f"  {small:,} small files, {large_bytes >> 20:,} MiB of large ones")
    again: dict[str, list[float]] = {"kedge": [], "restic": []}

    def ours() -> float:
        with kedge.open(bench.fresh("tree") / "store") as manager:

            def save() -> object:
                return manager.save("backup", "tree", {"tree": kedge.Tree(source)})

            cost = timed(save, memory=2 * large_bytes)
            again["kedge"].append(timed(save, memory=2 * large_bytes))
            return cost

    def restic() -> float:
        repository = peers.Restic(bench.fresh("restic"))
        cost = timed(lambda: repository.backup(source), memory=2 * large_bytes)
        again["restic"].append(timed(lambda: repository.backup(source), memory=2 * large_bytes))
        return cost

    def borg() -> float:
        repository = peers.Borg(bench.fresh("borg"))
        return timed(lambda: repository.backup(source), memory=2 * large_bytes)

    def tar(compressor: str) -> float:
        archive = bench.fresh("tar") / "tree.tar.zst"
        return timed(lambda: peers.tar(source, archive, compressor), memory=2 * large_bytes)

    sides = {
        "kedge": ours,
        "restic": restic,
        "borg": borg,
        "zstd": lambda: tar("zstd"),
        "zstd -1 -T0": lambda: tar("zstd -1 -T0"),
    }
    missing: dict[str, str] = {}
    for name in [name for name in sides if name != "kedge"]:
        try:
            peers.need(name.split()[0])
        except Missing as reason:
            del sides[name]
            missing[name] = str(reason)
    samples = interleave(max(3, bench.rounds // 2), sides)
    work = f"{small:,} small files + {large_bytes >> 20} MiB"
    rows = []
    for name, title, target in (
        ("restic", "restic", 4.0),
        ("borg", "borg", None),
        ("zstd", "tar + zstd + fsync", 1.3),
        ("zstd -1 -T0", "tar + zstd -1 -T0 + fsync", None),
    ):
        if name in samples:
            rows.append(Row(work, samples["kedge"], title, samples[name], target, best="zstd" in name))
        else:
            rows.append(Row(work, skipped=missing[name]))
    if again["restic"]:
        rows.append(Row("same tree, nothing changed", again["kedge"], "restic", again["restic"]))
    return rows


def write_tree(root: Path, small_files: int, large_bytes: int) -> None:
    """Text-like small files of 0.5 to 16 KB in directories of 100; large files of random bytes."""
    draw = random.Random(7)
    for n in range(small_files):
        folder = root / f"d{n // 100:04}"
        folder.mkdir(exist_ok=True)
        text = " ".join(draw.choices(WORDS, k=draw.randint(80, 2500)))
        (folder / f"f{n:05}.txt").write_text(f"{n} {text}")
    numbers = np.random.default_rng(7)
    for n in range(LARGE_FILES):
        (root / f"large{n}.bin").write_bytes(numbers.bytes(large_bytes // LARGE_FILES))
