"""Conversions between rows and values. Those of checkpoints are in `ports.record`, all other columns here."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from kedge.model import Event, Job, to_datetime
from kedge.ports import READABLE, Chunk, Encoding, unsupported
from kedge.ports.record import CheckpointRow

Row = tuple[Any, ...]
BATCH = 500  # parameters per statement


# Of `main.checkpoint c`. `row` and `offset` are reserved words in PostgreSQL.
CHECKPOINT = ", ".join(f'c."{name}"' for name in CheckpointRow._fields)
CHUNK = (
    'digest, size_bytes, stored_bytes, encoding, (SELECT name FROM main.pack WHERE no = pack_no), "offset", data, '
    "is_damaged, base"
)
JOB = "name, checkpoints, last_seq, size_bytes, stored_bytes, created_us, updated_us, retention"
EVENT = "id, at_us, actor, action, job, checkpoint, detail, chain"


# Deletes pack names that nothing references.
FORGET_PACKS = (
    "DELETE FROM main.pack WHERE no NOT IN (SELECT pack_no FROM main.chunk WHERE pack_no IS NOT NULL) "
    "AND no NOT IN (SELECT pack_no FROM main.record)"
)


def late_manifests(events: str = "main.event") -> str:
    """Return SQL, of (namespace, event), for the checkpoints with chunks that have later events.

    A sweep must mark these again before it deletes (I3). All kinds of events count: every change of what a manifest
    names has one, and a list of kinds would miss the next kind that is added.
    """
    return (
        f"SELECT DISTINCT c.id, c.manifest FROM {events} e JOIN main.checkpoint c ON c.id = e.checkpoint "
        "WHERE e.ns_no = ? AND e.id > ? AND c.has_chunks"
    )


_ENCODINGS = [Encoding(number) for number in range(READABLE + 1)]


def chunk_of(row: Row, written_by: str) -> Chunk:
    """Return the chunk of a row. Raises UnsupportedFormat for an encoding that a newer Kedge wrote."""
    digest, size, stored, encoding, pack, offset, data, is_damaged, base = row
    if encoding & ~READABLE:
        raise unsupported(f"chunk {digest.hex()[:16]}… (encoding {encoding:#x})", written_by)
    return Chunk(digest, size, stored, _ENCODINGS[encoding], pack or "", offset, data, bool(is_damaged), base)


def find_chunks(db: sqlite3.Connection, ns_no: int, columns: str, digests: Sequence[bytes]) -> Iterable[Row]:
    """Yield chunk rows by digest, in bounded statements."""
    for start in range(0, len(digests), BATCH):
        batch = digests[start : start + BATCH]
        marks = "?" if len(batch) == 1 else ",".join("?" * len(batch))
        yield from db.execute(
            f"SELECT {columns} FROM chunk WHERE ns_no = ? AND digest IN ({marks})",
            (ns_no, *batch),
        )


def job_of(row: Row) -> Job:
    name, checkpoints, last_seq, size, stored, created_us, updated_us, retention = row
    return Job(name, checkpoints, last_seq, size, stored, to_datetime(created_us), to_datetime(updated_us), retention)


def event_of(row: Row) -> Event:
    number, at_us, actor, action, job, checkpoint, detail, chain = row
    return Event(number, to_datetime(at_us), actor, action, job, checkpoint, detail, chain.hex())
