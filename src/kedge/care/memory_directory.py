"""`memory:dir`: a store in memory that starts as a copy of a directory and is copied back when it is closed."""

from __future__ import annotations

from kedge.blobs.memory import MemoryBlobs
from kedge.errors import NoSpace
from kedge.index.sqlite.index import SqliteIndex
from kedge.model import CheckpointId, Event
from kedge.store import knows
from kedge.store.local import LocalStore

from .copy import Copying

_PAGE = 1000  # events


class MemoryDirectory(LocalStore):
    """A store in memory with the content of another one, which it updates when it is closed.

    The directory may be encrypted; memory never is.
    """

    def __init__(self, disk: LocalStore) -> None:
        super().__init__(SqliteIndex(None, namespace=disk.index.namespace), MemoryBlobs())
        self._disk = disk
        self._is_written = False
        try:
            Copying(disk, self, actor="kedge").copy()
            newest = self.index.events(limit=1, newest=True)
            self._opened_at = newest[0].id if newest else 0  # the event up to which memory equals the directory
        except BaseException:
            self._is_written = True
            disk.close()
            raise

    def at_rest(self) -> LocalStore:
        return self._disk

    def new_id(self, step: str, created_us: int) -> CheckpointId:
        return self._disk.new_id(step, created_us)

    def close(self) -> None:
        """Copy the changes to the directory. A process that is killed earlier saves nothing.

        Copies only changes made here: what others saved or deleted there meanwhile stays so (I3). On failure both
        stores stay open, and the next call continues.
        """
        if self._is_written:
            return
        try:
            copying, position = Copying(self, self._disk, mirror=True, actor="kedge"), self._opened_at
            while events := self.index.events(position, _PAGE):
                copying.replay([event for event in events if self._is_ours(event)])
                position = events[-1].id
        except NoSpace as error:
            raise NoSpace(
                error.message, hint="memory still has it all: make room, then close the store again"
            ) from error
        self._is_written = True
        self._disk.close()
        super().close()

    def _is_ours(self, event: Event) -> bool:
        """Return whether to copy a change: one of a checkpoint that others deleted must not bring it back."""
        is_change = event.checkpoint is not None and event.action not in ("save", "delete")
        return not is_change or knows(self._disk.index, event.checkpoint or "")
