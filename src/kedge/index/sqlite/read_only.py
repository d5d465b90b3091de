"""Reading a database where nothing can be written beside it: a read-only mount, or somebody else's folder.

SQLite wants a file of shared memory (`-shm`) for whoever reads a database with a log. Where it cannot make one:

    no log          the file is read as it is, without locks; if it changes meanwhile, what was read is not given out
    log and -shm    somebody is writing, or was killed: both are read as they are, with locks
    log alone       a copy of both is read

A connection lasts as long as one reading: what is true of these files may be otherwise in the next.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kedge.errors import ReadOnly, Unavailable, storage_error

from .closed_mark import lacks_log, log_missing
from .database import TRANSLATED, typed

Look = tuple[tuple[int, ...], ...]


def read_only_error(name: str) -> ReadOnly:
    return ReadOnly(
        f"{name} can only be read",
        hint="its disk is mounted read-only, or its folder belongs to somebody else; save to another store",
    )


class ReadOnlyFile:
    """The database at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._copied: Look | None = None
        self._copying = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection. SQLite's errors leave the block as ours; Unavailable if the file was changed meanwhile (I2)."""
        before = self._look()
        try:
            connection, is_locked = self._connect(before)
            try:
                connection.execute("SELECT count(*) FROM sqlite_schema")
                yield connection
            finally:
                connection.close()
        except TRANSLATED as error:
            if self._look() != before:
                raise self._changed() from error
            raise typed(error, self._path) from error
        if not is_locked and self._look() != before:
            raise self._changed()

    def _connect(self, look: Look) -> tuple[sqlite3.Connection, bool]:
        """A connection, and whether it keeps writers from changing what is being read."""
        if lacks_log(self._path):
            raise log_missing(self._path)
        _, log, shared = look
        if not log or not log[1]:
            return _opened(self._path, "mode=ro&immutable=1"), False
        if shared:
            return _opened(self._path, "mode=ro&readonly_shm=1"), True
        with self._copying:
            return _opened(self._copy_of(look), "mode=rw"), True

    def _copy_of(self, look: Look) -> str:
        if self._copied != look:
            self.close()
            self._copy = tempfile.TemporaryDirectory(prefix="kedge-")
            copy = os.path.join(self._copy.name, "index")
            try:
                shutil.copyfile(self._path, copy)
                shutil.copyfile(self._path + "-wal", copy + "-wal")
            except OSError as error:
                raise storage_error("copy", self._path, error) from error
            if self._look() != look:
                raise self._changed()
            self._copied = look
        assert self._copy is not None
        return os.path.join(self._copy.name, "index")

    def close(self) -> None:
        """Remove the copy, if there is one."""
        if self._copy is not None:
            self._copy.cleanup()
        self._copy = self._copied = None

    def _look(self) -> Look:
        """What tells one state of the files from another: of the database, of its log, of the shared memory."""
        try:
            database = os.stat(self._path)
        except OSError as error:
            raise storage_error("read", self._path, error) from error
        return (
            (database.st_ino, database.st_size, database.st_mtime_ns),
            _identity(self._path + "-wal"),
            _identity(self._path + "-shm")[:1],
        )

    def _changed(self) -> Unavailable:
        return Unavailable(f"{self._path} was changed while it was read", hint="read it again")


def _identity(path: str) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_size


def _opened(path: str, how: str) -> sqlite3.Connection:
    # One user at a time, whatever its thread: a fork, or another thread, may close what this one has opened.
    place = f"{Path(path).absolute().as_uri()}?{how}"
    return sqlite3.connect(place, uri=True, isolation_level=None, timeout=30, check_same_thread=False)
