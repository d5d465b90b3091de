"""The port for the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from .values import Buffer


class BlobWriter(Protocol):
    """What one save writes. Used by several threads; then one of them calls commit or abort, and release at last."""

    def append(self, data: Buffer) -> tuple[str, int]:
        """Store `data` and answer (pack, offset). The caller may reuse `data` as soon as this returns."""
        ...

    def commit(self) -> None:
        """Return only when everything appended, and the names of its packs, survive power loss (I1).

        A failed sync is not tried again on the same file (I9): the packs are given up and StorageError is raised.
        """
        ...

    def abort(self) -> None:
        """Give up; what was appended becomes garbage. Includes release."""
        ...

    def withdraw(self, pack: str, offset: int) -> None:
        """As abort, after a commit whose save the index has refused: `scan` yields this append no more.

        Durable when it returns, so that whoever hears of the refusal will not see a rebuild bring the save back.
        """
        ...

    def release(self) -> None:
        """Let gc judge the packs again: the index has committed what names the chunks, or never will.

        Until then they are kept from `Blobs.remove`, in every process (I3). May be called again.
        """
        ...


class Blobs(Protocol):
    """The bytes. Packs are immutable once committed; offsets below a commit never change."""

    def writer(self, size_hint: int) -> BlobWriter: ...

    def seal(self) -> None:
        """Add nothing more to the packs written so far; later writers begin new ones. gc calls it to compact them."""
        ...

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target`; a missing pack is NotFound, a short one Corrupted.

        Both are answers of the place itself. While it cannot be asked (a folder or a bucket that is away, no
        permission, no descriptors, no network) nothing is known about the pack: StorageError.
        """
        ...

    def packs(self) -> Iterator[tuple[str, int]]:
        """(name, size in bytes) of every pack that takes space, finished or not."""
        ...

    def remove(self, pack: str, is_garbage: Callable[[], bool]) -> bool:
        """Delete a pack if no writer may still add to it and `is_garbage()`, asked while writers are kept out.

        Answers whether it was deleted. A missing pack is not an error: removal is repeated after crashes (I3).
        """
        ...

    def scan(self, pack: str, magic: bytes) -> Iterator[int]:
        """Offsets in a pack at which an append beginning with `magic` may lie, for rebuilding an index."""
        ...

    def file_of(self, pack: str) -> str | None:
        """A local file that can be mapped, for adapters that have one."""
        ...

    def close(self) -> None: ...
