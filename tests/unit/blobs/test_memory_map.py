"""Regions: memory made of pieces of files."""

import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kedge.blobs.memory_map import Piece, Region, is_mappable
from kedge.blobs.packs import PackBlobs
from kedge.errors import Corrupted, NotFound, StorageError, Validation
from kedge.testing.blobs_suite import pattern, put

PAGE = mmap.PAGESIZE


def mappings(path: Path) -> int:
    """How many mappings of the file this process has."""
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([n]) * PAGE for n in range(1, 9)))
    return path


def test_pieces_fillings_and_zeros(file: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.write_bytes(b"s" * PAGE)
    pieces = [
        Piece(5 * PAGE, 100, str(file), 7 * PAGE),
        Piece(0, PAGE, str(file), 2 * PAGE),
        Piece(2 * PAGE, PAGE, str(second), 0),
    ]
    region = Region(5 * PAGE + 100, pieces)
    region.writable[PAGE : PAGE + 5] = b"hello"
    view = region.seal()
    assert view.readonly
    assert view.nbytes == 5 * PAGE + 100
    expected = b"\x03" * PAGE + b"hello".ljust(PAGE, b"\0") + b"s" * PAGE + bytes(2 * PAGE) + b"\x08" * 100
    assert bytes(view) == expected


def test_neighbours_become_one_mapping(file: Path) -> None:
    region = Region(6 * PAGE, [Piece(n * PAGE, PAGE, str(file), (n + 2) * PAGE) for n in (3, 1, 0, 2, 4, 5)])
    assert mappings(file) == 1
    assert bytes(region.seal()) == file.read_bytes()[2 * PAGE :]
    shuffled = Region(6 * PAGE, [Piece(n * PAGE, PAGE, str(file), (7 - n) * PAGE) for n in range(6)])
    assert mappings(file) == 1 + 6
    assert bytes(shuffled.seal())[:PAGE] == b"\x08" * PAGE


def test_an_array_keeps_its_memory(file: Path) -> None:
    before = address_space_bytes()
    region = Region(64 << 20, [Piece(0, 8 * PAGE, str(file), 0)])
    region.writable[8 * PAGE] = 9
    view = region.seal()
    array = np.frombuffer(view, dtype=np.uint8)
    part = array[PAGE : 9 * PAGE].reshape(2, -1)[:, ::2]
    del region, view, array
    gc.collect()
    file.unlink()  # as gc may do
    assert part[0, 0] == 2
    assert part[1, 0] == 6
    assert not part.flags.writeable
    assert mappings(file) == 1
    del part
    gc.collect()
    assert mappings(file) == 0
    assert address_space_bytes() < before + (32 << 20)


def test_two_arrays_share_a_region(file: Path) -> None:
    view = Region(8 * PAGE, [Piece(0, 8 * PAGE, str(file), 0)]).seal()
    one, two = np.frombuffer(view[:PAGE], np.uint8), np.frombuffer(view[PAGE:], np.uint8)
    del view, one
    gc.collect()
    assert two[0] == 2


def test_the_processor_refuses_writes(file: Path) -> None:
    code = """
import ctypes
from kedge.blobs.memory_map import Region
from kedge.blobs.libc import address_of
region = Region(8192)
address = address_of(region.writable)
ctypes.memset(address, 1, 8192)
view = region.seal()
assert view[0] == 1
try:
    view[0] = 2
except TypeError:
    print("read-only", flush=True)
ctypes.memset(address, 1, 1)
print("written")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["read-only"]
    assert done.returncode < 0  # SIGSEGV


def test_an_empty_region() -> None:
    assert Region(0).seal().nbytes == 0


def test_a_missing_or_short_file_is_named(file: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        Region(PAGE, [Piece(0, PAGE, str(tmp_path / "nowhere"), 0)])
    with pytest.raises(Corrupted, match=str(file)):
        Region(2 * PAGE, [Piece(0, 2 * PAGE, str(file), 7 * PAGE)])
    with pytest.raises(StorageError, match=str(tmp_path)):
        Region(PAGE, [Piece(0, PAGE, str(tmp_path), 0)])
    assert mappings(file) == 0


def test_what_cannot_be_mapped_is_refused(file: Path) -> None:
    path = str(file)
    for piece in [
        Piece(1, PAGE, path, 0),
        Piece(0, PAGE, path, 1),
        Piece(0, 100, path, 0),  # something else may follow in its page
        Piece(0, 0, path, 0),
    ]:
        assert not is_mappable(piece, 4 * PAGE)
        with pytest.raises(Validation):
            Region(4 * PAGE, [piece])
    assert is_mappable(Piece(3 * PAGE, 100, path, 0), 3 * PAGE + 100)
    for pieces in [
        [Piece(0, 2 * PAGE, path, 0), Piece(PAGE, PAGE, path, 0)],
        [Piece(-PAGE, PAGE, path, 0)],
        [Piece(4 * PAGE, PAGE, path, 0)],
    ]:
        with pytest.raises(Validation):
            Region(4 * PAGE, pieces)


def test_extents_of_packs_can_be_mapped(tmp_path: Path) -> None:
    blobs = PackBlobs(str(tmp_path / "packs"))
    datas = [pattern(1 << 16, 1), pattern(1 << 16, 2), pattern(1 << 16, 3), pattern(5000, 4)]
    places = put(blobs, *datas)
    pieces = []
    for n in (2, 0, 1, 3):
        path = blobs.file_of(places[n][0])
        assert path is not None
        pieces.append(Piece(len(pieces) << 16, len(datas[n]), path, places[n][1]))
    view = Region((3 << 16) + 5000, pieces).seal()
    blobs.close()
    os.remove(pieces[0].path)
    assert bytes(view) == datas[2] + datas[0] + datas[1] + datas[3]
