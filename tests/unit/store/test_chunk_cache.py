"""What a process takes for known saves questions, and never what must be noticed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import kedge
from kedge.blobs.memory import MemoryBlobs
from kedge.ports import ChunksGone, Index
from kedge.store import chunk_cache
from kedge.store.chunk_cache import KnownChunks


class Looked(MemoryBlobs):
    """Packs that are not files here; counts who looks at them."""

    looks = 0

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        self.looks += 1
        super().read_into(pack, offset, target)


@pytest.fixture
def stored() -> tuple[Index, Looked, list[bytes], str]:
    """An index, its blobs, and the chunks of one save, which are in one pack."""
    manager = kedge.open("memory:")
    store = manager.store
    blobs = store.blobs = Looked()
    manager.save("job", "step", {"a": os.urandom(200_000)})
    ((_, packed),) = store.index.list_stored("job")
    digests = list(store.contents(packed))
    (pack,) = {chunk.pack for chunk in store.index.locate(digests).values()}
    return store.index, blobs, digests, pack


def test_a_pack_elsewhere_is_looked_at_once_in_a_while(
    stored: tuple[Index, Looked, list[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    index, blobs, digests, pack = stored
    chunks = KnownChunks(index, blobs)
    blobs.looks = 0
    for _ in range(3):
        chunks.check_packs(digests)
    assert blobs.looks == 1
    assert blobs.remove(pack, lambda: True)
    later = time.monotonic() + chunk_cache._TRUSTED_S + 1
    monkeypatch.setattr(chunk_cache, "time", SimpleNamespace(monotonic=lambda: later))
    with pytest.raises(ChunksGone) as gone:
        chunks.check_packs(digests)
    assert set(gone.value.digests) == set(digests)
    assert all(chunk.is_damaged for chunk in index.locate(digests).values())  # the next save writes them again


def test_trust_is_not_renewed_by_being_relied_on(
    stored: tuple[Index, Looked, list[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever saves every few seconds would never look again."""
    index, blobs, digests, pack = stored
    chunks = KnownChunks(index, blobs)
    now = time.monotonic()
    monkeypatch.setattr(chunk_cache, "time", SimpleNamespace(monotonic=lambda: now))
    chunks.check_packs(digests)
    assert blobs.remove(pack, lambda: True)
    now += chunk_cache._TRUSTED_S - 1
    chunks.check_packs(digests)
    now += 2
    with pytest.raises(ChunksGone):
        chunks.check_packs(digests)


def test_what_this_process_wrote_is_not_asked_for(stored: tuple[Index, Looked, list[bytes], str]) -> None:
    index, blobs, digests, _ = stored
    chunks = KnownChunks(index, blobs)
    chunks.remember(digests, list(index.locate(digests).values()))
    blobs.looks = 0
    chunks.check_packs(digests)
    assert blobs.looks == 0
    assert all(digest in chunks for digest in digests)


def test_a_pack_that_is_a_file_here_is_always_looked_at(tmp_path: object) -> None:
    """Looking costs nothing there, and whoever tidies up a directory does it in a moment."""
    with kedge.open(f"file:{tmp_path}/store") as manager:
        state = {"a": os.urandom(200_000)}
        manager.save("job", "one", state)
        chunks = manager.store._known
        ((_, packed),) = manager.store.index.list_stored("job")
        digests = list(manager.store.contents(packed))
        chunks.check_packs(digests)
        (pack,) = {chunk.pack for chunk in manager.store.index.locate(digests).values()}
        path = manager.store.blobs.file_of(pack)
        assert path is not None
        os.unlink(path)
        with pytest.raises(ChunksGone):
            chunks.check_packs(digests)


@pytest.mark.parametrize("harm", [os.unlink, lambda path: os.truncate(path, os.path.getsize(path) // 2)])
def test_a_chunk_is_looked_for_where_it_was_and_the_index_is_asked_only_if_it_is_not_there(
    tmp_path: Path, harm: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with kedge.open(f"file:{tmp_path}/store") as manager:
        manager.save("job", "one", {"a": os.urandom(200_000)})
        ((_, packed),) = manager.store.index.list_stored("job")
        index, blobs, digests = manager.store.index, manager.store.blobs, list(manager.store.contents(packed))
        asked: list[Sequence[bytes]] = []
        monkeypatch.setattr(index, "locate", lambda names, locate=index.locate: (asked.append(names), locate(names))[1])
        chunks = KnownChunks(index, blobs)
        chunks.remember(digests, list(index.locate(digests).values()))
        asked.clear()
        for _ in range(3):
            chunks.check_packs(digests)
        assert not asked
        path = blobs.file_of(next(iter(index.locate(digests).values())).pack)
        assert path is not None
        harm(path)
        with pytest.raises(ChunksGone) as gone:
            chunks.check_packs(digests)
        assert set(gone.value.digests) == set(digests)


def test_a_chunk_that_gc_has_moved_is_found_at_its_new_place(stored: tuple[Index, Looked, list[bytes], str]) -> None:
    index, blobs, digests, pack = stored
    before = index.locate(digests)
    chunks = KnownChunks(index, blobs)
    chunks.remember(digests, list(before.values()))
    chunks._seen_whole.clear()  # a minute later
    writer = blobs.writer(0)
    moved = []
    for chunk in before.values():
        data = bytearray(chunk.stored_bytes)
        blobs.read_into(pack, chunk.offset, memoryview(data))
        place, offset = writer.append(bytes(data))
        moved.append(replace(chunk, pack=place, offset=offset))
    writer.commit()
    assert index.relocate(moved, from_pack=pack) == len(moved)
    assert blobs.remove(pack, lambda: True)
    chunks.check_packs(digests)
