"""A write transaction on PostgreSQL: how it begins and ends, and PostgreSQL's own statements.

Its namespace belongs to it alone until it ends: what is asked for most needs less, and is done by `batch`. Only packs
and IDs are shared between namespaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from psycopg import Pipeline

from kedge.errors import Conflict, NotFound
from kedge.index.rows import Row
from kedge.index.transactions import JobRow, LeaseRow
from kedge.index.writes import Packs, SqlWrites
from kedge.model import Checkpoint, now_us
from kedge.ports import Chunk, ChunksGone, IdTaken, KeysChanged, NewCheckpoint, RecordPlace, Seen, Unmet

from .dialect import for_postgres
from .locks import ALONE, lock_store
from .marks import mark_damaged, standing
from .server import Array, Connection

_CHUNK = ("bytea", "bigint", "bigint", "smallint", "bytea", "bigint", "bigint", "bytea")


class PostgresWrites(SqlWrites):
    """The write operations of one transaction.

    `is_careful`: look whether an ID is taken before using it. Otherwise the database refuses, and fails the
    transaction, which is then run again with care: IDs are drawn at random, and saves need not wait for an answer each.
    """

    # By the clock of the server: that of the transaction would stand still while it waits its turn.
    _LEASE = "token, holder, is_live, extract(epoch FROM until - clock_timestamp())::float8"

    def __init__(
        self, db: Connection, ns_no: int, namespace: str, *, is_careful: bool, pipeline: Pipeline | None = None
    ) -> None:
        self._db = db
        self._pipeline = pipeline
        self._ns = ns_no
        self._namespace = namespace
        self._is_careful = is_careful
        self._one("SELECT kedge.lock_1(?, false, ?, ?)", ns_no, *ALONE)

    def savepoint(self) -> None:
        self._do("SAVEPOINT one")

    def undo(self) -> None:
        self._do("ROLLBACK TO one")

    def commit(self, records: Sequence[NewCheckpoint], actor: str) -> list[Checkpoint]:
        if len(records) == 1:
            return [self._insert(records[0], actor)]
        self._do("SAVEPOINT several")
        try:
            return [self._insert(record, actor) for record in records]
        except (Conflict, NotFound, ChunksGone, IdTaken, KeysChanged, Unmet):
            self._do("ROLLBACK TO several")
            raise

    # Statements

    def _one(self, sql: str, *parameters: object) -> Row | None:
        cursor = self._db.execute(for_postgres(sql), parameters)
        if self._pipeline is not None:
            self._pipeline.sync()  # so the server knows that it waits for us, and for how long
        return cursor.fetchone()

    def _do(self, sql: str, *parameters: object) -> None:
        """In a pipeline what goes wrong is told by a later statement."""
        self._db.execute(for_postgres(sql), parameters)

    def _many(self, sql: str, rows: Sequence[Row]) -> None:
        with self._db.cursor() as cursor:
            cursor.executemany(for_postgres(sql), rows)

    def event(
        self, action: str, actor: str, job: str | None = None, checkpoint: str | None = None, detail: str = "{}"
    ) -> None:
        """It gets its number later (`PostgresReads.number_events`)."""
        entry = (now_us(), actor, action, job, checkpoint, detail)
        self._do("SELECT kedge.append_1(?, ?, ?, ?, ?, ?, ?)", self._ns, *entry)

    # Leases

    def _left_s(self, lease: LeaseRow) -> float:
        return max(0.0, lease.until_s)

    def _put_lease(self, job_no: int, token: int, holder: str, ttl_s: float) -> None:
        self._do(
            "INSERT INTO main.lease VALUES (?, ?, ?, clock_timestamp() + make_interval(secs => ?), true) "
            "ON CONFLICT (job_no) DO UPDATE SET token = excluded.token, holder = excluded.holder, "
            "until = excluded.until, is_live = true",
            job_no, token, holder, ttl_s,
        )  # fmt: skip

    def _extend_lease(self, job_no: int, ttl_s: float) -> None:
        self._do(
            "UPDATE main.lease SET until = clock_timestamp() + make_interval(secs => ?) WHERE job_no = ?", ttl_s, job_no
        )

    # Checkpoints

    def _taken(self, new: NewCheckpoint, job: JobRow | None) -> Checkpoint | None:
        return self.landed(new) if self._is_careful else None

    def _standing(self, seen: Sequence[Seen]) -> list[Seen]:
        return standing(self._db, self._ns, seen)

    def _is_encrypted(self, *, is_changing: bool = False) -> bool:
        # Namespaces are kept apart that would both be the first, and plain saves out meanwhile.
        lock_store(self._db, is_changing=is_changing)
        row = self._one("SELECT value FROM main.meta WHERE key = 'encrypted'")
        return row is not None and row[0] == "yes"

    def _mark_encrypted(self) -> None:
        self._do("UPDATE main.meta SET value = 'yes' WHERE key = 'encrypted'")

    # Chunks

    def _sound(self, digests: Sequence[bytes]) -> set[bytes]:
        rows = self._db.execute(
            "SELECT digest FROM kedge.chunk WHERE ns_no = %s AND digest = ANY(%s) AND NOT is_damaged",
            (self._ns, Array("bytea", digests)),
        )
        return {digest for (digest,) in rows}

    def _lock_packs(self, chunks: Sequence[Chunk]) -> Packs:
        return self._pack_numbers(chunks)

    def _pack_numbers(self, places: Iterable[Chunk | RecordPlace]) -> Packs:
        """Locked against `condemn`."""
        packs: dict[str, int | None] = {"": None}
        for name in sorted({place.pack for place in places} - {""}):
            row = self._one(
                "INSERT INTO main.pack (name) VALUES (?) ON CONFLICT (name) DO UPDATE SET name = excluded.name "
                "RETURNING no, is_condemned",
                name,
            )
            assert row is not None
            if row[1]:
                raise ChunksGone([place.digest for place in places if place.pack == name])
            packs[name] = row[0]
        return packs

    def _insert_chunks(self, chunks: Sequence[Chunk], packs: Packs) -> None:
        """In one statement: a state of many small pieces has thousands."""
        if not chunks:
            return
        rows = [
            (c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), c.base, packs[c.pack], c.offset, c.data)
            for c in {chunk.digest: chunk for chunk in reversed(chunks)}.values()
        ]
        self._do(
            "INSERT INTO main.chunk SELECT ?::integer, d, s, t, e, false, b, p, o, i FROM unnest(?::bytea[], "
            "?::bigint[], ?::bigint[], ?::smallint[], ?::bytea[], ?::bigint[], ?::bigint[], ?::bytea[]) "
            "AS u (d, s, t, e, b, p, o, i) ON CONFLICT (ns_no, digest) DO UPDATE SET "
            "stored_bytes = excluded.stored_bytes, encoding = excluded.encoding, is_damaged = false, "
            'base = excluded.base, pack_no = excluded.pack_no, "offset" = excluded."offset", data = excluded.data '
            "WHERE chunk.is_damaged",
            self._ns, *map(Array, _CHUNK, zip(*rows, strict=True)),
        )  # fmt: skip

    def mark_damaged(self, chunks: Sequence[Chunk], is_damaged: bool) -> list[bytes]:
        return mark_damaged(self._db, self._ns, chunks, is_damaged)
