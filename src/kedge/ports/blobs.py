"""The port for the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from .values import Buffer


class BlobWriter(Protocol):
    """The bytes of one save. Several threads append; then one of them calls commit or abort, and finally release."""

    def append(self, data: Buffer) -> tuple[str, int]:
        """Store `data` and return (pack, offset). The caller may reuse `data` as soon as this returns."""
        ...

    def commit(self) -> None:
        """Return only when everything appended, and the names of its packs, survive power loss (I1).

        A failed sync is not retried on the same file (I9): the packs are abandoned. Raises StorageError.
        """
        ...

    def abort(self) -> None:
        """Abandon everything appended, which becomes garbage. Includes release."""
        ...

    def withdraw(self, pack: str, offset: int) -> None:
        """Undo a commit whose save the index refused: `scan` no longer yields these bytes. Includes abort.

        Durable on return: once a caller knows of the refusal, no rebuild brings the save back.
        """
        ...

    def release(self) -> None:
        """Let gc judge the packs again: the index has committed what names the chunks, or never will.

        Until then `Blobs.remove` does not delete them, in any process (I3). May be called again.
        """
        ...


class Blobs(Protocol):
    """The bytes. Packs are immutable once committed; offsets below a commit never change."""

    def writer(self, size_hint: int) -> BlobWriter: ...

    def seal(self) -> None:
        """Append nothing more to the packs written so far; later writers begin new ones. gc compacts sealed packs."""
        ...

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        """Fill `target`. Raises NotFound for a missing pack, Corrupted for a short one.

        Only the storage itself can report these. If it cannot be read, nothing is known about the pack: raises
        StorageError. It may be away (directory, bucket, network), or permission or file descriptors may be missing.
        """
        ...

    def packs(self) -> Iterator[tuple[str, int]]:
        """Yield (name, size in bytes) of every pack that takes space, finished or not."""
        ...

    def remove(self, pack: str, is_garbage: Callable[[], bool]) -> bool:
        """Delete a pack unless a writer may still append to it. Return whether it was deleted.

        `is_garbage()` must confirm it, called while writers are locked out. A missing pack is not an error, because
        removal is repeated after crashes (I3).
        """
        ...

    def scan(self, pack: str, magic: bytes) -> Iterator[int]:
        """Yield offsets in a pack where an append that begins with `magic` may be, to rebuild an index."""
        ...

    def file_of(self, pack: str) -> str | None:
        """Return the path of a local file that can be mapped, if the adapter has one."""
        ...

    def close(self) -> None: ...
