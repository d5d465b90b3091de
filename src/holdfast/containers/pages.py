"""Where to cut CRIU's files of memory pages, so that the same memory gives the same chunks.

A pages file holds the present pages of a process, one behind the other. One more page anywhere moves all that follow:
chunks of fixed size would all be new. So a chunk is what is present of one aligned window of 64 KiB of the process's
addresses, which the pagemap tells.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import Corrupted

PAGE_BYTES = 4096
WINDOW_BYTES = 64 * 1024
_IMAGE_MAGIC = 0x54564319  # of every image; the next word tells which
_MAX_RECORD_BYTES = 1 << 20
_PRESENT = 4  # flag of a run of pages that are in the pages file
_IN_PARENT = 1


def cuts(directory: Path) -> dict[str, list[int]]:
    """For each pages file of a CRIU dump, where its chunks end. Corrupted when pagemaps and pages do not fit."""
    ends: dict[int, list[int]] = {}
    for name in sorted(os.listdir(directory)):
        if name.startswith("pagemap-") and name.endswith(".img"):
            _add(ends, directory / name)
    found = {}
    for pages_id, borders in ends.items():
        name = f"pages-{pages_id}.img"
        size = (directory / name).stat().st_size if borders else 0
        if borders and borders[-1] != size:
            raise Corrupted(f"{name} has {size:,} bytes, its pagemap names {borders[-1]:,}", hint="dump it again")
        if borders:
            found[name] = borders
    return found


def _add(ends: dict[int, list[int]], path: Path) -> None:
    records = _records(path)
    head = next(records, None)
    if head is None:
        raise Corrupted(f"{path.name} is empty", hint="dump it again")
    borders = ends.setdefault(head.get(1, 0), [])
    position = borders[-1] if borders else 0
    window = -1
    for record in records:
        flags = record.get(4)
        is_present = not record.get(3) if flags is None else bool(flags & _PRESENT) and not flags & _IN_PARENT
        if not is_present:
            continue
        start = record.get(1, 0)
        stop = start + record.get(5, record.get(2, 0)) * PAGE_BYTES
        while start < stop:
            end = min(stop, start - start % WINDOW_BYTES + WINDOW_BYTES)
            if borders and window == start // WINDOW_BYTES:
                borders.pop()
            window = start // WINDOW_BYTES
            position += end - start
            borders.append(position)
            start = end


def _records(path: Path) -> Iterator[dict[int, int]]:
    """The number fields of each record of an image."""
    data = path.read_bytes()
    if int.from_bytes(data[:4], "little") != _IMAGE_MAGIC:
        raise Corrupted(f"{path.name} is not an image of CRIU", hint="dump it again")
    position = 8
    while position < len(data):
        size = int.from_bytes(data[position : position + 4], "little")
        position += 4
        if size > _MAX_RECORD_BYTES or position + size > len(data):
            raise Corrupted(f"{path.name} is cut off", hint="dump it again")
        yield _numbers(data, position, position + size, path.name)
        position += size


def _numbers(data: bytes, position: int, end: int, name: str) -> dict[int, int]:
    found = {}
    while position < end:
        key, position = _varint(data, position)
        if key & 7:
            raise Corrupted(f"{name} holds what no pagemap holds", hint="dump it again")
        found[key >> 3], position = _varint(data, position)
    return found


def numbers_in(stats: bytes) -> dict[int, int]:
    """The numbers of a statistics image: a record with one message of numbers in it."""
    position = 12  # behind the magic words and the size
    if len(stats) <= position or stats[position] != (1 << 3 | 2):
        return {}
    size, position = _varint(stats, position + 1)
    return _numbers(stats, position, min(position + size, len(stats)), "stats-dump")


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position] if position < len(data) and shift < 70 else 0
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
