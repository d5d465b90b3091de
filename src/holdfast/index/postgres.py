"""The index in PostgreSQL, for many machines.

The same contract as SQLite's, kept by the same means: one writer at a time in a namespace (whoever holds the lock on
its row), waiting savers of a process share a transaction (`groupcommit`), readers see the newest state and wait for
nobody (I6). What operations do inside a transaction is in `postgres_writes`, the schema in `sql/postgres`.

An answer may be lost between a server that commits and us. A save is then simply committed again: its ID is its own,
and "that ID exists, with this digest" means that it arrived the first time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import psycopg

from holdfast.errors import CheckpointError, StorageError, Unavailable, Validation
from holdfast.model import Checkpoint, CheckpointLevel, CheckpointStatus, Job, Lease
from holdfast.ports import (
    CheckpointIds,
    Checkpoints,
    Chunk,
    ChunksGone,
    EventChain,
    Events,
    IdTaken,
    Jobs,
    KeysChanged,
    NewCheckpoint,
    Outcomes,
    PackUse,
    Problems,
    References,
)
from holdfast.postgresql import Connection, Server, array, typed

from .connections import survive_forks
from .groupcommit import GroupCommit, Waiting, one_by_one
from .postgres_batch import Known, Save, commit_together
from .postgres_writes import PostgresWrites
from .rows import CHECKPOINT, EVENT, JOB, SEQ_BITS, Row, checkpoint_of, chunk_of, event_of, job_of
from .writes import chain_of, missing

T = TypeVar("T")

PAGE = 256  # rows a long walk reads at once
_LOOK_EVERY_S = 1.0  # for events that nobody told us of
BATCH = 1000  # keys or digests in one statement
REFUSALS = (CheckpointError, ChunksGone, IdTaken, KeysChanged)  # raised before anything is changed
_GATHER_S = 0.001  # for savers who will be back; a commit takes a few of these
_LOST_ANSWERS = 3  # in a row, until a save gives up

_CHECKPOINT = ", ".join(f'c."{name.strip()}"' for name in CHECKPOINT.split(","))
_CHUNK = (
    'digest, size_bytes, stored_bytes, encoding, (SELECT name FROM holdfast.pack WHERE no = pack_no), "offset", data'
)
_FROM = 'holdfast.checkpoint c JOIN holdfast.job j ON j.no = c."row" >> 32'


class _AnswerLost(Unavailable):
    """The connection broke while the server was committing."""


class _Operation(Generic[T]):
    """What one caller wants done in a transaction."""

    def __init__(self, index: PostgresIndex, work: Callable[[PostgresWrites], T] | Save) -> None:
        self._index = index
        self.work = work

    def __call__(self) -> T:
        writes = self._index.writes
        assert writes is not None
        if isinstance(self.work, Save):
            return cast(T, writes.commit(self.work.records, self.work.actor))
        return self.work(writes)


class PostgresIndex:
    """`ports.Index` in a PostgreSQL database whose schema is there (`Server.migrate`)."""

    def __init__(self, server: Server, *, namespace: str = "default") -> None:
        self.namespace = namespace
        self._server = server
        self.writes: PostgresWrites | None = None  # of the transaction that is open
        self._known = Known()
        self._group = GroupCommit(self._run_batch, gather_s=_GATHER_S)
        store = server.one("SELECT value FROM holdfast.meta WHERE key = 'store_id'")
        if store is None:
            raise StorageError(f"there is no store in {server.name}", hint="open it with create=True")
        self.store_id: str = store[0]
        if (found := self._number()) is None:
            server.all(
                "INSERT INTO holdfast.namespace (name) VALUES (%s) ON CONFLICT DO NOTHING RETURNING no", namespace
            )
            found = self._number()
        assert found is not None
        self._ns: int = found
        self.is_encrypted = server.is_encrypted()
        survive_forks(self)

    def _number(self) -> int | None:
        row = self._server.one("SELECT no FROM holdfast.namespace WHERE name = %s", self.namespace)
        return None if row is None else row[0]

    def before_fork(self) -> None:
        return None  # connections of the parent are left alone in the child

    def after_fork(self, *, is_child: bool) -> None:
        if is_child:
            self._group = GroupCommit(self._run_batch, gather_s=_GATHER_S)
            self.writes = None

    def close(self) -> None:
        self._server.close()

    # Transactions

    def _write(self, operation: Callable[[PostgresWrites], T] | Save) -> T:
        self._server.check_open()
        return self._group.run(_Operation(self, operation))

    def _write_again(self, operation: Callable[[PostgresWrites], T] | Save) -> T:
        """For what may be done twice: also when the answer to a commit was lost."""
        for _ in range(_LOST_ANSWERS):
            try:
                return self._write(operation)
            except _AnswerLost:
                continue
        return self._write(operation)

    def _run_batch(self, batch: Sequence[Waiting[Any]]) -> None:
        """All operations in one transaction; each gets its result, its refusal, or the failure of all."""
        try:
            self._server.backoff.run(lambda: self._run_transaction(batch))
        except Exception as failure:  # noqa: BLE001 - goes to every caller: nothing was acknowledged
            for waiting in batch:
                waiting.error = typed(failure, self._server.name)
        except BaseException:  # Ctrl-C belongs to the thread that got it; the others hear what it means for them
            for waiting in batch:
                waiting.error = StorageError(f"{self._server.name}: the commit was interrupted", hint="save again")
            raise
        finally:
            self.writes = None

    def _run_transaction(self, batch: Sequence[Waiting[Any]]) -> None:
        """May be run again as long as no commit was sent: Unavailable. Afterwards it is _AnswerLost, to the callers."""
        with self._server.lend() as db:
            if self._commit_saves(db, batch):
                return
            if not self._run_together(db, batch):
                self._run_apart(db, batch)
            try:
                db.execute("COMMIT")
            except psycopg.OperationalError as error:
                self._lose(db, batch, error)
            else:
                assert self.writes is not None
                self.writes.committed()

    def _lose(self, db: Connection, batch: Sequence[Waiting[Any]], error: Exception) -> None:
        lost = _AnswerLost(f"{self._server.name}: {error}", hint="look whether it was done, then do it again")
        for waiting in batch:
            waiting.error = waiting.error or lost
        db.close()
        self._server.distrust()

    def _commit_saves(self, db: Connection, batch: Sequence[Waiting[Any]]) -> bool:
        """The quick way, if there are only saves and nothing is the matter with any; False if nothing was done."""
        work = [waiting.operation.work for waiting in batch if isinstance(waiting.operation, _Operation)]
        saves = [save for save in work if isinstance(save, Save)]
        if len(saves) < len(batch):
            return False
        for waiting in batch:
            waiting.error = None
        try:
            saved = commit_together(db, saves, self._ns, self.namespace, self._known)
        except Exception as error:  # noqa: BLE001 - the other ways meet it again, and tell whose it is
            if not db.closed:
                db.execute("ROLLBACK")
                return False
            self._lose(db, batch, error)
            return True
        for waiting, checkpoints in zip(batch, saved or (), strict=saved is not None):
            waiting.result = checkpoints
        return saved is not None

    def _begin(self, db: Connection, *, is_careful: bool) -> PostgresWrites:
        db.execute("BEGIN")
        self.writes = PostgresWrites(db, self._ns, self.namespace, self._known, is_careful=is_careful)
        return self.writes

    def _run_together(self, db: Connection, batch: Sequence[Waiting[Any]]) -> bool:
        """The usual way: operations refuse before they change anything. False if one failed half-way."""
        try:
            with db.pipeline():  # what nobody waits for goes out together
                writes = self._begin(db, is_careful=False)
                for waiting in batch:
                    waiting.error = None
                    try:
                        waiting.result = waiting.operation()
                    except REFUSALS as refusal:
                        waiting.error = refusal
                writes.finish()
        except Exception:
            if db.closed:
                raise
            db.execute("ROLLBACK")  # the culprit is met again, alone, in _run_apart
            return False
        return True

    def _run_apart(self, db: Connection, batch: Sequence[Waiting[Any]]) -> None:
        """Each in a savepoint, so that what one of them did half-way is undone and the others do not suffer."""
        writes = self._begin(db, is_careful=True)
        for waiting in batch:
            waiting.error = None
            head = writes.savepoint()
            try:
                waiting.result = waiting.operation()
            except psycopg.OperationalError:
                raise
            except Exception as error:  # noqa: BLE001 - handed to its caller
                waiting.error = typed(error, self._server.name)
                writes.undo(head)
        writes.finish()

    # Checkpoints

    def commit(self, records: Sequence[NewCheckpoint], *, actor: str) -> Checkpoints:
        return self._write_again(Save(records, actor))

    def commit_each(self, saves: Sequence[tuple[NewCheckpoint, str]]) -> Outcomes:
        self._server.check_open()
        wanted = [Save((record,), actor) for record, actor in saves]
        outcomes: list[Checkpoints | BaseException] = self._group.run_each([_Operation(self, save) for save in wanted])
        answers: Outcomes = []
        for (record, actor), outcome in zip(saves, outcomes, strict=True):
            if isinstance(outcome, _AnswerLost):
                answers += one_by_one(self, [(record, actor)])
            else:
                answers.append(outcome if isinstance(outcome, BaseException) else outcome[0])
        return answers

    def get(self, checkpoint_id: str) -> Checkpoint:
        return self._find(checkpoint_id, "")[0]

    def read(self, checkpoint_id: str) -> tuple[Checkpoint, bytes]:
        checkpoint, row = self._find(checkpoint_id, ", manifest")
        return checkpoint, row[16]

    def _find(self, checkpoint_id: str, extra: str) -> tuple[Checkpoint, Row]:
        row = self._one(
            f"SELECT {_CHECKPOINT}, j.name{extra} FROM {_FROM} WHERE id = %s AND ns_no = %s", checkpoint_id, self._ns
        )
        if row is None:
            raise missing(checkpoint_id)
        return checkpoint_of(row[15], row), row

    def latest(self, job: str, level: CheckpointLevel | None = None) -> tuple[Checkpoint, bytes] | None:
        if (span := self._span(job)) is None:
            return None
        row = self._one(
            f'SELECT {_CHECKPOINT}, manifest FROM holdfast.checkpoint c WHERE "row" BETWEEN %s AND %s '
            f"AND status <> 'corrupted' {'AND level = %s ' if level else ''}ORDER BY \"row\" DESC LIMIT 1",
            *span, *([str(level)] if level else []),
        )  # fmt: skip
        return None if row is None else (checkpoint_of(job, row), row[15])

    def find(self, job: str, keys: Sequence[str]) -> dict[str, tuple[Checkpoint, bytes]]:
        found: dict[str, tuple[Checkpoint, bytes]] = {}
        for start in range(0, len(keys), BATCH):
            for row in self._all(
                f"SELECT {_CHECKPOINT}, manifest, key FROM holdfast.idempotency "
                'JOIN holdfast.checkpoint c USING ("row") '
                "WHERE job_no = (SELECT no FROM holdfast.job WHERE ns_no = %s AND name = %s) AND key = ANY(%s)",
                self._ns, job, [*keys[start : start + BATCH]],
            ):  # fmt: skip
                found[row[16]] = (checkpoint_of(job, row), row[15])
        return found

    def find_next(self, job: str, after: int, limit: int) -> dict[str, tuple[Checkpoint, bytes]]:
        if (span := self._span(job)) is None:
            return {}
        rows = self._all(
            f'SELECT {_CHECKPOINT}, manifest, key FROM holdfast.checkpoint c JOIN holdfast.idempotency USING ("row") '
            'WHERE "row" BETWEEN %s AND %s ORDER BY "row"',
            span[0] + after + 1, min(span[0] + after + limit, span[1]),
        )  # fmt: skip
        return {row[16]: (checkpoint_of(job, row), row[15]) for row in rows}

    def keys_of(self, checkpoint_ids: Sequence[str]) -> dict[str, tuple[str, bytes]]:
        found: dict[str, tuple[str, bytes]] = {}
        for start in range(0, len(checkpoint_ids), BATCH):
            rows = self._all(
                'SELECT id, key, request_digest FROM holdfast.checkpoint JOIN holdfast.idempotency USING ("row") '
                "JOIN holdfast.job ON no = job_no WHERE id = ANY(%s) AND ns_no = %s",
                [*checkpoint_ids[start : start + BATCH]], self._ns,
            )  # fmt: skip
            found.update({row[0]: (row[1], row[2]) for row in rows})
        return found

    def _span(self, job: str) -> tuple[int, int] | None:
        """First and last possible row of a job."""
        found = self._one("SELECT no FROM holdfast.job WHERE ns_no = %s AND name = %s", self._ns, job)
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
        conditions, parameters = _metadata_filter(metadata or {})
        if (span := self._span(job)) is None:
            return []
        # Kept inside the job: the rows beyond are those of other jobs, of other namespaces too.
        first = span[0] + max(after or 0, 0) + 1
        last = span[1] if before is None else min(span[0] + before - 1, span[1])
        if level is not None:
            conditions.append("level = %s")
            parameters.append(str(level))
        for name, value in (tags or {}).items():
            conditions.append(
                '"row" IN (SELECT "row" FROM holdfast.tag WHERE job_no = %s AND name = %s AND value = %s)'
            )
            parameters += [span[0] >> SEQ_BITS, name, value]
        where = " AND ".join(['"row" BETWEEN %s AND %s', *conditions])
        order = "ASC" if after is not None or limit is None else "DESC"
        rows = self._all(
            f'SELECT {_CHECKPOINT} FROM holdfast.checkpoint c WHERE {where} ORDER BY "row" {order} LIMIT %s',
            first, last, *parameters, limit,
        )  # fmt: skip
        return [checkpoint_of(job, row) for row in (rows if order == "ASC" else reversed(rows))]

    def job(self, name: str) -> Job | None:
        row = self._one(f"SELECT {JOB} FROM holdfast.job WHERE ns_no = %s AND name = %s", self._ns, name)
        return None if row is None else job_of(row)

    def jobs(self, prefix: str = "", limit: int | None = None, after: str = "") -> Jobs:
        rows = self._all(
            f"SELECT {JOB} FROM holdfast.job WHERE ns_no = %s AND name > %s AND name >= %s AND name < %s "
            "ORDER BY name LIMIT %s",
            self._ns, after, prefix, prefix + "\x7f", limit,
        )  # fmt: skip
        return [job_of(row) for row in rows]

    def delete(self, checkpoint_ids: Sequence[str], *, even_pinned: bool = False, actor: str) -> CheckpointIds:
        return self._write(lambda writes: writes.delete(checkpoint_ids, even_pinned, actor))

    def update(
        self,
        checkpoint_id: str,
        *,
        actor: str,
        is_pinned: bool | None = None,
        tags: Mapping[str, str | None] | None = None,
        status: CheckpointStatus | None = None,
    ) -> Checkpoint:
        return self._write_again(lambda writes: writes.update(checkpoint_id, is_pinned, tags, status, actor))

    def mark(self, checkpoint_ids: Sequence[str], status: CheckpointStatus, *, actor: str) -> None:
        if checkpoint_ids:
            self._write_again(lambda writes: writes.mark(checkpoint_ids, status, actor))

    def set_retention(self, job: str, policy_json: str | None, *, actor: str) -> None:
        self._write_again(lambda writes: writes.set_retention(job, policy_json, actor))

    # Leases, events

    def acquire_lease(self, job: str, holder: str, ttl_s: float) -> Lease:
        return self._write(lambda writes: writes.acquire_lease(job, holder, ttl_s))

    def renew_lease(self, lease: Lease) -> None:
        self._write_again(lambda writes: writes.renew_lease(lease))

    def release_lease(self, lease: Lease) -> None:
        self._write_again(lambda writes: writes.release_lease(lease))

    def append_event(self, action: str, *, actor: str, job: str | None = None, detail: str = "{}") -> None:
        self._write(lambda writes: writes.event(action, actor, job, None, detail))

    def events(self, after: int = 0, limit: int = 100, *, newest: bool = False, before: int | None = None) -> Events:
        order = "DESC" if newest else "ASC"
        rows = self._all(
            f"SELECT {EVENT} FROM holdfast.event WHERE ns_no = %s AND id > %s AND id < %s ORDER BY id {order} LIMIT %s",
            self._ns, after, 2**63 - 1 if before is None else before, limit,
        )  # fmt: skip
        return [event_of(row) for row in (reversed(rows) if newest else rows)]

    def wait_for_event(self, after: int, timeout_s: float) -> bool:
        """Hears of it through LISTEN; looks now and then too, because pgbouncer may keep that from us."""
        if self.events(after, 1):
            return True
        if timeout_s <= 0:
            return False
        until = time.monotonic() + timeout_s
        with self._server.listening() as listen:
            while not self.events(after, 1):
                left = until - time.monotonic()
                if left <= 0:
                    return False
                listen(min(left, _LOOK_EVERY_S))
        return True

    def audit(self, until: int | None = None) -> EventChain:
        """The chain of this namespace, a page at a time."""
        chain, expected = bytes(32), 1
        while rows := self._all(
            "SELECT id, at_us, ns_no, actor, action, job, checkpoint, detail, chain FROM holdfast.event "
            "WHERE ns_no = %s AND id >= %s AND id <= %s ORDER BY id LIMIT 1000",
            self._ns, expected, 2**63 - 1 if until is None else until,
        ):  # fmt: skip
            for number, *entry, stored in rows:
                following = chain_of(chain, number, *entry)
                if number != expected or following != stored:
                    return EventChain(expected - 1, chain.hex(), expected)
                chain, expected = following, expected + 1
        return EventChain(expected - 1, chain.hex())

    # Chunks and packs

    def locate(self, digests: Sequence[bytes]) -> dict[bytes, Chunk]:
        found: dict[bytes, Chunk] = {}
        for start in range(0, len(digests), BATCH):
            for row in self._all(
                f"SELECT {_CHUNK} FROM holdfast.chunk WHERE ns_no = %s AND digest = ANY(%s::bytea[])",
                self._ns, array(digests[start : start + BATCH]),
            ):  # fmt: skip
                found[row[0]] = chunk_of(row)
        return found

    def manifests(self, after: int = 0, *, with_chunks: bool = True) -> Iterator[tuple[int, Checkpoint, bytes]]:
        return self._walk(self._all, after, with_chunks)

    def _walk(
        self, fetch: Callable[..., Sequence[Row]], after: int = 0, with_chunks: bool = True
    ) -> Iterator[tuple[int, Checkpoint, bytes]]:
        condition = "AND has_chunks " if with_chunks else ""
        while rows := fetch(
            f'SELECT {_CHECKPOINT}, manifest, j.name FROM {_FROM} WHERE ns_no = %s AND "row" > %s {condition}'
            f'ORDER BY "row" LIMIT {PAGE}',
            self._ns, after,
        ):  # fmt: skip
            for row in rows:
                yield row[0], checkpoint_of(row[16], row), row[15]
            after = rows[-1][0]

    def sweep(self, references: References) -> tuple[int, int]:
        """Marks go to a temporary table. Writers go on while it fills; the end of the transaction locks them out."""
        return self._server.run(lambda db: self._sweep(db, references))

    def _sweep(self, db: Connection, references: References) -> tuple[int, int]:
        with db.transaction():
            # For this transaction alone, which is all that pgbouncer grants.
            db.execute("CREATE TEMP TABLE mark (digest bytea PRIMARY KEY) ON COMMIT DROP")

            def mark(digests: Iterable[bytes]) -> None:
                some = [*digests]
                db.execute("INSERT INTO pg_temp.mark SELECT unnest(%s::bytea[]) ON CONFLICT DO NOTHING", (some,))

            def fetch(sql: str, *parameters: object) -> Sequence[Row]:
                return db.execute(sql, parameters, binary=True).fetchall()

            seen = fetch("SELECT last_event FROM holdfast.namespace WHERE no = %s", self._ns)[0][0]
            for _, checkpoint, manifest in self._walk(fetch):
                mark(references(checkpoint.id, manifest))
            # From here on nobody commits in this namespace: a save has come before, and its references are found
            # through its event, or it comes after, and hears that chunks are gone (I3).
            db.execute("SELECT 1 FROM holdfast.namespace WHERE no = %s FOR UPDATE", (self._ns,))
            for checkpoint_id, manifest in fetch(
                "SELECT c.id, manifest FROM holdfast.event e JOIN holdfast.checkpoint c ON c.id = e.checkpoint "
                "WHERE e.ns_no = %s AND e.id > %s AND action IN ('save', 'reseal') AND has_chunks",
                self._ns, seen,
            ):  # fmt: skip
                mark(references(checkpoint_id, manifest))
            ((count, size),) = fetch(
                "WITH gone AS (DELETE FROM holdfast.chunk WHERE ns_no = %s AND NOT EXISTS "
                "(SELECT 1 FROM pg_temp.mark WHERE mark.digest = chunk.digest) RETURNING stored_bytes) "
                "SELECT count(*), coalesce(sum(stored_bytes), 0)::bigint FROM gone",
                self._ns,
            )
        return count, size

    def packs(self) -> Sequence[PackUse]:
        rows = self._all(
            "SELECT name, count(*), sum(stored_bytes)::bigint FROM holdfast.chunk JOIN holdfast.pack ON no = pack_no "
            "GROUP BY name"
        )
        return [PackUse(*row) for row in rows]

    def chunks_of(self, pack: str) -> Sequence[Chunk]:
        rows = self._all(
            f"SELECT {_CHUNK} FROM holdfast.chunk WHERE ns_no = %s AND pack_no = "
            '(SELECT no FROM holdfast.pack WHERE name = %s) ORDER BY "offset"',
            self._ns, pack,
        )  # fmt: skip
        return [chunk_of(row) for row in rows]

    def is_pack_used(self, pack: str) -> bool:
        sql = "SELECT 1 FROM holdfast.chunk WHERE pack_no = (SELECT no FROM holdfast.pack WHERE name = %s) LIMIT 1"
        return self._one(sql, pack) is not None

    def condemn(self, pack: str) -> bool:
        return self._server.run(lambda db: self._condemn(db, pack))

    def _condemn(self, db: Connection, pack: str) -> bool:
        with db.transaction():
            # The row's lock keeps out whoever is about to name the pack; who has named it has committed.
            db.execute(
                "INSERT INTO holdfast.pack (name) VALUES (%s) ON CONFLICT (name) DO UPDATE SET name = excluded.name",
                (pack,),
            )
            changed = db.execute(
                "UPDATE holdfast.pack SET is_condemned = true WHERE name = %s "
                "AND NOT EXISTS (SELECT 1 FROM holdfast.chunk WHERE pack_no = no)",
                (pack,),
            )
            return changed.rowcount == 1

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> None:
        if chunks:
            self._write_again(lambda writes: writes.mark_damaged(chunks, is_damaged))

    def relocate(self, chunks: Sequence[Chunk], *, from_pack: str) -> int:
        return self._write_again(lambda writes: writes.relocate(chunks, from_pack))

    # Keys

    def keyring(self) -> str | None:
        row = self._one("SELECT value FROM holdfast.meta WHERE key = %s", f"keyring:{self.namespace}")
        return None if row is None else row[0]

    def set_keyring(self, keyring: str, key_id: str, *, replacing: str | None, actor: str) -> bool:
        try:
            is_done = self._write(lambda writes: writes.set_keyring(keyring, key_id, replacing, actor))
        except _AnswerLost:
            is_done = self.keyring() == keyring
        self.is_encrypted = self.is_encrypted or is_done
        return is_done

    def reseal(self, record: NewCheckpoint, *, replacing: bytes, actor: str) -> bool:
        return self._write_again(lambda writes: writes.reseal(record, replacing, actor))

    def scrub(self) -> None:
        """The database's own vacuum does that, in its time."""

    def totals(self) -> Mapping[str, int]:
        of_jobs = self._one(
            "SELECT count(*), sum(checkpoints), sum(size_bytes), sum(stored_bytes) FROM holdfast.job WHERE ns_no = %s",
            self._ns,
        )
        of_chunks = self._one(
            "SELECT count(*), sum(size_bytes), sum(stored_bytes), sum(length(data)) "
            "FROM holdfast.chunk WHERE ns_no = %s",
            self._ns,
        )
        names = (
            "jobs",
            "checkpoints",
            "size_bytes",
            "stored_bytes",
            "chunks",
            "plain_bytes",
            "chunk_bytes",
            "inline_bytes",
        )
        return {
            name: int(value or 0) for name, value in zip(names, (*(of_jobs or ()), *(of_chunks or ())), strict=True)
        }

    def integrity_problems(self) -> Problems:
        """Jobs whose counters are off, and breaks in the chain of events; the pages are the server's own affair."""
        wrong = self._all(
            'SELECT name FROM holdfast.job LEFT JOIN (SELECT ("row" >> 32)::integer AS no, count(*) AS n, '
            'sum(size_bytes) AS size, sum(stored_bytes) AS stored, max("row" & 4294967295) AS last '
            "FROM holdfast.checkpoint GROUP BY 1) counted USING (no) "
            "WHERE ns_no = %s AND (checkpoints <> coalesce(n, 0) "
            "OR job.size_bytes <> coalesce(size, 0) OR job.stored_bytes <> coalesce(stored, 0) "
            "OR last_seq < coalesce(last, 0))",
            self._ns,
        )
        problems = [f"the counters of job {name} do not match its checkpoints" for (name,) in wrong]
        if (broken_at := self.audit().broken_at) is not None:
            problems.append(f"the event log was altered at entry {broken_at}")
        return problems

    def _one(self, sql: str, *parameters: object) -> Row | None:
        rows = self._all(sql, *parameters)
        return rows[0] if rows else None

    def _all(self, sql: str, *parameters: object) -> Sequence[Row]:
        return self._server.all(sql, *parameters)


def _metadata_filter(metadata: Mapping[str, object]) -> tuple[list[str], list[object]]:
    """Conditions and parameters for {"a.b": value}: the path and the value are bound, types are compared too."""
    conditions: list[str] = []
    parameters: list[object] = []
    for path, value in metadata.items():
        parts = path.split(".")
        if not all(parts):
            raise Validation(f"{path!r} is not a metadata path", hint='use names joined by dots, such as "model.name"')
        if value is not None and not isinstance(value, str | int | float):
            raise Validation(
                f"metadata can't be filtered by a {type(value).__name__}", hint="use text, numbers, booleans or None"
            )
        kind = "null" if value is None else "boolean" if isinstance(value, bool) else "number"
        kind = "string" if isinstance(value, str) else kind
        found = "metadata::json #>> %s::text[]"
        # CASE, because conditions joined by AND may be evaluated in any order, and not every text is a number.
        test = {"null": "true", "string": f"({found}) = %s", "boolean": f"({found})::boolean = %s"}.get(
            kind, f"({found})::{'float8' if isinstance(value, float) else 'numeric'} = %s"
        )
        conditions.append(f"CASE WHEN json_typeof(metadata::json #> %s::text[]) = %s THEN {test} ELSE false END")
        parameters += [parts, kind] if value is None else [parts, kind, parts, value]
    return conditions, parameters
