"""`files:dir`, checkpoints as JSON files that people can read; `memory:dir`, a store in memory that is kept at last."""

from __future__ import annotations

import base64
from pathlib import Path

from . import codec
from .blobs.memory import MemoryBlobs
from .copying import Copying
from .embedded import absolute, naming, packs_of, refuse_network
from .errors import Corrupted, NoSpace, NotAStore, NotFound
from .index.files import FilesIndex, make_folder
from .index.shown_files import INSIDE
from .index.sqlite import SqliteIndex
from .jsonview import to_json_view
from .manifest import Entry, parse_manifest
from .model import CheckpointId, Event
from .ports import ENVELOPE
from .store import Store

_PAGE = 1000  # events


def open_files(path: Path, *, namespace: str, create: bool) -> Store:
    """The store of readable files in `path`, which is made if it does not exist or is empty."""
    path = absolute(path)
    with naming("open the store", path):
        if not is_files(path):
            if (path / INSIDE / "packs").is_dir():  # which come after the journal
                raise Corrupted(
                    f"{path / INSIDE / 'journal'} is missing", hint="put it back, or make a new one: kedge rebuild"
                )
            if not create:
                raise NotFound(f"there is no store of files at {path}", hint="check --store or $KEDGE_STORE")
            refuse_others(path)
            make_folder(path)
        refuse_network(path)
        index = FilesIndex(path, namespace=namespace, view=view)
        return Store(index, packs_of(index, path / INSIDE / "packs"))


def is_files(path: Path) -> bool:
    return (path / INSIDE / "journal").is_file()


def refuse_others(path: Path) -> None:
    """A directory with other things in it is left alone."""
    if path.exists() and not path.is_dir():
        raise NotAStore(f"{path} is not a directory", hint="give the directory of a store, or a new one")
    foreign = [found.name for found in path.iterdir() if found.name != INSIDE] if path.exists() else []
    if foreign:
        raise NotAStore(
            f"{path} is no store of files and holds others ({min(foreign)}, …)",
            hint="give an empty or new directory",
        )


def view(manifest: bytes) -> dict[str, object]:
    """What a readable file shows of a state: itself where it is JSON, else an outline; large ones name their chunks.

    Of a sealed one, its envelope: whoever has the key and this file has the state.
    """
    if manifest[:1] == bytes([ENVELOPE]):
        return {"sealed": base64.b64encode(manifest).decode()}
    if manifest[:1] not in (b"\x01", b"\x02"):
        return {"state_in": "chunks"}
    tree = parse_manifest(manifest, _nothing_spilled).tree
    assert tree is not None  # nosec B101 # of these two forms
    shown = to_json_view(codec.outline(tree))
    return {"state": shown}


def _nothing_spilled(size_bytes: int, entries: list[Entry]) -> bytes:
    raise NotFound("a small state has no chunks")


class KeptMemory(Store):
    """A store in memory that begins with what is in another one, and goes there when it is closed.

    What is kept may be encrypted; memory is not, whatever it is part of.
    """

    def __init__(self, kept: Store) -> None:
        super().__init__(SqliteIndex(None, namespace=kept.index.namespace), MemoryBlobs())
        self._kept = kept
        self._is_kept = False
        try:
            Copying(kept, self, actor="kedge").copy()
            newest = self.index.events(limit=1, newest=True)
            self._opened_at = newest[0].id if newest else 0  # the event up to which memory is what was kept
        except BaseException:
            self._is_kept = True
            kept.close()
            raise

    def at_rest(self) -> Store:
        return self._kept

    def new_id(self, step: str, created_us: int) -> CheckpointId:
        return self._kept.new_id(step, created_us)

    def close(self) -> None:
        """Bring the directory up to the memory. A process that is killed before keeps nothing.

        Only what was done here goes there: what others saved or deleted there meanwhile stays so (I3). If it fails,
        both stay open, and the next call goes on with it.
        """
        if self._is_kept:
            return
        try:
            copying, position = Copying(self, self._kept, mirror=True, actor="kedge"), self._opened_at
            while events := self.index.events(position, _PAGE):
                copying.replay([event for event in events if self._is_ours(event)])
                position = events[-1].id
        except NoSpace as error:
            raise NoSpace(
                error.message, hint="memory still has it all: make room, then close the store again"
            ) from error
        self._is_kept = True
        self._kept.close()
        super().close()

    def _is_ours(self, event: Event) -> bool:
        """A change of what others have deleted meanwhile must not bring it back."""
        is_change = event.checkpoint is not None and event.action not in ("save", "delete")
        return not is_change or self._kept.knows(event.checkpoint or "")
