"""Write transactions on SQLite: how they begin, what is remembered between them, and SQLite's own statements.

Saves that wait together are one statement, which outside a transaction is one of its own. Python lets other threads run
whenever SQLite works, and waits for its turn afterwards: a statement for each row of each save would be a hand-over for
each. So the rows of all saves go to a view, whose trigger writes what belongs to a save.

Numbers come from memory. They are right if nobody else has written meanwhile, which the statement proves: the number of
its first event is free, and each job ends where we know it to end. Whatever is wrong, it changes nothing, and the same
saves are done one by one, which tells for each what is the matter.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain as chained
from typing import Any, TypeVar

from kedge.index.event_chain import chain_of
from kedge.index.group_commit import REFUSALS, Save, Waiting
from kedge.index.rows import Row, find_chunks
from kedge.index.transactions import JobRow, LeaseRow
from kedge.index.writes import Packs, SqlWrites
from kedge.model import Checkpoint, now_us
from kedge.ports import Chunk, IdTaken, NewCheckpoint, RecordPlace, Seen
from kedge.ports.record import SEQ_BITS, CheckpointRow, columns_of

from .database import is_encrypted, mark_encrypted, overwrite_deleted, run_alone, typed
from .leases import LEASE, boot_clock, seconds_left
from .marks import mark_damaged, stands

T = TypeVar("T")

MAX_JOBS = 1000  # remembered between transactions
MAX_ROWS = 512  # of one statement

_CHECKPOINT = (*CheckpointRow._fields, "has_chunks", "manifest")
_COLUMNS = ("event", "at_us", "ns_no", "actor", "job", "chain", "key", "request_digest", *_CHECKPOINT)
_NOTHING = (0,) * len(_COLUMNS)  # a row that is none; Python binds numbers faster than None

_VIEW = (
    f"CREATE TEMP VIEW IF NOT EXISTS new_save ({', '.join(_COLUMNS)}) AS SELECT {', '.join(['NULL'] * len(_COLUMNS))}"
)
_TRIGGER = f"""
CREATE TEMP TRIGGER IF NOT EXISTS save INSTEAD OF INSERT ON new_save WHEN new.row > 0 BEGIN
    INSERT INTO event VALUES
        (new.event, new.at_us, new.ns_no, new.actor, 'save', new.job, new.id, '{{}}', new.chain);
    SELECT RAISE(ABORT, 'no parent') WHERE new.parent IS NOT NULL AND NOT EXISTS
        (SELECT 1 FROM checkpoint c JOIN job j ON j.no = c.row >> 32 WHERE c.id = new.parent AND j.ns_no = new.ns_no);
    UPDATE job SET last_seq = last_seq + 1, checkpoints = checkpoints + 1, size_bytes = size_bytes + new.size_bytes,
        stored_bytes = stored_bytes + new.stored_bytes, updated_us = new.created_us
        WHERE no = new.row >> 32 AND last_seq = (new.row & 0xffffffff) - 1;
    SELECT RAISE(ABORT, 'another number') WHERE changes() = 0;
    INSERT INTO checkpoint VALUES ({", ".join(f"new.{name}" for name in _CHECKPOINT)});
    INSERT INTO idempotency SELECT new.row >> 32, new.key, new.row, new.request_digest WHERE new.key IS NOT NULL;
    INSERT INTO tag SELECT new.row >> 32, key, value, new.row FROM json_each(new.tags);
END"""
PREPARATION = (_VIEW, _TRIGGER)  # of a connection; nobody else sees it


class Writes(SqlWrites):
    """The write operations of one namespace, in one transaction after the other on one connection."""

    _LEASE = LEASE

    others_write = False  # other processes, or stores, between our last two transactions or while we waited

    def __init__(
        self, connection: sqlite3.Connection, name: str, ns_no: int, namespace: str, busy_timeout_s: float
    ) -> None:
        self._name = name  # of the index, for errors
        self._ns = ns_no
        self._namespace = namespace
        self._busy_timeout_s = busy_timeout_s
        self.use(connection)

    def forget(self) -> None:
        """What is remembered between transactions holds while nobody else commits, and none of ours is undone."""
        self._data_version: int | None = None
        self._head = None
        self._jobs: dict[str, JobRow] = {}
        self._key_id = None

    def use(self, connection: sqlite3.Connection, ns_no: int | None = None) -> None:
        """Go on with another connection, on which the namespace may have another number."""
        self._ns = self._ns if ns_no is None else ns_no
        connection.execute("PRAGMA busy_timeout=0")  # `begin` waits
        self._db = connection
        self._is_prepared = False
        self.forget()

    def begin(self) -> None:
        if not self._is_prepared:
            for sql in PREPARATION:
                run_alone(self._db, sql, self._busy_timeout_s)
            self._is_prepared = True
        had_to_wait = run_alone(self._db, "BEGIN IMMEDIATE", self._busy_timeout_s)
        # Changes when another connection, of whatever process, has committed; exact, because we hold the write lock.
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        is_changed = self.others_write if self._data_version is None else version != self._data_version
        self.others_write = had_to_wait or is_changed
        if version != self._data_version or len(self._jobs) > MAX_JOBS:
            self.forget()
            self._data_version = version

    def undo(self, savepoint: str) -> None:
        self.forget()
        self._db.execute(f"ROLLBACK TO {savepoint}")

    def save_together(self, batch: Sequence[Waiting[Any]]) -> bool:
        """The quick way, if there are only saves and nothing is the matter with any; False if nothing was done.

        Outside a transaction it is one of its own, of jobs that are known. False where others write too: then what is
        known is out of date as a rule, and a transaction reads it first.
        """
        can_read = self._db.in_transaction
        if not can_read and self._head is None:
            return False
        number, chain = self._head or self._newest_event()
        at_us = now_us()
        jobs: dict[str, JobRow] = {}
        rows: list[Row] = []
        chunks: list[Chunk] = []
        reused: list[bytes] = []
        for waiting in batch:
            save = waiting.operation
            if not isinstance(save, Save):
                return False
            waiting.result = []
            for new in save.records:
                job = jobs.get(new.job) or (self._job(new.job) if can_read else self._jobs.get(new.job))
                if job is None or not self._is_usual(new, job):
                    return False
                if new.new_chunks or new.reused_chunks:
                    if not can_read:
                        return False
                    chunks += new.new_chunks
                    reused += new.reused_chunks
                seq = job.last_seq + 1
                number += 1
                chain = chain_of(chain, number, at_us, self._ns, save.actor, "save", new.job, new.id, "{}")
                event = (number, at_us, self._ns, save.actor, new.job, chain, new.idempotency_key, new.request_digest)
                rows.append((*event, job.no << SEQ_BITS | seq, *columns_of(new)))
                jobs[new.job] = JobRow(job.no, seq, job.lease)
                waiting.result.append(new.saved(seq, new.digest.hex()) if waiting.needs_checkpoints else seq)
        if not rows or len(rows) > MAX_ROWS or (reused and not self._sound(reused).issuperset(reused)):
            return False
        if not _insert(self._db, rows):
            return False
        if chunks:
            self._insert_chunks(chunks, {})
        self._head = (number, chain)
        self._jobs.update(jobs)
        return True

    def _is_usual(self, new: NewCheckpoint, job: JobRow) -> bool:
        """Whether a save needs no look at the database, but for its chunks: all it relies on is in its row, or known of
        its job."""
        lease = job.lease
        if new.lease_token is None:
            has_right = lease is None or not lease.is_live
        else:
            has_right = lease is not None and bool(lease.is_live) and lease.token == new.lease_token
        return (
            has_right
            and job.last_seq > 0
            and (not new.key_id or new.key_id == self._key_id)
            and new.seq is None
            and new.takes_key_from is None
            and new.then is None
            and new.provided is None
        )

    def run_all(self, batch: Sequence[Waiting[Any]]) -> None:
        """All operations in one transaction, which may have begun, durably; each gets its result or its error."""
        if not self._db.in_transaction:
            self.begin()
        if not self._run_together(batch):
            self.begin()
            self._run_apart(batch)
        if all(waiting.error for waiting in batch):
            self.roll_back()  # not even pages that an undone statement has touched are written
        else:
            self._db.execute("COMMIT")

    def _run_together(self, batch: Sequence[Waiting[Any]]) -> bool:
        """The usual way: operations refuse before they change anything. False if one failed half-way."""
        if self.save_together(batch):
            return True
        for waiting in batch:
            try:
                waiting.result = self._run(waiting.operation)
            except REFUSALS as refusal:
                waiting.error = refusal
            except Exception:  # noqa: BLE001 - met again, alone, in _run_apart
                self.roll_back()
                return False
        return True

    def _run_apart(self, batch: Sequence[Waiting[Any]]) -> None:
        """Each in a savepoint, so that what one of them did half-way is undone and the others do not suffer."""
        for waiting in batch:
            waiting.error = None
            self._db.execute("SAVEPOINT one")
            try:
                waiting.result = self._run(waiting.operation)
            except Exception as error:
                if not self._db.in_transaction:
                    raise  # a full disk or an I/O error ended the transaction, and the others with it
                waiting.error = typed(error, self._name)
                self.undo("one")
            self._db.execute("RELEASE one")

    def roll_back(self) -> None:
        self.forget()  # also when SQLite has rolled back by itself, as it does on a full disk
        with suppress(sqlite3.Error):  # SQLite has rolled back by itself; the first error is the one to report
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _run(self, operation: Callable[[], T] | Save) -> T | list[Checkpoint]:
        return self.commit(*operation) if isinstance(operation, Save) else operation()

    def commit(self, records: Sequence[NewCheckpoint], actor: str) -> list[Checkpoint]:
        if len(records) == 1:
            return [self._insert(records[0], actor)]
        self._db.execute("SAVEPOINT several")
        try:
            saved = [self._insert(record, actor) for record in records]
        except BaseException:
            if self._db.in_transaction:
                self.undo("several")
            raise
        finally:
            if self._db.in_transaction:
                self._db.execute("RELEASE several")
        return saved

    # Statements

    def _one(self, sql: str, *parameters: object) -> Row | None:
        row: Row | None = self._db.execute(sql, parameters).fetchone()
        return row

    def _do(self, sql: str, *parameters: object) -> None:
        self._db.execute(sql, parameters)

    def _many(self, sql: str, rows: Sequence[Row]) -> None:
        self._db.executemany(sql, rows)

    def _newest_event(self) -> tuple[int, bytes]:
        return self._db.execute("SELECT id, chain FROM event ORDER BY id DESC LIMIT 1").fetchone() or (0, bytes(32))

    # Jobs and leases

    def _job(self, name: str) -> JobRow | None:
        return self._jobs.get(name) or super()._job(name)

    def _remember(self, job: str, row: JobRow) -> None:
        self._jobs[job] = row

    def _lease(self, job: str) -> LeaseRow | None:
        self._jobs.pop(job, None)  # it is about to be changed
        return super()._lease(job)

    def _left_s(self, lease: LeaseRow) -> float:
        return seconds_left(lease)

    def _put_lease(self, job_no: int, token: int, holder: str, ttl_s: float) -> None:
        boot_id, clock_s = boot_clock()
        self._do(
            "INSERT OR REPLACE INTO lease VALUES (?, ?, ?, ?, ?, 1)", job_no, token, holder, boot_id, clock_s + ttl_s
        )

    def _extend_lease(self, job_no: int, ttl_s: float) -> None:
        boot_id, clock_s = boot_clock()
        self._do("UPDATE lease SET boot_id = ?, until_s = ? WHERE job_no = ?", boot_id, clock_s + ttl_s, job_no)

    # Checkpoints

    def _taken(self, new: NewCheckpoint, job: JobRow | None) -> None:
        """Of a known job nothing is changed before its row is inserted, which tells; a new job is inserted first."""
        if job is None and self._one("SELECT 1 FROM checkpoint WHERE id = ?", new.id):
            raise IdTaken

    def _insert_row(self, row: Row) -> None:
        try:
            super()._insert_row(row)
        except sqlite3.IntegrityError:
            raise IdTaken from None

    def _standing(self, seen: Sequence[Seen]) -> list[Seen]:
        return [look for look in seen if stands(self._db, self._ns, look, self._find(look.checkpoint.id))]

    def _is_encrypted(self, *, is_changing: bool = False) -> bool:
        return is_encrypted(self._db)

    def _mark_encrypted(self) -> None:
        mark_encrypted(self._db)
        overwrite_deleted(self._db)

    # Chunks

    def _sound(self, digests: Sequence[bytes]) -> set[bytes]:
        rows = find_chunks(self._db, self._ns, "digest, is_damaged", digests)
        return {digest for digest, is_damaged in rows if not is_damaged}

    def _lock_packs(self, chunks: Sequence[Chunk]) -> Packs:
        return {}  # whoever writes a pack has locked it

    def _pack_numbers(self, places: Iterable[Chunk | RecordPlace]) -> Packs:
        packs: dict[str, int | None] = {"": None}
        for name in {place.pack for place in places} - {""}:
            self._db.execute("INSERT OR IGNORE INTO pack (name) VALUES (?)", (name,))
            packs[name] = self._db.execute("SELECT no FROM pack WHERE name = ?", (name,)).fetchone()[0]
        return packs

    def _insert_chunks(self, chunks: Sequence[Chunk], _: Packs) -> None:
        packs = self._pack_numbers(chunks)
        self._db.executemany(
            "INSERT INTO chunk VALUES (?, ?, ?, ?, ?, 0, ?, ?, ?, ?) ON CONFLICT DO UPDATE "
            "SET stored_bytes = excluded.stored_bytes, encoding = excluded.encoding, is_damaged = 0, "
            "base = excluded.base, pack_no = excluded.pack_no, offset = excluded.offset, data = excluded.data "
            "WHERE is_damaged",
            [
                (
                    *(self._ns, c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), c.base),
                    *(packs[c.pack], c.offset, c.data),
                )
                for c in chunks
            ],
        )

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> list[bytes]:
        return mark_damaged(self._db, self._ns, chunks, is_damaged)


def _insert(db: sqlite3.Connection, rows: Sequence[Row]) -> bool:
    """Insert all of these saves; False, and nothing, if others write or have written, or one of them is refused."""
    count = 1 << (len(rows) - 1).bit_length()  # a few statements, each of which stays prepared
    values = tuple(chained.from_iterable(rows)) if len(rows) > 1 else rows[0]
    try:
        db.execute(_statement(count), values + _NOTHING * (count - len(rows)))
    except (sqlite3.IntegrityError, sqlite3.DataError, sqlite3.ProgrammingError, UnicodeError, OverflowError):
        return False
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


@cache
def _statement(rows: int) -> str:
    marks = f"({', '.join('?' * len(_COLUMNS))})"
    return f"INSERT INTO temp.new_save VALUES {', '.join([marks] * rows)}"
