"""States on their way between a service and its client: a manifest, and the chunks that the other side lacks.

    a save       head, chunks, an empty chunk, manifest, what of it is spilled, BLAKE3 of both
    chunks       each with its length; instead of one that cannot be read, FAILED and why
    a manifest   head, manifest, BLAKE3 of it

Lengths are 4 bytes, little-endian, before what they are of; heads are JSON. Chunks are named by their bytes alone.
"""

from __future__ import annotations

import struct

SAVE_TYPE = "application/vnd.kedge.save"
CHUNKS_TYPE = "application/vnd.kedge.chunks"
MANIFEST_TYPE = "application/vnd.kedge.manifest"
DIGEST_BYTES = 32
MAX_DIGESTS = 4096  # asked for at once
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
    """Digests one behind the other; ValueError if they are none."""
    if len(data) % DIGEST_BYTES or len(data) > MAX_DIGESTS * DIGEST_BYTES:
        raise ValueError(f"{len(data)} bytes are no digests, or too many")
    return [data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES)]
