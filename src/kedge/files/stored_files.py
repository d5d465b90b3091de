"""Files in a store: their table, and their content by verified chunk, read on demand."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from kedge.chunks import Deferred, Entry, StoredStream, allocate, cut_by_content
from kedge.errors import Corrupted

from .table import MAX_TABLE_BYTES, Table, pack_table, parse_table

MAX_CHUNK_BYTES = 64 << 20  # no save creates larger ones; a manifest that claims some would only exhaust memory
_TABLE_CHUNK_BYTES = 64 * 1024
_ZEROS = bytes(1 << 20)


class Part(NamedTuple):
    """Part of a file's content, and where it is in its chunk."""

    row: int
    start: int  # in the file's content
    offset: int  # in the chunk
    size_bytes: int


class StoredFiles:
    """A tree or a single file, not read yet."""

    def __init__(self, is_tree: bool, packed_table: bytes | StoredStream, content: StoredStream | None) -> None:
        self.is_tree = is_tree
        self.packed_table = packed_table
        self.content = content  # None if all files are empty
        self._table: Table | None = None
        self._starts: dict[int, int] | None = None  # row → where its content begins
        self._offsets: list[int] = []  # of the chunks
        self._last: tuple[Entry, memoryview] | None = None
        self._rows: dict[bytes, int] = {}

    @property
    def table(self) -> Table:
        """The table, read and checked once. Raises Corrupted if no save could have written it."""
        if self._table is None:
            packed = self.packed_table
            data = packed if isinstance(packed, bytes) else _read_all(packed)
            size = self.content.size_bytes if self.content is not None else 0
            self._table = parse_table(data, content_bytes=size, is_tree=self.is_tree)
        return self._table

    def row_of(self, path: bytes) -> int | None:
        """Return the row of a path below the root."""
        if not self._rows:
            self._rows = {name: row for row, name in enumerate(self.table.paths())}
        return self._rows.get(path) or None

    def parts(self, row: int) -> Iterator[tuple[StoredStream, Entry, Part]]:
        """Yield the chunks with a file's content, in order, each with the stream to read it from."""
        if self._starts is None:
            rows, starts = self.table.layout()
            self._starts = dict(zip(rows, starts, strict=False))
        if self.content is None or row not in self._starts:
            return
        entries = self.content.entries
        if not self._offsets:
            self._offsets = list(accumulate((entry.size_bytes for entry in entries), initial=0))
        begin = self._starts[row]
        end = begin + self.table.data_bytes(row)
        number = bisect_right(self._offsets, begin) - 1
        while number < len(entries) and (at := self._offsets[number]) < end:
            first, last = max(begin, at), min(end, self._offsets[number + 1])
            yield self.content, entries[number], Part(row, first - begin, first - at, last - first)
            number += 1

    def pieces(self, row: int) -> Iterator[memoryview | bytes]:
        """Yield the content of a file, holes as zeros. A piece is valid until the next one."""
        position = 0
        for stream, entry, part in self.parts(row):
            data = self._chunk(entry, stream)[part.offset : part.offset + part.size_bytes]
            for offset, length in self.table.segments(row, part.start, part.size_bytes):
                yield from _zeros(offset - position)
                yield data[:length]
                data, position = data[length:], offset + length
        yield from _zeros(self.table.size[row] - position)

    def window(self, row: int, offset: int, size_bytes: int) -> Iterator[memoryview | bytes]:
        """The same for part of a file: reads only the chunks that contain it."""
        end = min(offset + size_bytes, self.table.size[row])
        position = offset
        for stream, entry, part in self.parts(row):
            inside = part.offset
            for start, length in self.table.segments(row, part.start, part.size_bytes):
                first, last = max(start, position), min(start + length, end)
                if first < last:
                    yield from _zeros(first - position)
                    yield self._chunk(entry, stream)[inside + first - start : inside + last - start]
                    position = last
                inside += length
            if position >= end:
                return
        yield from _zeros(end - position)

    def _chunk(self, entry: Entry, stream: StoredStream) -> memoryview:
        """Return a chunk. The last one is kept, because consecutive small files share it."""
        last = self._last
        if last is None or last[0] != entry:
            self._last = None  # first, so that not both are in memory
            last = self._last = (entry, read_chunk(entry, stream).toreadonly())
        return last[1]


def read_chunk(entry: Entry, stream: StoredStream) -> memoryview:
    """Return the bytes of one chunk, verified."""
    check_size(entry, stream)
    data = memoryview(bytearray(entry.size_bytes))
    stream.reader.read([(entry, data)], of=stream.of)
    return data


def parts_of_chunks(table: Table, stream: StoredStream) -> Iterator[tuple[Entry, list[Part]]]:
    """Yield each chunk of the stream with its parts of files."""
    rows, starts = table.layout()
    number = begin = 0
    for entry in stream.entries:
        check_size(entry, stream)
        end = begin + entry.size_bytes
        parts = []
        while number < len(rows) and starts[number] < end:
            first, last = max(starts[number], begin), min(starts[number + 1], end)
            parts.append(Part(rows[number], first - starts[number], first - begin, last - first))
            if starts[number + 1] > end:
                break
            number += 1
        yield entry, parts
        begin = end


def check_size(entry: Entry, stream: StoredStream) -> None:
    if entry.size_bytes > MAX_CHUNK_BYTES:
        raise Corrupted(f"a chunk of {stream.of} claims {entry.size_bytes:,} bytes", hint="run kedge check")


class StoredSource:
    """A stream to be saved again: reads nothing in the same store, and only missing chunks in another one."""

    def __init__(self, stream: StoredStream) -> None:
        self.stream = stream
        self.size_bytes = stream.size_bytes

    def pieces(self) -> Iterator[Deferred]:
        for entry in self.stream.entries:
            yield Deferred(entry.size_bytes, partial(read_chunk, entry, self.stream), entry)


class TableSource:
    """A table to be saved, cut by content: a small change stores little.

    It is packed after the content is stored, because reading that shows which files are unsettled.
    """

    def __init__(self, table: Table, size_bytes: int) -> None:
        self._table = table
        self.size_bytes = size_bytes  # when packed, whatever is unsettled

    def pieces(self) -> Iterator[memoryview]:
        return cut_by_content(pack_table(self._table), _TABLE_CHUNK_BYTES)


def _read_all(stream: StoredStream) -> bytes:
    if stream.size_bytes > MAX_TABLE_BYTES:
        raise Corrupted(f"a table of {stream.of} claims {stream.size_bytes:,} bytes", hint="run kedge check")
    data = allocate(stream.size_bytes)
    targets, offset = [], 0
    for entry in stream.entries:
        targets.append((entry, data[offset : offset + entry.size_bytes]))
        offset += entry.size_bytes
    stream.reader.read(targets, of=stream.of)
    return bytes(data)


def _zeros(size: int) -> Iterator[bytes]:
    while size > 0:
        yield _ZEROS[:size]
        size -= len(_ZEROS)
