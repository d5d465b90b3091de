"""The index in SQLite: one file, many threads and processes, every commit synced (I1).

Transactions are shared by all who write at the same time. How the file is opened and closed is in `file`; what is
asked of it, and what happens inside its transactions, in `index.reads` and `index.writes`, which PostgreSQL shares.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

from kedge.blobs.shelter import is_exposed
from kedge.errors import Corrupted, NoSpace, OutcomeUnknown, StorageError, Validation
from kedge.index.changes import SqlChanges
from kedge.index.group_commit import Save, Waiting, one_by_one
from kedge.index.reads import Conditions, FirstRow, SqlReads
from kedge.index.rows import Row
from kedge.index.writes import SqlWrites
from kedge.model import EventChain
from kedge.ports import (
    Checkpoints,
    NewCheckpoint,
    Outcomes,
    Problems,
    References,
    Selection,
)
from kedge.ports.record import SEQ_BITS
from kedge.ports.selection import PATH_HINT

from .closed_mark import has_event, newest_event
from .connections import InPlace, Reading, identity_of, refuse_after_fork
from .database import connect, overwrite_deleted, run_alone, share_files, translated, typed
from .file import SqliteFile
from .leases import check_holder
from .read_only import read_only_error
from .sweep import audit, integrity_problems, sweep
from .writes import MAX_JOBS

T = TypeVar("T")

_IN_PLACE = frozenset({"changed_jobs", "events", "find", "get", "job", "list_stored", "read"})
_LOOK_EVERY_S = 0.1  # for events of other processes


class SqliteIndex(SqliteFile, SqlReads, SqlChanges):
    """`ports.Index` in a SQLite file."""

    row_bytes = 896  # fits without a page of its own

    # How it is read

    @property
    def in_place(self) -> frozenset[str]:
        """Methods that signal handlers do not disturb: what the main thread calls of these needs no other thread."""
        return _IN_PLACE if self._path is not None and self._file is None else frozenset()

    def _reading(self) -> AbstractContextManager[sqlite3.Connection | InPlace]:
        """What `_fetch` asks in a `with` block. SQLite's errors leave it as ours."""
        if self._path is not None and self._file is None and is_exposed():
            self._check_open()
            return self._pool.in_place
        return self._lent()

    def _lent(self) -> AbstractContextManager[sqlite3.Connection]:
        """A connection for a `with` block."""
        self._check_open()
        if self._file is not None:
            return self._file.reading()
        return Reading(self._name, None if self._path is None else self._pool, self._connection, self._memory_lock)

    def _connect_again(self) -> sqlite3.Connection:
        """Another connection to the file that was opened, which must still be the one at its path."""
        assert self._path is not None
        refuse_after_fork(self._path)
        self._check_identity()
        with self._joining:
            self._join()
        connection = connect(self._path, self._busy_timeout_s, create=False)
        if self.is_encrypted:
            overwrite_deleted(connection)
        share_files(self._path)
        return connection

    def _fetch(self, db: sqlite3.Connection | InPlace, sql: str, *parameters: object) -> Sequence[Row]:
        return db.fetch(sql, parameters) if isinstance(db, InPlace) else db.execute(sql, parameters).fetchall()

    def changed_jobs(self, after: int, limit: int) -> Sequence[tuple[int, str | None]] | None:
        if not self.in_place:
            return None
        sql = "SELECT id, CASE ns_no WHEN ? THEN job ELSE '' END FROM main.event WHERE id > ? ORDER BY id DESC LIMIT ?"
        return self._all(sql, self._ns, after, limit)

    def _among(self, column: str, values: Sequence[str] | Sequence[bytes]) -> tuple[str, Sequence[object]]:
        return f"{column} IN ({','.join('?' * len(values))})", values

    def _metadata_filter(self, wanted: Selection) -> Conditions:
        conditions: list[str] = []
        parameters: list[object] = []
        for names, value in wanted.metadata_paths():
            path = "$" + "".join(f'."{name}"' for name in names)
            if any('"' in name or "\0" in name for name in names):
                raise Validation(f"{'.'.join(names)!r} is not a metadata path", hint=PATH_HINT)
            if value is None or isinstance(value, bool):
                conditions.append("json_type(metadata, ?) = ?")
                parameters += [path, "null" if value is None else str(value).lower()]
                continue
            kinds = "('text')" if isinstance(value, str) else "('integer', 'real')"
            conditions.append(f"json_type(metadata, ?) IN {kinds} AND json_extract(metadata, ?) = ?")
            parameters += [path, path, value]
        return conditions, parameters

    def _first_row(self, db: sqlite3.Connection | InPlace, job: str) -> FirstRow | None:
        """Asked for once: the number of a job is its own for ever."""
        number = self._numbers.get(job)
        if number is None:
            for (number,) in self._fetch(db, "SELECT no FROM main.job WHERE ns_no = ? AND name = ?", self._ns, job):
                if len(self._numbers) >= MAX_JOBS:
                    self._numbers.clear()
                self._numbers[job] = number
        return None if number is None else FirstRow("?", (number << SEQ_BITS,))

    def _newest_event(self, db: sqlite3.Connection | InPlace) -> int:
        ((newest,),) = self._fetch(db, "SELECT coalesce(max(id), 0) FROM event")
        return int(newest)

    # How it is written

    def _change(self, change: Callable[[SqlWrites], T], *, is_urgent: bool = False, is_repeatable: bool = True) -> T:
        return self._write(lambda: change(self._writes), is_urgent=is_urgent)

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        return self._write(Save(records, actor))

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        if self._path is None:
            return one_by_one(self, saves)
        self._check_room()
        outcomes = self._group.run_each([Save((record,), actor) for record, actor in saves])
        return [outcome if isinstance(outcome, BaseException) else outcome[0] for outcome in outcomes]

    def _write(self, operation: Callable[[], T] | Save, *, is_urgent: bool = False) -> T:
        """What frees space or notes damage is urgent and may use the reserve; the rest waits until that is whole."""
        if is_urgent:
            self._check_writable()
        else:
            self._check_room()
        try:
            return self._run(operation)
        except NoSpace:
            if not is_urgent or self._reserve is None or not self._reserve.release():
                raise
        return self._run(operation)

    def _check_room(self) -> None:
        """Before a save: what is left of the reserve is not for it."""
        if self._is_closed or self._file is not None:
            self._check_writable()
        if self._reserve is not None and not self._reserve.is_whole and not self._reserve.refill():
            raise NoSpace(f"{self._name}: the disk is full", hint="free some space: kedge cleanup, kedge gc")

    def make_room(self) -> bool:
        """Give back the space of the log and of the reserve, for gc on a full disk; whether there was any."""
        if self._path is None:
            return False
        with self._writing:
            is_shorter = self._shrink_log()
        return (self._reserve is not None and self._reserve.release()) or is_shorter

    def _run(self, operation: Callable[[], T] | Save) -> T:
        if self._path is None:
            with self._memory_lock:
                return self._group.run(operation)
        return self._group.run(operation)

    def _run_batch(self, batch: Sequence[Waiting[Any]]) -> None:
        """All operations in one transaction; each gets its result, its refusal, or the failure of all."""
        with self._writing:
            if self._was_full:
                self._shrink_log()
            if self._run_transaction(batch):
                return
            full = [waiting for waiting in batch if isinstance(waiting.error, NoSpace)]
            if full and self._shrink_log():
                for waiting in full:
                    waiting.error = None
                self._run_transaction(full)  # once more, in the space that the log has given back

    def _shrink_log(self) -> bool:
        """On a full disk, before each write until it works: else what somebody frees goes into a longer log."""
        try:
            self._was_full = not (self._is_connected and self._move_log_on())
        except sqlite3.Error:
            self._was_full = True  # a write will tell what is wrong
        return not self._was_full

    def _run_transaction(self, batch: Sequence[Waiting[Any]]) -> bool:
        """Whether all of them were done in the quick way; else each has its result or its error."""
        try:
            if self._is_closed:
                self._check_open()
            if not self._is_connected:
                self._connection = self._connect_again()
                self._is_connected = True
                self._writes.use(self._connection)
            if self._queue is not None and self._writes.others_write:
                self._queue.run(batch, self._writes, self._confirm, self._busy_timeout_s)
                return False
            is_quick = self._writes.save_together(batch)
            if not is_quick:
                self._writes.run_all(batch)
            self._confirm()
            return is_quick
        except Exception as failure:  # noqa: BLE001 - goes to every caller: nothing was acknowledged
            self._writes.roll_back()
            for waiting in batch:
                waiting.error = typed(failure, self._name)
            return False
        except BaseException:  # Ctrl-C belongs to the thread that got it; the others hear what it means for them
            self._writes.roll_back()
            for waiting in batch:
                waiting.error = StorageError(f"{self._name}: the commit was interrupted", hint="save again")
            raise

    def _confirm(self) -> None:
        """After a commit, before anybody is told."""
        if self._state is not None and not self._state.is_marked:
            try:
                self._say_open()
            except StorageError as error:  # it is committed: a refusal would be wrong
                raise OutcomeUnknown(
                    f"{self._name}: it may have been done: {error.message}",
                    hint="look whether it was done, then do it again",
                ) from error
        self._check_identity()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageError(f"{self._name} is closed", hint="open the store again")

    def _check_writable(self) -> None:
        self._check_open()
        if self._file is not None:
            raise read_only_error(self._name)

    def _check_identity(self) -> None:
        if self._path is not None and identity_of(self._path) != self._identity:
            raise StorageError(
                f"the store at {self._path} was moved, replaced or removed while it was open",
                hint="nothing was saved at that place; close this store and open the right one",
            )

    # Events

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not self.events(after, 1):
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _LOOK_EVERY_S))
        return True

    def audit(self, until: int | None = None) -> EventChain:
        with self._lent() as db:
            return audit(db, until)

    # Chunks and packs

    def sweep(self, references: References, *, lease_token: int | None = None) -> tuple[int, int]:
        self._check_writable()
        with translated(self._name):
            if self._path is None:
                with self._memory_lock:
                    check = partial(check_holder, self._ns, self.namespace, lease_token)
                    swept = sweep(self._connection, self._ns, self.manifests, references, lambda: False, check)
                    assert swept is not None
                    return swept
            try:
                chunks, size = self._sweep(references, lease_token)
            except NoSpace:
                if not self.make_room():
                    raise
                chunks, size = self._sweep(references, lease_token)
            if chunks:  # before a pack of theirs goes (I3); without any, nothing that counts was committed
                self._say_open()
            return chunks, size

    def _sweep(self, references: References, lease_token: int | None) -> tuple[int, int]:
        check = partial(check_holder, self._ns, self.namespace, lease_token)
        for is_last in (False, False, True):
            with self._lent() as connection:
                # On its own connection: a fork waits for it to come back, and would keep others from being lent.
                manifests = partial(self._walk, partial(self._fetch, connection))
                stop = (lambda: False) if is_last else (lambda: self._pool.is_paused)
                swept = sweep(connection, self._ns, manifests, references, stop, check)
                if swept is not None:
                    return swept
        raise AssertionError("the last sweep never stops")

    def condemn(self, pack: str) -> bool:
        self._check_identity()  # what a repaired index names, the one it replaced may not (I3)
        number = self._one("SELECT no FROM pack WHERE name = ?", pack)
        return number is None or not any(  # gc asks while it holds the pack's lock: nobody is about to name it
            self._one(f"SELECT 1 FROM {table} WHERE pack_no = ? LIMIT 1", *number) for table in ("chunk", "record")
        )

    # What the store once had

    def refuse_older(self) -> None:
        if self._state is None:
            return
        with self._lent() as db:
            said = self._state.read()
            if not has_event(db, said.event, said.chain):
                raise Corrupted(
                    f"{self._name} is older than what is stored: it does not know event {said.event:,}",
                    hint="put the newer one back, or run kedge rebuild, which adds what the packs know",
                )

    def accept(self, closed: Mapping[str, str]) -> None:
        if closed != self.closed_namespaces():
            self._change(lambda writes: writes.set_locked(closed))
        if self._state is None:
            return
        with self._lent() as db:
            newest = newest_event(db)
        with self._state.alone():
            self._state.accept(*newest)

    def set_keyring(
        self, keyring: str, key_id: str, *, replacing: str | None, actor: str, lease_token: int | None = None
    ) -> bool:
        is_done = self._write(partial(self._writes.set_keyring, keyring, key_id, replacing, actor, lease_token))
        self.is_encrypted = self.is_encrypted or is_done
        return is_done

    def integrity_problems(self) -> Problems:
        with self._lent() as db:
            return integrity_problems(db)

    def scrub(self) -> None:
        """`secure_delete` leaves pieces of rows in pages whose cells were moved: every page is written anew."""
        if self._path is None:
            return
        self._check_writable()
        with self._writing, translated(self._name):
            run_alone(self._connection, "VACUUM", self._busy_timeout_s)
            self._say_open()
            self._move_log_on()
