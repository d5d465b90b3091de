"""What can still be read of a damaged index.sqlite. Works on a copy; the damaged file is not touched."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kedge.errors import UnsupportedFormat
from kedge.index.rows import CHECKPOINT, CHUNK, Row, chunk_of
from kedge.ports import Chunk, NewCheckpoint
from kedge.ports.record import SEQ_BITS, columns_of, record_from_row

_KEY = "job_no, key"


@dataclass(frozen=True, slots=True)
class SalvagedJob:
    """What a job has beside its checkpoints; the sequence and the token must not begin anew (I4, I5)."""

    name: str
    last_seq: int
    retention: str | None
    token: int


@dataclass(slots=True)
class Salvaged:
    """Rows of one index, by namespace."""

    checkpoints: dict[str, list[NewCheckpoint]] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    jobs: dict[str, list[SalvagedJob]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)  # IDs whose deletion is in the event log, and no later save
    meta: dict[str, str] = field(default_factory=dict)  # what the store says of itself, keyrings among it
    is_complete: bool = True  # every row could be read


def salvage(path: Path) -> Salvaged:
    """Everything that can be read of the index at `path`."""
    salvaged = Salvaged()
    with _copy(path) as db:
        if db is None:
            salvaged.is_complete = False
            return salvaged
        namespaces: dict[int, str] = dict(_rows(db, salvaged, "namespace", "no, name", "no"))
        salvaged.meta = dict(_rows(db, salvaged, "meta", "key, value", "key"))
        tokens: dict[int, int] = dict(_rows(db, salvaged, "lease", "job_no, token", "job_no"))
        keys = {
            row: (key, digest)
            for _, key, row, digest in _rows(db, salvaged, "idempotency", f"{_KEY}, row, request_digest", _KEY)
        }
        jobs: dict[int, tuple[str, str]] = {}
        of_job = "no, ns_no, name, last_seq, retention"
        for no, ns_no, name, last_seq, retention in _rows(db, salvaged, "job", of_job, "no"):
            namespace = namespaces.get(ns_no, "default")
            jobs[no] = namespace, name
            job = SalvagedJob(name, last_seq, retention, tokens.get(no, 0))
            salvaged.jobs.setdefault(namespace, []).append(job)
        salvaged.deleted = _deleted(db, salvaged)
        for *columns, has_chunks, manifest in _rows(
            db, salvaged, "checkpoint c", f"{CHECKPOINT}, has_chunks, manifest", "row"
        ):
            row = columns[0]
            namespace, name = jobs.get(row >> SEQ_BITS, ("default", f"recovered-{row >> SEQ_BITS}"))
            key, request_digest = keys.get(row, (None, b""))
            try:
                record = record_from_row(name, columns, has_chunks=bool(has_chunks), manifest=manifest)
            except (ValueError, KeyError, TypeError):
                salvaged.is_complete = False
                continue
            record = replace(record, idempotency_key=key, request_digest=request_digest)
            salvaged.checkpoints.setdefault(namespace, []).append(record)
        for ns_no, _, *columns in _rows(db, salvaged, "chunk", f"ns_no, digest, {CHUNK}", "ns_no, digest"):
            try:
                chunk = chunk_of(tuple(columns), salvaged.meta.get("written_by", ""))
            except (ValueError, TypeError, AttributeError, UnsupportedFormat):
                salvaged.is_complete = False
            else:
                salvaged.chunks.setdefault(namespaces.get(ns_no, "default"), []).append(chunk)
    return salvaged


def _deleted(db: sqlite3.Connection, salvaged: Salvaged) -> set[str]:
    deletions: dict[str, int] = {}
    events = ("event", "id, action, checkpoint", "id")  # some may come from the end backwards
    for number, action, checkpoint in _rows(db, salvaged, *events):
        if action == "delete":
            deletions[checkpoint] = max(number, deletions.get(checkpoint, 0))
    if deletions:
        for number, action, checkpoint in _rows(db, salvaged, *events):
            if action == "save" and number > deletions.get(checkpoint, number):
                del deletions[checkpoint]  # it came back from another store
    return set(deletions)


def put_jobs(path: Path, namespace: str, jobs: Sequence[SalvagedJob]) -> None:
    """Give the jobs of a new index back what they have beside their checkpoints. Every lease has ended."""
    with _transaction(path) as db:
        _put_jobs(db, _number(db, namespace), jobs)


def _put_jobs(db: sqlite3.Connection, ns_no: int, jobs: Sequence[SalvagedJob]) -> None:
    for job in jobs:
        db.execute("INSERT OR IGNORE INTO job VALUES (NULL, ?, ?, 0, 0, 0, 0, 0, 0, NULL)", (ns_no, job.name))
        db.execute(
            "UPDATE job SET last_seq = max(last_seq, ?), retention = ? WHERE ns_no = ? AND name = ?",
            (job.last_seq, job.retention, ns_no, job.name),
        )
        if job.token:
            db.execute(
                "INSERT INTO lease SELECT no, ?, '', '', 0, 0 FROM job WHERE ns_no = ? AND name = ?",
                (job.token, ns_no, job.name),
            )


def put_sealed(path: Path, namespace: str, keyring: str, key_id: str, salvaged: Salvaged) -> int:
    """Give a new index the rows of a namespace whose key nobody has given, as they are; answers how many."""
    rows = salvaged.checkpoints.get(namespace, [])
    with _transaction(path) as db:
        db.execute("INSERT OR IGNORE INTO namespace (name) VALUES (?)", (namespace,))
        db.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [(f"keyring:{namespace}", keyring), (f"key:{namespace}", key_id)],
        )
        ns_no = _number(db, namespace)
        names = {row.job for row in rows} - {job.name for job in salvaged.jobs.get(namespace, [])}
        _put_jobs(db, ns_no, [*salvaged.jobs.get(namespace, []), *(SalvagedJob(name, 0, None, 0) for name in names)])
        _put_chunks(db, ns_no, salvaged.chunks.get(namespace, []))
        for row in rows:
            _put_row(db, ns_no, row)
    return len(rows)


def _put_row(db: sqlite3.Connection, ns_no: int, new: NewCheckpoint) -> None:
    ((job_no,),) = db.execute("SELECT no FROM job WHERE ns_no = ? AND name = ?", (ns_no, new.job))
    row = job_no << SEQ_BITS | (new.seq or 0)
    columns = columns_of(new)
    db.execute(f"INSERT INTO checkpoint VALUES (?{', ?' * len(columns)})", (row, *columns))
    db.executemany("INSERT INTO tag VALUES (?, ?, ?, ?)", [(job_no, *tag, row) for tag in new.tags.items()])
    if new.idempotency_key is not None:
        key = job_no, new.idempotency_key, row, new.request_digest
        db.execute("INSERT INTO idempotency VALUES (?, ?, ?, ?)", key)
    db.execute(
        "UPDATE job SET last_seq = max(last_seq, ?), checkpoints = checkpoints + 1, size_bytes = size_bytes + ?, "
        "stored_bytes = stored_bytes + ?, updated_us = max(updated_us, ?), "
        "created_us = CASE created_us WHEN 0 THEN ? ELSE min(created_us, ?) END WHERE no = ?",
        (new.seq, new.size_bytes, new.stored_bytes, new.created_us, new.created_us, new.created_us, job_no),
    )


def _put_chunks(db: sqlite3.Connection, ns_no: int, chunks: Sequence[Chunk]) -> None:
    db.executemany("INSERT OR IGNORE INTO pack (name) VALUES (?)", {(c.pack,) for c in chunks if c.pack})
    db.executemany(
        "INSERT INTO chunk VALUES (?, ?, ?, ?, ?, 0, ?, (SELECT no FROM pack WHERE name = ?), ?, ?)",
        [
            (ns_no, c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), c.base, c.pack, c.offset, c.data)
            for c in chunks
        ],
    )


def _number(db: sqlite3.Connection, namespace: str) -> int:
    return int(db.execute("SELECT no FROM namespace WHERE name = ?", (namespace,)).fetchone()[0])


@contextmanager
def _transaction(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA synchronous=FULL")
        db.execute("BEGIN IMMEDIATE")
        yield db
        db.execute("COMMIT")


@contextmanager
def _copy(path: Path) -> Iterator[sqlite3.Connection | None]:
    """A connection to a copy of the database and its WAL; None when SQLite cannot make anything of it."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="salvage-") as folder:
        for suffix in ("", "-wal"):
            if (part := path.with_name(path.name + suffix)).exists():
                shutil.copyfile(part, Path(folder) / ("index" + suffix))
        db = sqlite3.connect(Path(folder) / "index", isolation_level=None)
        try:
            db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        except sqlite3.DatabaseError:
            db.close()
            yield None
            return
        try:
            yield db
        finally:
            db.close()


def _rows(db: sqlite3.Connection, salvaged: Salvaged, table: str, columns: str, key: str) -> Iterator[Row]:
    """Rows of a table from both ends: a damaged page in the middle costs the rows in it, not those behind it."""
    width = key.count(",") + 1
    forward: Row | None = None  # key of the last row read from the front
    try:
        for row in db.execute(f"SELECT {columns} FROM {table} ORDER BY {key}"):
            forward = row[:width]
            yield row
        return
    except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError):
        salvaged.is_complete = False
    descending = ", ".join(f"{name} DESC" for name in key.split(","))
    try:
        for row in db.execute(f"SELECT {columns} FROM {table} ORDER BY {descending}"):
            if forward is not None and row[:width] <= forward:
                return
            yield row
    except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError):
        return
