"""Packs on a local disk: `<directory>/<32 hex>.pack`. `pack_file` describes the bytes inside.

Who may do what:

- Only the process that created a pack appends to it, and only while it holds `flock` on it. It keeps one current pack
  across saves; its threads append to that one in parallel and share its syncs.
- A pack stays locked until every writer that appended to it is released, so that gc cannot judge chunks that are
  durable but not yet named by the index (I3). Between saves it is free: gc of any process may lock it.
- `remove` needs the lock. A crash drops the lock, so that the crashed process's remains can be removed.
- A pack whose sync failed is never appended to or synced again (I9).
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator

from kedge.errors import Corrupted, NotFound, StorageError, storage_error, storage_errors
from kedge.ports import Buffer

from .direct import BLOCK_BYTES, Input, OpenFiles, aligned_memory, round_up
from .pack_file import (
    NAME,
    SUFFIX,
    Folder,
    OpenPack,
    PackPool,
    check_name,
    check_writer,
    refuse_newer,
    try_lock,
)

ROLL_BYTES = 256 << 20  # no extent begins beyond this, so that compacting a pack stays a small task

_OPEN_FILES = 64
_SCAN_BYTES = 4 << 20


class PackBlobs:
    """`ports.Blobs` in files of one directory, shared by any number of threads and processes of one machine.

    `direct=False` uses the page cache, for file systems with slow or wrong direct writes. With `create=False` a missing
    directory is not created: until it is back, nothing is known about its packs.
    """

    def __init__(
        self, directory: str, *, roll_bytes: int = ROLL_BYTES, direct: bool = True, create: bool = True
    ) -> None:
        self._folder = Folder(os.path.abspath(directory), create=create)
        self._files = OpenFiles(_OPEN_FILES, refuse_newer)
        self._pool = PackPool(self._folder, roll_bytes=roll_bytes, direct=direct)
        # A forgotten close() leaves preallocated space: free it at the latest when Python ends.
        weakref.finalize(self, self._pool.close)

    def writer(self, size_hint: int) -> PackWriter:
        return PackWriter(self, self._pool, size_hint)

    def seal(self) -> None:
        self._pool.seal()

    def read_into(self, pack: str, offset: int, target: memoryview) -> None:
        if target.nbytes == 0:
            return
        target = target.cast("B")
        file = self._open(pack)
        try:
            count = file.read(target, offset)
        except OSError as error:
            raise storage_error("read", self._path(pack), error) from error
        if count < len(target):
            raise Corrupted(
                f"pack {pack} ends at byte {offset + count}, inside the {len(target)} bytes at {offset}",
                hint="it was damaged after it was written: run kedge check",
            )

    def packs(self) -> Iterator[tuple[str, int]]:
        with storage_errors("list", self._folder.path), os.scandir(self._folder.path) as entries:
            pack_entries = [entry for entry in entries if entry.name.endswith(SUFFIX)]
        for entry in pack_entries:
            name = entry.name.removesuffix(SUFFIX)
            try:
                if NAME.fullmatch(name) and entry.is_file(follow_symlinks=False):
                    yield name, entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError as error:
                raise storage_error("list", self._folder.path, error) from error

    def remove(self, pack: str, is_garbage: Callable[[], bool]) -> bool:
        path = self._path(pack)
        self._pool.release(())  # what dropped writers still hold
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise storage_error("remove", path, error) from error
        try:
            if not try_lock(fd, path) or not is_garbage():
                return False
            with storage_errors("remove", path):
                os.unlink(path)
                self._folder.sync()
        finally:
            os.close(fd)
        self._files.drop(path)
        return True

    def file_of(self, pack: str) -> str | None:
        return self._path(pack)

    def scan(self, pack: str, magic: bytes) -> Iterator[int]:
        """Yield every block that begins with `magic`. Tolerates garbage and unreadable blocks; holds 4 MiB."""
        file = self._open(pack)
        window = aligned_memory(_SCAN_BYTES)
        view = memoryview(window)
        start = 0
        try:
            while count := _read_damaged(file, view, start):
                for block in range(0, count, BLOCK_BYTES):
                    if window[block : block + len(magic)] == magic:
                        yield start + block
                start += count
        except OSError as error:
            raise storage_error("scan", self._path(pack), error) from error

    def close(self) -> None:
        """Free preallocated space and descriptors. Unreleased writers keep their packs."""
        self._pool.close()
        self._files.clear()

    def _path(self, pack: str) -> str:
        return os.path.join(self._folder.path, check_name(pack) + SUFFIX)

    def _open(self, pack: str) -> Input:
        path = self._path(pack)
        try:
            return self._files.get(path)
        except StorageError:
            raise
        except FileNotFoundError as error:
            if not os.path.isdir(self._folder.path):  # a missing disk has no packs either, but has lost none
                raise storage_error("read", self._folder.path, error) from error
            hint = "run kedge check; restore the file if there is a copy of it"
            raise NotFound(f"pack {pack} is missing", hint=hint) from None
        except OSError as error:
            raise storage_error("read", path, error) from error


class PackWriter:
    """`ports.BlobWriter`. Its packs are protected from gc until `release`."""

    def __init__(self, blobs: PackBlobs, pool: PackPool, size_hint: int) -> None:
        self._pid = os.getpid()
        self._blobs = blobs  # keeps the pool open
        self._pool = pool
        self._hint = size_hint  # bytes still to come
        self._changed = threading.Condition()
        self._ends: dict[OpenPack, int] = {}  # packs held, and where our last extent in each ends
        self._pack: OpenPack | None = None
        self._appending = 0  # calls in progress
        self._is_finished = False
        self._is_committed = False
        self._failure: StorageError | None = None

    def append(self, data: Buffer) -> tuple[str, int]:
        view = memoryview(data)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        with self._changed:
            self._check_open()
            pack, offset = self._reserve(len(view))
            self._appending += 1
        try:
            pack.write(view, offset)
        except StorageError as error:
            self._failure = error
            raise
        finally:
            with self._changed:
                self._appending -= 1
                self._changed.notify_all()
        return pack.name, offset

    def commit(self) -> None:
        with self._changed:
            self._check_open()
        self._finish()
        try:
            for pack, end in self._ends.items():
                pack.sync(end)
        except StorageError:
            self.release()
            raise
        self._is_committed = True

    def abort(self) -> None:
        self.release()

    def withdraw(self, pack: str, offset: int) -> None:
        try:
            for held in self._ends if self._pid == os.getpid() else ():
                if held.name == pack:
                    held.write(memoryview(bytes(BLOCK_BYTES)), offset)
                    held.sync(offset + BLOCK_BYTES)
        finally:
            self.release()

    def release(self) -> None:
        if self._pid == os.getpid():
            self._finish()
            packs, self._ends, self._pack = list(self._ends), {}, None
            self._pool.release(packs)

    def __del__(self) -> None:
        if getattr(self, "_ends", None) and self._pid == os.getpid():
            self._pool.drop(list(self._ends), is_committed=self._is_committed)

    def _finish(self) -> None:
        """Refuse further appends and wait for those in progress: their descriptor may be closed after this."""
        with self._changed:
            self._is_finished = True
            while self._appending:
                self._changed.wait()

    def _check_open(self) -> None:
        if self._failure is not None:
            kind = type(self._failure)  # a full disk is full for every thread
            raise kind(f"an earlier write failed: {self._failure.message}", hint=self._failure.hint)
        check_writer(self._pid, is_finished=self._is_finished)

    def _reserve(self, size: int) -> tuple[OpenPack, int]:
        try:
            while True:
                if self._pack is None:
                    self._pack = self._pool.acquire()
                    self._ends[self._pack] = 0
                offset = self._pack.reserve(size, self._hint)
                if offset is not None:
                    break
                self._pack = None
        except StorageError as error:
            self._failure = error
            raise
        self._hint = max(0, self._hint - size)
        self._ends[self._pack] = offset + round_up(size)
        return self._pack, offset


def _read_damaged(file: Input, target: memoryview, offset: int) -> int:
    """Read as much as possible; unreadable blocks become zeros."""
    try:
        return file.read(target, offset)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
    size = min(len(target), os.fstat(file.fd).st_size - offset)
    for start in range(0, size, BLOCK_BYTES):
        block = target[start : min(size, start + BLOCK_BYTES)]
        try:
            file.read(block, offset + start)
        except OSError:
            block[:] = bytes(len(block))
    return size
