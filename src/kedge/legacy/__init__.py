"""Old names that work: client code of the systems Kedge replaces runs with only its import line changed.

Thin adapters; nothing in Kedge knows them. docs/coming-from.md maps each name to the new one.
A directory given to one of them may hold old files: the store is in `.kedge` inside it, and the first opening imports
what is beside it. The old files are only read.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from kedge.manager import CheckpointManager

from .importers import Options, bring
from .importers.folder import IMPORTED

_STORE = ".kedge"


def store_in(directory: str | os.PathLike[str]) -> str:
    """Where the store of an old checkpoint directory is; URLs and stores are what they are."""
    place = os.fspath(directory)
    if ":" in place or os.path.exists(os.path.join(place, "kedge-store")):
        return place
    os.makedirs(place, exist_ok=True)
    return os.path.join(place, _STORE)


def open_in(directory: str | os.PathLike[str] | CheckpointManager, form: str) -> CheckpointManager:
    """The store of an old checkpoint directory, with the checkpoints of `form` that lie there imported."""
    if isinstance(directory, CheckpointManager):
        return directory
    store = CheckpointManager(store_in(directory))
    move_in(directory, store, form)
    return store


def move_in(directory: str | os.PathLike[str], store: CheckpointManager, form: str) -> None:
    """Import the old files of a directory, once. Later changes are only pointed out: `kedge import` takes them."""
    place = os.fspath(directory)
    if os.path.basename(store_in(place)) != _STORE or (fingerprint := _fingerprint(place)) is None:
        return
    marker = Path(place, IMPORTED)
    command = f"kedge import {place} --from {form} --store {store.place}"
    if not marker.exists():
        report = bring(place, store, Options(form=form))
        marker.write_text(fingerprint)
        if report.imported or report.findings:
            lost = f", {len(report.findings):,} remarks: {command} --dry-run" if report.findings else ""
            sys.stderr.write(f"kedge: {place}: {report.imported:,} checkpoints of old files imported{lost}\n")
    elif marker.read_text() != fingerprint:
        sys.stderr.write(f"kedge: {place}: old files changed since they were imported; to import them: {command}\n")


def _fingerprint(directory: str) -> str | None:
    """Names, sizes and times of the old files in a directory; None when there are none."""
    digest, has_files = hashlib.sha256(), False
    for folder, folders, files in os.walk(directory):
        folders[:] = sorted(name for name in folders if name != _STORE)
        for name in sorted(files):
            if name == IMPORTED:
                continue
            path = os.path.join(folder, name)
            about = os.lstat(path)
            shown = os.path.relpath(path, directory)
            digest.update(os.fsencode(f"{shown}\0{about.st_size}\0{about.st_mtime_ns}\n"))
            has_files = True
    return digest.hexdigest() if has_files else None
