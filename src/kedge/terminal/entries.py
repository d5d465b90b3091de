"""Entries of a stored tree of files, for people and as JSON."""

from __future__ import annotations

import stat
from collections.abc import Sequence

import click

from kedge.errors import NotFound
from kedge.files import File, FileEntry, Tree
from kedge.model import to_datetime

from .tables import Column, print_table
from .text import count_of, exactly, size, style

_TYPES = {"file": stat.S_IFREG, "directory": stat.S_IFDIR, "symlink": stat.S_IFLNK, "hard link": stat.S_IFREG}
_SUFFIXES = {"directory": "/"}


def entries_below(files: Tree | File, path: str) -> list[FileEntry]:
    """Return the entries of a tree: all, or those at and below a path in it."""
    if not path:
        return files.entries
    below = [entry for entry in files.entries if entry.path == path or entry.path.startswith(path + "/")]
    if not below:
        raise NotFound(f"the tree has no {path!r}", hint="kedge show --path shows what is in it")
    return below


def entry_json(entry: FileEntry) -> dict[str, object]:
    return {
        "path": entry.path.encode("utf-8", "backslashreplace").decode(),
        "kind": entry.kind,
        "size_bytes": entry.size_bytes,
        "mode": f"{entry.mode:04o}",
        "mtime": to_datetime(entry.mtime_ns // 1000).isoformat(),
        "target": None if entry.target is None else entry.target.encode("utf-8", "backslashreplace").decode(),
    }


_COLUMNS: tuple[Column[FileEntry], ...] = (
    Column("MODE", lambda e: stat.filemode(_TYPES[e.kind] | e.mode), look="dim", is_whole=True, drop=2),
    Column("SIZE", lambda e: size(e.size_bytes) if e.kind in ("file", "hard link") else "", ">", is_whole=True),
    Column("MODIFIED", lambda e: exactly(to_datetime(e.mtime_ns // 1000))[:16], look="dim", is_whole=True, drop=1),
    Column("PATH", lambda e: e.path + _SUFFIXES.get(e.kind, "") + (f" → {e.target}" if e.target else ""), least=20),
)


def print_entries(entries: Sequence[FileEntry], most: int) -> None:
    print_table(_COLUMNS, entries[:most])
    if len(entries) > most:
        more = count_of(len(entries) - most, "more entry", "more entries")
        click.echo(style(f"… {more} (--items N shows more)", "dim"))
