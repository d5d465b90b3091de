"""`memory:dir`: a store in memory that begins as a copy of a directory and is copied back when it is closed."""

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
    """A store in memory that begins with what is in another one, and goes there when it is closed.

    What is kept may be encrypted; memory is not, whatever it is part of.
    """

    def __init__(self, disk: LocalStore) -> None:
        super().__init__(SqliteIndex(None, namespace=disk.index.namespace), MemoryBlobs())
        self._kept = disk
        self._is_kept = False
        try:
            Copying(disk, self, actor="kedge").copy()
            newest = self.index.events(limit=1, newest=True)
            self._opened_at = newest[0].id if newest else 0  # the event up to which memory is what was kept
        except BaseException:
            self._is_kept = True
            disk.close()
            raise

    def at_rest(self) -> LocalStore:
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
        return not is_change or knows(self._kept.index, event.checkpoint or "")
