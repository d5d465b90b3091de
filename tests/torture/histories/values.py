"""States of histories: those of `states.py`, and directories of files. Each can be made again from kind and seed."""

from __future__ import annotations

import random
from pathlib import Path

import kedge
from tests.torture import states

from .history import Seen

KINDS = ("small", "small", "small", "inline", "inline", "packed", "packed", "tree", "arrays", "files")


def make(kind: str, seed: int, scratch: Path) -> object:
    if kind != "files":
        return states.make(kind, seed)
    folder = scratch / f"tree-{seed}"
    if not folder.exists():
        folder.mkdir()
        for name, content in _files(seed).items():
            (folder / name).write_bytes(content)
    return {"seed": seed, "tree": kedge.Tree(folder)}


def _files(seed: int) -> dict[str, bytes]:
    draw = random.Random(f"files {seed}")
    return {f"file-{n}": draw.randbytes(draw.choice((0, 100, 30_000, 150_000))) for n in range(draw.randint(1, 4))}


def difference(state: object, checkpoint: kedge.Checkpoint, *, only: str | None = None) -> str:
    """How a loaded state differs from what was saved; "" if it does not."""
    kind, seed = str(checkpoint.metadata["kind"]), int(str(checkpoint.metadata["seed"]))
    if kind == "files":
        is_same = isinstance(state, dict) and state.get("seed") == seed and _read(state.get("tree")) == _files(seed)
    else:
        wanted = states.make(kind, seed)
        is_same = states.same(state, wanted if only is None else {only: wanted[only]})
    return "" if is_same else f"{checkpoint.id} loads as something else than {kind} {seed}"


def _read(tree: object) -> dict[str, bytes] | None:
    return {e.path: tree.read(e.path) for e in tree.entries} if isinstance(tree, kedge.Tree) else None


def about(kind: str, seed: int, mark: str) -> dict[str, object]:
    """The metadata every save carries, so that whatever a store holds can be checked."""
    return {"kind": kind, "seed": seed, "mark": mark}


def seen(checkpoint: kedge.Checkpoint, *, is_encrypted: bool) -> Seen:
    return Seen(
        str(checkpoint.id),
        checkpoint.job,
        checkpoint.seq,
        str(checkpoint.metadata.get("mark")),
        checkpoint.parent,
        checkpoint.size_bytes,
        "" if is_encrypted else checkpoint.digest,
        str(checkpoint.status),
    )
