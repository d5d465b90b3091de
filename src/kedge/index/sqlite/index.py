"""The index in SQLite: one file, many threads and processes, every commit synced (I1).

How the file is opened, shared and written to is in `file`; what is asked of it, and what happens inside its
transactions, in `index.reads` and `index.writes`, which PostgreSQL shares.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from kedge.errors import Corrupted, NoSpace, Validation
from kedge.index.changes import SqlChanges
from kedge.index.group_commit import Save, one_by_one
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
from .connections import InPlace
from .database import translated
from .file import SqliteFile
from .leases import check_holder
from .sweep import audit, integrity_problems, sweep
from .writes import MAX_JOBS

T = TypeVar("T")

_IN_PLACE = frozenset({"events", "find", "generation", "get", "job", "list_stored", "read"})
_LOOK_EVERY_S = 0.1  # for events of other processes


class SqliteIndex(SqliteFile, SqlReads, SqlChanges):
    """`ports.Index` in a SQLite file."""

    row_bytes = 896  # fits without a page of its own

    # How it is read

    @property
    def in_place(self) -> frozenset[str]:
        """Methods that signal handlers do not disturb: what the main thread calls of these needs no other thread."""
        return _IN_PLACE if self._path is not None and self._file is None else frozenset()

    def _fetch(self, db: sqlite3.Connection | InPlace, sql: str, *parameters: object) -> Sequence[Row]:
        return db.fetch(sql, parameters)[0] if isinstance(db, InPlace) else db.execute(sql, parameters).fetchall()

    def generation(self) -> tuple[int, int] | None:
        if not self.in_place:
            return None
        sql = "PRAGMA data_version"  # changes when another connection, of whatever process, has committed
        with self._reading() as db:
            rows, number = db.fetch(sql) if isinstance(db, InPlace) else (db.execute(sql).fetchall(), db.number)
        for (version,) in rows:
            return number, version
        return None

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
                try:
                    swept = sweep(connection, self._ns, manifests, references, stop, check)
                finally:
                    connection.renumber()  # a sweep that fails may have deleted before
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
