"""A set of digests that takes 16 bytes each: how a map of millions of items knows which ones are done."""

from __future__ import annotations

DIGEST_BYTES = 16
_BUCKETS = 4096


class DigestSet:
    """Digests by their first 12 bits, in unsorted buckets that are searched: small, and fast into the millions."""

    __slots__ = ("_buckets", "_count")

    def __init__(self) -> None:
        self._buckets: list[bytearray | None] = [None] * _BUCKETS
        self._count = 0

    def add(self, digest: bytes) -> bool:
        """Whether it is new."""
        number = digest[0] << 4 | digest[1] >> 4
        bucket = self._buckets[number]
        if bucket is None:
            self._buckets[number] = bytearray(digest)
        elif _is_in(bucket, digest):
            return False
        else:
            bucket += digest
        self._count += 1
        return True

    def __contains__(self, digest: bytes) -> bool:
        bucket = self._buckets[digest[0] << 4 | digest[1] >> 4]
        return bucket is not None and _is_in(bucket, digest)

    def __len__(self) -> int:
        return self._count


def _is_in(bucket: bytearray, digest: bytes) -> bool:
    at = bucket.find(digest)
    while at >= 0 and at % DIGEST_BYTES:  # found across two neighbours
        at = bucket.find(digest, at + 1)
    return at >= 0
