"""`files:dir`: a store whose checkpoints are JSON files that people can read."""

from __future__ import annotations

import base64
from pathlib import Path

from kedge import codec
from kedge.codec.json_view import to_json_view
from kedge.errors import Corrupted, NotAStore, NotFound, storage_errors
from kedge.index.files.index import FilesIndex, make_folder
from kedge.index.files.shown_files import INSIDE
from kedge.ports import ENVELOPE

from .directory import absolute, packs_of, refuse_network
from .local import LocalStore
from .manifest import parse_small


def open_files(path: Path, *, namespace: str, create: bool) -> LocalStore:
    """Open the store of readable files in `path`, which is created if it does not exist or is empty."""
    path = absolute(path)
    with storage_errors("open the store", path):
        if not is_files(path):
            if (path / INSIDE / "packs").is_dir():  # created after the journal
                raise Corrupted(
                    f"{path / INSIDE / 'journal'} is missing",
                    hint="restore it from a copy, or make a new one: kedge rebuild",
                )
            if not create:
                raise NotFound(f"there is no files: store at {path}", hint="check --store or $KEDGE_STORE")
            refuse_others(path)
            make_folder(path)
        refuse_network(path)
        index = FilesIndex(path, namespace=namespace, view=view)
        return LocalStore(index, packs_of(index, path / INSIDE / "packs"), has_backlog=True)


def is_files(path: Path) -> bool:
    return (path / INSIDE / "journal").is_file()


def refuse_others(path: Path) -> None:
    """Refuse a directory with other files in it."""
    if path.exists() and not path.is_dir():
        raise NotAStore(f"{path} is not a directory", hint="give the directory of a store, or a new one")
    foreign = [entry.name for entry in path.iterdir() if entry.name != INSIDE] if path.exists() else []
    if foreign:
        raise NotAStore(
            f"{path} is not a files: store and holds other files ({min(foreign)}, …)",
            hint="give an empty or new directory",
        )


def view(manifest: bytes) -> dict[str, object]:
    """Return what a readable file shows of a state: the state if it is JSON, otherwise an outline.

    A large state is described as being in chunks. A sealed one is shown as its envelope: the key and this file give the
    state.
    """
    if manifest[:1] == bytes([ENVELOPE]):
        return {"sealed": base64.b64encode(manifest).decode()}
    if manifest[:1] not in (b"\x01", b"\x02"):
        return {"state_in": "chunks"}
    tree = parse_small(manifest).tree
    assert tree is not None  # nosec B101 # of these two forms
    shown = to_json_view(codec.outline(tree))
    return {"state": shown}
