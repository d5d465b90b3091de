"""An append-only file of transactions, each with its length and digest, shared by the processes of one machine.

    -- Kedge journal, format 1
    -- 211 3f9a…                         length and SHA-256 of what follows
    REPLACE INTO job VALUES(…);          SQL: `sqlite3 copy.db < journal` would make a database of it
    …

Writers hold a lock; readers need none: a transaction counts once it is complete. The next writer cuts off what a crash
left incomplete.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from kedge.blobs.direct import sync_directory
from kedge.blobs.group_files import OWN_FILE, open_lock, share
from kedge.errors import Corrupted, OutcomeUnknown, UnsupportedFormat, storage_error, storage_errors

FORMAT = 1
_HEADER = re.compile(rb"-- Kedge journal, format (\d{1,9})\n")
_HEAD = re.compile(rb"-- (\d{1,12}) ([0-9a-f]{64})\n")
_HEAD_BYTES = 96
MEND = "put a copy of it back, or make a new one: kedge rebuild"


class Journal:
    """One reader's position in the journal of `folder`. Not thread-safe: its index has its own lock."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "journal"
        self._lock_path = folder / "lock"
        self._handle: int | None = None  # of the file being read: while it is open, no other file can get its inode
        self._file = (0, 0)  # its device and inode
        self.position = 0  # after the last complete transaction that was read
        self._is_distrusted = False
        self._is_locked = False  # by this object

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock out other writers. The kernel drops the lock with the process."""
        with storage_errors("lock", self._lock_path):
            handle = open_lock(self._lock_path)
        try:
            with storage_errors("lock", self._lock_path):
                fcntl.flock(handle, fcntl.LOCK_EX)
            self._is_locked = True
            yield
        finally:
            self._is_locked = False
            os.close(handle)

    def exists(self) -> bool:
        return self.path.exists()

    def has_more(self) -> bool:
        """Return whether there may be something to read; costs one system call."""
        try:
            status = os.stat(self.path)
        except OSError as error:
            raise storage_error("read", str(self.path), error) from error
        return (status.st_dev, status.st_ino) != self._file or status.st_size != self.position

    def read(self) -> tuple[bool, list[str]]:
        """Return the transactions since the last read, and whether they are from another file.

        If it looks damaged, it is read once more while nobody writes (I2). A writer may have been cutting off an
        incomplete transaction, or a repair may be making a new journal, which this waits for.
        """
        try:
            return self._read()
        except Corrupted:
            if self._is_locked:
                raise
        with self.locked():
            return self._read()

    def _read(self) -> tuple[bool, list[str]]:
        try:
            return self._read_on()
        except BaseException:
            self.close()  # nothing of it was returned: start again
            raise

    def _read_on(self) -> tuple[bool, list[str]]:
        with storage_errors("read", self.path):
            is_other = self._look()
            assert self._handle is not None
            data = _read_from(self._handle, self.position)
        at = self._begin(data) if self.position == 0 else 0
        whole: list[str] = []
        while head := _HEAD.match(data, at, at + _HEAD_BYTES):
            end = head.end() + int(head[1])
            payload = data[head.end() : end]
            if len(payload) < int(head[1]):
                break
            if hashlib.sha256(payload).hexdigest().encode() != head[2]:
                if end < len(data):
                    raise Corrupted(f"{self.path} is damaged at {self.position + at}", hint=MEND)
                break
            try:
                whole.append(payload.decode())
            except UnicodeDecodeError as error:
                raise Corrupted(f"{self.path} is damaged at {self.position + at}: {error}", hint=MEND) from error
            at = end
        self.position += at
        return is_other, whole

    def beginning(self) -> tuple[bytes, bool]:
        """Return all complete transactions from the beginning as bytes, and whether nothing follows them."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return b"", False
        except OSError as error:
            raise storage_error("read", str(self.path), error) from error
        header = _HEADER.match(data)
        if header is None or int(header[1]) > FORMAT:
            return b"", False
        at = header.end()
        while head := _HEAD.match(data, at, at + _HEAD_BYTES):
            end = head.end() + int(head[1])
            if hashlib.sha256(data[head.end() : end]).hexdigest().encode() != head[2]:
                break
            at = end
        return data[:at] if at > header.end() else b"", at == len(data)

    def _look(self) -> bool:
        """Switch to the file at the path if it is another one, or if ours was truncated. Return whether it switched."""
        handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(handle)
        if (status.st_dev, status.st_ino) == self._file and status.st_size >= self.position:
            os.close(handle)
            return False
        self.close()
        self._handle, self._file = handle, (status.st_dev, status.st_ino)
        return True

    def _begin(self, data: bytes) -> int:
        header = _HEADER.match(data)
        if header is None:
            raise Corrupted(f"{self.path} is not a journal of Kedge", hint=MEND)
        if int(header[1]) > FORMAT:
            raise UnsupportedFormat(
                f"{self.path} has format {int(header[1])}, this Kedge knows up to {FORMAT}",
                hint="upgrade Kedge: install it from a newer clone (pip install .)",
            )
        return header.end()

    def append(self, payload: str) -> None:
        """Append a transaction durably after everything read (I1). Only while locked and caught up."""
        data = _framed(payload)
        with storage_errors("write", self.path):
            handle = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.ftruncate(handle, self.position)  # removes what a crashed writer left incomplete
            _write_all(handle, data, self.position)
            self._is_distrusted = True  # unsynced data may look written: the next write makes a new file (I9)
            os.fsync(handle)
            self._is_distrusted = False
        except OSError as error:
            self._take_back(handle, error)
        finally:
            os.close(handle)
        self.position += len(data)

    def _take_back(self, handle: int, cause: OSError) -> NoReturn:
        """Remove the written part of a refused transaction."""
        try:
            os.ftruncate(handle, self.position)
        except OSError:
            self._is_distrusted = True
            raise OutcomeUnknown(
                f"cannot write {self.path}: {cause.strerror}, nor take back what was written",
                hint="look whether it was done, then do it again",
            ) from cause
        raise storage_error("write", str(self.path), cause) from cause

    def close(self) -> None:
        """Close the file; the next read starts from the beginning."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self._file, self.position = None, (0, 0), 0

    def must_be_replaced(self) -> bool:
        return self._is_distrusted

    def replace(self, payload: str) -> None:
        """Replace this journal by a new one of one transaction: completely and durably, or not at all."""
        data = b"-- Kedge journal, format %d\n" % FORMAT + _framed(payload)
        write_file(self.path, data)
        with storage_errors("read", self.path):
            self._look()
        self.position, self._is_distrusted = len(data), False


def write_file(path: Path, data: bytes) -> None:
    """Write a file durably by a temporary file and a rename: the name has the new content or the old, never a part."""
    draft = draft_file(path, data)
    with storage_errors("write", path):
        os.replace(draft, path)
        sync_directory(path.parent)


def draft_file(path: Path, data: bytes) -> Path:
    """Write the temporary file and sync it."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, OWN_FILE)
        try:
            _write_all(handle, data, 0)
            os.fsync(handle)
        finally:
            os.close(handle)
        share(draft)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise storage_error("write", str(path), error) from error
    return draft


def _framed(payload: str) -> bytes:
    data = payload.encode()
    return b"-- %d %s\n" % (len(data), hashlib.sha256(data).hexdigest().encode()) + data


def _read_from(handle: int, at: int) -> bytes:
    parts = []
    while part := os.pread(handle, 16 << 20, at):
        parts.append(part)
        at += len(part)
    return b"".join(parts)


def _write_all(handle: int, data: bytes, at: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(handle, rest, at)
        rest, at = rest[written:], at + written
