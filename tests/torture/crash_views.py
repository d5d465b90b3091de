"""What a store reads of a disk: two disks that differ elsewhere are opened once.

Of SQLite's files that is the database as its log makes it: https://sqlite.org/walformat.html. The log counts up to its
last commit; behind the first frame whose checksum is wrong nothing is read, and a page that the log has is not read
from the database. Of packs it is what the store asked for when such a disk was opened. Everything else counts in full.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

from kedge.blobs.direct import Input
from kedge.ports import digest_of

from .crash_disks import Content, Disk

_HEADER = struct.Struct(">8I")
_FRAME = struct.Struct(">6I")
_DIRECT = 100  # SQLite reads so many bytes of the database itself, whatever the log says
_MAGIC = (0x377F0682, 0x377F0683)
_PACK_HEADER = 64


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes of a pack that were asked for."""

    path: str
    offset: int
    size: int
    digest: bytes


@dataclass
class Views:
    """Remembers what it has worked out: the same files come again and again."""

    _logs: dict[bytes, tuple[int, dict[int, bytes]]] = field(default_factory=dict)
    _pages: dict[bytes, list[bytes]] = field(default_factory=dict)
    _sums: dict[tuple[int, int, bytes], tuple[int, int]] = field(default_factory=dict)
    _databases: dict[tuple[bytes, bytes], bytes] = field(default_factory=dict)
    _ranges: dict[tuple[bytes, int, int], bytes] = field(default_factory=dict)

    def key(self, disk: Disk) -> bytes:
        """The same for disks that a store cannot tell apart without reading packs."""
        files = dict(disk.files)
        parts = [path.encode() for path in disk.directories]
        for path, content in disk.files:
            if path.endswith("-wal") and path.removesuffix("-wal") in files:
                parts.append(path.encode())
            elif path.endswith(".sqlite"):
                parts += [path.encode(), self._database(content, files.get(path + "-wal"))]
            elif path.endswith(".pack") or "/reserve/" in path:
                parts.append(path.encode())
            else:
                parts += [path.encode(), content.digest]
        return digest_of(b"\0".join(parts))

    def is_read_alike(self, disk: Disk, reads: tuple[Read, ...]) -> bool:
        files = dict(disk.files)
        return all(
            read.path in files and self._range(files[read.path], read.offset, read.size) == read.digest
            for read in reads
        )

    def _range(self, content: Content, offset: int, size: int) -> bytes:
        key = (content.digest, offset, size)
        if key not in self._ranges:
            self._ranges[key] = digest_of(content.data[offset : offset + size])
        return self._ranges[key]

    def _database(self, database: Content, log: Content | None) -> bytes:
        key = (database.digest, b"" if log is None else log.digest)
        if key not in self._databases:
            pages = self._pages.get(database.digest)
            if pages is None:
                data = database.data
                pages = [digest_of(data[at : at + 4096]) for at in range(0, len(data), 4096)]
                self._pages[database.digest] = pages
            size, newer = (0, {}) if log is None or not database.data else self._log(log)
            count = size or len(pages)
            seen = [newer.get(n) or (pages[n - 1] if n <= len(pages) else b"") for n in range(1, count + 1)]
            self._databases[key] = digest_of(b"".join([database.data[:_DIRECT], b"|", *seen]))
        return self._databases[key]

    def _log(self, log: Content) -> tuple[int, dict[int, bytes]]:
        """How many pages the last commit says there are, and the pages in the log up to it."""
        if log.digest not in self._logs:
            self._logs[log.digest] = self._read_log(log.data)
        return self._logs[log.digest]

    def _read_log(self, data: bytes) -> tuple[int, dict[int, bytes]]:
        if len(data) < _HEADER.size:
            return 0, {}
        magic, _, page_size, _, *salt, first, second = _HEADER.unpack_from(data)
        sums = self._checksum(0, 0, data[:24])
        if magic not in _MAGIC or page_size != 4096 or sums != (first, second):
            return 0, {}
        size, pages, pending = 0, dict[int, bytes](), dict[int, bytes]()
        for at in range(_HEADER.size, len(data) - _FRAME.size - page_size + 1, _FRAME.size + page_size):
            number, commit, *found, first, second = _FRAME.unpack_from(data, at)
            page = data[at + _FRAME.size : at + _FRAME.size + page_size]
            sums = self._checksum(*sums, data[at : at + 8] + page)
            if found != salt or not number or sums != (first, second):
                break
            pending[number] = digest_of(page)
            if commit:
                size = commit
                pages.update(pending)
                pending.clear()
        return size, pages

    def _checksum(self, first: int, second: int, data: bytes) -> tuple[int, int]:
        key = (first, second, data)
        if key not in self._sums:
            # Of the two magic numbers, Kedge's stores have the one of little-endian machines.
            words = struct.unpack(f"<{len(data) // 4}I", data)
            for n in range(0, len(words), 2):
                first = (first + words[n] + second) & 0xFFFFFFFF
                second = (second + words[n + 1] + first) & 0xFFFFFFFF
            self._sums[key] = first, second
        return self._sums[key]


@contextmanager
def reads(root: str) -> Iterator[list[Read]]:
    """What is read of packs below `root` meanwhile."""
    noted: list[Read] = []
    real = Input.read

    def read(self: Input, target: memoryview, offset: int) -> int:
        count = real(self, target, offset)
        path = os.readlink(f"/proc/self/fd/{self.fd}")[len(root) + 1 :]
        header = os.pread(self.fd, _PACK_HEADER, 0)
        noted.append(Read(path, 0, _PACK_HEADER, digest_of(header)))
        noted.append(Read(path, offset, len(target), digest_of(target[:count])))
        return count

    with mock.patch.object(Input, "read", read):
        yield noted
