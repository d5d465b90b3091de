"""The manifest: the encoded state tree plus references to chunks (docs/format.md, "Manifest").

    buffer    one out-of-band piece of the state, known to the tree by its ordinal
    stream    bytes cut into chunks: a large buffer has its own, small buffers share one, a large tree has one
    entry     one chunk of a stream: length, BLAKE3; a digest of zeros marks a run of zero bytes

The first byte is the form:
    1  the tree                      4  [length, table]: the real manifest is itself stored in chunks
    2  the tree, zstd-compressed
    3  [tree or nil, tree stream, buffers, stream tables] as MessagePack
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import ormsgpack
import zstandard

from kedge.chunks import INLINE_BYTES, ZERO, Entry
from kedge.errors import Corrupted
from kedge.ports import ENVELOPE, UNREADABLE, unsupported

MAX_TREE_BYTES = 1 << 30  # limit for the expanded size a tree claims
COMPRESS_OVER_BYTES = 4096
SPILL_OVER_BYTES = 256 * 1024  # a larger manifest moves into chunks, so that index rows stay small

WHOLE_TREE = b"\x01"  # form 1: the tree follows, all of it

_ENTRY = struct.Struct("<I32s")
_SPAN = struct.Struct("<IQQ?")


@dataclass(frozen=True, slots=True)
class Span:
    """Where a buffer is: `size_bytes` from `offset` of a stream. A lazy one stays in the store until requested."""

    stream: int
    offset: int
    size_bytes: int
    is_lazy: bool = False


@dataclass(slots=True)
class Manifest:
    """A parsed manifest. Never mutated, but not frozen: that would make each small load slower."""

    tree: bytes | None  # None: in stream `tree_stream`
    tree_stream: int = -1
    buffers: list[Span] = field(default_factory=list)
    streams: list[list[Entry]] = field(default_factory=list)

    def digests(self) -> Iterator[bytes]:
        """Yield the digests of the chunks in this manifest, without zero runs."""
        for stream in self.streams:
            for entry in stream:
                if entry.digest != ZERO:
                    yield entry.digest


def pack_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest (forms 1 to 3)."""
    tree = manifest.tree
    if not manifest.streams and tree is not None:
        return pack_tree(tree)
    spans = b"".join(_SPAN.pack(s.stream, s.offset, s.size_bytes, s.is_lazy) for s in manifest.buffers)
    tables = [pack_table(stream) for stream in manifest.streams]
    return b"\x03" + ormsgpack.packb([tree, manifest.tree_stream, spans, tables])


def pack_tree(tree: bytes) -> bytes:
    """Return the manifest of a state that fits into its tree (forms 1 and 2)."""
    if len(tree) > COMPRESS_OVER_BYTES:
        squeezed = zstandard.ZstdCompressor(level=1).compress(tree)
        if len(squeezed) < 0.9 * len(tree):
            return b"\x02" + squeezed
    return WHOLE_TREE + tree


def pack_root(size_bytes: int, table: list[Entry]) -> bytes:
    """Return form 4: the root of a manifest that was itself cut into chunks."""
    return b"\x04" + ormsgpack.packb([size_bytes, pack_table(table)])


def pack_table(entries: list[Entry]) -> bytes:
    return b"".join(_ENTRY.pack(e.size_bytes, e.digest) for e in entries)


def unpack_table(table: bytes) -> list[Entry]:
    return [Entry(*fields) for fields in _ENTRY.iter_unpack(table)]


def root_of(data: bytes) -> tuple[int, list[Entry]] | None:
    """Return (length, entries) of a form 4 manifest; None for other forms."""
    if data[:1] != b"\x04":
        return None
    with _corrupted_as("root"):
        size_bytes, table = ormsgpack.unpackb(data[1:])
        entries = unpack_table(table)
        if not isinstance(size_bytes, int) or size_bytes != sum(e.size_bytes for e in entries):
            raise ValueError("lengths do not add up")
        return size_bytes, entries


def parse_manifest(data: bytes, read_spilled: Callable[[int, list[Entry]], bytes], written_by: str = "") -> Manifest:
    """Parse a manifest; `read_spilled` fetches the chunks of form 4. Raises Corrupted for invalid data.

    Raises UnsupportedFormat for an unknown form; `written_by` names the Kedge that may know it.
    """
    root = root_of(data)
    if root is not None:
        data = read_spilled(*root)
    form = data[:1]
    if form == WHOLE_TREE:
        return Manifest(data[1:])
    if form == b"\x02":
        return Manifest(decompress(data[1:], MAX_TREE_BYTES))
    if form in (b"", UNREADABLE, bytes([ENVELOPE])):
        raise Corrupted("the manifest is empty, or does not decrypt", hint="run kedge check")
    if form != b"\x03":
        raise unsupported(f"a manifest (form {form[0]})", written_by)
    with _corrupted_as("table"):
        tree, tree_stream, spans, tables = ormsgpack.unpackb(data[1:])
        streams = [unpack_table(table) for table in tables]
        sizes = [sum(e.size_bytes for e in stream) for stream in streams]
        buffers = [Span(*fields) for fields in _SPAN.iter_unpack(spans)]
        if any(s.offset + s.size_bytes > sizes[s.stream] for s in buffers):
            raise ValueError("a buffer lies outside its stream")
        if not (tree is None and 0 <= tree_stream < len(streams)) and not isinstance(tree, bytes):
            raise ValueError("no tree")
        return Manifest(tree, tree_stream, buffers, streams)


def parse_small(data: bytes) -> Manifest:
    """Parse an untrusted manifest of form 1 or 2 whose tree fits into a row. Raises Corrupted for any other."""
    tree = decompress(data[1:], INLINE_BYTES) if data[:1] == b"\x02" else data[1:]
    if data[:1] not in (WHOLE_TREE, b"\x02") or len(tree) > INLINE_BYTES:
        raise Corrupted("it is not a tree that fits into a row")
    return Manifest(tree)


class _Local(threading.local):
    """A decompressor for each thread: creating one takes longer than decompressing a short text."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_local = _Local()


def decompress(data: bytes | bytearray | memoryview, limit: int) -> bytes:
    """Decompress `data`. Raises Corrupted unless it declares its size, within `limit`.

    The declared size is checked first because the library ignores its own `max_output_size` if a size is declared.
    """
    declared = 0
    try:
        declared = zstandard.frame_content_size(data)
        if not 0 <= declared <= limit:
            raise Corrupted(f"compressed data claims {declared:,} bytes, at most {limit:,} fit", hint="run kedge check")
        plain = _local.decompressor.decompress(data)
    except zstandard.ZstdError as error:
        bytearray(2 * declared)  # raises MemoryError if the library ran out of memory: then the bytes may be sound
        raise Corrupted(f"compressed data is damaged: {error}", hint="run kedge check") from error
    if len(plain) != declared:
        raise Corrupted("compressed data is shorter than it claims", hint="run kedge check")
    return plain


@contextmanager
def _corrupted_as(part: str) -> Iterator[None]:
    """Raise Corrupted for any error while parsing: the bytes are not a manifest."""
    try:
        yield
    except (ValueError, TypeError, IndexError, struct.error) as error:
        raise Corrupted(f"the manifest's {part} is damaged: {error}", hint="run kedge check") from error
