"""A state that changes while it is saved: torn in itself at worst, never unloadable, and nobody else's harm (I2).

What is digested is what is written: a chunk under the wrong name would be reused by every later save that has the
content of that name, in any job, and none of those could be loaded.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import kedge
from kedge.blobs.memory import MemoryWriter
from kedge.blobs.packs import PackWriter
from kedge.index.sqlite.index import SqliteIndex
from kedge.store.chunk_writer import ChunkWriter
from tests.parts import library

SIZES = (300_000, 2_500_000)


def _random(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def _repeating(size: int) -> bytes:
    return (bytes(range(256)) * (size // 256 + 1))[:size]


def _zeros(size: int) -> bytes:
    return bytes(size)


def _array(content: bytes) -> Any:
    return np.frombuffer(bytearray(content), np.uint8)


def _tensor(content: bytes) -> Any:
    torch = library("torch")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _mapped(content: bytes) -> Any:
    region = mmap.mmap(-1, len(content))
    region[:] = content
    return np.frombuffer(region, np.uint8)


def _flip(state: Any) -> None:
    """Change every byte of what a state refers to."""
    memory = np.frombuffer(state, np.uint8) if isinstance(state, bytearray) else state
    memory ^= 255


@contextmanager
def _changing(cls: type, method: str, state: Any) -> Iterator[None]:
    """Whenever the store gets to `method`, the state changes first."""
    real = getattr(cls, method)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        _flip(state)
        return real(self, *args, **kwargs)

    with mock.patch.object(cls, method, changed):
        yield


MOMENTS = {
    "between digest and look-up": (SqliteIndex, "locate"),
    "before memory takes it": (MemoryWriter, "append"),
    "before the disk takes it": (PackWriter, "append"),
    "before it is compressed": (ChunkWriter, "_place"),
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("make", [_array, bytearray, _mapped, _tensor])
def test_a_state_changed_during_its_save_harms_nobody(
    tmp_path: Path, moment: str, make: Callable[[bytes], Any]
) -> None:
    url = "memory:" if "memory" in moment else str(tmp_path / "store")
    with kedge.open(url) as store:
        for original in (content(size) for size in SIZES for content in (_random, _repeating, _zeros)):
            state = make(original)
            with _changing(*MOMENTS[moment], state):
                torn = store.save("torn", "step", {"state": state})
                again = store.save("torn", "step", {"state": state})
            other = store.save("other", "step", {"state": _array(original)})
            flipped = _array(original) ^ 255
            third = store.save("third", "step", {"state": flipped})
            for checkpoint in (torn, again):
                store.load(checkpoint)
            assert store.load(other)["state"].tobytes() == original  # type: ignore[index]
            assert store.load(third)["state"].tobytes() == flipped.tobytes()  # type: ignore[index]
        assert store.verify().is_ok


@pytest.mark.parametrize("moment", MOMENTS)
def test_nor_where_chunks_are_sealed(tmp_path: Path, moment: str) -> None:
    url = "memory:" if "memory" in moment else str(tmp_path / "store")
    with kedge.open(url, key=bytes(range(32))) as store:
        for content in (_random, _repeating):
            state = _array(content(SIZES[-1]))
            with _changing(*MOMENTS[moment], state):
                torn = store.save("torn", "step", {"state": state})
            other = store.save("other", "step", {"state": _array(content(SIZES[-1]))})
            store.load(torn)
            assert store.load(other)["state"].tobytes() == content(SIZES[-1])  # type: ignore[index]


def test_digesting_what_others_can_change_would_be_noticed(tmp_path: Path) -> None:
    """The mutant: pieces are digested and written where they are."""
    with (
        mock.patch("kedge.store.streams._is_shared", return_value=False),
        pytest.raises((kedge.Corrupted, AssertionError)),
    ):
        test_a_state_changed_during_its_save_harms_nobody(tmp_path, "between digest and look-up", _array)


@pytest.mark.parametrize("how", ["save", "save_async", "aio"])
def test_threads_that_never_stop_changing(tmp_path: Path, how: str) -> None:
    arrays = [np.random.default_rng(n).integers(0, 255, size, np.uint8) for n, size in enumerate(SIZES)]
    stop = threading.Event()

    def change(array: Any) -> None:
        while not stop.is_set():
            array += 1

    threads = [threading.Thread(target=change, args=(array,)) for array in arrays]
    with kedge.open(tmp_path / "store") as store:
        for thread in threads:
            thread.start()
        try:
            saved = [_save(store, how, f"job-{n % 3}", {"arrays": arrays}) for n in range(12)]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        for checkpoint in saved:
            store.load(checkpoint)
        for value in range(0, 256, 8):  # what they may have passed through
            store.save("other", "step", {"arrays": [np.full(1 << 20, value, np.uint8)]})
        for checkpoint in store.list("other"):
            store.load(checkpoint.id)
        assert store.verify().is_ok


def _save(store: kedge.CheckpointManager, how: str, job: str, state: object) -> str:
    if how == "save":
        return store.save(job, "step", state)
    if how == "save_async":
        return store.save_async(job, "step", state).result(60)
    saved: str = asyncio.run(store.aio.save(job, "step", state))
    return saved


def test_files_that_change_while_they_are_saved(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for n, size in enumerate((1000, *SIZES)):
        (folder / str(n)).write_bytes(_random(size))

    def change() -> None:
        for path in folder.iterdir():
            with open(path, "r+b") as file:
                file.write(bytes(500))

    real = SqliteIndex.locate

    def locate(self: SqliteIndex, digests: Any) -> Any:
        change()
        return real(self, digests)

    with kedge.open(tmp_path / "store") as store:
        with mock.patch.object(SqliteIndex, "locate", locate):
            torn = store.save("torn", "step", {"files": kedge.Tree(folder, allow_changing=True)})
        for n, size in enumerate((1000, *SIZES)):
            (folder / str(n)).write_bytes(_random(size))
        other = store.save("other", "step", {"files": kedge.Tree(folder)})
        for name, checkpoint in (("torn", torn), ("other", other)):
            store.load(checkpoint)["files"].write_to(tmp_path / name)  # type: ignore[index]
        assert (tmp_path / "other" / "2").read_bytes() == _random(SIZES[-1])
        assert store.verify().is_ok
