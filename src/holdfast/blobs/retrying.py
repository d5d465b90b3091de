"""Trying again what may succeed the next time: `Unavailable`, and nothing else.

The pauses double and are drawn at random between nothing and that, so that many clients of a server that is too busy
do not all come back at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from holdfast.errors import Unavailable
from holdfast.ports import Blobs, BlobWriter, Buffer

_T = TypeVar("_T")
_dice = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class Backoff:
    """How often and how patiently. The default waits 12 s on average, 25 s at most, before it gives up."""

    attempts: int = 9
    first_s: float = 0.1
    most_s: float = 6.0

    def pause(self, failures: int, failure: Unavailable) -> None:
        """Wait before the next attempt; raises `failure` if that was the last one."""
        if failures >= self.attempts:
            raise failure
        time.sleep(_dice.uniform(0, min(self.most_s, self.first_s * 2 ** (failures - 1))))

    def run(self, action: Callable[[], _T]) -> _T:
        failures = 0
        while True:
            try:
                return action()
            except Unavailable as failure:
                failures += 1
                self.pause(failures, failure)


class RetryingBlobs:
    """`ports.Blobs` around another one, whose calls may be made again after Unavailable."""

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
        """Begins anew after a failure, and leaves out what it has said before."""
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

    def release(self) -> None:
        self.backoff.run(self.inner.release)
