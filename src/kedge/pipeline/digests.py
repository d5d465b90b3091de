"""A set of digests that takes 16 bytes each: how a map of millions of items knows which ones are done."""

from __future__ import annotations

DIGEST_BYTES = 16
_BUCKETS = 4096


def split(digests: bytes) -> list[bytes]:
    """Digests that are stored one behind the other."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


class DigestSet:
    """Digests by their first 12 bits, in unsorted buckets that are searched: small, and fast into the millions."""

    __slots__ = ("_buckets",)

    def __init__(self) -> None:
        self._buckets = [bytearray() for _ in range(_BUCKETS)]

    def add(self, digest: bytes) -> bool:
        """Whether it is new."""
        bucket = self._buckets[digest[0] << 4 | digest[1] >> 4]
        at = bucket.find(digest)
        if at >= 0 and (not at % DIGEST_BYTES or _is_behind(bucket, digest, at)):
            return False
        bucket += digest
        return True

    def __contains__(self, digest: bytes) -> bool:
        bucket = self._buckets[digest[0] << 4 | digest[1] >> 4]
        at = bucket.find(digest)
        return at >= 0 and (not at % DIGEST_BYTES or _is_behind(bucket, digest, at))

    def __len__(self) -> int:
        return sum(map(len, self._buckets)) // DIGEST_BYTES


def _is_behind(bucket: bytearray, digest: bytes, at: int) -> bool:
    """Whether it is in the bucket behind a place where it only seems to be, across two neighbours."""
    while at >= 0 and at % DIGEST_BYTES:
        at = bucket.find(digest, at + 1)
    return at >= 0
