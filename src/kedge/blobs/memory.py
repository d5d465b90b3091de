"""Blobs in the memory of this process, for tests and temporary stores. Each writer fills its own pack."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

from kedge.errors import Corrupted, NotFound
from kedge.ports import Buffer

from .pack_file import check_writer

_BLOCK_BYTES = 4096  # the step of `scan`, as in packs on disk


class MemoryBlobs:
    """`ports.Blobs` in a dictionary."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._packs: dict[str, bytearray] = {}
        self._held: set[str] = set()  # packs with unreleased writers

    def writer(self, size_hint: int) -> MemoryWriter:
        return MemoryWriter(self)

    def seal(self) -> None:
        return None  # every writer has its own pack

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        if target.nbytes == 0:
            return
        target = target.cast("B")
        with self._lock:
            data = self._find(pack)[offset : offset + len(target)]
        if len(data) < len(target):
            raise Corrupted(f"pack {pack} ends inside the {len(target)} bytes at {offset}")
        target[:] = data

    def packs(self) -> Iterator[tuple[str, int]]:
        with self._lock:
            sizes = [(name, len(data)) for name, data in self._packs.items()]
        yield from sizes

    def remove(self, pack: str, is_garbage: Callable[[], bool]) -> bool:
        with self._lock:
            if pack not in self._packs or pack in self._held:
                return False
        # No lock is needed for the call: this pack's writer is released, and there will be no other.
        if not is_garbage():
            return False
        with self._lock:
            return self._packs.pop(pack, None) is not None

    def file_of(self, pack: str) -> str | None:
        return None

    def scan(self, pack: str, magic: bytes) -> Iterator[int]:
        with self._lock:
            data = bytes(self._find(pack))
        for start in range(0, len(data), _BLOCK_BYTES):
            if data.startswith(magic, start):
                yield start

    def close(self) -> None:
        with self._lock:
            self._held.clear()

    def _find(self, pack: str) -> bytearray:
        try:
            return self._packs[pack]
        except KeyError:
            raise NotFound(f"pack {pack} is missing") from None


class MemoryWriter:
    """`ports.BlobWriter`; its pack is protected from gc until `release`."""

    def __init__(self, blobs: MemoryBlobs) -> None:
        self._blobs = blobs
        self._pack = ""
        self._is_finished = False

    def append(self, data: Buffer) -> tuple[str, int]:
        with self._blobs._lock:
            self._check_open()
            if not self._pack:
                self._pack = os.urandom(16).hex()
                self._blobs._packs[self._pack] = bytearray()
                self._blobs._held.add(self._pack)
            pack = self._blobs._packs[self._pack]
            offset = len(pack)
            pack += data
            pack += bytes(-len(pack) % _BLOCK_BYTES)
            return self._pack, offset

    def commit(self) -> None:
        with self._blobs._lock:
            self._check_open()
            self._is_finished = True

    def abort(self) -> None:
        with self._blobs._lock:
            if not self._is_finished:
                self._blobs._packs.pop(self._pack, None)
        self.release()

    def withdraw(self, pack: str, offset: int) -> None:
        with self._blobs._lock:
            self._blobs._packs[pack][offset : offset + _BLOCK_BYTES] = bytes(_BLOCK_BYTES)
        self.release()

    def release(self) -> None:
        with self._blobs._lock:
            self._is_finished = True
            self._blobs._held.discard(self._pack)

    def __del__(self) -> None:
        if not self._is_finished:
            self._blobs._held.discard(self._pack)

    def _check_open(self) -> None:
        check_writer(os.getpid(), is_finished=self._is_finished)
