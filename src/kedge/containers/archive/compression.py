"""Streams that may be compressed: found out from their first bytes, never from a name."""

from __future__ import annotations

import gzip
import zlib
from typing import BinaryIO, Protocol

import zstandard

from kedge.errors import Corrupted, Validation, storage_error

_MAX_WINDOW_BYTES = 1 << 27  # what zstd --long=27 uses; more is memory at the word of a stranger
_OTHERS = {b"\xfd7zXZ\0": "xz", b"BZh": "bzip2", b"\x04\x22\x4d\x18": "lz4"}


class Reader(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Plain:
    """What a stream holds, decompressed, in bounded pieces; no more than `limit_bytes` in all."""

    def __init__(self, file: BinaryIO, *, name: str, limit_bytes: int) -> None:
        self._name = name
        self._left = limit_bytes
        self._limit = limit_bytes
        start = file.read(6)
        file.seek(-len(start), 1)
        self._source = _opened(file, start, name)

    def read(self, size: int, /) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        try:
            data = self._source.read(min(size, 1 << 20))
        except (zlib.error, EOFError, gzip.BadGzipFile, zstandard.ZstdError) as error:
            raise Corrupted(f"{self._name} is damaged or cut off: {error}", hint="get it again") from error
        except OSError as error:
            raise storage_error("read", self._name, error) from error
        self._left -= len(data)
        if self._left < 0:
            raise Validation(
                f"{self._name} holds more than {self._limit:,} bytes",
                hint="if that is right, allow it with --max-bytes",
            )
        return data


def _opened(file: BinaryIO, start: bytes, name: str) -> Reader:
    if start[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=file, mode="rb")
    if start[:4] == b"\x28\xb5\x2f\xfd" or (start[1:4] == b"\x2a\x4d\x18" and start[:1] and start[0] & 0xF0 == 0x50):
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        return decompressor.stream_reader(file, read_across_frames=True, closefd=False)
    for magic, kind in _OTHERS.items():
        if start.startswith(magic):
            raise Validation(f"{name} is compressed with {kind}", hint="use gzip, zstd or no compression")
    return file
