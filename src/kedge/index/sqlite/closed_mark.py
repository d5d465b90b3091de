"""Whether an index in a file was closed: `<index>-state`, which nobody writes while saving (I6).

SQLite keeps the newest commits in a log beside the database (`-wal`) until it moves them on, at the latest when the
last user closes. If that log is lost after a crash, SQLite opens the database as it was before, or empty, without a
word. So the first commit of a process says "open" here, durably, when its log is, and before it is acknowledged; and
whoever closes the index as the last one says "closed", when the log has been moved on. Open, and no log: commits are
missing, and the index is refused (I1).

Everybody who has the index open holds a shared lock on this file: alone is who can get it exclusively. Opening and
closing happen one at a time, under a lock on the folder; both locks end with the process.

The file also names the last event at such a closing. An index that does not have that event is an older one, put back
from a backup: what it does not name may be all there is, and gc must not remove it (I3).
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kedge.blobs.direct import sync_data, sync_directory
from kedge.blobs.group_files import OWN_FILE, share
from kedge.errors import Corrupted, storage_error

SUFFIX = "-state"
_SIZE = 256
_TEXT = re.compile(rb"Kedge index\nstate: (open|closed)\nevent: (\d{1,19}) ([0-9a-f]{64})\n *\n")


class _Turns:
    """Whose turn it is in this process, to open or to close an index in one of the folders."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """In a forked child too: a thread that held the lock does not exist there."""
        self.lock = threading.RLock()
        self.held: set[str] = set()


_turns = _Turns()
os.register_at_fork(after_in_child=_turns.reset)


@dataclass(frozen=True, slots=True)
class Closing:
    """What the file says."""

    is_open: bool = False
    event: int = 0  # the newest one when it was last closed
    chain: str = "0" * 64  # and its hash

    def text(self) -> bytes:
        state = "open" if self.is_open else "closed"
        return f"Kedge index\nstate: {state}\nevent: {self.event} {self.chain}\n".encode().ljust(_SIZE - 1) + b"\n"


class IndexState:
    """One user's part in the state of the index at `path`. The caller sees to it that threads come one at a time."""

    def __init__(self, path: str) -> None:
        self._index = path
        self.path = path + SUFFIX
        self._fd: int | None = None
        self.is_marked = False  # open, by us or while we are here

    @property
    def is_entered(self) -> bool:
        return self._fd is not None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else opens or closes the index meanwhile."""
        folder = os.path.dirname(os.path.abspath(self._index))
        with _turns.lock:
            if folder in _turns.held:  # garbage is collected at any moment: an index that nobody closed is closed here
                yield
                return
            with _named(folder):
                handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _turns.held.add(folder)
            try:
                _lock(handle, fcntl.LOCK_EX, folder)
                yield
            finally:
                _turns.held.discard(folder)
                _unlock(handle)

    def enter(self) -> None:
        """Take part, and refuse an index whose log is lost. Called `alone`, before the database is opened."""
        if self._fd is not None:
            return
        with _named(self.path):
            self._fd = self._open()
        try:
            _lock(self._fd, fcntl.LOCK_SH, self.path)
        except BaseException:
            self.leave()
            raise
        if self.read().is_open and not self.has_log():
            self.leave()
            raise log_missing(self._index)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWN_FILE)
        try:
            share(self.path)
            os.pwrite(handle, Closing().text(), 0)
            os.fsync(handle)
            sync_directory(os.path.dirname(os.path.abspath(self.path)))
        except OSError:
            os.unlink(self.path)
            os.close(handle)
            raise
        return handle

    def read(self) -> Closing:
        assert self._fd is not None
        with _named(self.path):
            return _parsed(os.pread(self._fd, _SIZE, 0))

    def has_log(self) -> bool:
        return os.path.exists(self._index + "-wal")

    def mark_open(self) -> None:
        """With the first commit, when the log is there. While we are here nobody says that it is closed."""
        if self.is_marked:
            return
        said = self.read()
        if not said.is_open:
            self._write(replace(said, is_open=True))
        self.is_marked = True

    def is_last(self) -> bool:
        """Whether nobody else has the index open. Called `alone`; only `read`, `close` and `leave` may follow."""
        assert self._fd is not None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise storage_error("lock", self.path, error) from error
        return True

    def close(self, said: Closing) -> None:
        """Say that the log has been moved on, before SQLite removes it."""
        self._write(replace(said, is_open=False))

    def accept(self, event: int, chain: str) -> None:
        """The index as it is counts from now on."""
        self._write(replace(self.read(), event=event, chain=chain))

    def leave(self) -> None:
        if self._fd is not None:
            _unlock(self._fd)
        self._fd, self.is_marked = None, False

    def forget(self) -> None:
        """In a forked child: the lock stays the parent's."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self.is_marked = None, False

    def _write(self, said: Closing) -> None:
        assert self._fd is not None
        with _named(self.path):
            os.pwrite(self._fd, said.text(), 0)
            sync_data(self._fd)


def lacks_log(index: str) -> bool:
    """Whether the index was not closed and its log is gone; without a lock, so not while somebody closes it."""
    try:
        with open(index + SUFFIX, "rb") as file:
            said = _parsed(file.read(_SIZE))
    except FileNotFoundError:
        return False  # made by a Kedge that did not say
    except OSError as error:
        raise storage_error("read", index + SUFFIX, error) from error
    return said.is_open and not os.path.exists(index + "-wal")


def log_missing(index: str) -> Corrupted:
    return Corrupted(
        f"{index} was not closed, and its log {os.path.basename(index)}-wal, with the newest checkpoints, is missing",
        hint="put that file back; without it, kedge check --repair makes a new index from this one and the packs",
    )


def _parsed(text: bytes) -> Closing:
    match = _TEXT.fullmatch(text)
    if match is None:  # cut off while it was made, or while the log was there (opening) or had been moved on (closing)
        return Closing()
    return Closing(match[1] == b"open", int(match[2]), match[3].decode())


def newest_event(db: sqlite3.Connection) -> tuple[int, str]:
    """Its number and hash."""
    row = db.execute("SELECT id, chain FROM event ORDER BY id DESC LIMIT 1").fetchone()
    return (0, "0" * 64) if row is None else (row[0], row[1].hex())


def has_event(db: sqlite3.Connection, number: int, chain: str) -> bool:
    row = db.execute("SELECT chain FROM event WHERE id = ?", (number,)).fetchone()
    return number == 0 or (row is not None and row[0].hex() == chain)


def _lock(handle: int, how: int, path: str) -> None:
    try:
        fcntl.flock(handle, how)
    except OSError as error:
        raise storage_error("lock", path, error) from error


def _unlock(handle: int) -> None:
    """And close. Closing alone would not unlock, if a child was forked meanwhile."""
    try:
        fcntl.flock(handle, fcntl.LOCK_UN)
    except OSError:
        pass  # then closing does, as soon as no child has it open
    finally:
        os.close(handle)


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error("use", path, error) from error
