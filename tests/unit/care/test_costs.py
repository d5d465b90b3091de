"""What operations may cost: memory in proportion to what is asked for, no matter how it was saved."""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import kedge
from kedge.model import CheckpointId, CheckpointLevel
from kedge.ports import NewCheckpoint, digest_of


def peak_of(call: Callable[[], object]) -> tuple[int, object]:
    """The most memory `call` held at once, and what it returned."""
    tracemalloc.start()
    try:
        try:
            result = call()
        except SystemExit as ended:  # a command
            if ended.code:
                raise
            result = None
        return tracemalloc.get_traced_memory()[1], result
    finally:
        tracemalloc.stop()


def test_many_arrays_load_in_little_more_memory_than_they_take(tmp_path: Path) -> None:
    import numpy as np

    # Buffers that do not end where chunks do, so that they share them and lie across their borders.
    state = {f"layer{n}": np.random.default_rng(n).random(2_500 + n % 7) for n in range(1500)}
    size_bytes = sum(array.nbytes for array in state.values())
    with kedge.open(tmp_path) as manager:
        saved = manager.save("train", "epoch", state)
        peak, loaded = peak_of(lambda: manager.load(saved))
    assert isinstance(loaded, dict)
    assert all(np.array_equal(loaded[name], array) for name, array in state.items())
    assert all(array.flags.writeable for array in loaded.values())
    assert peak < 1.3 * size_bytes + (6 << 20)  # beside the data: a chunk for each worker


# KEDGE_TEST_HISTORY=1000000 is the torture form.
HISTORY = int(os.environ.get("KEDGE_TEST_HISTORY", "8000"))


@pytest.fixture(scope="module")
def long_history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one long job, committed many at a time."""
    path = tmp_path_factory.mktemp("long")
    with kedge.open(path) as manager:
        for start in range(0, HISTORY, 10_000):
            stop = min(start + 10_000, HISTORY)
            manager.store.index.commit([record(n) for n in range(start, stop)], actor="test")
    return path


def record(n: int) -> NewCheckpoint:
    return NewCheckpoint(
        id=CheckpointId(f"row_{n}"),
        job="long",
        step="step",
        level=CheckpointLevel.STEP,
        created_us=(1_750_000_000 + n) * 1_000_000,
        size_bytes=1,
        stored_bytes=1,
        digest=digest_of(b"\x01\xc0"),
        codec="kedge1",
        schema_version="1.0",
        manifest=b"\x01\xc0",
        metadata_json='{"epoch": 3}',
    )


PAGES_BYTES = 6 << 20  # a few pages of a thousand checkpoints


def test_a_walk_holds_a_page_of_the_history(long_history: Path) -> None:
    with kedge.open(long_history) as manager:
        peak, count = peak_of(lambda: sum(1 for _ in manager.walk("long")))
    assert count == HISTORY
    assert peak < PAGES_BYTES


@pytest.mark.parametrize(
    "words",
    [
        ["list", "long"],
        ["cleanup", "long", "--keep-last", "1000", "--json"],
    ],
    ids=" ".join,
)
def test_commands_hold_a_page_of_the_history(
    words: list[str], long_history: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kedge.cli import cli

    with open(os.devnull, "w") as nowhere:
        monkeypatch.setattr("sys.stdout", nowhere)
        peak, _ = peak_of(lambda: cli.main(["--store", str(long_history), *words]))
        monkeypatch.undo()
    assert peak < PAGES_BYTES + 32 * HISTORY


def test_cleaning_up_holds_a_page_of_the_history(long_history: Path, tmp_path: Path) -> None:
    shutil.copytree(long_history, tmp_path / "copy")
    with kedge.open(tmp_path / "copy") as manager:
        policy = kedge.RetentionPolicy(keep_last=HISTORY // 2, keep_within="1h")
        peak, _ = peak_of(lambda: sum(1 for _ in manager.review(policy, job="long")))
        assert peak < PAGES_BYTES + 48 * HISTORY
        peak, deleted = peak_of(lambda: manager.cleanup("long", keep_last=HISTORY - 3000))
        assert deleted == 3000
        assert peak < PAGES_BYTES
