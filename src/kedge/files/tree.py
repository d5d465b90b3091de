"""File and Tree: the values that stand for files in a state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self

import ormsgpack

from kedge import codec
from kedge.chunks import StoredStream
from kedge.errors import CheckpointError, NotFound, Validation

from .scan import Options, Scan, scan_file, scan_tree
from .stored_files import StoredFiles, StoredSource, TableSource
from .table import APART, VERSION, FileEntry, Table, pack_table

_TREE_TAG = 40
_FILE_TAG = 41
_INLINE_TABLE_BYTES = 4096

Path = str | os.PathLike[str]
Progress = Callable[[int, int], None]


class _Files:
    """The common part of Tree and File: they have a path and options on disk; once loaded, they are in a store."""

    path: str  # "" once loaded
    _options: Options
    _stored: StoredFiles | None

    def __init__(self, path: Path, options: Options) -> None:
        self.path = os.fspath(path)
        self._options = options
        self._stored = None

    @classmethod
    def _loaded(cls, stored: StoredFiles) -> Self:
        """Return the value of a loaded state."""
        value = cls.__new__(cls)
        value.path, value._options, value._stored = "", Options(), stored
        return value

    @property
    def stored(self) -> StoredFiles:
        """Its table and content in the store. Raises Validation if it is on disk."""
        if self._stored is None:
            raise Validation(f"{self!r} is on disk, not in a store", hint="save it, then load the checkpoint")
        return self._stored

    @property
    def _table(self) -> Table:
        """Its entries: from the store if loaded, otherwise as on disk now."""
        return self._stored.table if self._stored is not None else self._scan().table

    def _scan(self) -> Scan:
        """Scan what is on disk now, without reading it."""
        raise NotImplementedError

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} in a store>" if self._stored is not None else f"{name}({self.path!r})"


class Tree(_Files):
    """A directory with everything below it.

    A save reads each file once, in pieces. It does not read a file that the job's last checkpoint stored with the same
    size, times and inode, if its times can be trusted: nobody had it open for writing (or mapped) then, it was not
    brand-new, and it is on ext4, XFS, Btrfs, F2FS or bcachefs. always_read reads everything. A file that changes during
    the save is a Conflict, unless allow_changing. A load reads no content until you ask for it, and needs the store to
    stay open.

    Saved are names, types, permission bits, modification times, numeric owners, symlinks (as they are), hard links
    within the tree, holes. `exclude` is a list of globs; one without "/" matches a name at any depth, one with "/" the
    path from the root. Kedge stores inside the tree are left out, except with `exact`. Fifos, sockets and devices are
    refused, or left out with skip_special: see `skipped`.

    With `exact`, extended attributes (ACLs, capabilities, those of overlayfs), fifos and devices are saved too, and
    only sockets are left out; without_attributes names attributes to omit. `cuts` says where the chunks of a file end,
    for files whose writer knows which parts will stay the same.
    """

    def __init__(
        self,
        path: Path,
        *,
        exclude: str | Iterable[str] = (),
        skip_special: bool = False,
        allow_changing: bool = False,
        always_read: bool = False,
        exact: bool = False,
        without_attributes: Iterable[str] = (),
        cuts: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        borders = {os.fsencode(name): ends for name, ends in (cuts or {}).items()}
        attributes = frozenset(without_attributes)
        super().__init__(path, Options(patterns, skip_special, allow_changing, always_read, exact, attributes, borders))

    @property
    def entries(self) -> list[FileEntry]:
        """Everything below the root: as stored if loaded, otherwise as on disk now."""
        table = self._table
        return [table.entry(row, path) for row, path in enumerate(table.paths()) if row]

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """(path, kind) of everything that was left out without being excluded."""
        return [(os.fsdecode(path), file_type) for path, file_type in self._table.skipped]

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(self._table.size)

    def read(self, name: str) -> bytes:
        """Return the content of one file, verified. Raises NotFound if the tree has no such file."""
        return b"".join(self.stream(name))

    def read_part(self, name: str, offset: int, size_bytes: int) -> bytes:
        """Return part of a file's content, as far as it exists, reading nothing else."""
        return b"".join(self.stored.window(_file_row(self.stored, name), offset, size_bytes))

    def stream(self, name: str) -> Iterator[memoryview | bytes]:
        """Yield the content in pieces of at most a few MiB; each is valid until the next is requested."""
        return self.stored.pieces(_file_row(self.stored, name))

    def attributes(self, name: str) -> dict[bytes, bytes]:
        """Return the extended attributes of an entry, which only exact trees have; {} if there are none."""
        row = self.stored.row_of(os.fsencode(name))
        return {} if row is None else dict(self._table.attributes.get(row, {}))

    def ranges(self, name: str) -> list[tuple[int, int]] | None:
        """Return (offset, length) of the parts of a sparse file that are not holes; None for any other entry."""
        row = self.stored.row_of(os.fsencode(name))
        ranges = None if row is None else self._table.sparse.get(self._table.links.get(row, row))
        return None if ranges is None else list(ranges)

    def write_to(
        self,
        destination: Path,
        *,
        overwrite: bool = False,
        owners: bool | None = None,
        setuid: bool = False,
        exact: bool = False,
        durable: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Write everything below `destination`: durable on return, and never part of a file in its place.

        The destination must not exist, or be empty: otherwise raises Conflict. With `overwrite`, files of the same name
        are replaced and others stay. Numeric owners are restored if we are root, or as `owners` says; set-user-ID and
        set-group-ID bits only with `setuid`. `exact` restores all of that, and everything else in an exact tree: it
        needs root, and is for trees you trust. Without `durable`, for files needed only now, it does not wait for the
        disk. Nothing is ever written outside of `destination`, whatever the store contains. `progress(done, total)`
        counts bytes.
        """
        from .output import Wishes  # start time: few programs that save files also restore them
        from .restore import write_tree

        wishes = Wishes(overwrite, owners, setuid or exact, exact, durable, progress)
        write_tree(self.stored.table, self.stored.content, os.fsencode(destination), wishes)

    def _scan(self) -> Scan:
        return scan_tree(self.path, self._options)


class File(_Files):
    """One file, saved and loaded like a Tree. If the path is a symlink, the file it points to is saved."""

    def __init__(self, path: Path, *, allow_changing: bool = False, always_read: bool = False) -> None:
        super().__init__(path, Options(allow_changing=allow_changing, always_read=always_read))

    @property
    def entry(self) -> FileEntry:
        """Its name, size, mode and times: as stored if loaded, otherwise as on disk now."""
        return self._table.entry(0)

    @property
    def entries(self) -> list[FileEntry]:
        return [self.entry]

    @property
    def size_bytes(self) -> int:
        return self._table.size[0]

    def read(self) -> bytes:
        """Return the content, verified."""
        return b"".join(self.stream())

    def stream(self) -> Iterator[memoryview | bytes]:
        """Yield the content in pieces of at most a few MiB; each is valid until the next is requested."""
        return self.stored.pieces(0)

    def write_to(
        self,
        destination: Path,
        *,
        overwrite: bool = False,
        owners: bool | None = None,
        setuid: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Write the file as `destination`: complete and durable, or not at all.

        Raises Conflict if it exists, unless `overwrite`.
        """
        from .output import Wishes  # start time
        from .restore import write_file

        wishes = Wishes(overwrite, owners, setuid, progress=progress)
        write_file(self.stored.table, self.stored.content, os.fsencode(destination), wishes)

    def _scan(self) -> Scan:
        return scan_file(self.path, self._options)


def _file_row(stored: StoredFiles, name: str) -> int:
    table, row = stored.table, stored.row_of(os.fsencode(name))
    if row is None:
        raise NotFound(f"the tree has no {name!r}", hint="`entries` lists its files")
    row = table.links.get(row, row)
    if table.kind[row] & ~APART:
        raise Validation(f"{name!r} is a {table.entry(row).kind}, not a file", hint="read a file")
    return row


# The codec. Payload of both tags: [version, entries, bytes of all files, device and inode of the root, packed table or
# the ordinal of its buffer, ordinal of the content's buffer or nil].


@dataclass(frozen=True, slots=True)
class FilesSummary(codec.BufferSummary):
    """A File or Tree in an outline. `shape` is the number of entries, `size_bytes` the size of all files together."""

    root: tuple[int, int] = field(default=(0, 0), compare=False)  # device and inode on the machine where it was saved
    table: bytes | int = field(default=b"", compare=False)  # packed, or the ordinal of a buffer
    content: int | None = field(default=None, compare=False)  # ordinal


def _encode(value: Tree | File, context: codec.EncodeContext) -> bytes:
    table_place: bytes | int
    if value._stored is not None:
        stored = value._stored
        table = stored.table
        content = None if stored.content is None else context.add_buffer(StoredSource(stored.content))
        packed = stored.packed_table
        table_place = packed if isinstance(packed, bytes) else context.add_buffer(StoredSource(packed))
    else:
        from .content import Content  # start time

        scan = value._scan()
        table = scan.table
        source = Content(scan, lambda outline, open_stream: _find_earlier(scan, outline, open_stream))
        content = context.add_buffer(source) if source.size_bytes else None
        table_bytes = len(pack_table(table))
        if table_bytes <= _INLINE_TABLE_BYTES:
            source.find_unsettled()
            table_place = pack_table(table)
        else:
            table_place = context.add_buffer(TableSource(table, table_bytes))
    entries = len(table) - isinstance(value, Tree)
    root = (table.device[0], table.inode[0])
    return ormsgpack.packb([VERSION, entries, sum(table.size), *root, table_place, content])


def _summary(kind: str, payload: bytes) -> FilesSummary:
    version, entries, size_bytes, device, inode, table, content = ormsgpack.unpackb(payload)
    if version != VERSION:
        raise ValueError(f"version {version!r} is newer than this Kedge knows")
    return FilesSummary(
        kind=kind,
        dtype="",
        shape=(int(entries),),
        size_bytes=int(size_bytes),
        ordinals=tuple(n for n in (content, table) if isinstance(n, int)),
        data=table if isinstance(table, bytes) else b"",
        root=(int(device), int(inode)),
        table=table,
        content=content,
    )


def _stored(summary: FilesSummary, open_stream: Callable[[int], StoredStream]) -> StoredFiles:
    table = summary.table if isinstance(summary.table, bytes) else open_stream(summary.table)
    content = None if summary.content is None else open_stream(summary.content)
    return StoredFiles(summary.kind == "Tree", table, content)


def _decode(cls: type[Tree | File], payload: bytes, context: codec.DecodeContext) -> Tree | File:
    return cls._loaded(_stored(_summary(cls.__name__, payload), context.stream))


def _find_earlier(scan: Scan, outline: object, open_stream: Callable[[int], StoredStream]) -> StoredFiles | None:
    """Return the same tree or file from an earlier state; a damaged one only costs the comparison."""
    kind = "Tree" if scan.is_tree else "File"
    root = (scan.table.device[0], scan.table.inode[0])
    for summary in summaries_in(outline):
        if summary.kind == kind and summary.root == root:
            stored = _stored(summary, open_stream)
            try:
                _ = stored.table
            except CheckpointError:
                continue
            return stored
    return None


def summaries_in(outline: object) -> Iterator[FilesSummary]:
    """Yield the files and trees of a state, given its outline."""
    waiting = [outline]
    while waiting:
        value = waiting.pop()
        if isinstance(value, FilesSummary):
            yield value
        elif isinstance(value, codec.TypeSummary):
            waiting.extend(value.fields.values())
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, Sequence | set | frozenset) and not isinstance(value, str | bytes | bytearray):
            waiting.extend(value)


for _tag, _class in ((_TREE_TAG, Tree), (_FILE_TAG, File)):
    codec.register_builtin(
        _tag,
        _class,
        _encode,
        partial(_decode, _class),
        outline=partial(lambda name, payload, _context: _summary(name, payload), _class.__name__),
    )
