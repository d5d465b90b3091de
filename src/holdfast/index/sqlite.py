"""The index in SQLite: one file, many threads and processes, every commit synced (I1).

Writers share commits (`groupcommit`); what they do inside is in `writes`. Readers have connections of their own, kept
in a small pool, and never wait for writers (I6). With path None the database is in memory and one connection, under
one lock, serves everybody.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from holdfast.errors import CheckpointError, StorageError
from holdfast.model import Checkpoint, CheckpointLevel, CheckpointStatus, Job, Lease
from holdfast.ports import (
    CheckpointIds,
    Checkpoints,
    Chunk,
    ChunksGone,
    Events,
    IdTaken,
    Jobs,
    NewCheckpoint,
    PackUse,
    Problems,
)

from .database import connect, migrate, translated, typed
from .groupcommit import GroupCommit, Waiting
from .rows import CHECKPOINT, CHUNK, EVENT, JOB, SEQ_BITS, checkpoint_of, chunk_of, event_of, job_of, metadata_filter
from .sweeping import integrity_problems, sweep
from .writes import BATCH, Writes, find_chunks, missing

T = TypeVar("T")

PAGE = 256  # rows a long walk reads at once
REFUSALS = (CheckpointError, ChunksGone, IdTaken)  # raised before anything is changed


class SqliteIndex:
    """`ports.Index` in a SQLite file. The caller makes sure that creating the file is exclusive and durable."""

    def __init__(
        self,
        path: str | None,
        *,
        namespace: str = "default",
        busy_timeout_s: float = 30.0,
        store_id: str | None = None,  # given when an index is made anew for a store that has an ID
    ) -> None:
        self.namespace = namespace
        self._path = path
        self._name = path or "the index in memory"
        self._busy_timeout_s = busy_timeout_s
        self._is_closed = False
        with translated(self._name):
            self._open(store_id)
        _open_indexes.add(self)

    def _open(self, store_id: str | None = None) -> None:
        self._idle: list[sqlite3.Connection] = []
        self._memory_lock = threading.RLock()
        self._connection = connect(self._path, self._busy_timeout_s)
        migrate(self._connection, self._name, store_id)
        if self._path is not None:
            # A crashed process may have left a commit in the WAL whose sync failed. Its pages look written but may
            # not be on disk, and a later sync of the same file would not cover them (I9): move them on, durably,
            # before anything is appended behind them. Others at work make this a no-op; then they are not crashed.
            self._connection.execute("PRAGMA busy_timeout=0")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._connection.execute(f"PRAGMA busy_timeout={int(self._busy_timeout_s * 1000)}")
            self._identity = _identity(self._path)
        db = self._connection
        self.store_id: str = db.execute("SELECT value FROM meta WHERE key = 'store_id'").fetchone()[0]
        db.execute("INSERT OR IGNORE INTO namespace (name) VALUES (?)", (self.namespace,))
        self._ns: int = db.execute("SELECT no FROM namespace WHERE name = ?", (self.namespace,)).fetchone()[0]
        self._writes = Writes(db, self._ns)
        self._group = GroupCommit(self._run_batch)

    def after_fork(self) -> None:
        """In a forked child: the parent's connections are its own. They are left open here, never closed (SQLite)."""
        if self._path is not None and not self._is_closed:
            _inherited.append((self._connection, self._idle))
            with translated(self._name):
                self._open()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with translated(self._name):
            while self._idle:
                self._idle.pop().close()
            self._connection.close()

    # Transactions

    def _write(self, operation: Callable[[], T]) -> T:
        self._check_open()
        if self._path is None:
            with self._memory_lock:
                return self._group.run(operation)
        return self._group.run(operation)

    def _run_batch(self, batch: Sequence[Waiting[Any]]) -> None:
        """All operations in one transaction; each gets its result, its refusal, or the failure of all."""
        try:
            if not self._run_together(batch):
                self._run_apart(batch)
            self._connection.execute("COMMIT")
            self._check_identity()
        except Exception as failure:  # noqa: BLE001 - goes to every caller: nothing was acknowledged
            self._roll_back()
            for waiting in batch:
                waiting.error = typed(failure, self._name)
        except BaseException:  # Ctrl-C belongs to the thread that got it; the others hear what it means for them
            self._roll_back()
            for waiting in batch:
                waiting.error = StorageError(f"{self._name}: the commit was interrupted", hint="save again")
            raise

    def _run_together(self, batch: Sequence[Waiting[Any]]) -> bool:
        """The usual way: operations refuse before they change anything. False if one failed half-way."""
        self._writes.begin()
        for waiting in batch:
            try:
                waiting.result = waiting.operation()
            except REFUSALS as refusal:
                waiting.error = refusal
            except Exception:  # noqa: BLE001 - met again, alone, in _run_apart
                self._roll_back()
                return False
        return True

    def _run_apart(self, batch: Sequence[Waiting[Any]]) -> None:
        """Each in a savepoint, so that what one of them did half-way is undone and the others do not suffer."""
        self._writes.begin()
        for waiting in batch:
            waiting.error = None
            self._connection.execute("SAVEPOINT one")
            try:
                waiting.result = waiting.operation()
            except Exception as error:
                if not self._connection.in_transaction:
                    raise  # a full disk or an I/O error ended the transaction, and the others with it
                waiting.error = typed(error, self._name)
                self._writes.undo("one")
            self._connection.execute("RELEASE one")

    def _roll_back(self) -> None:
        try:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
        except sqlite3.Error:
            pass  # SQLite has rolled back by itself; the first error is the one to report

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageError(f"{self._name} is closed", hint="open the store again")

    def _check_identity(self) -> None:
        if self._path is not None and _identity(self._path) != self._identity:
            raise StorageError(
                f"the store at {self._path} was replaced or removed while it was open",
                hint="nothing was saved there; close this store and open it again",
            )

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        self._check_open()
        with translated(self._name):
            if self._path is None:
                with self._memory_lock:
                    yield self._connection
                return
            idle = self._idle
            try:
                connection = idle.pop()
            except IndexError:
                connection = self._connect_again()
            try:
                yield connection
            finally:
                idle.append(connection)

    def _connect_again(self) -> sqlite3.Connection:
        """Another connection to the file that was opened, which must still be the one at its path."""
        assert self._path is not None
        self._check_identity()
        return connect(self._path, self._busy_timeout_s, create=False)

    def _one(self, sql: str, *parameters: object) -> Any:
        with self._reading() as db:
            return db.execute(sql, parameters).fetchone()

    def _all(self, sql: str, *parameters: object) -> Sequence[Any]:
        with self._reading() as db:
            return db.execute(sql, parameters).fetchall()

    # Checkpoints

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        return self._write(partial(self._writes.commit, records, actor))

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self._find(checkpoint_id, "1")[0]

    def read(self, checkpoint_id: str) -> tuple[Checkpoint, bytes]:
        return self._find(checkpoint_id, "manifest")

    def _find(self, checkpoint_id: str, extra: str) -> tuple[Checkpoint, Any]:
        with self._reading() as db:
            row = db.execute(f"SELECT {CHECKPOINT}, {extra} FROM checkpoint WHERE id = ?", (checkpoint_id,)).fetchone()
            job = (
                row
                and db.execute(
                    "SELECT name FROM job WHERE no = ? AND ns_no = ?", (row[0] >> SEQ_BITS, self._ns)
                ).fetchone()
            )
        if not job:
            raise missing(checkpoint_id)
        return checkpoint_of(job[0], row), row[15]

    def latest(self, job: str, level: CheckpointLevel | None = None) -> tuple[Checkpoint, bytes] | None:
        with self._reading() as db:
            if (span := self._span(db, job)) is None:
                return None
            row = db.execute(
                f"SELECT {CHECKPOINT}, manifest FROM checkpoint WHERE row BETWEEN ? AND ? AND status != 'corrupted' "
                + ("AND level = ? " if level else "")
                + "ORDER BY row DESC LIMIT 1",
                (*span, str(level)) if level else span,
            ).fetchone()
        return None if row is None else (checkpoint_of(job, row), row[15])

    def find(self, job: str, keys: Sequence[str]) -> dict[str, tuple[Checkpoint, bytes]]:
        found: dict[str, tuple[Checkpoint, bytes]] = {}
        with self._reading() as db:
            for start in range(0, len(keys), BATCH):
                some = keys[start : start + BATCH]
                marks = ",".join("?" * len(some))
                rows = db.execute(
                    f"SELECT {CHECKPOINT}, manifest, key FROM idempotency JOIN checkpoint USING (row) "
                    f"WHERE job_no = (SELECT no FROM job WHERE ns_no = ? AND name = ?) AND key IN ({marks})",
                    (self._ns, job, *some),
                )
                found.update({row[16]: (checkpoint_of(job, row), row[15]) for row in rows})
        return found

    def _span(self, db: sqlite3.Connection, job: str) -> tuple[int, int] | None:
        """First and last possible row of a job."""
        found = db.execute("SELECT no FROM job WHERE ns_no = ? AND name = ?", (self._ns, job)).fetchone()
        return None if found is None else (found[0] << SEQ_BITS, (found[0] + 1 << SEQ_BITS) - 1)

    def list(
        self,
        job: str,
        *,
        level: CheckpointLevel | None = None,
        tags: Mapping[str, str] | None = None,
        metadata: Mapping[str, object] | None = None,
        limit: int | None = None,
        before: int | None = None,
        after: int | None = None,
    ) -> Checkpoints:
        conditions, parameters = metadata_filter(metadata or {})
        with self._reading() as db:
            if (span := self._span(db, job)) is None:
                return []
            first = span[0] + (after or 0) + 1
            last = span[1] if before is None else span[0] + before - 1
            if level is not None:
                conditions.append("level = ?")
                parameters.append(str(level))
            for name, value in (tags or {}).items():
                conditions.append("row IN (SELECT row FROM tag WHERE job_no = ? AND name = ? AND value = ?)")
                parameters += [span[0] >> SEQ_BITS, name, value]
            where = " AND ".join(["row BETWEEN ? AND ?", *conditions])
            order = "ASC" if after is not None or limit is None else "DESC"
            rows = db.execute(
                f"SELECT {CHECKPOINT} FROM checkpoint WHERE {where} ORDER BY row {order} LIMIT ?",
                (first, last, *parameters, -1 if limit is None else limit),
            ).fetchall()
        return [checkpoint_of(job, row) for row in (rows if order == "ASC" else reversed(rows))]

    def job(self, name: str) -> Job | None:
        row = self._one(f"SELECT {JOB} FROM job WHERE ns_no = ? AND name = ?", self._ns, name)
        return None if row is None else job_of(row)

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        # Names are ASCII, so the names with a prefix are those between it and it followed by the last character.
        rows = self._all(
            f"SELECT {JOB} FROM job WHERE ns_no = ? AND name > ? AND name >= ? AND name < ? ORDER BY name LIMIT ?",
            self._ns, after, prefix, prefix + "\x7f", -1 if limit is None else limit,
        )  # fmt: skip
        return [job_of(row) for row in rows]

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        return self._write(partial(self._writes.delete, checkpoint_ids, even_pinned, actor))

    def update(
        self,
        checkpoint_id: str,
        *,
        actor: str,
        is_pinned: bool | None = None,
        tags: Mapping[str, str | None] | None = None,
        status: CheckpointStatus | None = None,
    ) -> Checkpoint:
        return self._write(partial(self._writes.update, checkpoint_id, is_pinned, tags, status, actor))

    def mark(self, checkpoint_ids: Sequence[str], status: CheckpointStatus, *, actor: str) -> None:
        if checkpoint_ids:
            self._write(partial(self._writes.mark, checkpoint_ids, status, actor))

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        self._write(partial(self._writes.set_retention, job, policy_json, actor))

    # Leases, events

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        return self._write(partial(self._writes.acquire_lease, job, holder, ttl_s))

    def renew_lease(self, lease: Lease) -> None:
        self._write(partial(self._writes.renew_lease, lease))

    def release_lease(self, lease: Lease) -> None:
        self._write(partial(self._writes.release_lease, lease))

    def append_event(self, action: str, *, actor: str, job: str | None = None, detail: str = "{}") -> None:
        self._write(partial(self._writes.event, action, actor, job, None, detail))

    def events(self, after: int = 0, limit: int = 100) -> Events:
        rows = self._all(
            f"SELECT {EVENT} FROM event WHERE id > ? AND ns_no = ? ORDER BY id LIMIT ?", after, self._ns, limit
        )
        return [event_of(row) for row in rows]

    # Chunks and packs

    def locate(self, digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        with self._reading() as db:
            chunks = map(chunk_of, find_chunks(db, self._ns, CHUNK, digests))
            return {chunk.digest: chunk for chunk in chunks}

    def manifests(self, after: int = 0, *, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        condition = "AND has_chunks " if with_chunks else ""
        while True:
            rows = self._all(
                f"SELECT {CHECKPOINT}, manifest, (SELECT name FROM job WHERE no = row >> 32 AND ns_no = ?) "
                f"FROM checkpoint WHERE row > ? {condition}ORDER BY row LIMIT {PAGE}",
                self._ns, after,
            )  # fmt: skip
            for row in rows:
                if row[16] is not None:  # else of another namespace
                    yield row[0], checkpoint_of(row[16], row), row[15]
            if not rows:
                return
            after = rows[-1][0]

    def sweep(self, references: Callable[[bytes], Iterable[bytes]]) -> tuple[int, int]:
        self._check_open()
        with translated(self._name):
            if self._path is None:
                with self._memory_lock:
                    return sweep(self._connection, self._ns, self.manifests, references)
            connection = self._connect_again()
            try:
                return sweep(connection, self._ns, self.manifests, references)
            finally:
                connection.close()

    def packs(self) -> Sequence[PackUse]:
        rows = self._all(
            "SELECT pack.name, count(*), sum(stored_bytes) FROM chunk JOIN pack ON pack.no = pack_no GROUP BY pack_no"
        )
        return [PackUse(*row) for row in rows]

    def chunks_of(self, pack: str) -> Sequence[Chunk]:
        rows = self._all(
            f"SELECT {CHUNK} FROM chunk WHERE pack_no = (SELECT no FROM pack WHERE name = ?) AND ns_no = ? "
            "ORDER BY offset",
            pack, self._ns,
        )  # fmt: skip
        return [chunk_of(row) for row in rows]

    def is_pack_used(self, pack: str) -> bool:
        found = self._one("SELECT 1 FROM chunk WHERE pack_no = (SELECT no FROM pack WHERE name = ?) LIMIT 1", pack)
        return found is not None

    def relocate(self, chunks: Sequence[Chunk], *, from_pack: str) -> int:
        return self._write(partial(self._writes.relocate, chunks, from_pack))

    def totals(self) -> Mapping[str, int]:
        of_jobs = self._one(
            "SELECT count(*), total(checkpoints), total(size_bytes), total(stored_bytes) FROM job WHERE ns_no = ?",
            self._ns,
        )
        of_chunks = self._one(
            "SELECT count(*), total(stored_bytes), total(length(data)) FROM chunk WHERE ns_no = ?", self._ns
        )
        names = ("jobs", "checkpoints", "size_bytes", "stored_bytes", "chunks", "chunk_bytes", "inline_bytes")
        return {name: int(value) for name, value in zip(names, (*of_jobs, *of_chunks), strict=True)}

    def integrity_problems(self) -> Problems:
        with self._reading() as db:
            return integrity_problems(db)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


_open_indexes: weakref.WeakSet[SqliteIndex] = weakref.WeakSet()
_inherited: list[object] = []  # what a forked child must neither use nor close


def _after_fork() -> None:
    for index in list(_open_indexes):
        index.after_fork()


os.register_at_fork(after_in_child=_after_fork)
