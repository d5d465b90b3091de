"""Index records of saves, and the copy of them in packs, from which a lost index is rebuilt (docs/format.md)."""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import ormsgpack
import zstandard

from kedge.blobs.pack_file import header
from kedge.errors import Corrupted, NotFound
from kedge.model import CheckpointLevel
from kedge.ports import READABLE, Blobs, BlobWriter, Chunk, Encoding, NewCheckpoint, digest_of, unsupported
from kedge.version import __version__

from .manifest import COMPRESS_OVER_BYTES, decompress

Wrap: TypeAlias = Callable[[bytes], bytes]

RECORD_MAGIC = b"KDREC1\n\0"
MAX_RECORD_BYTES = 64 << 20
SAVES = 2  # the kind of record that is written today, bound to its pack
_UNBOUND = 1  # as before, in packs of format 1: content that looked like a record was taken for one
OPTIONAL_KINDS = 0x8000  # a reader skips a kind from here on if it does not know it
_HEAD = struct.Struct("<8sHHI16s")  # magic, kind, encoding, payload length, writing version; BLAKE3 of all follows
_HEAD_BYTES = _HEAD.size + 32
_OLD_HEADER_BYTES = 48  # of a pack, as far as it says something
# What a record in a pack does not say of a save: what mattered to its commit alone, and what `chunks` says.
_UNPACKED = {"new_chunks", "reused_chunks", "lease_token", "takes_key_from", "status", "key_id", "then", "provided"}
_NAMES = {"is_pinned": "pinned", "metadata_json": "metadata", "idempotency_key": "key"}
_PACKED = {
    field.name: _NAMES.get(field.name, field.name) for field in fields(NewCheckpoint) if field.name not in _UNPACKED
}
_values = attrgetter(*_PACKED)
_OF_CHUNK = ("digest", "size_bytes", "stored_bytes", "encoding", "pack", "offset")  # and `base`, where there is one


@dataclass(frozen=True, slots=True)
class PackRecord:
    """What one record of a pack tells: saves, and where chunks are."""

    namespace: str
    saves: Sequence[NewCheckpoint]
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class Draft:
    """A record for a pack that is not known yet.

    The pack's name, which is random and told to nobody, is part of the digest: what users save, whatever it looks like,
    is no record, neither where it was written nor in the pack of another store.
    """

    head: bytes
    payload: bytes

    @property
    def size_bytes(self) -> int:
        return _HEAD_BYTES + len(self.payload)

    def bound_to(self, pack: str) -> bytes:
        return self.head + digest_of(pack.encode() + self.head + self.payload) + self.payload


def append_record(writer: BlobWriter, draft: Draft, likely: str = "") -> tuple[str, int]:
    """Append a record to whichever pack takes it; `likely` took what came before. Answers (pack, offset)."""
    pack = likely or writer.append(b"")[0]
    while True:
        place = writer.append(draft.bound_to(pack))
        if place[0] == pack:
            return place
        pack = place[0]  # a new one was begun: what went there is bound to another, and is nothing


def pack_record(record: PackRecord, wrap: Wrap | None = None) -> Draft:
    """A record to be appended to a pack, so that an index can be rebuilt from packs (docs/format.md).

    Where the namespace is encrypted, `wrap` seals it (`crypto.Vault.wrap_record`).
    """
    payload = ormsgpack.packb(
        {
            "namespace": record.namespace,
            "saves": [_save_fields(save) for save in record.saves],
            "chunks": [_chunk_fields(chunk) for chunk in record.chunks],
        }
    )
    encoding = Encoding.RAW
    if len(payload) > COMPRESS_OVER_BYTES:
        squeezed = zstandard.ZstdCompressor(level=1).compress(payload)
        if len(squeezed) < 0.9 * len(payload):
            payload, encoding = squeezed, Encoding.ZSTD
    if wrap is not None:
        payload, encoding = wrap(payload), encoding | Encoding.SEALED
    return Draft(_HEAD.pack(RECORD_MAGIC, SAVES, encoding, len(payload), __version__.encode()), payload)


def _save_fields(save: NewCheckpoint) -> dict[str, object]:
    packed = dict(zip(_PACKED.values(), _values(save), strict=True))
    packed["level"], packed["tags"] = str(save.level), dict(save.tags)
    return packed


def _chunk_fields(chunk: Chunk) -> dict[str, object]:
    packed = {name: getattr(chunk, name) for name in _OF_CHUNK} | {"encoding": int(chunk.encoding)}
    return packed if chunk.base is None else {**packed, "base": chunk.base}


def read_records(blobs: Blobs, pack: str, unwrap: Wrap | None = None, *, is_plain: bool = True) -> Iterator[PackRecord]:
    """Every whole record in a pack: sealed ones that `unwrap` opens, and, where `is_plain`, those that are not sealed.

    UnsupportedFormat for one that a newer Kedge has written and this one would misunderstand.
    """
    bound_to: str | None = None  # until it matters
    for offset in blobs.scan(pack, RECORD_MAGIC):
        if bound_to is None:
            bound_to = "" if _is_old(blobs, pack) else pack
        try:
            head = memoryview(bytearray(_HEAD_BYTES))
            blobs.read_into(pack, offset, head)
            size = _HEAD_BYTES + int(_HEAD.unpack_from(head)[3])
            if size > MAX_RECORD_BYTES:
                continue
            data = memoryview(bytearray(size))
            blobs.read_into(pack, offset, data)
            record = _unpack_record(bytes(data), bound_to, unwrap, is_plain)
        except (Corrupted, ValueError, TypeError, AttributeError):
            continue  # bytes that look like a record and are none, or a damaged one
        if record is not None:
            yield record


def _is_old(blobs: Blobs, pack: str) -> bool:
    """Whether a pack is of the format whose records are not bound to it. Only Kedge can have written its name there."""
    start = memoryview(bytearray(_OLD_HEADER_BYTES))
    try:
        blobs.read_into(pack, 0, start)
    except (Corrupted, NotFound):
        return False  # shorter than a header
    return start == header(pack, 1)[:_OLD_HEADER_BYTES]


def _unpack_record(data: bytes, bound_to: str, unwrap: Wrap | None, is_plain: bool) -> PackRecord | None:
    """The record that `data` is; None for one that does not verify, or of a kind that a reader may pass over."""
    magic, kind, encoding, size, author = _HEAD.unpack_from(data)
    payload = data[_HEAD_BYTES:]
    digest = digest_of(bound_to.encode() + data[: _HEAD.size] + payload)
    if magic != RECORD_MAGIC or len(payload) != size or digest != data[_HEAD.size : _HEAD_BYTES]:
        return None
    written_by = author.rstrip(b"\0").decode("ascii", "replace")
    if kind != (SAVES if bound_to else _UNBOUND):
        if kind >= OPTIONAL_KINDS:
            return None
        raise unsupported(f"a record in a pack (kind {kind})", written_by)
    if encoding & ~READABLE:
        raise unsupported(f"a record in a pack (encoding {encoding:#x})", written_by)
    is_sealed = Encoding(encoding).is_sealed
    if is_sealed != (unwrap is not None) and not (is_plain and not is_sealed):
        return None
    if is_sealed and unwrap is not None:
        payload = unwrap(payload)
    if Encoding(encoding).is_zstd:
        payload = decompress(payload, MAX_RECORD_BYTES)
    content = ormsgpack.unpackb(payload)
    if not isinstance(content, dict):
        return None
    if needs := content.get("needs"):
        raise unsupported(f"a record in a pack (needs {', '.join(map(str, needs))})", written_by)
    try:
        chunks = [_chunk(packed, written_by) for packed in content["chunks"]]
        return PackRecord(content["namespace"], [_save(packed) for packed in content["saves"]], chunks)
    except KeyError as missing:
        raise unsupported(f"a record in a pack (without {missing})", written_by) from missing


def _save(packed: dict[str, Any]) -> NewCheckpoint:
    values = {field: packed[name] for field, name in _PACKED.items()}
    return NewCheckpoint(**{**values, "level": CheckpointLevel(packed["level"])})


def _chunk(packed: dict[str, Any], written_by: str) -> Chunk:
    encoding = packed["encoding"]
    if encoding & ~READABLE:
        raise unsupported(f"chunk {packed['digest'].hex()[:16]}… (encoding {encoding:#x})", written_by)
    values = {name: packed[name] for name in _OF_CHUNK}
    return Chunk(**{**values, "encoding": Encoding(encoding)}, base=packed.get("base"))


class Keys(Protocol):
    """What opens sealed records: `crypto.Keyrings`, which learns keys from the records themselves, or `NoKeys`."""

    locked: Counter[str]  # records that did not open, by the ID of the master key they want

    @property
    def closed(self) -> Mapping[str, str]:
        """Namespaces of which nothing opens, with the ID of the master key they want."""
        ...

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
        self.closed: dict[str, str] = {}

    def unwrap_record(self, payload: bytes, /) -> bytes:
        _, namespace, keyring, _ = ormsgpack.unpackb(payload)
        master = str(json.loads(keyring)["master"])
        self.locked[master] += 1
        self.closed[str(namespace)] = master
        raise Corrupted("the record is encrypted, and no key was given")


def read_packs(
    blobs: Blobs, packs: Iterable[str], keys: Keys, progress: Callable[[int, int], None] | None = None
) -> Iterator[PackRecord]:
    """The records of all these packs; some twice: a pack whose keys turn up in a later one is read again then.

    `keys.locked` says at the end what stayed closed. `progress(done, total)` counts packs.
    """
    waiting, known = list(packs), -1
    while waiting and keys.count != known:
        todo, waiting, known = waiting, [], keys.count
        keys.locked.clear()
        for done, pack in enumerate(todo, 1):
            before = keys.locked.total()
            yield from read_records(blobs, pack, keys.unwrap_record, is_plain=isinstance(keys, NoKeys))
            if keys.locked.total() > before:
                waiting.append(pack)
            if progress:
                progress(done, len(todo))
