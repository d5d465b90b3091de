"""The content of scanned files as one stream of pieces, read when they are stored, and only as far as needed.

Small files are joined into bundles. Their borders follow the names, so that a new file changes one bundle and not all
that follow. Large files are cut by content. Size, times and inode tell whether a file changed since the last save,
unless that save noted that they cannot (`Table.unsettled`). Every file that is read must be the one that was scanned,
before and after (I2).
"""

from __future__ import annotations

import os
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, pairwise

from kedge.chunks import Deferred, Entry, StoredStream
from kedge.errors import CheckpointError
from kedge.ports import Buffer

from .directories import Directories
from .scan import BUNDLE_BYTES, READ_FILE, Scan
from .stored_files import StoredFiles
from .table import APART, Table
from .windows import Windows
from .writers import Writers

PIECE_BYTES = 1 << 20  # average of large files
_LEAST_PIECE_BYTES = PIECE_BYTES // 2
_MOST_PIECE_BYTES = PIECE_BYTES * 2
_WINDOW_BYTES = 4 << 20  # of a large file, read at once
_WINDOWS = 3  # enough to keep the workers busy
_LEAST_BUNDLE_BYTES = BUNDLE_BYTES // 4
_HASHES_PER_BYTE = (1 << 32) // (BUNDLE_BYTES // 2)  # a bundle ends after this many bytes, on average


class Content:
    """A source of chunks (chunks.RecallingSource): the bytes of all files of a scan."""

    def __init__(
        self, scan: Scan, find_earlier: Callable[[object, Callable[[int], StoredStream]], StoredFiles | None]
    ) -> None:
        self._scan = scan
        self._table = scan.table
        self._find_earlier = find_earlier
        self._known: _Known | None = None
        self._cuts = scan.options.cuts
        self._rows, self._starts = self._table.layout()  # of the content
        self.size_bytes = self._starts[-1]
        self._writers = Writers()
        self._apart = bisect_left(self._rows, APART, key=lambda row: self._table.kind[row] & APART)

    def recall(self, earlier: Iterable[tuple[object, Callable[[int], StoredStream]]]) -> None:
        if self._scan.options.always_read or self._known is not None:
            return
        for outline, open_stream in earlier:
            stored = self._find_earlier(outline, open_stream)
            if stored is not None:
                self._known = _Known(stored, self._table)
                return

    def find_unsettled(self) -> None:
        """Note which files may change unnoticed, for a table that is packed before they are read."""
        with Directories(self._table, self._open_root()) as directories:
            for row in self._rows:
                try:
                    os.close(self._open(row, directories))
                except OSError as error:
                    raise self._scan.unreadable(row, error) from error

    def pieces(self) -> Iterator[Buffer | Deferred]:
        windows = Windows(BUNDLE_BYTES)
        for first, last in _bundles(self._table, self._rows[: self._apart]):
            rows, starts = self._rows[first:last], self._starts[first : last + 1]
            entries = self._known.chunks_of(rows, starts) if self._known else []
            size = starts[-1] - starts[0]
            yield Deferred(size, partial(self._read_bundle, rows, windows), entries[0] if len(entries) == 1 else None)
        windows = Windows(_WINDOW_BYTES, _WINDOWS)
        for number in range(self._apart, len(self._rows)):
            row = self._rows[number]
            entries = self._known.chunks_of([row], self._starts[number : number + 2]) if self._known else []
            if not entries:
                borders = self._cuts.get(self._table.path(row)) if row not in self._table.sparse else None
                yield from self._cut(row, windows) if borders is None else self._cut_at(row, borders, windows)
            begins = accumulate((entry.size_bytes for entry in entries), initial=0)
            for entry, start in zip(entries, begins, strict=False):
                yield Deferred(entry.size_bytes, partial(self._read_part, row, start, entry.size_bytes), entry)

    def _read_bundle(self, rows: list[int], windows: Windows) -> memoryview:
        bundle = windows.take()
        end = 0
        with Directories(self._table, self._open_root()) as directories:
            for row in rows:
                start, end = end, end + self._table.size[row]
                self._read(row, directories, 0, bundle[start:end])
        return bundle[:end]

    def _read_part(self, row: int, start: int, size: int) -> memoryview:
        """Read part of a large file's content, for a known chunk that is gone."""
        part = memoryview(bytearray(size))
        with Directories(self._table, self._open_root()) as directories:
            self._read(row, directories, start, part)
        return part

    def _read(self, row: int, directories: Directories, start: int, target: memoryview) -> None:
        try:
            fd = self._open(row, directories)
            try:
                self._fill(row, fd, start, target)
                self._check(row, fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._scan.unreadable(row, error) from error

    def _cut(self, row: int, windows: Windows) -> Iterator[memoryview]:
        """Yield a large file, cut by content. Reads a window, yields the pieces in it, and carries the rest over."""
        with self._opened(row) as fd:
            left = self._table.data_bytes(row)
            rest = memoryview(b"")
            while left or rest:
                window = windows.take()
                window[: len(rest)] = rest
                new = min(left, len(window) - len(rest))
                self._fill(row, fd, self._table.data_bytes(row) - left, window[len(rest) : len(rest) + new])
                left -= new
                window = window[: len(rest) + new]
                borders = _cut_points(window)
                if left:
                    borders.pop()  # the window's end, not the content's
                rest = window[borders[-1] :]
                for start, stop in pairwise(borders):
                    yield window[start:stop]

    def _cut_at(self, row: int, borders: Sequence[int], windows: Windows) -> Iterator[memoryview]:
        """Yield a file cut where the caller said, read in windows of several chunks."""
        with self._opened(row) as fd:
            start = number = 0
            while number < len(borders):
                last = max(bisect_right(borders, start + _WINDOW_BYTES), number + 1)
                size = borders[last - 1] - start
                window = windows.take()[:size] if size <= _WINDOW_BYTES else memoryview(bytearray(size))
                self._fill(row, fd, start, window)
                for end in borders[number:last]:
                    piece, window = window[: end - start], window[end - start :]
                    yield piece
                    start = end
                number = last

    @contextmanager
    def _opened(self, row: int) -> Iterator[int]:
        """Open a large file, and check before and after reading that it is the scanned one."""
        try:
            with Directories(self._table, self._open_root()) as directories:
                fd = self._open(row, directories)
            try:
                self._check(row, fd)
                yield fd
                self._check(row, fd)
            finally:
                os.close(fd)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise self._scan.unreadable(row, error) from error

    def _open_root(self) -> int:
        try:
            return self._scan.open_root()
        except OSError as error:
            raise self._scan.unreadable(0, error) from error

    def _open(self, row: int, directories: Directories) -> int:
        table = self._table
        name = table.names[row] if row else os.path.basename(self._scan.root)
        fd = os.open(name, READ_FILE, dir_fd=directories.fd(table.parent[row]))
        if row not in table.unsettled and self._writers.may_change_unseen(fd, table.device[row]):
            table.unsettled.add(row)
        return fd

    def _fill(self, row: int, fd: int, start: int, target: memoryview) -> None:
        if row not in self._table.sparse and os.preadv(fd, [target], start) == len(target):
            return
        for offset, length in self._table.segments(row, start, len(target)):
            done = 0
            while done < length:
                count = os.preadv(fd, [target[done:length]], offset + done)
                if count == 0:  # truncated meanwhile
                    self._check(row, fd)
                    target[done:length] = bytes(length - done)
                    break
                done += count
            target = target[length:]

    def _check(self, row: int, fd: int) -> None:
        """Raise Conflict unless the open file is the scanned one, unchanged."""
        if self._scan.options.allow_changing:
            return
        status, table = os.fstat(fd), self._table
        if (
            status.st_size != table.size[row]
            or status.st_mtime_ns != table.mtime_ns[row]
            or status.st_ctime_ns != table.ctime_ns[row]
            or status.st_ino != table.inode[row]
            or status.st_dev != table.device[row]
        ):
            raise self._scan.changed(row)


def _cut_points(window: memoryview) -> list[int]:
    """Return where to cut, from 0 to the length of the window."""
    from pyfastcdc import FastCDC

    if len(window) <= _LEAST_PIECE_BYTES:
        return [0, len(window)]
    cutter = FastCDC(avg_size=PIECE_BYTES, min_size=_LEAST_PIECE_BYTES, max_size=_MOST_PIECE_BYTES)
    return [0, *(piece.offset + piece.length for piece in cutter.cut_buf(window))]


def _bundles(table: Table, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield groups of small files up to a chunk: (first, after the last). The hash of a name may end a group."""
    first = total = 0
    for number, row in enumerate(rows):
        size = table.size[row]
        if total + size > BUNDLE_BYTES and total:
            yield first, number
            first, total = number, 0
        total += size
        if total >= _LEAST_BUNDLE_BYTES:
            mark = zlib.crc32(table.names[row], zlib.crc32(table.names[table.parent[row]]))
            if mark < size * _HASHES_PER_BYTE:
                yield first, number + 1
                first, total = number + 1, 0
    if total:
        yield first, len(rows)


class _Known:
    """Which of the files now on disk an earlier save has stored, if that is certain without reading them."""

    def __init__(self, earlier: StoredFiles, table: Table) -> None:
        old = earlier.table
        self._new = table
        self._starts = dict(zip(*old.layout(), strict=False))
        self._entries = earlier.content.entries if earlier.content is not None else ()
        offsets = accumulate((entry.size_bytes for entry in self._entries), initial=0)
        self._chunk_at = {offset: number for number, offset in enumerate(offsets)}
        self._twins = _twins(old, table)
        before: list[object] = [*_signatures(old), None]  # None is the last: no twin, number -1
        now = zip(_signatures(table), self._twins, strict=True)
        self._is_same = bytearray([signature == before[twin] for signature, twin in now])
        for row, ranges in table.sparse.items():
            if self._is_same[row] and old.sparse.get(self._twins[row]) != ranges:
                self._is_same[row] = False

    def chunks_of(self, rows: list[int], starts: list[int]) -> list[Entry]:
        """Return the chunks that contain exactly these files, which now begin and end at `starts`.

        Returns [] if one of them changed, or if they were not together.
        """
        first = self._starts.get(self._twins[rows[0]])
        if first is None or not all(map(self._is_same.__getitem__, rows)):
            return []
        shift = first - starts[0]
        if any(self._starts.get(self._twins[row]) != at + shift for row, at in zip(rows, starts, strict=False)):
            return []
        number = self._chunk_at.get(first)
        last = self._chunk_at.get(starts[-1] + shift)
        return [] if number is None or last is None else list(self._entries[number:last])


def _twins(old: Table, new: Table) -> list[int]:
    """Return for each row of `new` the row of `old` with the same path, or -1."""
    if new.names == old.names and new.parent == old.parent:
        return list(range(len(new)))
    rows = dict(zip(zip(old.parent, old.names, strict=True), range(len(old)), strict=True))
    twins = [0]
    for parent, name in zip(new.parent[1:], new.names[1:], strict=True):
        twins.append(rows.get((twins[parent], name), -1))
    return twins


def _signatures(table: Table) -> Iterator[tuple[int, ...]]:
    return zip(table.kind, table.size, table.mtime_ns, table.ctime_ns, table.inode, table.device, strict=True)
