"""States in transit between a service and its client: a manifest, and the chunks the other side lacks.

    a save       head, chunks, an empty chunk, manifest, its spilled content, BLAKE3 of both
    chunks       each after its length; for one that cannot be read, FAILED and the reason
    a manifest   head, manifest, its BLAKE3

A length is 4 bytes, little-endian, and precedes its data; heads are JSON. Chunks are named only by their bytes.
"""

from __future__ import annotations

import struct

SAVE_TYPE = "application/vnd.kedge.save"
CHUNKS_TYPE = "application/vnd.kedge.chunks"
MANIFEST_TYPE = "application/vnd.kedge.manifest"
DIGEST_BYTES = 32
MAX_DIGESTS = 4096  # per request
MAX_HEAD_BYTES = 1 << 20
FAILED = 0xFFFFFFFF

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size


def length(size_bytes: int) -> bytes:
    return _LENGTH.pack(size_bytes)


def parse_length(data: bytes | bytearray | memoryview) -> int:
    size: int = _LENGTH.unpack(data)[0]
    return size


def framed(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def split_digests(data: bytes) -> list[bytes]:
    """Split consecutive digests. Raises ValueError if these are not digests."""
    if len(data) % DIGEST_BYTES or len(data) > MAX_DIGESTS * DIGEST_BYTES:
        raise ValueError(f"{len(data)} bytes are not digests, or too many")
    return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]
