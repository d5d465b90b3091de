"""Between rows and values. Those of checkpoints are in `ports.record`; the columns of all others are listed here."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

from kedge.model import Event, Job, to_datetime
from kedge.ports import READABLE, Chunk, Encoding, unsupported
from kedge.ports.record import CheckpointRow

Row = tuple[Any, ...]
BATCH = 500  # parameters in one statement


# Of `main.checkpoint c`. `row` and `offset` are words of PostgreSQL's own.
CHECKPOINT = ", ".join(f'c."{name}"' for name in CheckpointRow._fields)
CHUNK = (
    'digest, size_bytes, stored_bytes, encoding, (SELECT name FROM main.pack WHERE no = pack_no), "offset", data, '
    "is_damaged, base"
)
JOB = "name, checkpoints, last_seq, size_bytes, stored_bytes, created_us, updated_us, retention"
EVENT = "id, at_us, actor, action, job, checkpoint, detail, chain"


# For names of packs that nothing names any more.
FORGET_PACKS = (
    "DELETE FROM main.pack WHERE no NOT IN (SELECT pack_no FROM main.chunk WHERE pack_no IS NOT NULL) "
    "AND no NOT IN (SELECT pack_no FROM main.record)"
)


def late_manifests(events: str = "main.event") -> str:
    """SQL, of (namespace, event), for the checkpoints with chunks that events behind that one speak of.

    What a sweep has to mark again before it deletes (I3). Whatever the event was: each change of what a manifest names
    has one, and a list of such changes would be forgotten when another kind is added.
    """
    return (
        f"SELECT DISTINCT c.id, c.manifest FROM {events} e JOIN main.checkpoint c ON c.id = e.checkpoint "
        "WHERE e.ns_no = ? AND e.id > ? AND c.has_chunks"
    )


_ENCODINGS = [Encoding(number) for number in range(READABLE + 1)]


def chunk_of(row: Row, written_by: str) -> Chunk:
    """The chunk of a row; UnsupportedFormat for an encoding that a newer Kedge has written."""
    digest, size, stored, encoding, pack, offset, data, is_damaged, base = row
    if encoding & ~READABLE:
        raise unsupported(f"chunk {digest.hex()[:16]}… (encoding {encoding:#x})", written_by)
    return Chunk(digest, size, stored, _ENCODINGS[encoding], pack or "", offset, data, bool(is_damaged), base)


def find_chunks(db: sqlite3.Connection, ns_no: int, columns: str, digests: Sequence[bytes]) -> Iterable[Row]:
    """Chunk rows by digest, in statements of bounded size."""
    for start in range(0, len(digests), BATCH):
        some = digests[start : start + BATCH]
        marks = "?" if len(some) == 1 else ",".join("?" * len(some))
        yield from db.execute(
            f"SELECT {columns} FROM chunk WHERE ns_no = ? AND digest IN ({marks})",
            (ns_no, *some),
        )


def job_of(row: Row) -> Job:
    name, checkpoints, last_seq, size, stored, created_us, updated_us, retention = row
    return Job(name, checkpoints, last_seq, size, stored, to_datetime(created_us), to_datetime(updated_us), retention)


def event_of(row: Row) -> Event:
    number, at_us, actor, action, job, checkpoint, detail, chain = row
    return Event(number, to_datetime(at_us), actor, action, job, checkpoint, detail, chain.hex())
