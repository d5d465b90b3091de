"""Blobs whose calls are retried if the store behind them is unavailable."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kedge.errors import Unavailable
from kedge.ports import Blobs, BlobWriter, Buffer

from .backoff import Backoff


class RetryingBlobs:
    """`ports.Blobs` around another one, whose calls may be repeated after Unavailable."""

    def __init__(self, inner: Blobs, backoff: Backoff | None = None) -> None:
        self.inner = inner
        self.backoff = backoff or Backoff()

    def writer(self, size_hint: int) -> RetryingWriter:
        return RetryingWriter(self.backoff.run(lambda: self.inner.writer(size_hint)), self.backoff)

    def seal(self) -> None:
        self.backoff.run(self.inner.seal)

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        self.backoff.run(lambda: self.inner.read_into(pack, offset, target))

    def packs(self) -> Iterator[tuple[str, int]]:
        yield from self.backoff.run(lambda: list(self.inner.packs()))

    def remove(self, pack: str, is_garbage: Callable[[], bool]) -> bool:
        return self.backoff.run(lambda: self.inner.remove(pack, is_garbage))

    def scan(self, pack: str, magic: bytes) -> Iterator[int]:
        """Restart after a failure, skipping what was yielded before."""
        last, failures = -1, 0
        while True:
            try:
                for offset in self.inner.scan(pack, magic):
                    if offset > last:
                        last = offset
                        yield offset
            except Unavailable as failure:
                failures += 1
                self.backoff.pause(failures, failure)
            else:
                return

    def file_of(self, pack: str) -> str | None:
        return self.inner.file_of(pack)

    def close(self) -> None:
        self.backoff.run(self.inner.close)


class RetryingWriter:
    """`ports.BlobWriter` around another one."""

    def __init__(self, inner: BlobWriter, backoff: Backoff) -> None:
        self.inner = inner
        self.backoff = backoff

    def append(self, data: Buffer) -> tuple[str, int]:
        return self.backoff.run(lambda: self.inner.append(data))

    def commit(self) -> None:
        self.backoff.run(self.inner.commit)

    def abort(self) -> None:
        self.backoff.run(self.inner.abort)

    def withdraw(self, pack: str, offset: int) -> None:
        self.backoff.run(lambda: self.inner.withdraw(pack, offset))

    def release(self) -> None:
        self.backoff.run(self.inner.release)
