"""The entry table: what a tree of files consists of, apart from the bytes in the files (docs/format.md, "Files").

One row per entry, row 0 is the root itself, and a row comes after the directory it is in. A row names its directory
by number and itself by one name: no path is ever stored, so that none can lead out of the tree.
Rows are kept as columns: an unchanged column is an unchanged chunk, and most columns stay as they are from save to
save. A column that a reader does not know is ignored; a version that it does not know is refused (I8).

The content of all files is one stream: first the small files, in the order of their rows, then those that stand
`APART`, each beginning with a chunk of its own. Holes of sparse files are not in it.

Packed: a msgpack map. Numbers are little-endian columns with one value per row, but for those said otherwise.

    version                          1; 2 with fifos, devices or attributes
    kind                   u8        0 file, 0x80 file apart, 1 directory, 2 symlink, 3 hard link,
                                     4 fifo, 5 character device, 6 block device
    names                            joined by NUL; of the root of a tree ""
    parent, mode, uid, gid u32       mode: the permission bits
    size                   u64       of files, else 0
    mtime_ns, ctime_ns     i64       since the epoch; ctime_ns -1: the times of this file cannot tell a later change
    inode, device          u64
    targets                          of the symlinks, in the order of their rows, joined by NUL
    links                  u32       of the hard links, in the order of their rows: the row of the file
    sparse                           [[row, offset, length, offset, length, …], …]: the parts that are not holes
    skipped                          [[path, what it is], …]: what was left out
    devices                u32       of the devices, in the order of their rows: major, minor       (version 2)
    attributes                       [[row, name, value, name, value, …], …]: extended attributes  (version 2)
"""

from __future__ import annotations

import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, chain
from operator import lt
from typing import Any, Final, NamedTuple

import ormsgpack

from kedge.errors import Corrupted, UnsupportedFormat

VERSION = 1
VERSION_EXACT = 2  # written only where needed, so that an older Kedge reads all the rest
MAX_TABLE_BYTES = 1 << 30
MAX_ROWS = 10_000_000
MAX_DEPTH = 4096
UNSETTLED: Final = -1  # a ctime_ns

# Kinds of rows: plain numbers, because tables have many rows.
FILE: Final = 0
DIRECTORY: Final = 1
SYMLINK: Final = 2
HARD_LINK: Final = 3  # another name of an earlier file
FIFO: Final = 4
CHARACTER_DEVICE: Final = 5
BLOCK_DEVICE: Final = 6
DEVICES: Final = (CHARACTER_DEVICE, BLOCK_DEVICE)
APART: Final = 0x80  # a file whose content is in the second part of the stream

Ranges = list[tuple[int, int]]  # (offset, length) of the parts of a sparse file that are not holes

KIND_NAMES = {
    FILE: "file", APART: "file", DIRECTORY: "directory", SYMLINK: "symlink", HARD_LINK: "hard link",
    FIFO: "fifo", CHARACTER_DEVICE: "character device", BLOCK_DEVICE: "block device",
}  # fmt: skip
_NUMBERS = (
    ("parent", "I"), ("mode", "I"), ("uid", "I"), ("gid", "I"),
    ("size", "Q"), ("mtime_ns", "q"), ("ctime_ns", "q"), ("inode", "Q"), ("device", "Q"),
)  # fmt: skip


class FileEntry(NamedTuple):
    """One entry of a tree, for users. Names that are not UTF-8 are decoded like os.fsdecode does."""

    path: str  # relative to the root, "/"-joined
    kind: str  # file, directory, symlink, hard link; in exact trees also fifo, character device, block device
    size_bytes: int
    mode: int  # permission bits
    mtime_ns: int
    uid: int
    gid: int
    target: str | None = None  # of a symlink; the first name of a hard-linked file; "major:minor" of a device


def shown(path: bytes) -> str:
    """Return a path for messages, always printable."""
    return path.decode("utf-8", "backslashreplace")


class Table:
    """The rows, as columns. Filled by a scan or parsed; not changed after that."""

    def __init__(self) -> None:
        self.kind = bytearray()
        self.names: list[bytes] = []
        self.parent = array("I")
        self.mode = array("I")
        self.uid = array("I")
        self.gid = array("I")
        self.size = array("Q")
        self.mtime_ns = array("q")
        self.ctime_ns = array("q")
        self.inode = array("Q")
        self.device = array("Q")
        self.targets: dict[int, bytes] = {}  # of symlinks
        self.links: dict[int, int] = {}  # hard link → row of the file
        self.sparse: dict[int, Ranges] = {}
        self.skipped: list[tuple[bytes, str]] = []  # what was left out, and why
        self.unsettled: set[int] = set()  # files whose times may not show a change; packed as UNSETTLED
        self.devices: dict[int, tuple[int, int]] = {}  # row → (major, minor)
        self.attributes: dict[int, dict[bytes, bytes]] = {}  # extended attributes of rows that have some
        self._layout: tuple[list[int], list[int]] | None = None

    def add(self, name: bytes, parent: int, kind: int) -> int:
        """Append a row without its numbers, which `fill` adds; return its number."""
        self.kind.append(kind)
        self.names.append(name)
        self.parent.append(parent)
        return len(self.names) - 1

    def fill(self, statuses: list[os.stat_result]) -> None:
        """Add the status of each row; all columns at once, which is faster than row by row."""
        self.mode = array("I", [status.st_mode & 0o7777 for status in statuses])
        self.uid = array("I", [status.st_uid for status in statuses])
        self.gid = array("I", [status.st_gid for status in statuses])
        kinds = zip(self.kind, statuses, strict=True)
        self.size = array("Q", [0 if kind & ~APART else status.st_size for kind, status in kinds])
        self.mtime_ns = array("q", [status.st_mtime_ns for status in statuses])
        self.ctime_ns = array("q", [status.st_ctime_ns for status in statuses])
        self.inode = array("Q", [status.st_ino for status in statuses])
        self.device = array("Q", [status.st_dev for status in statuses])

    @property
    def is_exact(self) -> bool:
        """Whether it contains entries that only an exact restore can restore."""
        return bool(self.attributes) or not {FIFO, *DEVICES}.isdisjoint(self.kind)

    def __len__(self) -> int:
        return len(self.names)

    def path(self, row: int) -> bytes:
        """Return the path of a row below the root."""
        parts = []
        while row:
            parts.append(self.names[row])
            row = self.parent[row]
        return b"/".join(reversed(parts)) or self.names[0]

    def rows(self, kind: int) -> list[int]:
        """Return the rows of a kind."""
        return [row for row, row_kind in enumerate(self.kind) if row_kind == kind]

    def layout(self) -> tuple[list[int], list[int]]:
        """Return the rows with bytes in the stream, in order, and where each begins, with the end of the last."""
        if self._layout is None:
            sizes = self.size
            rows = [row for row, kind in enumerate(self.kind) if kind == FILE and sizes[row]]
            lengths = [sizes[row] for row in rows]
            apart = [row for row in self.rows(APART) if self.data_bytes(row)]
            lengths += map(self.data_bytes, apart)
            self._layout = rows + apart, list(accumulate(lengths, initial=0))
        return self._layout

    def data_bytes(self, row: int) -> int:
        """Return a file's number of bytes in the stream."""
        ranges = self.sparse.get(row)
        return self.size[row] if ranges is None else sum(length for _, length in ranges)

    def segments(self, row: int, start: int, length: int) -> Iterator[tuple[int, int]]:
        """Yield (offset in the file, length) for `length` bytes of a file's content from `start`, without holes."""
        ranges = self.sparse.get(row)
        if ranges is None:
            yield start, length
            return
        before = list(accumulate((size for _, size in ranges), initial=0))
        index = bisect_right(before, start) - 1
        while length:
            offset, size = ranges[index]
            inside = start - before[index]
            part = min(size - inside, length)
            yield offset + inside, part
            start, length, index = start + part, length - part, index + 1

    def entry(self, row: int, path: bytes | None = None) -> FileEntry:
        kind = self.kind[row]
        target = self.targets.get(row)
        first = self.links.get(row, row)
        if kind == HARD_LINK:
            target = self.path(first)
        elif row in self.devices:
            target = b"%d:%d" % self.devices[row]
        return FileEntry(
            os.fsdecode(self.path(row) if path is None else path),
            KIND_NAMES[kind],
            self.size[first],
            self.mode[row],
            self.mtime_ns[row],
            self.uid[row],
            self.gid[row],
            None if target is None else os.fsdecode(target),
        )

    def paths(self) -> list[bytes]:
        """Return the path of every row; b"" for the root."""
        paths = [b""]
        for row in range(1, len(self)):
            above = paths[self.parent[row]]
            paths.append(above + b"/" + self.names[row] if above else self.names[row])
        return paths


def pack_table(table: Table) -> bytes:
    return ormsgpack.packb(
        {
            "version": VERSION_EXACT if table.is_exact else VERSION,
            "kind": bytes(table.kind),
            "names": b"\0".join(table.names),
            **{name: _to_bytes(getattr(table, name)) for name, _ in _NUMBERS},
            "ctime_ns": _to_bytes(_settled_ctimes(table)),
            "targets": b"\0".join(table.targets.values()),
            "links": _to_bytes(array("I", table.links.values())),
            "sparse": [[row, *chain.from_iterable(ranges)] for row, ranges in table.sparse.items()],
            "skipped": [list(pair) for pair in table.skipped],
            **(_pack_exact(table) if table.is_exact else {}),
        }
    )


def _settled_ctimes(table: Table) -> array[int]:
    """Return the times that a later save compares; for unsettled files, one that no file has."""
    ctimes = array("q", table.ctime_ns)
    for row in table.unsettled:
        ctimes[row] = UNSETTLED
    return ctimes


def _pack_exact(table: Table) -> dict[str, object]:
    return {
        "devices": _to_bytes(array("I", chain.from_iterable(table.devices.values()))),
        "attributes": [[row, *chain.from_iterable(attributes.items())] for row, attributes in table.attributes.items()],
    }


def parse_table(data: bytes, *, content_bytes: int, is_tree: bool) -> Table:
    """Parse a table and check every claim in it. Raises Corrupted if no save could have written it.

    Guarantees: names are single path components, directories precede their content, no name occurs twice in a
    directory, links lead to files of the table, and the content fits the stream.
    """
    try:
        return _parse(data, content_bytes, is_tree)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, AttributeError) as error:
        if isinstance(error, Corrupted):
            raise
        raise Corrupted(f"the entry table is damaged: {error}", hint="run kedge check") from error


def _parse(data: bytes, content_bytes: int, is_tree: bool) -> Table:
    fields = ormsgpack.unpackb(data)
    version = fields["version"]
    if version not in (VERSION, VERSION_EXACT):
        raise UnsupportedFormat(
            f"the entry table has version {version!r}, this Kedge reads {VERSION_EXACT}", hint="update Kedge"
        )
    table = Table()
    table.kind = bytearray(fields["kind"])
    table.names = fields["names"].split(b"\0")
    count = len(table.kind)
    for name, code in _NUMBERS:
        setattr(table, name, _from_bytes(code, fields[name]))
    if not 1 <= count <= MAX_ROWS or any(len(getattr(table, name)) != count for name in ("names", *dict(_NUMBERS))):
        raise ValueError("columns of different length")
    if not KIND_NAMES.keys() >= set(table.kind):
        raise ValueError("an unknown kind of entry")
    _check_structure(table, is_tree)
    table.targets = dict(zip(table.rows(SYMLINK), fields["targets"].split(b"\0"), strict=False))
    table.links = dict(zip(table.rows(HARD_LINK), _from_bytes("I", fields["links"]), strict=True))
    for row, *flat in fields["sparse"]:
        table.sparse[row] = _ranges(flat, table.size[row])
    table.skipped = [(bytes(path), str(reason)) for path, reason in fields["skipped"]]
    if version == VERSION_EXACT:
        _parse_exact(table, fields)
    elif set(table.kind) & {FIFO, *DEVICES}:
        raise ValueError("an entry of a newer kind")
    _check_content(table, content_bytes)
    return table


def _parse_exact(table: Table, fields: dict[str, Any]) -> None:
    rows = [row for row, kind in enumerate(table.kind) if kind in DEVICES]
    numbers = _from_bytes("I", fields["devices"])
    table.devices = dict(zip(rows, zip(numbers[::2], numbers[1::2], strict=True), strict=True))
    for row, *flat in fields["attributes"]:
        if not 0 <= row < len(table) or table.kind[row] == HARD_LINK:
            raise ValueError("attributes of no entry")
        attributes = dict(zip(map(bytes, flat[::2]), map(bytes, flat[1::2]), strict=True))
        if any(not 0 < len(name) <= 255 or b"\0" in name or len(value) > 65536 for name, value in attributes.items()):
            raise ValueError("an attribute that no file has")
        table.attributes[row] = attributes


def _check_structure(table: Table, is_tree: bool) -> None:
    names, parent, kind = table.names, table.parent, table.kind
    if is_tree != (kind[0] == DIRECTORY) or parent[0] != 0 or (is_tree and names[0]):
        raise ValueError("no proper root")
    if not is_tree and (len(names) != 1 or kind[0] & ~APART):
        raise ValueError("a single file has one row")
    own = names[1:] if is_tree else names
    if b"/" in b"".join(own) or not {b"", b".", b".."}.isdisjoint(own):
        raise ValueError("a name that is not one path component")
    if not all(map(lt, parent[1:], range(1, len(parent)))):
        raise ValueError("an entry before its directory")
    if any(kind[row] != DIRECTORY for row in set(parent[1:])):
        raise ValueError("an entry inside something that is not a directory")
    if len(set(zip(parent[1:], own, strict=False))) != len(parent) - 1:
        raise ValueError("a name that occurs twice in a directory")
    depth = {0: 0}
    for row in table.rows(DIRECTORY):
        if row:
            depth[row] = depth[parent[row]] + 1
    if max(depth.values()) > MAX_DEPTH:
        raise ValueError(f"directories more than {MAX_DEPTH:,} levels deep")
    if max(table.mode) > 0o7777 or max(table.size) >= 1 << 63:
        raise ValueError("a mode or size that no file has")


def _check_content(table: Table, content_bytes: int) -> None:
    if len(table.targets) != len(table.rows(SYMLINK)) or b"" in table.targets.values():
        raise ValueError("a symlink without target")
    if any(table.kind[first] & ~APART or first > row for row, first in table.links.items()):
        raise ValueError("a hard link to something that is not a file")
    if any(table.kind[row] != APART for row in table.sparse):
        raise ValueError("holes outside of files")
    if table.layout()[1][-1] != content_bytes:
        raise ValueError("files and content differ in length")


def _ranges(flat: list[int], size: int) -> Ranges:
    ranges = list(zip(flat[::2], flat[1::2], strict=True))
    end = 0
    for offset, length in ranges:
        if not (isinstance(offset, int) and isinstance(length, int)) or offset < end or length < 1:
            raise ValueError("holes out of order")
        end = offset + length
    if end > size:
        raise ValueError("content beyond the end of a file")
    return ranges


def _to_bytes(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def _from_bytes(code: str, data: bytes) -> array[int]:
    column = array(code)
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column
