"""What changed from one stored tree to another, found without reading the files."""

from __future__ import annotations

import os
from typing import NamedTuple

from kedge.errors import Validation

from .stored_files import StoredFiles
from .table import APART, FileEntry
from .tree import File, Tree


class TreeChange(NamedTuple):
    path: str
    what: str  # added, removed, changed
    fields: tuple[str, ...]  # of a changed entry: content, kind, mode, mtime, owner, target
    old: FileEntry | None
    new: FileEntry | None


def diff_trees(old: Tree | File, new: Tree | File) -> list[TreeChange]:
    """Return the changed entries by path; both trees must be loaded.

    Large files are compared by their chunks. A small file shares its chunk with others: if one of them changed and its
    own time, too, it is read.
    """
    before, after = old.stored, new.stored
    if before.is_tree != after.is_tree:
        raise Validation("a file and a tree cannot be compared", hint="compare two files or two trees")
    first = 1 if before.is_tree else 0
    rows_before = {path: row for row, path in enumerate(before.table.paths()) if row >= first}
    rows_after = {path: row for row, path in enumerate(after.table.paths()) if row >= first}
    changes = []
    for path in sorted(rows_before.keys() | rows_after.keys()):
        a, b = rows_before.get(path), rows_after.get(path)
        entry_a = None if a is None else before.table.entry(a, path if a else None)
        entry_b = None if b is None else after.table.entry(b, path if b else None)
        fields: tuple[str, ...] = ()
        if a is not None and b is not None and entry_a is not None and entry_b is not None:
            fields = _changed_fields(entry_a, entry_b)
            if entry_a.kind == entry_b.kind and entry_a.kind in ("file", "hard link"):
                row_a, row_b = before.table.links.get(a, a), after.table.links.get(b, b)
                if not _is_same_content(before, row_a, after, row_b):
                    fields = ("content", *fields)
            if not fields:
                continue
        what = "added" if a is None else "removed" if b is None else "changed"
        changes.append(TreeChange(os.fsdecode(path), what, fields, entry_a, entry_b))
    return changes


def _changed_fields(a: FileEntry, b: FileEntry) -> tuple[str, ...]:
    pairs = {
        "kind": (a.kind, b.kind),
        "mode": (a.mode, b.mode),
        "mtime": (a.mtime_ns, b.mtime_ns),
        "owner": ((a.uid, a.gid), (b.uid, b.gid)),
        "target": (a.target, b.target),
    }
    return tuple(name for name, (x, y) in pairs.items() if x != y)


def _is_same_content(a: StoredFiles, row_a: int, b: StoredFiles, row_b: int) -> bool:
    if a.table.size[row_a] != b.table.size[row_b]:
        return False
    if _references(a, row_a) == _references(b, row_b):
        return True
    if a.table.kind[row_a] & b.table.kind[row_b] & APART:
        return False
    if a.table.mtime_ns[row_a] == b.table.mtime_ns[row_b]:
        return True
    return b"".join(a.pieces(row_a)) == b"".join(b.pieces(row_b))


def _references(files: StoredFiles, row: int) -> list[tuple[bytes, int, int]]:
    """Return what a file's content consists of: chunk, offset in it, length; and where its holes are."""
    chunks = [(entry.digest, part.offset, part.size_bytes) for _, entry, part in files.parts(row)]
    return chunks + [(b"", offset, length) for offset, length in files.table.sparse.get(row, [])]
