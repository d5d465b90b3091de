"""Between rows and values."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kedge.errors import Corrupted, Validation
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus, Event, Job, to_datetime
from kedge.ports import Chunk, Encoding

SEQ_BITS = 32
DAMAGED = 128  # added to the encoding of a chunk that verify found damaged

CHECKPOINT = (
    "row, id, step, level, parent, created_us, status, size_bytes, stored_bytes, digest, codec, schema_version, "
    "tags, is_pinned, metadata"
)
CHUNK = "digest, size_bytes, stored_bytes, encoding, (SELECT name FROM pack WHERE no = pack_no), offset, data"
JOB = "name, checkpoints, last_seq, size_bytes, stored_bytes, created_us, updated_us, retention"
EVENT = "id, at_us, actor, action, job, checkpoint, detail, chain"

Row = tuple[Any, ...]
BATCH = 500  # parameters in one statement


def late_manifests(schema: str = "", bound: str = "?") -> str:
    """SQL, of (namespace, event), for the checkpoints with chunks that events behind that one speak of.

    What a sweep has to mark again before it deletes (I3). Whatever the event was: each change of what a manifest names
    has one, and a list of such changes would be forgotten when another kind is added.
    """
    return (
        f"SELECT DISTINCT c.id, c.manifest FROM {schema}event e JOIN {schema}checkpoint c ON c.id = e.checkpoint "
        f"WHERE e.ns_no = {bound} AND e.id > {bound} AND c.has_chunks"
    )


_decode = json.JSONDecoder().decode
_LEVELS = {str(level): level for level in CheckpointLevel}  # asking the classes takes twenty times as long
_STATUSES = {str(status): status for status in CheckpointStatus}


def checkpoint_of(job: str, row: Row) -> Checkpoint:
    """The checkpoint of a row, or Corrupted when no save can have written it (I2)."""
    number, id_, step, level, parent, created_us, status, size, stored, digest, codec, version, tags, pinned, meta = (
        row[:15]
    )
    try:
        return Checkpoint(
            CheckpointId(id_),
            job,
            number & (1 << SEQ_BITS) - 1,
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


def chunk_of(row: Row) -> Chunk:
    digest, size, stored, encoding, pack, offset, data = row
    return Chunk(digest, size, stored, Encoding(encoding & ~DAMAGED), pack or "", offset, data, encoding >= DAMAGED)


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


def metadata_filter(metadata: Mapping[str, object]) -> tuple[list[str], list[object]]:
    """Conditions and parameters for {"a.b": value}: the path and the value are bound, types are compared too."""
    conditions: list[str] = []
    parameters: list[object] = []
    for path, value in metadata.items():
        parts = path.split(".")
        if not all(parts) or '"' in path or "\0" in path:
            raise Validation(f"{path!r} is not a metadata path", hint='use names joined by dots, such as "model.name"')
        bound = "$" + "".join(f'."{part}"' for part in parts)
        if value is None or isinstance(value, bool):
            conditions.append("json_type(metadata, ?) = ?")
            parameters += [bound, "null" if value is None else str(value).lower()]
            continue
        kinds = "('text')" if isinstance(value, str) else "('integer', 'real')"
        if not isinstance(value, str | int | float):
            raise Validation(
                f"metadata can't be filtered by a {type(value).__name__}", hint="use text, numbers, booleans or None"
            )
        conditions.append(f"json_type(metadata, ?) IN {kinds} AND json_extract(metadata, ?) = ?")
        parameters += [bound, bound, value]
    return conditions, parameters
