"""The embedded store: one directory with SQLite for the index and packs for the bytes.

<store>/kedge-store        marker: format, store ID, name of the index; written last, so that a store is complete
<store>/lock               held while the store is created or rebuilt
<store>/index.sqlite       the source of truth
<store>/index.sqlite-state whether it was closed (`index.state`)
<store>/packs/             chunk bytes
<store>/reserve/           space to open the store, and to delete from it, when the disk is full
<store>/keyrings           of an encrypted store: a copy of the keyrings in the index, for repairs
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from kedge.blobs.direct import sync_directory
from kedge.blobs.group_files import OWN_FILE, is_writable, make_folder, make_store_folder, open_lock, share
from kedge.blobs.kernel import is_network, mounts
from kedge.blobs.packs import PackBlobs
from kedge.blobs.reserve import NAME as RESERVE
from kedge.blobs.reserve import Reserve
from kedge.errors import Corrupted, NoSpace, NotAStore, NotFound, storage_errors
from kedge.index.sqlite.closed_mark import SUFFIX as STATE
from kedge.index.sqlite.index import SqliteIndex
from kedge.index.sqlite.process_queue import SUFFIX as QUEUE
from kedge.ports import FORMAT_VERSION, Index, unsupported
from kedge.version import __version__

MARKER = "kedge-store"
INDEX = "index.sqlite"
PACKS = "packs"
KEYRINGS = "keyrings"

_MARKER = re.compile(
    rb"Kedge store\nformat: \d{1,9}\nid: (?P<id>[0-9a-f]{32})\nindex: (?P<index>index(?:-\d{1,9})?\.sqlite)\n"
    rb"encrypted: (?P<encrypted>yes|no)\nwritten by: [0-9A-Za-z.+-]{1,64}\n(?:[a-z ]{1,32}: [^\n]*\n)*"
)
_FORMAT = re.compile(rb"Kedge store\nformat: (\d{1,9})\n")
_WRITTEN_BY = re.compile(rb"^written by: ([0-9A-Za-z.+-]{1,64})$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Marker:
    """The content of the marker file. Replacing it puts a repaired index in the place of a damaged one."""

    store_id: str
    index: str = INDEX
    is_encrypted: bool = False  # some namespace has a keyring


def open_embedded(path: Path, *, namespace: str, create: bool = True) -> tuple[SqliteIndex, PackBlobs]:
    """Open the index and blobs of the store in `path`, which is created if it does not exist or is empty.

    Opened read-only if it cannot be written to.
    """
    path = absolute(path)
    with storage_errors("open the store", path):
        if not (path / MARKER).is_file():
            if not create:
                raise NotFound(f"there is no store at {path}", hint="check --store or $KEDGE_STORE")
            refuse_foreign(path)
            make_store_folder(path)
            refuse_network(path)
            with locked(path):
                if not (path / MARKER).is_file():
                    _create(path)
        else:
            refuse_network(path)
        marker = read_marker(path)
        index_path = path / marker.index
        if not index_path.is_file():
            raise Corrupted(f"{index_path} is missing", hint="restore it from a copy, or run kedge check --repair")
        index = _open_index(index_path, namespace)
    if index.store_id != marker.store_id:
        index.close()
        raise Corrupted(
            f"{index_path} belongs to another store than {path / MARKER} says",
            hint="two stores were mixed: restore the right index.sqlite, or run kedge check --repair",
        )
    try:
        return index, packs_of(index, path / PACKS)
    except BaseException:
        index.close()
        raise


def packs_of(index: Index, folder: Path) -> PackBlobs:
    """Open the packs of an index. Creates their directory only if it names none: a missing directory is not empty."""
    with storage_errors("open the packs of a store", folder):
        is_there = folder.is_dir()
    return PackBlobs(str(folder), create=not is_there and not index.packs())


def _open_index(path: Path, namespace: str) -> SqliteIndex:
    """Open the index; on a full disk, with the space reserved for that."""
    if not is_writable(path.parent) or not os.access(path, os.W_OK):
        return SqliteIndex(str(path), namespace=namespace, create=False, read_only=True)
    reserve = Reserve(path.parent)
    try:
        index = SqliteIndex(str(path), namespace=namespace, create=False, reserve=reserve)
    except NoSpace:
        if not reserve.release():
            raise
        index = SqliteIndex(str(path), namespace=namespace, create=False, reserve=reserve)
    try:
        reserve.refill()
    except BaseException:
        index.close()
        raise
    return index


def open_packs(path: Path) -> PackBlobs:
    """Open the bytes of a store whose index is elsewhere: packs in `path`, which is created if it is new."""
    with storage_errors("use for the bytes of a store", path):
        if (path / MARKER).exists():
            raise NotAStore(f"{path} is a store of its own", hint="give an empty or new directory for the bytes")
        if path.exists() and not path.is_dir():
            raise NotAStore(f"{path} is not a directory", hint="give a directory for the bytes, or a new one")
        if not (path / PACKS).is_dir():
            make_store_folder(path)
            make_folder(path / PACKS)
            sync_directory(path)
            _sync_names(path)
        refuse_network(path)
    return PackBlobs(str(path / PACKS))


def absolute(path: Path) -> Path:
    """Return `path` as an absolute path; `~` is a user's home."""
    try:
        return path.expanduser().absolute()
    except (OSError, RuntimeError) as error:  # no such user, or the working directory is gone
        raise NotAStore(f"{path} names no directory here: {error}", hint="give an absolute path") from error


def read_marker(path: Path) -> Marker:
    """Return the marker of the store in `path`. Raises UnsupportedFormat for a newer format (I8)."""
    text = (path / MARKER).read_bytes()[:1024]
    version = _FORMAT.match(text)
    if version is not None and int(version[1]) > FORMAT_VERSION:
        author = _WRITTEN_BY.search(text)
        raise unsupported(f"the store at {path} (format {int(version[1])})", author[1].decode() if author else "")
    match = _MARKER.fullmatch(text)
    if match is None:
        raise Corrupted(f"{path / MARKER} is damaged", hint="run kedge check --repair")
    return Marker(match["id"].decode(), match["index"].decode(), match["encrypted"] == b"yes")


def write_marker(path: Path, marker: Marker) -> None:
    """Mark `path` as a complete store."""
    lines = (
        "Kedge store",
        f"format: {FORMAT_VERSION}",
        f"id: {marker.store_id}",
        f"index: {marker.index}",
        f"encrypted: {'yes' if marker.is_encrypted else 'no'}",
        f"written by: {__version__}",
    )
    _write(path / MARKER, "".join(f"{line}\n" for line in lines).encode())


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically: its name appears durably with its content, or not at all (I1)."""
    draft = path.with_name(path.name + ".new")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, OWN_FILE), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    share(draft)
    os.replace(draft, path)
    sync_directory(path.parent)


def read_keyrings(path: Path) -> dict[str, str]:
    """Return the copies of keyrings by namespace; {} if there are none, or they are unreadable."""
    try:
        document = json.loads((path / KEYRINGS).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return (
        {name: text for name, text in document.items() if isinstance(text, str)} if isinstance(document, dict) else {}
    )


def keep_keyring(path: Path, namespace: str, keyring: str) -> None:
    """Store a copy of a keyring, and mark the store as encrypted if it is not marked yet.

    The index is the truth; after a crash in between, the next opening updates both.
    """
    with storage_errors("mark as encrypted the store", path):
        if not read_marker(path).is_encrypted:
            with locked(path):
                write_marker(path, replace(read_marker(path), is_encrypted=True))
    keep_copy(path, namespace, keyring)


def keep_copy(path: Path, namespace: str, keyring: str) -> None:
    """Store a copy of a keyring in the directory `path` if it is not there yet."""
    with storage_errors("keep a copy of the keyring in", path):
        if read_keyrings(path).get(namespace) == keyring:
            return
        with locked(path):
            copies = {**read_keyrings(path), namespace: keyring}
            _write(path / KEYRINGS, json.dumps(copies, indent=1).encode())


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock out other processes that create or rebuild this store. The kernel drops the lock with the process."""
    with storage_errors("lock", path):
        handle = open_lock(path / "lock")
    try:
        with storage_errors("lock", path):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _create(path: Path) -> None:
    make_folder(path / PACKS)
    Reserve(path).refill()
    index = SqliteIndex(str(path / INDEX), namespace="default")
    store_id = index.store_id
    index.close()
    sync_directory(path)
    _sync_names(path)
    write_marker(path, Marker(store_id))


def _sync_names(path: Path) -> None:
    """Make the names that lead to `path` durable, up to its mount point: a crashed process may have created any."""
    device = os.stat(path).st_dev
    for parent in path.parents:
        if os.stat(parent).st_dev != device:
            return
        try:
            sync_directory(parent)
        except PermissionError:
            return  # it cannot have been created without permission to read it


def refuse_foreign(path: Path) -> None:
    """Refuse a directory with other files in it. Remains of an interrupted creation are ours."""
    if not path.exists():
        return
    if not path.is_dir():
        raise NotAStore(f"{path} is not a directory", hint="give the directory of a store, or a new one")
    ours = {MARKER + ".new", "lock", PACKS, KEYRINGS, KEYRINGS + ".new"}
    ours |= {RESERVE, *(INDEX + suffix for suffix in ("", "-wal", "-shm", "-journal", STATE, QUEUE))}
    names = set(os.listdir(path))
    if MARKER in names:
        return  # complete, if only since another process created it a moment ago
    foreign = sorted(names - ours)
    if foreign:
        raise NotAStore(
            f"{path} is not a Kedge store and holds other files ({foreign[0]}, …)",
            hint="give an empty or new directory",
        )


def refuse_network(path: Path) -> None:
    """Refuse network file systems, where other machines cannot see file locks."""
    device = os.stat(path).st_dev
    kind = next((mount.kind for mount in mounts() if mount.device == device), "")
    if is_network(kind):
        raise NotAStore(
            f"{path} is on a network file system ({kind}), where locks cannot be trusted",
            hint="use a local disk, or a store for many machines (postgresql://…)",
        )
