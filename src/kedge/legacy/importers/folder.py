"""Reading old files without trusting them: no link is followed, nothing outside is opened, sizes are bounded."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.errors import NotFound, Validation, storage_error

from .common import MAX_JSON_BYTES, Finding, Unreadable, Verdict, clean, parse_json

MAX_DEPTH = 16
MARKER = "kedge-store"
IMPORTED = ".kedge-imported"  # says that the old files beside it were imported by the old names
SNIFF_BYTES = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """A regular file of a folder: `shown` is its path below the root, for reports."""

    path: str
    name: str
    shown: str
    size_bytes: int


@dataclass(slots=True)
class Listing:
    """One folder: its files and folders by name, and what was passed over."""

    path: str
    shown: str
    files: dict[str, Entry]
    folders: tuple[str, ...]
    findings: tuple[Finding, ...]


def check_root(source: str | os.PathLike[str]) -> str:
    path = os.path.abspath(os.fspath(source))
    if not os.path.isdir(path):
        if os.path.isfile(path):
            return path
        raise NotFound(f"there is no {path}", hint="give the directory of the old checkpoints, or a database URL")
    if os.path.lexists(Path(path, MARKER)):
        raise Validation(f"{path} is a Kedge store", hint="kedge copy brings jobs from store to store")
    return path


def walk(root: str) -> Iterator[Listing]:
    """The folders below `root`, parents first, by name. Those the caller takes out of `folders` are passed over."""
    pending = [(root, "", 0)]
    while pending:
        path, shown, depth = pending.pop()
        listing = list_folder(path, shown)
        if depth == MAX_DEPTH and listing.folders:
            deep = Finding(Verdict.SKIPPED, clean(shown), f"folders more than {MAX_DEPTH} deep are not looked into")
            listing.findings, listing.folders = (*listing.findings, deep), ()
        yield listing
        pending += [
            (os.path.join(path, name), os.path.join(shown, name), depth + 1) for name in reversed(listing.folders)
        ]


def list_folder(path: str, shown: str) -> Listing:
    files: dict[str, Entry] = {}
    folders: list[str] = []
    findings: list[Finding] = []
    try:
        with os.scandir(path) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                where = os.path.join(shown, entry.name)
                if entry.name == IMPORTED:
                    continue
                if entry.is_symlink():
                    findings.append(Finding(Verdict.SKIPPED, clean(where), "a link; links are never followed"))
                elif entry.is_dir(follow_symlinks=False):
                    if not os.path.lexists(os.path.join(entry.path, MARKER)):  # a store beside old files is none
                        folders.append(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    try:
                        size_bytes = entry.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        continue  # deleted meanwhile
                    files[entry.name] = Entry(entry.path, entry.name, clean(where), size_bytes)
                else:
                    findings.append(Finding(Verdict.SKIPPED, clean(where), "not a regular file"))
    except FileNotFoundError:
        pass  # deleted meanwhile
    except OSError as error:
        raise storage_error("read", path, error) from error
    return Listing(path, shown, files, tuple(folders), tuple(findings))


def read_file(entry: Entry, limit: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a file, if it still is one and not larger than `limit`."""
    if entry.size_bytes > limit:
        raise Unreadable(f"{entry.size_bytes:,} bytes; at most {limit:,} are read")
    data = _read(entry, limit + 1)
    if len(data) > limit:
        raise Unreadable(f"more than {limit:,} bytes")
    return data


def read_head(entry: Entry) -> bytes:
    """The first bytes of a file, which tell what it is."""
    return _read(entry, SNIFF_BYTES)


def read_json(entry: Entry) -> Any:
    """The document in a file; Unreadable with what could be salvaged."""
    return parse_json(read_file(entry))


def _read(entry: Entry, most_bytes: int) -> bytes:
    """As much of a file as there is now: what is written behind that meanwhile is for the next time."""
    try:
        handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Unreadable("a link; links are never followed") from None
        raise Unreadable(f"cannot be opened: {error.strerror}") from None
    with os.fdopen(handle, "rb", buffering=0) as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise Unreadable("not a regular file")
        try:
            return file.read(min(status.st_size, most_bytes)) or b""
        except OSError as error:
            raise Unreadable(f"cannot be read: {error.strerror}") from None


def is_plain_name(name: object) -> bool:
    """Whether `name` can only mean something inside its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not {"/", "\0", "\\"} & set(name)
