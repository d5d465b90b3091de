"""Writing tar archives: pax headers where ustar cannot say it, so that nothing of a file is lost."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import BinaryIO

from .tar import BLOCK, CHARACTER, DIRECTORY, FILE, Member

_OCTAL_MOST = 8**7 - 1
_SIZE_MOST = 8**11 - 1
_PLAIN = re.compile(rb"[\x20-\x7e]{1,100}")


class TarWriter:
    """Members one after the other; `close` ends the archive and leaves the file open."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out

    def add(self, member: Member, pieces: Iterable[bytes | memoryview] = ()) -> None:
        """A member and its data, of which there must be as much as it says."""
        head = b""
        name = member.name + b"/" if member.kind == DIRECTORY and not member.name.endswith(b"/") else member.name
        records = _records(member, name)
        size = member.data_bytes
        if member.ranges is not None:
            head = _sparse_map(member)
            records = [
                (b"GNU.sparse.major", b"1"), (b"GNU.sparse.minor", b"0"), (b"GNU.sparse.name", member.name),
                (b"GNU.sparse.realsize", b"%d" % member.size), *records,
            ]  # fmt: skip
            size += len(head)
        if size > _SIZE_MOST:
            records.append((b"size", b"%d" % size))
        if records:
            text = b"".join(_record(key, value) for key, value in records)
            self._out.write(_header(Member(b"./PaxHeaders/" + _short(name)[:80], b"x"), len(text)))
            self._out.write(_padded(text))
        self._out.write(_header(member, size, name))
        self._out.write(head)
        written = len(head)
        for piece in pieces:
            self._out.write(piece)
            written += len(piece)
        if written != size:
            raise ValueError(f"{member.name!r} has {written} bytes instead of {size}")
        self._out.write(bytes(-size % BLOCK))

    def close(self) -> None:
        self._out.write(bytes(2 * BLOCK))


def _records(member: Member, name: bytes) -> list[tuple[bytes, bytes]]:
    records = []
    if not _PLAIN.fullmatch(name):
        records.append((b"path", name))
    if member.link and not _PLAIN.fullmatch(member.link):
        records.append((b"linkpath", member.link))
    if member.mtime_ns % 10**9 or not 0 <= member.mtime_ns // 10**9 <= _SIZE_MOST:
        sign, rest = ("-", -member.mtime_ns) if member.mtime_ns < 0 else ("", member.mtime_ns)
        records.append((b"mtime", f"{sign}{rest // 10**9}.{rest % 10**9:09}".encode()))
    records += [
        (key, b"%d" % value) for key, value in ((b"uid", member.uid), (b"gid", member.gid)) if value > _OCTAL_MOST
    ]
    return records + [(b"SCHILY.xattr." + key, value) for key, value in sorted(member.attributes.items())]


def _record(key: bytes, value: bytes) -> bytes:
    """With its own length in front, which counts itself."""
    rest = b" " + key + b"=" + value + b"\n"
    size = len(rest)
    while len(b"%d" % size) + len(rest) != size:
        size = len(b"%d" % size) + len(rest)
    return b"%d" % size + rest


def can_be_sparse(ranges: list[tuple[int, int]]) -> bool:
    """Whether every reader of sparse files understands these; holes of real file systems are so."""
    return all(length % BLOCK == 0 for _, length in ranges[:-1])


def _sparse_map(member: Member) -> bytes:
    """The ranges and, where a hole ends the file, an empty one at its end: GNU tar takes the size from there.

    It also begins each range with a new block, so all but the last must be whole blocks: see `can_be_sparse`.
    """
    ranges = list(member.ranges or [])
    if not can_be_sparse(ranges):
        raise ValueError(f"{member.name!r} has ranges that are no whole blocks")
    if not ranges or sum(ranges[-1]) < member.size:
        ranges.append((member.size, 0))
    numbers = [len(ranges), *(number for pair in ranges for number in pair)]
    return _padded(b"".join(b"%d\n" % number for number in numbers))


def _header(member: Member, size: int, name: bytes = b"") -> bytes:
    seconds = member.mtime_ns // 10**9
    major, minor = member.device if member.kind in (CHARACTER, b"4") else (0, 0)
    fields = (
        _short(name or member.name).ljust(100, b"\0"),
        b"%07o\0" % member.mode,
        b"%07o\0" % (member.uid if member.uid <= _OCTAL_MOST else 0),
        b"%07o\0" % (member.gid if member.gid <= _OCTAL_MOST else 0),
        b"%011o\0" % (size if size <= _SIZE_MOST else 0),
        b"%011o\0" % (seconds if 0 <= seconds <= _SIZE_MOST else 0),
        b" " * 8,
        member.kind if member.kind != b"\0" else FILE,
        _short(member.link).ljust(100, b"\0"),
        b"ustar\00000",
        bytes(64),
        b"%07o\0%07o\0" % (major, minor),
    )
    block = b"".join(fields).ljust(BLOCK, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def _short(name: bytes) -> bytes:
    """What fits into the header itself; the pax header in front of it has the whole."""
    return name if _PLAIN.fullmatch(name) else re.sub(rb"[^\x20-\x7e]", b"_", name)[:100]


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)
