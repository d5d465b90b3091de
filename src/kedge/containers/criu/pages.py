"""Where to cut CRIU's files of memory pages, so that the same memory gives the same chunks.

A pages file holds the present pages of a process, one behind the other. One more page anywhere moves all that follow:
chunks of fixed size would all be new. So a chunk is what is present of one aligned window of 64 KiB of the process's
addresses, which the pagemap tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kedge.errors import Corrupted

from .images import Pagemap, pagemap

PAGE_BYTES = 4096
WINDOW_BYTES = 64 * 1024


def cuts(directory: Path, coming: Mapping[str, int] | None = None) -> dict[str, list[int]]:
    """For each pages file of a CRIU dump, where its chunks end. Corrupted when pagemaps and pages do not fit. `coming`:
    the sizes of files that are still being written."""
    borders_of = {}
    for memory in pagemap(directory):
        if borders := _borders(memory):
            path = directory / memory.pages_file
            size = (coming or {}).get(memory.pages_file)
            if size is None:
                size = path.stat().st_size if path.is_file() else 0
            if borders[-1] != size:
                raise Corrupted(
                    f"{memory.pages_file} has {size:,} bytes, pagemap-{memory.name}.img names {borders[-1]:,}",
                    hint="dump it again",
                )
            borders_of[memory.pages_file] = borders
    return borders_of


def validate_images(directory: Path, coming: Mapping[str, int] | None = None) -> dict[str, list[int]]:
    """Corrupted unless these are the images of a whole dump: looked at before they reach CRIU, and after it.

    Answers where their pages are to be cut (see `cuts`).
    """
    for name in ("inventory.img", "pstree.img"):
        if not (directory / name).is_file() or not (directory / name).stat().st_size:
            raise Corrupted(f"the images lack {name}", hint="use another checkpoint: kedge container list")
    return cuts(directory, coming)


def _borders(memory: Pagemap) -> list[int]:
    borders: list[int] = []
    last = -1  # the window that the last chunk belongs to
    for run in memory.windows:
        if run.offset is None:
            continue
        start, stop = run.address, run.address + run.size_bytes
        while start < stop:
            end = min(stop, start - start % WINDOW_BYTES + WINDOW_BYTES)
            if borders and last == start // WINDOW_BYTES:
                borders.pop()
            last = start // WINDOW_BYTES
            borders.append(run.offset + end - run.address)
            start = end
    return borders
