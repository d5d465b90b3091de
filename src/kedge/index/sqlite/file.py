"""A SQLite file from opening to closing: its connections, and what a fork does to them.

Readers have connections of their own, kept in a small pool, and never wait for writers (I6). With path None the
database is in memory and one connection, under one lock, serves everybody.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

from kedge.blobs.reserve import Reserve
from kedge.errors import Corrupted
from kedge.exit import close_at_end
from kedge.index.group_commit import GroupCommit, Waiting

from .closed_mark import Closing, IndexState, has_event, newest_event
from .connections import (
    FORK_WAIT_S,
    Pool,
    forked_while_open,
    identity_of,
    is_gone,
    leave_open,
    open_indexes,
    refuse_after_fork,
    survive_forks,
)
from .database import (
    connect,
    is_encrypted,
    is_unsigned,
    migrate,
    overwrite_deleted,
    refuse_full_small_blocks,
    share_files,
    sign,
    translated,
    written_by,
)
from .process_queue import ProcessQueue
from .read_only import ReadOnlyFile
from .writes import Writes

T = TypeVar("T")

_NO_NAMESPACE = -1


class SqliteFile:
    """One namespace of a file. The caller makes sure that creating the file is exclusive and durable."""

    def __init__(
        self,
        path: str | None,
        *,
        namespace: str = "default",
        busy_timeout_s: float = 30.0,
        create: bool = True,
        store_id: str | None = None,  # given when an index is made anew for a store that has an ID
        reserve: Reserve | None = None,
        read_only: bool = False,
    ) -> None:
        self.namespace = namespace
        self._is_closed = True  # until it is open
        self._path = path
        self._reserve = reserve
        self._file = ReadOnlyFile(path) if read_only and path is not None else None
        self._state = None if path is None or self._file is not None else IndexState(path)
        self._name = path or "the index in memory"
        self._busy_timeout_s = busy_timeout_s
        self._is_connected = True  # until a fork
        self._was_full = False  # the disk, when last written to
        self._queue: ProcessQueue | None = None
        with translated(self._name):
            self._open(create, store_id)
        self._is_closed = False
        survive_forks(self)

    def _open(self, create: bool, store_id: str | None) -> None:
        self._make_locks()
        refuse_after_fork(self._path)
        if self._file is not None:
            with self._file.reading() as db:
                self._connection = db
                migrate(db, self._name, None)
                self._learn()
                self._writes = Writes(db, self._name, self._ns, self.namespace, self._busy_timeout_s)
        elif self._state is None or self._path is None:
            self._start(create, store_id)
        else:
            refuse_full_small_blocks(self._path)
            with self._state.alone():
                self._state.enter()
                try:
                    self._start(create, store_id)
                except BaseException:
                    self._state.leave()
                    raise

    def _start(self, create: bool, store_id: str | None) -> None:
        self._connection = db = connect(self._path, self._busy_timeout_s, create=create)
        try:
            share_files(self._path)
            migrate(db, self._name, store_id)
            share_files(self._path)
            if self._path is not None:
                db.execute("PRAGMA busy_timeout=0")
                self._move_log_on()
                db.execute(f"PRAGMA busy_timeout={int(self._busy_timeout_s * 1000)}")
                self._identity = identity_of(self._path)
            self._learn()
            if self.is_encrypted:
                overwrite_deleted(db)
        except BaseException:
            self._close_connection()
            raise
        if self._path is not None and self._identity is not None:
            self._queue = ProcessQueue(self._path, self._identity[1], self._ns)
        self._writes = Writes(db, self._name, self._ns, self.namespace, self._busy_timeout_s)

    def _learn(self) -> None:
        """The ID of the store, the number of our namespace, whether rows are sealed."""
        row = self._connection.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone()
        if row is None:
            raise Corrupted(f"{self._name} has lost the ID of its store", hint="run kedge check --repair")
        self.store_id: str = row[0]
        self._ns = self._namespace_no()
        if self._file is None and is_unsigned(self._connection):
            sign(self._connection)
            self._say_open()
        self.is_encrypted = is_encrypted(self._connection)
        self.written_by = written_by(self._connection)

    def _move_log_on(self) -> bool:
        """Move what the WAL holds into the database proper; answers whether all of it went.

        A crashed process may have left a commit in the WAL whose sync failed. Its pages look written but may not be
        on disk, and a later sync of the same file would not cover them (I9): move them on, durably, before anything
        is appended behind them. Others at work make this a no-op; then they are not crashed.
        """
        try:
            return bool(self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_FULL:
                raise
            # A store on a full disk must open, or nothing in it could be deleted; its log is read where it is.
            return False

    def _namespace_no(self) -> int:
        look_up = "SELECT no FROM namespace WHERE name = ?"
        row = self._connection.execute(look_up, (self.namespace,)).fetchone()
        if row is None and self._file is not None:
            return _NO_NAMESPACE
        if row is None:  # only then: opening a store that is full writes nothing
            self._connection.execute("INSERT OR IGNORE INTO namespace (name) VALUES (?)", (self.namespace,))
            self._say_open()
            row = self._connection.execute(look_up, (self.namespace,)).fetchone()
        return int(row[0])

    def _make_locks(self) -> None:
        self._memory_lock = threading.RLock()
        self._writing = threading.Lock()  # held while a transaction of ours is open
        self._joining = threading.Lock()
        self._pool = Pool(self._name, self._connect_again)
        self._numbers: dict[str, int] = {}  # of jobs that were asked for
        self._group = GroupCommit(self._run_batch)

    def _connect_again(self) -> sqlite3.Connection:
        """Another connection to the file that was opened, which must still be the one at its path."""
        raise NotImplementedError

    def _run_batch(self, batch: Sequence[Waiting[Any]]) -> None:
        """All operations in one transaction; each gets its result, its refusal, or the failure of all."""
        raise NotImplementedError

    def before_fork(self) -> None:
        """Finish what is under way and close all connections (see `connections`)."""
        if self._path is None:
            self._memory_lock.acquire()  # the child gets a copy of its own
            return
        self._is_writing_stopped = self._writing.acquire(timeout=FORK_WAIT_S)
        self._is_stopped = self._pool.pause(FORK_WAIT_S) and self._is_writing_stopped
        if self._is_stopped:
            self._close_connection()
            self._is_connected = False

    def after_fork(self, *, is_child: bool) -> None:
        if is_child:
            if self._path is not None and not self._is_stopped:
                forked_while_open.add(self._identity)
            if self._state is not None:
                self._state.forget()
            if self._queue is not None:
                self._queue.close()
            self._make_locks()  # those of the parent may be held by threads that do not exist here
        elif self._path is None:
            self._memory_lock.release()
        else:
            self._pool.resume()
            if self._is_writing_stopped:
                self._writing.release()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with translated(self._name):
            is_unused = self._pool.close(FORK_WAIT_S)
            with self._writing:
                if is_unused or self._path is None:
                    self._close_connection()
                else:
                    leave_open(
                        self._connection, self._path
                    )  # else the reader's is the last one, and SQLite removes the log

    def __del__(self) -> None:
        """What nobody closed is closed all the same: SQLite would remove its log, and nobody had said "closed"."""
        if not getattr(self, "_is_closed", True):
            self.close()

    def _close_connection(self) -> None:
        """Close what is left of our connections; as the last user of the file, say that its log has been moved on."""
        state = self._state
        if self._file is not None:
            self._file.close()
        if self._queue is not None:
            self._queue.close()
        if state is None or self._path is None or is_gone(self._path):
            self._connection.close()
            return
        try:
            with state.alone():
                try:
                    self._close_alone(state)
                finally:
                    state.leave()
        except BaseException:
            leave_open(self._connection, self._path)
            raise

    def _close_alone(self, state: IndexState) -> None:
        """SQLite decides by its own locks who is the last user, and removes the log then. A user who is being killed
        loses its locks one by one: SQLite may see a last one where we did not. So look again when it has closed."""
        is_last = state.is_entered and state.is_last()
        if is_last and self._queue is not None:
            self._queue.remove()
        said = state.read() if state.is_entered else Closing()
        if is_last and said.is_open and not self._is_connected:
            assert self._path is not None
            self._connection = connect(self._path, self._busy_timeout_s, create=False)
        elif not said.is_open or not self._is_connected:
            self._connection.close()
            return
        closing = self._newest(said)
        self._connection.execute("PRAGMA busy_timeout=0")
        if is_moved_on := is_last and self._move_log_on():
            state.close(closing)
        self._connection.close()
        if not is_moved_on and not state.has_log():
            state.close(closing)

    def _newest(self, said: Closing) -> Closing:
        """What to say at closing: the newest event, unless this index is older than the one the store had."""
        if not has_event(self._connection, said.event, said.chain):
            return said
        number, chain = newest_event(self._connection)
        return Closing(event=number, chain=chain)

    def _say_open(self) -> None:
        """When the log with the first commit is durable, before that is acknowledged (I1): a power cut in between
        leaves a log that nobody asks for; the other way round, an index would ask for a log that never was. (I6: once)
        """
        if self._state is not None and not self._state.is_marked:
            with self._joining:
                self._join()
                self._state.mark_open()

    def _join(self) -> None:
        """Be counted among those who have the file open, after a fork anew."""
        if self._state is not None and not self._state.is_entered:
            with self._state.alone():
                self._state.enter()


@close_at_end
def _close_all() -> None:
    """At the end of the program, before the interpreter takes connections apart."""
    for index in open_indexes():
        if isinstance(index, SqliteFile):
            index.close()
