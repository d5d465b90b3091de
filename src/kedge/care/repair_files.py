"""A `files:` store whose journal was lost or damaged gets a new one, from all that is left.

    the beginning of the old journal, up to where it is damaged
    the readable files: a state that is JSON, or sealed, is whole in them, and its digest proves it
    the packs, which tell of larger states

The new journal is made in a folder of its own and takes the place of the old one by a rename: killed anywhere, the
store has the old one or the new one, whole. Nothing is thrown away: the old journal stays as `journal.damaged-…`, and
files whose state is only outlined go to `lost-…`.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from kedge import codec
from kedge.blobs.direct import sync_directory
from kedge.blobs.group_files import make_own_folder
from kedge.blobs.packs import PackBlobs
from kedge.errors import Corrupted, NotFound, storage_errors
from kedge.index.files.index import FilesIndex, make_folder
from kedge.index.files.journal import Journal, write_file
from kedge.index.files.shown_files import DEFAULT, INSIDE
from kedge.index.sqlite.database import translated
from kedge.model import Checkpoint, parse_name
from kedge.ports import NewCheckpoint, digest_of
from kedge.store.directory import read_keyrings
from kedge.store.local import LocalStore
from kedge.store.manifest import pack_tree
from kedge.store.readable_files import view

from .rebuild import Known, rebuild
from .repair import RepairReport, behind_keys, gather_keys

if TYPE_CHECKING:
    from kedge.crypto import Keyrings, MasterKey

_MAX_FILE_BYTES = 64 << 20


ShownRows = dict[str, dict[Path, NewCheckpoint | None]]  # by namespace and file; None: the file is no whole checkpoint


def refile(path: Path, *, actor: str, master: MasterKey | None = None) -> RepairReport:
    """Make a new journal for the store in `path`, whose master key is needed where it is encrypted."""
    inside = path / INSIDE
    if not (inside / "packs").is_dir():
        raise NotFound(f"there is no store of files at {path}", hint="check --store or $KEDGE_STORE")
    journal = Journal(inside)
    with storage_errors("repair", path), translated(str(path)), journal.locked():
        for left in inside.glob("rebuilt-*"):  # by one that was killed
            shutil.rmtree(left)
        new = inside / f"rebuilt-{time.time_ns()}"
        make_folder(new)
        is_complete = _begin(journal, new)
        shown_rows = _read_files(path)
        keys = _find_keys(inside, new, shown_rows, master)
        blobs = PackBlobs(str(inside / "packs"))
        try:
            known = {namespace: Known([row for row in rows.values() if row]) for namespace, rows in shown_rows.items()}
            report = rebuild(blobs, _opening(inside, new, keys, actor), actor=actor, keys=keys, known=known)
            with closing(FilesIndex(new)) as index:
                index.accept(report.closed)
        finally:
            blobs.close()
        count, is_lost = _put_aside(path, new, shown_rows)
        aside = _put_in_place(inside, new)
    return RepairReport(count, report.added, report.corrupted, is_complete and not is_lost, aside)


def _begin(journal: Journal, new: Path) -> bool:
    """Copy the intact beginning of the old journal; return whether that is all of it."""
    beginning, is_complete = journal.beginning()
    if beginning:
        write_file(new / INSIDE / "journal", beginning)
    try:
        FilesIndex(new, view=view).close()
    except Corrupted:  # whole, and yet not what an index writes
        (new / INSIDE / "journal").unlink()
        return False
    return is_complete


def _read_files(path: Path) -> ShownRows:
    """What the readable files say. One that somebody changed does not match its digest any more."""
    shown_rows: ShownRows = {}
    for file in path.glob("**/*.json"):
        parts = file.relative_to(path).parts
        if INSIDE in parts or len(parts) not in (3, 4) or (len(parts) == 4 and parts[0][:1] != "@"):
            continue  # people may put files of their own beside ours
        namespace = unquote(parts[0][1:]) if len(parts) == 4 else DEFAULT
        try:
            shown = json.loads(file.read_bytes()) if file.stat().st_size <= _MAX_FILE_BYTES else None
            if isinstance(shown, dict) and f"{shown.get('id')}.json" == file.name:
                shown_rows.setdefault(parse_name("namespace", namespace), {})[file] = _row(shown)
        except (ValueError, KeyError, TypeError, OSError):
            continue
    return shown_rows


def _row(shown: Mapping[str, Any]) -> NewCheckpoint | None:
    """The row of the index that a file shows, if the state is whole in it."""
    if "sealed" in shown:
        manifest = base64.b64decode(shown["sealed"], validate=True)
    elif "state" in shown:
        manifest = pack_tree(codec.encode(shown["state"]).tree)
    else:
        return None  # in packs, which tell of it
    digest = digest_of(manifest)
    if digest.hex() != shown["digest"]:
        return None  # an outline
    checkpoint = Checkpoint.from_json({"codec": codec.CODEC, **shown, "stored_bytes": len(manifest)})
    parse_name("checkpoint ID", checkpoint.id)
    if not all(isinstance(value, str) for value in checkpoint.tags.values()):
        return None
    return replace(NewCheckpoint.of(checkpoint, manifest), seq=checkpoint.seq, status=checkpoint.status)


def _find_keys(inside: Path, new: Path, shown_rows: ShownRows, master: MasterKey | None) -> Keyrings | None:
    """The keys of an encrypted store, as far as the old journal and the copy beside it have them; None if plain."""
    copies = read_keyrings(inside)
    keyrings: dict[str, tuple[str, str]] = {}
    for namespace in {DEFAULT, *copies, *shown_rows}:
        with closing(FilesIndex(new, namespace=namespace)) as index:
            if (text := index.keyring()) is not None:
                keyrings[namespace] = index.store_id, text
    if not copies and not keyrings:
        return None
    newest = [(keyrings[name][0] if name in keyrings else _bound_to(text), name, text) for name, text in copies.items()]
    return gather_keys(master, [*newest, *((store_id, name, text) for name, (store_id, text) in keyrings.items())])


def _bound_to(keyring: str) -> str:
    """The ID of the store that a keyring was sealed for; "" for a damaged one, which opens for no store."""
    try:
        return str(json.loads(keyring)["bound_to"])
    except (ValueError, TypeError, KeyError):
        return ""


def _opening(
    inside: Path, new: Path, keys: Keyrings | None, actor: str
) -> Callable[[str], AbstractContextManager[LocalStore]]:
    @contextmanager
    def opened(namespace: str) -> Iterator[LocalStore]:
        index, blobs = FilesIndex(new, namespace=namespace, view=view), PackBlobs(str(inside / "packs"))
        store = LocalStore(index, blobs) if keys is None else behind_keys(index, blobs, keys, actor)
        try:
            yield store
        finally:
            store.close()

    return opened


def _put_aside(path: Path, new: Path, shown_rows: ShownRows) -> tuple[int, bool]:
    """Copy the files of lost checkpoints aside; return how many checkpoints are left, and whether any was lost."""
    aside = path / INSIDE / new.name.replace("rebuilt", "lost")
    count, is_lost = 0, False
    for namespace in {DEFAULT, *shown_rows}:
        with closing(FilesIndex(new, namespace=namespace)) as index:
            count += index.totals()["checkpoints"]
            for file in shown_rows.get(namespace, ()):
                try:
                    index.get(unquote(file.stem))
                except NotFound:
                    is_lost = True
                    there = aside / file.relative_to(path)
                    make_own_folder(there.parent)
                    shutil.copy2(file, there)
    return count, is_lost


def _put_in_place(inside: Path, new: Path) -> str:
    """The moment of the change is a rename; the old journal has another name by then."""
    old, aside = inside / "journal", inside / new.name.replace("rebuilt", "journal.damaged")
    has_old = old.exists()
    with storage_errors("put the new journal in place of", old):
        if has_old:
            os.link(old, aside)
        os.replace(new / INSIDE / "journal", old)
        sync_directory(inside)
        shutil.rmtree(new)
    return str(aside) if has_old else ""
