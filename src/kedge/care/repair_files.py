"""A new journal for a `files:` store whose journal was lost or damaged, made from all that is left:

    the beginning of the old journal, up to the damage
    the readable files: a JSON or sealed state is complete in its file, and its digest proves it
    the packs, which have records of larger states

The new journal is made in its own directory and replaces the old one by a rename: after a kill anywhere, the store has
the complete old or new one. Nothing is deleted: the old journal stays as `journal.damaged-…`, and files whose state is
only outlined are moved to `lost-…`.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
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


ShownRows = dict[str, dict[Path, NewCheckpoint | None]]  # by namespace and file; None: not a complete checkpoint


def refile(path: Path, *, actor: str, master: MasterKey | None = None) -> RepairReport:
    """Make a new journal for the store in `path`. An encrypted one needs its master key."""
    inside = path / INSIDE
    if not (inside / "packs").is_dir():
        raise NotFound(f"there is no files: store at {path}", hint="check --store or $KEDGE_STORE")
    journal = Journal(inside)
    with storage_errors("repair", path), translated(str(path)), journal.locked():
        for left in inside.glob("rebuilt-*"):  # left by a killed repair
            shutil.rmtree(left)
        new = inside / f"rebuilt-{time.time_ns()}"
        make_folder(new)
        is_complete = _begin(journal, new)
        shown_rows = _read_files(path)
        keys = _find_keys(inside, new, shown_rows, master)
        blobs = PackBlobs(str(inside / "packs"))
        try:
            known = {namespace: Known([row for row in rows.values() if row]) for namespace, rows in shown_rows.items()}
            report = rebuild(blobs, partial(_opened, inside, new, keys, actor), actor=actor, keys=keys, known=known)
            with closing(FilesIndex(new)) as index:
                index.accept(report.closed)
        finally:
            blobs.close()
        count, is_lost = _put_aside(path, new, shown_rows)
        aside = _put_in_place(inside, new)
    return RepairReport(count, report.added, report.corrupted, is_complete and not is_lost, aside)


def _begin(journal: Journal, new: Path) -> bool:
    """Start with the sound beginning of the old journal. Return whether that is all of it."""
    beginning, is_complete = journal.beginning()
    if beginning:
        write_file(new / INSIDE / "journal", beginning)
    try:
        FilesIndex(new, view=view).close()
    except Corrupted:  # complete, but not what an index writes
        (new / INSIDE / "journal").unlink()
        return False
    return is_complete


def _read_files(path: Path) -> ShownRows:
    """Return the rows in the readable files. One that somebody changed no longer matches its digest."""
    shown_rows: ShownRows = {}
    for file in path.glob("**/*.json"):
        parts = file.relative_to(path).parts
        if INSIDE in parts or len(parts) not in (3, 4) or (len(parts) == 4 and parts[0][:1] != "@"):
            continue  # people may have their own files beside ours
        namespace = unquote(parts[0][1:]) if len(parts) == 4 else DEFAULT
        try:
            shown = json.loads(file.read_bytes()) if file.stat().st_size <= _MAX_FILE_BYTES else None
            if isinstance(shown, dict) and f"{shown.get('id')}.json" == file.name:
                shown_rows.setdefault(parse_name("namespace", namespace), {})[file] = _row(shown)
        except (ValueError, KeyError, TypeError, OSError):
            continue
    return shown_rows


def _row(shown: Mapping[str, Any]) -> NewCheckpoint | None:
    """Return the index row that a file shows, if it contains the whole state."""
    if "sealed" in shown:
        manifest = base64.b64decode(shown["sealed"], validate=True)
    elif "state" in shown:
        manifest = pack_tree(codec.encode(shown["state"]).tree)
    else:
        return None  # in packs, which have its record
    digest = digest_of(manifest)
    if digest.hex() != shown["digest"]:
        return None  # an outline
    checkpoint = Checkpoint.from_json({"codec": codec.CODEC, **shown, "stored_bytes": len(manifest)})
    parse_name("checkpoint ID", checkpoint.id)
    if not all(isinstance(value, str) for value in checkpoint.tags.values()):
        return None
    return replace(NewCheckpoint.of(checkpoint, manifest), seq=checkpoint.seq, status=checkpoint.status)


def _find_keys(inside: Path, new: Path, shown_rows: ShownRows, master: MasterKey | None) -> Keyrings | None:
    """Return an encrypted store's keys, as far as the old journal or their copy has them; None if plain."""
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
    """Return the ID of the store a keyring was sealed for; "" for a damaged one, which opens for no store."""
    try:
        return str(json.loads(keyring)["bound_to"])
    except (ValueError, TypeError, KeyError):
        return ""


@contextmanager
def _opened(inside: Path, new: Path, keys: Keyrings | None, actor: str, namespace: str) -> Iterator[LocalStore]:
    index, blobs = FilesIndex(new, namespace=namespace, view=view), PackBlobs(str(inside / "packs"))
    with closing(LocalStore(index, blobs) if keys is None else behind_keys(index, blobs, keys, actor)) as store:
        yield store


def _put_aside(path: Path, new: Path, shown_rows: ShownRows) -> tuple[int, bool]:
    """Copy the files of lost checkpoints aside. Return how many checkpoints remain, and whether any is lost."""
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
    """Replace the old journal by a rename, after giving it a second name."""
    old, aside = inside / "journal", inside / new.name.replace("rebuilt", "journal.damaged")
    has_old = old.exists()
    with storage_errors("put the new journal in place of", old):
        if has_old:
            os.link(old, aside)
        os.replace(new / INSIDE / "journal", old)
        sync_directory(inside)
        shutil.rmtree(new)
    return str(aside) if has_old else ""
