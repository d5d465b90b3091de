"""Saves that wait together, committed in one round trip: a statement that checks all of them and inserts all or none.

Most of what a small save costs on PostgreSQL is waiting for answers. So nothing is asked that need not be: what the
last transaction left (`Known`) is taken to be still so, and the statement changes something only if that is true. What
it reads besides the row of the namespace it reads behind the lock on that, in a snapshot taken after it (I3, I5).
Where a check fails, or the database refuses, nothing has happened, and `postgres_writes` finds out for each save why.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg

from holdfast.model import Checkpoint
from holdfast.ports import Chunk, NewCheckpoint
from holdfast.postgresql import CHANNEL, Connection, array

from .rows import CHECKPOINT, DAMAGED, SEQ_BITS, checkpoint_of
from .writes import chain_of, now_us

MAX_JOBS = 10_000  # remembered between transactions

Head = tuple[int, bytes]  # number and chain of the newest event

_COLUMNS_OF = {
    "bigint": "row created_us size_bytes stored_bytes event at_us offset token newest added size stored",
    "bytea": "digest manifest chain request_digest data",
    "boolean": "is_pinned has_chunks",
    "integer": "job_no",
    "smallint": "encoding",
}
_TYPES = {column: kind for kind, columns in _COLUMNS_OF.items() for column in columns.split()}


def _unnest(*columns: str) -> str:
    """Rows, from one array for each column."""
    arrays = ", ".join(f"%s::{_TYPES.get(column, 'text')}[]" for column in columns)
    names = ", ".join(f'"{column}"' for column in columns)
    return f"unnest({arrays}) AS new ({names})"


_CHECKPOINT = [*(name.strip() for name in CHECKPOINT.split(",")), "has_chunks", "manifest"]
_SAVE = [*_CHECKPOINT, "event", "at_us", "actor", "job", "chain", "key", "request_digest"]
_COUNTS = ["job_no", "newest", "added", "size", "stored", "at_us"]

_LOCK = "SELECT last_event, chain FROM holdfast.namespace WHERE no = %s FOR UPDATE"
_JOBS = (
    "SELECT name, no, last_seq, token IS NOT NULL FROM holdfast.job LEFT JOIN holdfast.lease ON job_no = no "
    "WHERE ns_no = %s AND name = ANY(%s::text[])"
)

# The statement, of which only what a batch needs is sent: parsing and planning is most of what it costs. `go` is one
# row if everything is as it was taken to be, else none; all that follows hangs on it.
_NEW = f"WITH new AS MATERIALIZED (SELECT * FROM {_unnest(*_SAVE)})"
_PACKS = f"""pack AS (
    INSERT INTO holdfast.pack (name) SELECT * FROM {_unnest("name")}
    ON CONFLICT (name) DO UPDATE SET name = excluded.name RETURNING no, name, is_condemned
)"""  # locked against being condemned, and heard of if they are (I3)
_GO = """go AS (
    UPDATE holdfast.namespace SET last_event = %s, chain = %s WHERE no = %s AND last_event = %s AND chain = %s"""
_IF_PACKS = "AND NOT EXISTS (SELECT FROM pack WHERE is_condemned)"
_IF_LEASES = f"""AND %s = (SELECT count(*) FROM holdfast.lease JOIN {_unnest("job_no", "token")}
    USING (job_no, token) WHERE is_live)"""
_IF_CHUNKS = f"""AND %s = (SELECT count(*) FROM holdfast.chunk
    WHERE ns_no = %s AND digest = ANY(%s::bytea[]) AND encoding < {DAMAGED})"""
_IF_PARENTS = f"""AND %s = (SELECT count(*) FROM holdfast.checkpoint c JOIN holdfast.job ON job.no = "row" >> {SEQ_BITS}
    WHERE c.id = ANY(%s::text[]) AND ns_no = %s)"""
_COUNT = f"""counted AS (
    UPDATE holdfast.job SET last_seq = greatest(last_seq, newest), checkpoints = checkpoints + added,
        size_bytes = size_bytes + size, stored_bytes = stored_bytes + stored, updated_us = at_us
    FROM go, {_unnest(*_COUNTS)} WHERE no = job_no
)"""
_ON_KNOWN_CHUNK = f"""ON CONFLICT (ns_no, digest) DO UPDATE
    SET stored_bytes = excluded.stored_bytes, encoding = excluded.encoding, pack_no = excluded.pack_no,
    "offset" = excluded."offset", data = excluded.data WHERE chunk.encoding >= {DAMAGED}"""
_PLACE_INLINE = f"""placed AS (
    INSERT INTO holdfast.chunk SELECT %s::integer, digest, size_bytes, stored_bytes, encoding, NULL, 0, data
    FROM go, {_unnest("digest", "size_bytes", "stored_bytes", "encoding", "data")} {_ON_KNOWN_CHUNK}
)"""
_PLACE_IN_PACKS = f"""placed AS (
    INSERT INTO holdfast.chunk
    SELECT %s::integer, digest, size_bytes, stored_bytes, encoding, pack.no, "offset", data
    FROM go, {_unnest("digest", "size_bytes", "stored_bytes", "encoding", "pack", "offset", "data")}
    LEFT JOIN pack ON pack.name = new.pack {_ON_KNOWN_CHUNK}
)"""
_TAG = f"""tagged AS (INSERT INTO holdfast.tag SELECT new.* FROM go, {_unnest("job_no", "name", "value", "row")})"""
_KEY = f"""keyed AS (
    INSERT INTO holdfast.idempotency
    SELECT ("row" >> {SEQ_BITS})::integer, key, "row", request_digest FROM go, new WHERE key IS NOT NULL
)"""
_INSERT = f"""saved AS (
    INSERT INTO holdfast.checkpoint SELECT {", ".join(f'"{c}"' for c in _CHECKPOINT)} FROM go, new
),
told AS (
    INSERT INTO holdfast.event SELECT %s::integer, event, at_us, actor, 'save', job, id, '{{}}', chain FROM go, new
)
SELECT pg_notify(%s, %s)::text FROM go"""


class KnownJob(NamedTuple):
    no: int
    last_seq: int
    was_leased: bool


class Known:
    """What one transaction leaves for the next: jobs as they are while the chain of events ends at `head`.

    Whoever else writes in the namespace moves its end on. Renewing a lease leaves no event, and neither does the time
    in which it expires: leases are looked at each time.
    """

    def __init__(self) -> None:
        self.head: Head | None = None
        self.jobs: dict[str, KnownJob] = {}
        self.key_id: str | None = None  # of the current data key, where there is one
        self.is_alone = True  # nobody else wrote between our last two transactions

    def forget(self) -> None:
        self.head = None
        self.jobs.clear()
        self.key_id = None


@dataclass(frozen=True, slots=True)
class Save:
    """One `Index.commit`."""

    records: Sequence[NewCheckpoint]
    actor: str


class _Unsure(Exception):
    """A save needs more than is known."""


class _Batch:
    """Saves as rows, numbered from where the namespace is known to be."""

    def __init__(self, saves: Iterable[Save], ns_no: int, namespace: str, known: Known) -> None:
        assert known.head is not None
        self._ns = ns_no
        self._namespace = namespace
        self._known = known
        self._before = self.head = known.head
        self.jobs: dict[str, KnownJob] = {}
        self._rows: list[tuple[object, ...]] = []
        self._counts: dict[int, tuple[int, int, int, int, int]] = {}  # by job: newest number, saves, bytes, time
        self._tags: list[tuple[object, ...]] = []
        self._chunks: dict[bytes, Chunk] = {}
        self._reused: set[bytes] = set()
        self._parents: set[str] = set()
        self._leases: dict[int, int] = {}
        self._has_keys = False
        self.saved = [[self._add(record, save.actor) for record in save.records] for save in saves]

    def _add(self, new: NewCheckpoint, actor: str) -> Checkpoint:
        job = self.jobs.get(new.job) or self._known.jobs.get(new.job)
        if job is None or new.seq is not None:
            raise _Unsure
        if new.key_id != self._known.key_id if new.key_id else job.last_seq == 0:
            raise _Unsure  # whether it must be encrypted, and with which key (I10)
        if new.lease_token is None:
            if job.was_leased:
                raise _Unsure  # whether the lease has ended (I5)
        elif self._leases.setdefault(job.no, new.lease_token) != new.lease_token:
            raise _Unsure
        seq = job.last_seq + 1
        self.jobs[new.job] = job._replace(last_seq=seq)
        number, at_us = self.head[0] + 1, now_us()
        chain = chain_of(self.head[1], number, at_us, self._ns, actor, "save", new.job, new.id, "{}")
        self.head = (number, chain)
        row = job.no << SEQ_BITS | seq
        fields = (
            row, new.id, new.step, str(new.level), new.parent, new.created_us, str(new.status), new.size_bytes,
            new.stored_bytes, new.digest, new.codec, new.schema_version,
            json.dumps(dict(new.tags)) if new.tags else None, new.is_pinned,
            None if new.metadata_json == "{}" else new.metadata_json,
        )  # fmt: skip
        key = (new.idempotency_key, new.request_digest)
        self._rows.append((*fields, new.has_chunks, new.manifest, number, at_us, actor, new.job, chain, *key))
        _, added, size, stored, _ = self._counts.get(job.no, (0, 0, 0, 0, 0))
        self._counts[job.no] = (seq, added + 1, size + new.size_bytes, stored + new.stored_bytes, new.created_us)
        self._tags += [(job.no, name, value, row) for name, value in new.tags.items()]
        for chunk in new.new_chunks:
            self._chunks.setdefault(chunk.digest, chunk)
        self._reused.update(new.reused_chunks)
        self._has_keys = self._has_keys or new.idempotency_key is not None
        if new.parent is not None:
            self._parents.add(new.parent)
        return checkpoint_of(new.job, fields)

    @property
    def needs_lock(self) -> bool:
        """Whether it looks at other rows than the namespace's, which must not have changed while it waited for that."""
        return bool(self._leases or self._reused or self._parents or self._chunks)

    def send(self, db: Connection) -> psycopg.Cursor[tuple[Any, ...]]:
        """Give the statement to the server, which answers a row if it inserts."""
        chunks = [(c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), c.data) for c in self._chunks.values()]
        places = [(c.pack, c.offset) for c in self._chunks.values()]
        packs = sorted({pack for pack, _ in places} - {""})
        sql, values = [_NEW], [*_columns(self._rows)]

        def add(text: str, *more: object) -> None:
            sql.append(text)
            values.extend(more)

        if packs:
            add(f", {_PACKS}", array(packs))
        add(f", {_GO}", *self.head, self._ns, *self._before)
        if packs:
            add(_IF_PACKS)
        if self._leases:
            add(_IF_LEASES, len(self._leases), array(self._leases), array(self._leases.values()))
        if self._reused:
            add(_IF_CHUNKS, len(self._reused), self._ns, array(self._reused))
        if self._parents:
            add(_IF_PARENTS, len(self._parents), array(self._parents), self._ns)
        add("RETURNING 1)")
        add(f", {_COUNT}", *_columns([(no, *counts) for no, counts in self._counts.items()]))
        if packs:
            *columns, data = _columns(chunks)
            add(f", {_PLACE_IN_PACKS}", self._ns, *columns, *_columns(places), data)
        elif chunks:
            add(f", {_PLACE_INLINE}", self._ns, *_columns(chunks))
        if self._tags:
            add(f", {_TAG}", *_columns(self._tags))
        if self._has_keys:
            add(f", {_KEY}")
        add(f", {_INSERT}", self._ns, CHANNEL, f"{self._namespace}:{self.head[0]}")
        return db.execute(" ".join(sql).encode(), values)


def commit_together(
    db: Connection, saves: Sequence[Save], ns_no: int, namespace: str, known: Known
) -> list[list[Checkpoint]] | None:
    """What was saved, durably; None if nothing was, because some of it must be looked at by itself.

    What psycopg raises goes to the caller. If the connection is still there then, nothing has been committed.
    """

    def prepare() -> _Batch | None:
        try:
            return _Batch(saves, ns_no, namespace, known)
        except _Unsure:
            return None

    batch = prepare() if known.head is not None and known.is_alone else None
    is_guess = batch is not None
    if batch is not None and not batch.needs_lock:
        known.head = None  # until this has committed
        answer = batch.send(db)
    else:
        with db.pipeline():
            db.execute("BEGIN")
            locked = db.execute(_LOCK, (ns_no,))
            if batch is None:
                names = {record.job for save in saves for record in save.records}
                jobs = db.execute(_JOBS, (ns_no, array(names)))
                head = locked.fetchone()
                assert head is not None
                known.is_alone = head == known.head
                if not known.is_alone or len(known.jobs) > MAX_JOBS:
                    known.forget()
                known.head = (head[0], head[1])
                known.jobs.update({row[0]: KnownJob(*row[1:]) for row in jobs})
                batch = prepare()
            known.head = None  # until this transaction has committed
            if batch is None:
                db.execute("ROLLBACK")
                return None
            answer = batch.send(db)
            db.execute("COMMIT")
    if answer.fetchone() is not None:
        known.head = batch.head
        known.jobs.update(batch.jobs)
        return batch.saved
    known.forget()
    return commit_together(db, saves, ns_no, namespace, known) if is_guess else None


def _columns(rows: Sequence[tuple[object, ...]]) -> list[object]:
    return [array(column) for column in zip(*rows, strict=True)]
