"""Rebuilding the index of an embedded store from what is still readable: the damaged index itself, and the packs.

Every save leaves its record in a pack, a small one a moment later (`store.backlog`). Small states that neither the
packs nor the damaged index give are lost and reported. Nothing is deleted: the old index stays beside the new one as
`index….damaged-…`.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.blobs.direct import sync_directory
from kedge.blobs.packs import PackBlobs
from kedge.errors import Conflict, Corrupted, NotFound, Validation, storage_errors
from kedge.index.sqlite.closed_mark import SUFFIX as STATE
from kedge.index.sqlite.closed_mark import lacks_log
from kedge.index.sqlite.database import translated
from kedge.index.sqlite.index import SqliteIndex
from kedge.index.sqlite.process_queue import SUFFIX as QUEUE
from kedge.index.sqlite.salvage import Salvaged, put_jobs, put_sealed, salvage
from kedge.store.directory import INDEX, PACKS, Marker, absolute, locked, read_keyrings, read_marker, write_marker
from kedge.store.local import LocalStore

from .rebuild import Known, rebuild

if TYPE_CHECKING:
    from kedge.crypto import Keyrings, MasterKey

_INDEX = re.compile(r"index(?:-(\d{1,9}))?\.sqlite")


@dataclass(frozen=True, slots=True)
class RepairReport:
    checkpoints: int  # in the new index
    from_packs: int  # of those, known only from packs
    corrupted: tuple[str, ...]  # IDs that are listed but cannot be loaded
    is_index_complete: bool  # whether the old index could be read to its end
    old_index: str  # its new place; "" if there was none


def repair(path: Path, *, actor: str, master: MasterKey | None = None) -> RepairReport:
    """Create a new index for the store at `path`. An encrypted one needs its master key.

    Other processes wait meanwhile. Those with the old index open are refused at their next commit, because it is no
    longer the index. After a kill at any moment the store has the complete old or new index: the marker, replaced
    atomically, says which (I1).
    """
    path = absolute(path)
    if not (path / PACKS).is_dir():
        raise NotFound(f"there is no store at {path}", hint="check --store or $KEDGE_STORE")
    with storage_errors("repair", path), translated(str(path)), locked(path):
        try:
            marker = read_marker(path)
        except (Corrupted, FileNotFoundError):
            marker = None
        old = path / (marker.index if marker else _first_index(path))
        is_cut = lacks_log(str(old))
        with _writers_kept_out(old):
            salvaged = salvage(old)
            store_id = marker.store_id if marker else salvaged.meta.get("store_id") or os.urandom(16).hex()
            keys = _find_keys(path, store_id, salvaged, master, marker)
            new = path / _next_index(path, old.name)
            with closing(PackBlobs(str(path / PACKS))) as blobs:
                opened = _opening(new, blobs, store_id, salvaged, keys, actor)
                report = rebuild(blobs, opened, actor=actor, keys=keys, known=_known(salvaged, keys))
            carried = _carry_closed(new, store_id, salvaged, read_keyrings(path), report.closed)
            sync_directory(path)
            write_marker(path, Marker(store_id, new.name, is_encrypted=keys is not None))
            has_old = old.exists()
            aside = _put_aside(path, old)
    is_complete = salvaged.is_complete and not is_cut
    added = report.added + carried
    return RepairReport(added, report.from_packs, report.corrupted, is_complete, str(aside) if has_old else "")


def _carry_closed(
    new: Path, store_id: str, salvaged: Salvaged, copies: Mapping[str, str], closed: Mapping[str, str]
) -> int:
    """Copy keyrings and old index rows of namespaces under other keys. Return how many rows.

    What only packs have waits for a rebuild with the right key; gc keeps it until then (I3).
    """
    carried = 0
    if closed:
        from kedge.crypto import key_id_of

        for namespace in closed:
            if text := salvaged.meta.get(f"keyring:{namespace}") or copies.get(namespace):
                carried += put_sealed(new, namespace, text, key_id_of(text), salvaged)
        with closing(SqliteIndex(str(new), store_id=store_id)) as index:
            index.accept(closed)
    return carried


def _known(salvaged: Salvaged, keys: Keyrings | None) -> dict[str, Known]:
    """Return what the old index still gives, by namespace."""
    namespaces = {
        "default",
        *salvaged.checkpoints,
        *salvaged.jobs,
        *salvaged.chunks,
        *(keys.namespaces if keys else ()),
    }
    return {
        name: Known(salvaged.checkpoints.get(name, ()), salvaged.chunks.get(name, ()), salvaged.deleted)
        for name in namespaces
    }


def _opening(
    new: Path, blobs: PackBlobs, store_id: str, salvaged: Salvaged, keys: Keyrings | None, actor: str
) -> Callable[[str], AbstractContextManager[LocalStore]]:
    @contextmanager
    def opened(namespace: str) -> Iterator[LocalStore]:
        index = SqliteIndex(str(new), namespace=namespace, store_id=store_id)
        store = LocalStore(index, blobs) if keys is None else behind_keys(index, blobs, keys, actor)
        try:
            yield store
        finally:
            store.index.close()
        put_jobs(new, namespace, salvaged.jobs.get(namespace, []))

    return opened


def _find_keys(
    path: Path, store_id: str, salvaged: Salvaged, master: MasterKey | None, marker: Marker | None
) -> Keyrings | None:
    """Return an encrypted store's keys, as far as its index or their copy has them; None if it is plain."""
    copies = read_keyrings(path)
    keyrings = {
        name.removeprefix("keyring:"): text for name, text in salvaged.meta.items() if name.startswith("keyring:")
    }
    if not copies and not keyrings and not (marker and marker.is_encrypted):
        return None
    return gather_keys(master, [(store_id, *keyring) for keyring in [*keyrings.items(), *copies.items()]])


def gather_keys(master: MasterKey | None, keyrings: Sequence[tuple[str, str, str]]) -> Keyrings:
    """Return the keys in keyrings; each comes with the ID of its store and its namespace."""
    if master is None:
        raise Validation(
            "this store is encrypted, and no key was given", hint="give it: --key, $KEDGE_KEY or $KEDGE_KEY_FILE"
        )
    from kedge.crypto import Keyrings

    keys = Keyrings(master)
    keys.refuse_wrong_master([text for _, _, text in keyrings])
    for keyring in keyrings:
        keys.add(*keyring)
    return keys


def behind_keys(index: SqliteIndex, blobs: PackBlobs, keys: Keyrings, actor: str) -> LocalStore:
    """Return a store that seals under the keys of its namespace, after adding them to the index."""
    from kedge.crypto import Vault, key_id_of
    from kedge.index.encrypted import EncryptedIndex

    text = keys.keyring_for(index.store_id, index.namespace)
    if text is None:
        return LocalStore(index, blobs)  # nothing was ever saved there
    who = keys.shown_as(index.namespace, actor)
    index.set_keyring(text, key_id_of(text), replacing=index.keyring(), actor=who)
    vault = Vault(keys.master, index.store_id, index.namespace, index.keyring)
    return LocalStore(EncryptedIndex(index, vault), blobs, vault)


@contextmanager
def _writers_kept_out(index: Path) -> Iterator[None]:
    """Hold the write lock of the old index. If it cannot be locked, nobody can commit to it either."""
    db = None
    if index.is_file():
        db = sqlite3.connect(f"{index.as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=30)
        try:
            db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                db.close()
                raise Conflict(
                    f"{index} is in use", hint="stop the jobs that write to this store, then repair"
                ) from error
        except sqlite3.DatabaseError:
            pass
    try:
        yield
    finally:
        if db is not None:
            db.close()


def _indexes(path: Path) -> dict[int, str]:
    """Return the index files in the store by number."""
    names = {}
    for name in os.listdir(path):
        if match := _INDEX.fullmatch(name):
            names[int(match[1] or 1)] = name
    return names


def _first_index(path: Path) -> str:
    """Return the index of a store without a readable marker. A killed repair leaves a newer, unfinished one."""
    names = _indexes(path)
    return names[min(names)] if names else INDEX


def _next_index(path: Path, old: str) -> str:
    """Return a name that no index here has, nor the lost one: remains of a killed repair are not reused."""
    lost = _INDEX.fullmatch(old)
    return f"index-{max([*_indexes(path), int(lost[1] or 1) if lost else 1]) + 1}.sqlite"


def _put_aside(path: Path, old: Path) -> Path:
    """Rename the old index. It is no longer in use, so the order does not matter."""
    aside = path / f"{old.stem}.damaged-{time.time_ns()}"
    for suffix in ("", "-wal", "-shm", STATE, QUEUE):
        part = path / (old.name + suffix)
        if part.exists():
            os.rename(part, str(aside) + suffix)
    sync_directory(path)
    return aside
