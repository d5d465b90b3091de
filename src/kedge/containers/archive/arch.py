"""The files of a container as ARCH kept them: `container_files.tar` beside CRIU's images, gzipped.

It is a tar of an overlay's upper directory, below that directory's own name: removed files are devices 0/0 in it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kedge.errors import Corrupted

from .compression import Plain
from .extraction import OPAQUE_ATTRIBUTE, Extraction
from .tar import CHARACTER, DIRECTORY, HARD_LINK, LIMITS, Limits, Member, TarReader

FILES = "container_files.tar"

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FINISHED = b"Dumping finished successfully"


def is_finished(folder: str | os.PathLike[str]) -> bool:
    """Whether the last line of CRIU's log in this directory says that the dump is complete."""
    try:
        with open(os.open(os.path.join(folder, "dump.log"), _OPEN), "rb") as log:
            status = os.fstat(log.fileno())
            if not stat.S_ISREG(status.st_mode):
                return False
            log.seek(max(0, status.st_size - 4096))
            lines = log.read().splitlines()
    except OSError:
        return False
    return bool(lines) and _FINISHED in lines[-1]


class _Upper(TarReader):
    """Its members as those of a layer."""

    def __iter__(self) -> Iterator[Member]:
        for member in super().__iter__():
            member.name = _below(member.name)
            if member.kind == HARD_LINK:
                member.link = _below(member.link)
            elif member.kind == CHARACTER and member.device == (0, 0):
                folder, _, name = member.name.rpartition(b"/")
                member.name = b"/".join((*([folder] if folder else ()), b".wh." + name))
            is_opaque = member.attributes.pop(OPAQUE_ATTRIBUTE.encode(), None) == b"y" and member.kind == DIRECTORY
            yield member
            if is_opaque:
                yield Member(member.name + b"/.wh..wh..opq")


def _below(name: bytes) -> bytes:
    """A name without the directory that all of them are in."""
    return name.removeprefix(b"./").partition(b"/")[2]


def unpack(path: str | os.PathLike[str], upper: Path, limits: Limits = LIMITS) -> list[tuple[str, str]]:
    """Write the files into a directory of their own; answers what was left out, and why."""
    if not os.path.getsize(path):
        raise Corrupted(f"{FILES} is empty", hint="the checkpoint beside it has no files to restore")
    upper.mkdir(mode=0o755)
    with open(path, "rb") as file, Extraction(upper, name=FILES, limits=limits) as extraction:
        plain = Plain(file, name=FILES, limit_bytes=limits.total_bytes)
        extraction.layer(_Upper(plain, name=FILES, limits=limits))
        while plain.read(1 << 20):
            pass  # to its end, where the compression has its checksum
        return extraction.left_out
