"""Between rows and values: every list of columns is here, and nothing else counts them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kedge.errors import Corrupted
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus, Event, Job, to_datetime
from kedge.ports import READABLE, Chunk, Encoding, NewCheckpoint, unsupported

SEQ_BITS = 32
LAST_SEQ = (1 << SEQ_BITS) - 1

Row = tuple[Any, ...]
BATCH = 500  # parameters in one statement


class CheckpointRow(NamedTuple):
    """A row of the table of checkpoints, without its manifest."""

    row: int  # job number << 32 | sequence number
    id: CheckpointId
    step: str
    level: str
    parent: CheckpointId | None
    created_us: int
    status: str
    size_bytes: int
    stored_bytes: int
    digest: bytes
    codec: str
    schema_version: str
    tags: str | None
    is_pinned: bool
    metadata: str | None

    @property
    def job_no(self) -> int:
        return self.row >> SEQ_BITS

    @property
    def seq(self) -> int:
        return self.row & LAST_SEQ


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


def late_manifests() -> str:
    """SQL, of (namespace, event), for the checkpoints with chunks that events behind that one speak of.

    What a sweep has to mark again before it deletes (I3). Whatever the event was: each change of what a manifest names
    has one, and a list of such changes would be forgotten when another kind is added.
    """
    return (
        "SELECT DISTINCT c.id, c.manifest FROM main.event e JOIN main.checkpoint c ON c.id = e.checkpoint "
        "WHERE e.ns_no = ? AND e.id > ? AND c.has_chunks"
    )


_decode = json.JSONDecoder().decode
_LEVELS = {str(level): level for level in CheckpointLevel}  # asking the classes takes twenty times as long
_STATUSES = {str(status): status for status in CheckpointStatus}
_ENCODINGS = [Encoding(number) for number in range(READABLE + 1)]


def checkpoint_of(job: str, columns: Iterable[Any]) -> Checkpoint:
    """The checkpoint of a row, or Corrupted when no save can have written it (I2)."""
    row, id_, step, level, parent, created_us, status, size, stored, digest, codec, version, tags, pinned, meta = (
        columns
    )
    try:
        return Checkpoint(
            id_,
            job,
            row & LAST_SEQ,
            step,
            _LEVELS[level],
            parent,
            to_datetime(created_us),
            _STATUSES[status],
            size,
            stored,
            digest.hex(),
            codec,
            version,
            _decode(tags) if tags else {},
            bool(pinned),
            _decode(meta) if meta else {},
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Corrupted(f"the row of checkpoint {id_} is damaged: {error}", hint="run kedge check --repair") from error


def columns_of(new: NewCheckpoint) -> Row:
    """The row of a save, behind its number: the columns of a CheckpointRow, `has_chunks` and the manifest."""
    return (
        new.id, new.step, str(new.level), new.parent, new.created_us, str(new.status), new.size_bytes,
        new.stored_bytes, new.digest, new.codec, new.schema_version,
        json.dumps(dict(new.tags), ensure_ascii=False) if new.tags else None,  # what is no Unicode is refused so
        new.is_pinned, None if new.metadata_json == "{}" else new.metadata_json, new.has_chunks,
        new.manifest,
    )  # fmt: skip


def record_from_row(job: str, columns: Iterable[Any], *, has_chunks: bool, manifest: bytes) -> NewCheckpoint:
    """The save that wrote a row, as far as the row has it; ValueError, KeyError or TypeError when no save can have."""
    row = CheckpointRow._make(columns)
    return NewCheckpoint(
        id=row.id,
        job=job,
        step=row.step,
        level=_LEVELS[row.level],
        created_us=row.created_us,
        size_bytes=row.size_bytes,
        stored_bytes=row.stored_bytes,
        digest=row.digest,
        codec=row.codec,
        schema_version=row.schema_version,
        manifest=manifest,
        parent=row.parent,
        tags=_decode(row.tags) if row.tags else {},
        is_pinned=bool(row.is_pinned),
        metadata_json=row.metadata or "{}",
        has_chunks=has_chunks,
        seq=row.seq,
        status=_STATUSES[row.status],
    )


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
