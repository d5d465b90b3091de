"""Index records of saves, and the copy of them in packs, from which a lost index is rebuilt (docs/format.md)."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Protocol, TypeAlias

import ormsgpack

from kedge import codec
from kedge.errors import Corrupted
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, to_us
from kedge.ports import Blobs, Buffer, Chunk, Encoding, NewCheckpoint, digest_of

from .request import Request

Wrap: TypeAlias = Callable[[bytes], bytes]

RECORD_MAGIC = b"KDREC1\n\0"
MAX_RECORD_BYTES = 64 << 20
_HEAD = struct.Struct("<8sI32s")  # magic, payload length, BLAKE3 of the payload
# What a pack does not tell of a record: of this save alone, or told by the chunks. `seq` is that of a copy, which keeps
# its number; others get theirs from the index, later.
_UNPACKED = {
    *("stored_bytes", "has_chunks", "new_chunks", "reused_chunks"),
    *("lease_token", "takes_key_from", "status", "key_id"),
}
_NAMES = {"is_pinned": "pinned", "metadata_json": "metadata", "idempotency_key": "key"}
_PACKED = {
    field.name: _NAMES.get(field.name, field.name) for field in fields(NewCheckpoint) if field.name not in _UNPACKED
}


def new_record(
    request: Request,
    checkpoint_id: CheckpointId,
    created_us: int,
    size_bytes: int,
    packed: bytes,
    *,
    content: bytes,
) -> NewCheckpoint:
    """The index record of a save whose chunks are still to be added.

    `content` is what an idempotency key stands for: bytes that no other version of a compressor makes differently.
    """
    digest = digest_of(packed)
    key = request.idempotency_key
    asked = f"{request.level}\0{request.step}\0".encode()
    return NewCheckpoint(
        id=checkpoint_id,
        job=request.job,
        step=request.step,
        level=request.level,
        created_us=created_us,
        size_bytes=size_bytes,
        stored_bytes=len(packed),
        digest=digest,
        codec=codec.CODEC,
        schema_version=request.schema_version,
        manifest=packed,
        parent=request.parent,
        tags=request.tags or {},
        is_pinned=request.is_pinned,
        metadata_json=request.metadata_json,
        lease_token=request.lease.token if request.lease else None,
        idempotency_key=key,
        request_digest=digest_of(asked + content) if key else b"",
    )


def branch_record(
    source: Checkpoint,
    packed: bytes,
    request: Request,
    chunks: Iterable[bytes],
    checkpoint_id: CheckpointId,
    created_us: int,
) -> NewCheckpoint:
    """The record of a checkpoint with the state of `source`, as `request` says; it shares all chunks with `source`."""
    shared = sorted(set(chunks))
    record = new_record(request, checkpoint_id, created_us, source.size_bytes, packed, content=b"")
    return replace(
        record,
        codec=source.codec,
        has_chunks=bool(shared),
        reused_chunks=shared,
        request_digest=record.digest,
    )


def record_of(source: Checkpoint, packed: bytes) -> NewCheckpoint:
    """The record of a checkpoint that exists, but for its number, its status, its idempotency key and its chunks."""
    return NewCheckpoint(
        id=source.id,
        job=source.job,
        step=source.step,
        level=source.level,
        created_us=to_us(source.created_at),
        size_bytes=source.size_bytes,
        stored_bytes=len(packed),
        digest=digest_of(packed),
        codec=source.codec,
        schema_version=source.schema_version,
        manifest=packed,
        parent=source.parent,
        tags=source.tags,
        is_pinned=source.is_pinned,
        metadata_json=json.dumps(dict(source.metadata), ensure_ascii=False, separators=(",", ":")),
    )


def pack_record(namespace: str, record: NewCheckpoint, placed: Sequence[Chunk], wrap: Wrap | None = None) -> bytes:
    """What a pack says of the save that wrote it, so that an index can be rebuilt from packs (docs/format.md).

    Where the namespace is encrypted, `wrap` seals it (`crypto.Vault.wrap_record`).
    """
    payload = ormsgpack.packb(
        {
            "namespace": namespace,
            **{name: getattr(record, field) for field, name in _PACKED.items()},
            "level": str(record.level),
            "tags": dict(record.tags),
            "chunks": [[c.digest, c.size_bytes, c.stored_bytes, int(c.encoding), c.pack, c.offset] for c in placed],
        }
    )
    if wrap is not None:
        payload = wrap(payload)
    return _HEAD.pack(RECORD_MAGIC, len(payload), digest_of(payload)) + payload


def nobody() -> NewCheckpoint:
    """For a record of chunks alone, in a pack that gc has filled."""
    return NewCheckpoint(CheckpointId(""), "", "", CheckpointLevel.STEP, 0, 0, 0, b"", "", "", b"")


def read_records(
    blobs: Blobs, pack: str, unwrap: Wrap | None = None
) -> Iterator[tuple[str, NewCheckpoint, list[Chunk]]]:
    """(namespace, record, chunks) of every whole record in a pack. The ID is "" where there are only chunks.

    With `unwrap`, of those that it opens; without, of those that are plain.
    """
    for offset in blobs.scan(pack, RECORD_MAGIC):
        try:
            head = memoryview(bytearray(_HEAD.size))
            blobs.read_into(pack, offset, head)
            size = _HEAD.size + int(_HEAD.unpack_from(head)[1])
            if size > MAX_RECORD_BYTES:
                continue
            data = memoryview(bytearray(size))
            blobs.read_into(pack, offset, data)
            found = _unpack_record(data, unwrap)
        except (Corrupted, ValueError, KeyError, TypeError):
            continue  # bytes that look like a record and are none, or a damaged one
        if found is not None:
            yield found


class Keys(Protocol):
    """What opens sealed records: `crypto.FoundKeys`, which learns keys from the records themselves, or `NoKeys`."""

    locked: Counter[str]  # records that did not open, by the ID of the master key they want

    @property
    def count(self) -> int:
        """How many data keys are known."""
        ...

    def unwrap_record(self, wrapped: bytes, /) -> bytes: ...


class NoKeys:
    """For a plain store: what is sealed is only counted."""

    count = 0

    def __init__(self) -> None:
        self.locked: Counter[str] = Counter()

    def unwrap_record(self, payload: bytes, /) -> bytes:
        envelope = ormsgpack.unpackb(payload)
        if isinstance(envelope, list) and len(envelope) == 4:
            self.locked[str(json.loads(envelope[2])["master"])] += 1
            raise Corrupted("the record is encrypted, and no key was given")
        return payload


def read_packs(
    blobs: Blobs, packs: Iterable[str], keys: Keys, progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[str, NewCheckpoint, list[Chunk]]]:
    """The records of all these packs; some twice: a pack whose keys turn up in a later one is read again then.

    `keys.locked` says at the end what stayed closed. `progress(done, total)` counts packs.
    """
    waiting, known = list(packs), -1
    while waiting and keys.count != known:
        todo, waiting, known = waiting, [], keys.count
        keys.locked.clear()
        for done, pack in enumerate(todo, 1):
            before = keys.locked.total()
            yield from read_records(blobs, pack, keys.unwrap_record)
            if keys.locked.total() > before:
                waiting.append(pack)
            if progress:
                progress(done, len(todo))


def _unpack_record(data: Buffer, unwrap: Wrap | None) -> tuple[str, NewCheckpoint, list[Chunk]] | None:
    """(namespace, record, chunks) of bytes that begin with a record; None when they do not verify."""
    if len(data) < _HEAD.size:
        return None
    magic, size, digest = _HEAD.unpack_from(data)
    payload = bytes(memoryview(data)[_HEAD.size : _HEAD.size + size])
    if magic != RECORD_MAGIC or len(payload) != size or digest_of(payload) != digest:
        return None
    if unwrap is not None:
        payload = unwrap(payload)
    payload_fields = ormsgpack.unpackb(payload)
    chunks = [Chunk(d, n, s, Encoding(e), pack, offset) for d, n, s, e, pack, offset in payload_fields["chunks"]]
    packed = {field: payload_fields[name] for field, name in _PACKED.items()}
    packed["level"] = CheckpointLevel(packed["level"])
    stored_bytes = len(packed["manifest"]) + sum(c.stored_bytes for c in chunks)
    record = NewCheckpoint(**packed, stored_bytes=stored_bytes, has_chunks=True)
    return payload_fields["namespace"], record, chunks
