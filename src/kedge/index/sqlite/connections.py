"""Connections for reading, and what happens to all connections when the process forks.

SQLite keeps one table of locks per process. A forked child inherits that table, but not the locks themselves: a
connection it opens to the same file believes that it holds what the parent held, takes no lock of its own, and waits
for ever for a lock that only exists in its memory. So nothing of an index may be open at the moment of the fork:
everybody finishes what they do, all connections are closed, and both sides open new ones when they need them.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from types import CodeType
from typing import Protocol, Self

from kedge.blobs import shelter
from kedge.blobs.shelter import forking
from kedge.errors import StorageError
from kedge.index.rows import Row

from .database import TRANSLATED, typed

MAX_IDLE = 8
FORK_WAIT_S = 10.0  # for what is under way; then the child does without the index
_LOOK_EVERY_S = 0.001


class Pool:
    """Connections that are lent, one user each."""

    def __init__(self, name: str, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._idle: list[sqlite3.Connection] = []
        self._lent = 0
        self.is_paused = False
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())
        self.in_place = InPlace(name, self)

    def take(self) -> sqlite3.Connection:
        with self._changed:
            while self.is_paused:
                self._changed.wait()
            self._lent += 1
            if self._idle:
                return self._idle.pop()
        try:
            return self._connect()
        except BaseException:
            self._returned(None)
            raise

    def give(self, connection: sqlite3.Connection) -> None:
        if surplus := self._returned(connection):
            surplus.close()

    def _returned(self, connection: sqlite3.Connection | None) -> sqlite3.Connection | None:
        """Count one less as lent; answers the connection if it isn't kept."""
        with self._changed:
            self._lent -= 1
            if connection is not None and not self._is_closed and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
                connection = None
            if self.is_paused or self._is_closed:
                self._changed.notify_all()
        return connection

    def pause(self, wait_s: float) -> bool:
        """Lend nothing any more, and close all once they are back; False if they are not within `wait_s`."""
        self.is_paused = True
        if not self._are_all_back(wait_s):
            return False
        with self._changed:
            self._close_idle()
        return True

    def resume(self) -> None:
        with self._changed:
            self.is_paused = False
            self._changed.notify_all()

    def close(self, wait_s: float) -> bool:
        """Whether all are back within `wait_s`; those that are not are closed when they come back."""
        with self._changed:
            self._is_closed = True
            self._close_idle()
        return self._are_all_back(wait_s)

    def _are_all_back(self, wait_s: float) -> bool:
        until = time.monotonic() + wait_s
        while True:
            self.in_place.give_back(until)
            with self._changed:
                left_s = until - time.monotonic()
                if self._changed.wait_for(lambda: self._lent == 0, min(max(left_s, 0.0), 0.05)) or left_s <= 0:
                    return self._lent == 0

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


class Reading:
    """`with Reading(…) as connection`: one that is lent, or the only one; SQLite's errors leave the block as ours.

    A class, because reading is what small calls spend their time on, and contextlib costs as much as the query.
    """

    __slots__ = ("_connection", "_lock", "_name", "_pool")

    def __init__(
        self, name: str, pool: Pool | None, connection: sqlite3.Connection, lock: AbstractContextManager[object]
    ) -> None:
        self._name = name
        self._pool = pool
        self._connection = connection
        self._lock = lock

    def __enter__(self) -> sqlite3.Connection:
        if self._pool is None:
            self._lock.__enter__()
            return self._connection
        try:
            self._connection = self._pool.take()
        except TRANSLATED as error:
            raise typed(error, self._name) from error
        return self._connection

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._pool is None:
            self._lock.__exit__(None, None, None)
        else:
            self._pool.give(self._connection)
        if isinstance(error, TRANSLATED):
            raise typed(error, self._name) from error


class InPlace:
    """A connection that the main thread reads from without a lock and without another thread (`kedge.blobs.shelter`).

    Python runs signal handlers between two steps of the main thread, and a statement with all its rows is one step
    here. So the connection is idle whenever a handler runs: it may read, fork or raise, and nothing is left half-done.
    Another thread that closes it, for a fork, first takes it away and then looks whether the main thread is in `_rows`,
    where it is taken from.
    """

    def __init__(self, name: str, pool: Pool) -> None:
        self._name = name
        self._pool = pool
        self._connections: list[sqlite3.Connection] = []  # one; two if a handler has taken one at the same time

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TRANSLATED):
            raise typed(error, self._name) from error

    def fetch(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """All rows."""
        while True:
            connections = self._connections
            try:
                if (result := self._rows(sql, parameters)) is not None:
                    return result
            except sqlite3.ProgrammingError:
                if connections is self._connections:
                    raise
                continue  # a handler has forked, and closed it
            shelter.run(self._take)

    def _rows(self, sql: str, parameters: Sequence[object]) -> list[Row] | None:
        """None if there is no connection."""
        if connections := self._connections:
            connection = connections[-1]
            return [*chain.from_iterable(map(connection.execute, (sql,), (parameters,)))]
        return None

    def _take(self) -> None:
        connection = self._pool.take()
        self._connections.append(connection)

    def give_back(self, until: float) -> None:
        """Give the connection back to the pool, unless the main thread uses it until then."""
        connections, self._connections = self._connections, []
        while connections and _is_main_thread_in(InPlace._rows.__code__) and not shelter.is_exposed():
            if time.monotonic() >= until:
                self._connections += connections
                return
            time.sleep(_LOOK_EVERY_S)
        for connection in connections:
            self._pool.give(connection)


def _is_main_thread_in(code: CodeType) -> bool:
    """By its frames: unlike a mark that it sets and takes back, they are right whatever a signal handler does."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


_left_open: set[tuple[int, tuple[int, int] | None]] = set()


def leave_open(connection: sqlite3.Connection, path: str) -> None:
    """Let the end of the process close it: SQLite would remove the log, and nobody has said "closed".

    One for a file is enough, as SQLite keeps a log that somebody has open: else whoever opens a damaged store again
    and again runs out of open files.
    """
    import ctypes

    holder = os.getpid(), identity_of(path)
    if holder in _left_open:
        connection.close()
        return
    _left_open.add(holder)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


class Forkable(Protocol):
    def before_fork(self) -> None: ...

    def after_fork(self, *, is_child: bool) -> None: ...


_open: weakref.WeakSet[Forkable] = weakref.WeakSet()
_paused: list[Forkable] = []


def survive_forks(index: Forkable) -> None:
    _open.add(index)


def open_indexes() -> list[Forkable]:
    return list(_open)


def _before() -> None:
    forking(True)
    _paused[:] = _open
    for index in _paused:
        index.before_fork()


def _after(is_child: bool) -> None:
    try:
        while _paused:
            _paused.pop().after_fork(is_child=is_child)
    finally:
        if _paused:  # one failed: the others go on all the same
            _after(is_child)
        forking(False)


os.register_at_fork(before=_before, after_in_parent=lambda: _after(False), after_in_child=lambda: _after(True))


def identity_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


forked_while_open: set[tuple[int, int] | None] = set()  # files this process, a child, can lock no more


def refuse_after_fork(path: str | None) -> None:
    if path is not None and forked_while_open and identity_of(path) in forked_while_open:
        raise StorageError(
            f"{path} was in use when this process was forked, and cannot be used in it",
            hint="fork before long work on the store begins, or start processes with spawn",
        )


def is_gone(path: str) -> bool:
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False
