"""A checkpoint on its way into an index and out of it: the record of a save, its row, and their conversions.

To add a field, change this module, `model.Checkpoint` and the SQL. Packs, envelopes, readable files, the queue of
processes and the service's answers follow from these fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from blake3 import blake3

from kedge.errors import Corrupted
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, CheckpointStatus, new_checkpoint, to_datetime, to_us

from .values import Buffer, Chunk, Provided, Then

SEQ_BITS = 32
LAST_SEQ = (1 << SEQ_BITS) - 1

_decode = json.JSONDecoder().decode
_LEVELS = {str(level): level for level in CheckpointLevel}  # enum look-ups take twenty times as long
_STATUSES = {str(status): status for status in CheckpointStatus}


def digest_of(data: Buffer) -> bytes:
    """Return the BLAKE3 digest, 32 bytes, which names and verifies chunks, manifests and records."""
    return blake3(data).digest()


@dataclass(slots=True)
class NewCheckpoint:
    """All one save writes to the index. Never mutated, but not frozen: that would make each small save 5 % slower."""

    id: CheckpointId
    job: str
    step: str
    level: CheckpointLevel
    created_us: int
    size_bytes: int
    stored_bytes: int
    digest: bytes  # BLAKE3 of `manifest`
    codec: str
    schema_version: str
    manifest: bytes
    parent: CheckpointId | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    is_pinned: bool = False
    metadata_json: str = "{}"
    has_chunks: bool = False  # the manifest references chunks; gc reads only such manifests
    new_chunks: Sequence[Chunk] = ()  # already durable in their packs, or inline
    reused_chunks: Sequence[bytes] = ()  # digests that must still exist when this commits
    lease_token: int | None = None
    idempotency_key: str | None = None
    request_digest: bytes = b""  # must match when the idempotency key is used again
    takes_key_from: CheckpointId | None = None  # the checkpoint that has the key until this is saved
    seq: int | None = None  # given when an index is rebuilt or a history copied; otherwise the job's next number
    status: CheckpointStatus = CheckpointStatus.CREATED
    key_id: str = ""  # the data key this is sealed under; must still be current at the commit
    then: Then | None = None
    provided: Provided | None = None

    @classmethod
    def of(cls, source: Checkpoint, manifest: bytes) -> NewCheckpoint:
        """The record of an existing checkpoint, without its number, status, idempotency key and chunks."""
        same = {name: getattr(source, name) for name in _KEPT}
        return cls(
            **same,
            created_us=to_us(source.created_at),
            stored_bytes=len(manifest),
            digest=digest_of(manifest),
            manifest=manifest,
            metadata_json=json.dumps(dict(source.metadata), ensure_ascii=False, separators=(",", ":")),
        )

    def saved(self, seq: int, digest: str) -> Checkpoint:
        """Return the saved checkpoint, equal to what a reader makes of its row, without reading it."""
        return new_checkpoint(
            self.id, self.job, seq, self.step, self.level, self.parent, to_datetime(self.created_us), self.status,
            self.size_bytes, self.stored_bytes, digest, self.codec, self.schema_version, self.tags, self.is_pinned,
            _decode(self.metadata_json) if self.metadata_json != "{}" else {},
        )  # fmt: skip


# The fields that the record of an existing checkpoint takes over unchanged.
_KEPT = set(NewCheckpoint.__slots__) & set(Checkpoint.__slots__) - {"seq", "status", "stored_bytes", "digest"}


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


def checkpoint_of(job: str, columns: Iterable[Any]) -> Checkpoint:
    """Return the checkpoint of a row. Raises Corrupted if no save can have written the row (I2)."""
    row, id_, step, level, parent, created_us, status, size, stored, digest, codec, version, tags, pinned, meta = (
        columns
    )
    try:
        return new_checkpoint(
            id_, job, row & LAST_SEQ, step, _LEVELS[level], parent, to_datetime(created_us), _STATUSES[status], size,
            stored, digest.hex(), codec, version, _decode(tags) if tags else {}, bool(pinned),
            _decode(meta) if meta else {},
        )  # fmt: skip
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise Corrupted(f"the row of checkpoint {id_} is damaged: {error}", hint="run kedge check --repair") from error


def columns_of(new: NewCheckpoint) -> tuple[object, ...]:
    """The row of a save, after its number: the columns of a CheckpointRow, `has_chunks` and the manifest."""
    return (
        new.id, new.step, str(new.level), new.parent, new.created_us, str(new.status), new.size_bytes,
        new.stored_bytes, new.digest, new.codec, new.schema_version,
        json.dumps(dict(new.tags), ensure_ascii=False) if new.tags else None,  # refuses text that UTF-8 cannot hold
        new.is_pinned, None if new.metadata_json == "{}" else new.metadata_json, new.has_chunks,
        new.manifest,
    )  # fmt: skip


def record_from_row(job: str, columns: Iterable[Any], *, has_chunks: bool, manifest: bytes) -> NewCheckpoint:
    """Return the save that wrote a row, as far as the row tells.

    Raises ValueError, KeyError or TypeError if no save can have written it.
    """
    values = CheckpointRow._make(columns)._asdict()
    values["seq"] = values.pop("row") & LAST_SEQ
    values["level"], values["status"] = _LEVELS[values["level"]], _STATUSES[values["status"]]
    values["tags"] = _decode(values["tags"]) if values["tags"] else {}
    values["is_pinned"] = bool(values["is_pinned"])
    values["metadata_json"] = values.pop("metadata") or "{}"
    return NewCheckpoint(**values, job=job, has_chunks=has_chunks, manifest=manifest)


# The immutable, public fields of a checkpoint. The rest of its row is sealed, or proved by what is sealed.
_LASTING = tuple(
    name
    for name in CheckpointRow._fields
    if name not in {"row", "step", "created_us", "status", "stored_bytes", "digest", "tags", "is_pinned", "metadata"}
)
_lasting = attrgetter(*_LASTING)


def lasting(row: Checkpoint | NewCheckpoint, job: str, created_us: int) -> list[object]:
    """Return what the envelope of a row is bound to (I10), the same for saving and reading."""
    id_, level, parent, *others = _lasting(row)
    return [id_, job, str(level), parent, created_us, *others]


# The fields another process needs to commit a small save without chunks, tags, conditions or further changes.
SMALL = tuple(
    name
    for name in NewCheckpoint.__slots__
    if name
    not in {"tags", "has_chunks", "new_chunks", "reused_chunks", "takes_key_from", "seq", "key_id", "then", "provided"}
)
small_values = attrgetter(*SMALL)


def small_record(values: Iterable[Any]) -> NewCheckpoint:
    """Return the record that has these `small_values`."""
    named = dict(zip(SMALL, values, strict=True))
    named["level"], named["status"] = _LEVELS[named["level"]], _STATUSES[named["status"]]
    return NewCheckpoint(**named)


SavedRow = tuple[NewCheckpoint, bytes]  # (record to save it again under its number, digest of its row)


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """What only the index has, oldest first, up to and including event `up_to`; see `Index.unrecorded`.

    `newest` is the last event there was to read.
    """

    rows: Sequence[SavedRow]
    chunks: Sequence[Chunk]
    up_to: int
    newest: int
