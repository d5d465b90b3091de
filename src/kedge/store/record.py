"""Index records of saves, and their copies in packs, from which a lost index is rebuilt (docs/format.md)."""

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
SAVES = 2  # the kind of record written today, bound to its pack
_UNBOUND = 1  # the earlier kind, in packs of format 1: user content that looked like a record was taken for one
OPTIONAL_KINDS = 0x8000  # readers skip unknown kinds from here on
_HEAD = struct.Struct("<8sHHI16s")  # magic, kind, encoding, payload length, writing version; BLAKE3 of all follows
_HEAD_BYTES = _HEAD.size + 32
_OLD_HEADER_BYTES = 48  # the meaningful part of a pack's header
# Fields of a save that a record in a pack omits: those needed only by the commit, and those in `chunks`.
_UNPACKED = {"new_chunks", "reused_chunks", "lease_token", "takes_key_from", "status", "key_id", "then", "provided"}
_NAMES = {"is_pinned": "pinned", "metadata_json": "metadata", "idempotency_key": "key"}
_PACKED = {
    field.name: _NAMES.get(field.name, field.name) for field in fields(NewCheckpoint) if field.name not in _UNPACKED
}
_values = attrgetter(*_PACKED)
_OF_CHUNK = ("digest", "size_bytes", "stored_bytes", "encoding", "pack", "offset")  # and `base`, if any


@dataclass(frozen=True, slots=True)
class PackRecord:
    """The content of one record in a pack: saves, and where chunks are."""

    namespace: str
    saves: Sequence[NewCheckpoint]
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True)
class Draft:
    """A record for a pack that is not known yet.

    The digest covers the pack's name, which is random and secret. So nothing a user saves passes for a record, neither
    in the pack it was written to nor in one of another store.
    """

    head: bytes
    payload: bytes

    @property
    def size_bytes(self) -> int:
        return _HEAD_BYTES + len(self.payload)

    def bound_to(self, pack: str) -> bytes:
        return self.head + digest_of(pack.encode() + self.head + self.payload) + self.payload


def append_record(writer: BlobWriter, draft: Draft, likely: str = "") -> tuple[str, int]:
    """Append a record to the pack that takes it, probably `likely`. Return (pack, offset)."""
    pack = likely or writer.append(b"")[0]
    while True:
        place = writer.append(draft.bound_to(pack))
        if place[0] == pack:
            return place
        pack = place[0]  # a new pack was begun: the copy in it is bound to the other one, and is void


def pack_record(record: PackRecord, wrap: Wrap | None = None) -> Draft:
    """Return a record for a pack, so that an index can be rebuilt from packs (docs/format.md).

    In an encrypted namespace, `wrap` seals it (`crypto.Vault.wrap_record`).
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
    """Yield every complete record in a pack: sealed ones that `unwrap` opens and, if `is_plain`, plain ones.

    Raises UnsupportedFormat for one that a newer Kedge wrote and this one would misread.
    """
    bound_to: str | None = None  # read only when needed
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
            continue  # bytes that only look like a record, or a damaged one
        if record is not None:
            yield record


def _is_old(blobs: Blobs, pack: str) -> bool:
    """Return whether a pack's format does not bind records to it. Only Kedge can have written its name there."""
    start = memoryview(bytearray(_OLD_HEADER_BYTES))
    try:
        blobs.read_into(pack, 0, start)
    except (Corrupted, NotFound):
        return False  # shorter than a header
    return start == header(pack, 1)[:_OLD_HEADER_BYTES]


def _unpack_record(data: bytes, bound_to: str, unwrap: Wrap | None, is_plain: bool) -> PackRecord | None:
    """Return the record in `data`; None if it does not verify, or is of a kind that readers may skip."""
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
    """Opens sealed records: `crypto.Keyrings`, which learns keys from the records themselves, or `NoKeys`."""

    locked: Counter[str]  # records that did not open, by the ID of their master key

    @property
    def closed(self) -> Mapping[str, str]:
        """Namespaces with no record that opens, and the ID of their master key."""
        ...

    @property
    def count(self) -> int:
        """The number of known data keys."""
        ...

    def unwrap_record(self, wrapped: bytes, /) -> bytes: ...


class NoKeys:
    """The keys of a plain store: sealed records are only counted."""

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
    """Yield the records of all these packs; a pack is read again if its keys appear in a later one.

    Its records are then yielded twice. At the end `keys.locked` tells which did not open. `progress(done, total)`
    counts packs.
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
