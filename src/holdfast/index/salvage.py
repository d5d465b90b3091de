"""What can still be read of a damaged index.sqlite. Works on a copy; the damaged file is not touched."""

from __future__ import annotations

import json
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.model import CheckpointId, CheckpointLevel, CheckpointStatus
from holdfast.ports import Chunk, NewCheckpoint

from .rows import CHUNK, SEQ_BITS, Row, chunk_of

_FIELDS = (
    "row, id, step, level, parent, created_us, status, size_bytes, stored_bytes, digest, codec, schema_version, "
    "tags, is_pinned, metadata, has_chunks, manifest"
)


@dataclass(slots=True)
class Salvaged:
    """Rows of one index, by namespace."""

    checkpoints: dict[str, list[NewCheckpoint]] = field(default_factory=dict)
    chunks: dict[str, list[Chunk]] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)  # IDs whose deletion is in the event log
    is_complete: bool = True  # no table ended in an unreadable page


def salvage(path: Path) -> Salvaged:
    """Every checkpoint and chunk row that can be read."""
    found = Salvaged()
    with _copy(path) as db:
        if db is None:
            found.is_complete = False
            return found
        namespaces = {row[0]: row[1] for row in _rows(db, found, "namespace", "no, name", "no")}
        jobs = {row[0]: row[1:] for row in _rows(db, found, "job", "no, ns_no, name", "no")}
        for row in _rows(db, found, "event", "id, action, checkpoint", "id"):
            if row[1] == "delete":
                found.deleted.add(row[2])
        for row in _rows(db, found, "checkpoint", _FIELDS, "row"):
            ns_no, job = jobs.get(row[0] >> SEQ_BITS, (0, f"recovered-{row[0] >> SEQ_BITS}"))
            record = NewCheckpoint(
                id=CheckpointId(row[1]),
                job=job,
                step=row[2],
                level=CheckpointLevel(row[3]),
                created_us=row[5],
                size_bytes=row[7],
                stored_bytes=row[8],
                digest=row[9],
                codec=row[10],
                schema_version=row[11],
                manifest=row[16],
                parent=row[4],
                tags=json.loads(row[12]) if row[12] else {},
                is_pinned=bool(row[13]),
                metadata_json=row[14] or "{}",
                has_chunks=bool(row[15]),
                seq=row[0] & (1 << SEQ_BITS) - 1,
                status=CheckpointStatus(row[6]),
            )
            found.checkpoints.setdefault(namespaces.get(ns_no, "default"), []).append(record)
        for row in _rows(db, found, "chunk", f"ns_no, digest, {CHUNK}", "ns_no, digest"):
            found.chunks.setdefault(namespaces.get(row[0], "default"), []).append(chunk_of(row[2:]))
    return found


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


def _rows(db: sqlite3.Connection, found: Salvaged, table: str, columns: str, key: str) -> Iterator[Row]:
    """Rows of a table from both ends: a damaged page in the middle costs the rows in it, not those behind it."""
    width = key.count(",") + 1
    forward: Row | None = None  # key of the last row read from the front
    try:
        for row in db.execute(f"SELECT {columns} FROM {table} ORDER BY {key}"):
            forward = row[:width]
            yield row
        return
    except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError):
        found.is_complete = False
    descending = ", ".join(f"{name} DESC" for name in key.split(","))
    try:
        for row in db.execute(f"SELECT {columns} FROM {table} ORDER BY {descending}"):
            if forward is not None and row[:width] <= forward:
                return
            yield row
    except (sqlite3.DatabaseError, UnicodeDecodeError, OverflowError):
        return
