"""One contiguous, read-only range of memory assembled from places in many files, without reading them.

A state loaded this way costs no memory and no time until its bytes are touched. The pages belong to the files:
processes share them, and the kernel can drop them at any time.

A mapped file that is truncated later kills the process that touches the lost part (SIGBUS). Packs only lose what was
never committed, and a removed pack lives on under its mappings. So only a damaged disk or another program can do that.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kedge.errors import Corrupted, NotFound, Validation, storage_error, storage_errors

from .libc import address_of, map_file, protect

_MAP_FIXED = 0x10


@dataclass(frozen=True, slots=True)
class Piece:
    """`size_bytes` bytes of a region from `offset`, which are those of a file from `file_offset`."""

    offset: int
    size_bytes: int
    path: str
    file_offset: int


def is_mappable(piece: Piece, region_bytes: int) -> bool:
    """Return whether it begins on a page in both places and ends on one, or where the region ends."""
    begins_well = piece.offset % mmap.PAGESIZE == 0 and piece.file_offset % mmap.PAGESIZE == 0
    ends_well = piece.size_bytes % mmap.PAGESIZE == 0 or piece.offset + piece.size_bytes == region_bytes
    return begins_well and ends_well and piece.size_bytes > 0


def unseal(view: memoryview) -> memoryview:
    """Return read-only memory as writable: a Region's own memory, with private writes, or a copy."""
    memory = view.obj
    if not isinstance(memory, mmap.mmap) or not view.contiguous:
        return memoryview(bytearray(view))
    address = address_of(memoryview(memory))
    with storage_errors("make writable", f"{len(memory)} bytes of memory"):
        protect(address, len(memory), mmap.PROT_READ | mmap.PROT_WRITE)
    return memoryview(memory)[: len(view)]


class Region:
    """Memory of `size_bytes` bytes: `pieces` mapped from files; the rest is zeros until written.

    Write what cannot be mapped through `writable` (never to a mapped piece: that is a segmentation fault), then `seal`.
    The memory lives as long as any view of it, including numpy arrays, and is unmapped with the last one.
    """

    def __init__(self, size_bytes: int, pieces: Iterable[Piece] = ()) -> None:
        # mmap.mmap is the owner: a buffer of it keeps it alive, and its end unmaps the whole range, including what is
        # mapped over parts of it here.
        self._size_bytes = size_bytes
        self._memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.writable = memoryview(self._memory)[:size_bytes]
        self._address = address_of(memoryview(self._memory))
        by_path: dict[str, list[Piece]] = {}
        for piece in _merged(pieces, size_bytes):
            by_path.setdefault(piece.path, []).append(piece)
        for path, of_one_file in by_path.items():
            self._map(path, of_one_file)

    def seal(self) -> memoryview:
        """Return the memory, which is now read-only for the processor, too."""
        self.writable.release()
        with storage_errors("protect", f"{self._size_bytes} bytes of memory"):
            protect(self._address, len(self._memory), mmap.PROT_READ)
        return memoryview(self._memory).toreadonly()[: self._size_bytes]

    def _map(self, path: str, pieces: Sequence[Piece]) -> None:
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            raise NotFound(f"{path} is missing", hint="run kedge check") from None
        except OSError as error:
            raise storage_error("map", path, error) from error
        try:
            size = os.fstat(fd).st_size
            for piece in pieces:
                if piece.file_offset + piece.size_bytes > size:
                    raise Corrupted(
                        f"{path} ends at byte {size}, inside the {piece.size_bytes} bytes at {piece.file_offset}",
                        hint="it was damaged after it was written: run kedge check",
                    )
                start = self._address + piece.offset
                map_file(start, piece.size_bytes, mmap.MAP_PRIVATE | _MAP_FIXED, fd, piece.file_offset)
        except OSError as error:
            raise storage_error("map", path, error) from error
        finally:
            os.close(fd)


def _merged(pieces: Iterable[Piece], region_bytes: int) -> list[Piece]:
    """Return the pieces in order, joining those that are consecutive in memory and in the file."""
    merged: list[Piece] = []
    end = 0
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        if not is_mappable(piece, region_bytes) or not end <= piece.offset <= region_bytes - piece.size_bytes:
            raise Validation(f"{piece} does not fit into a region of {region_bytes} bytes as pages of its own")
        end = piece.offset + piece.size_bytes
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.path == piece.path
            and last.offset + last.size_bytes == piece.offset
            and last.file_offset + last.size_bytes == piece.file_offset
        ):
            merged[-1] = replace(last, size_bytes=last.size_bytes + piece.size_bytes)
        else:
            merged.append(piece)
    return merged
