"""The items of memories as this process has read them last, so that a search reads only what has changed since.

A job counts its checkpoints and their numbers. While both are the same, so are its items; what is new lies behind the
last number. Something was deleted, too, where what is known then does not add up to the count: all is read again. An
item has one row, or none when it was deleted; the rows of those that may have more, because an older version is pinned
or was left behind, are looked up. The count is asked for first, so that what changes meanwhile shows the next time, and
once more before it proves anything: it counts what was read only if nothing has changed since.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kedge.codec.fragments import NotAFragment
from kedge.errors import Corrupted
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Job
from kedge.ports import Selection
from kedge.store import Stored

from .layout import Item
from .vectors import Vectors

ITEM = "item"  # the tag by which an item is found
EXPIRES = "expires"  # the tag that says when it is gone, in seconds since 1970
_PAGE = 500
_MOST_JOB_BYTES = 16 << 20  # of states; a larger job is read in pages each time
_MOST_BYTES = 64 << 20


class Entry:
    """The newest version of an item."""

    __slots__ = ("_expires_s", "_stored", "_tree", "_vectors", "item", "row")

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._tree: Item | None = None
        self._vectors: Vectors | None = None
        self.row = stored[0]
        self.item = self.row.tags.get(ITEM, "")
        self._expires_s = expiry_of(self.row)

    @property
    def is_expired(self) -> bool:
        return self._expires_s is not None and self._expires_s <= time.time()

    def state(self, manager: CheckpointManager) -> Any:
        """What was saved, shared with nobody; NotFound when it was deleted meanwhile."""
        try:
            if self._tree is None:
                self._tree = Item(manager.store.tree(self._stored), 0)
            return self._tree.value()
        except (NotAFragment, Corrupted):  # it has buffers; or this tells what is the matter with it
            return manager.load_stored(self._stored)

    def vectors(self, manager: CheckpointManager) -> Vectors:
        """Those of its texts: all that a search by meaning looks at, so they are read once."""
        if self._vectors is None:
            self._vectors = self.state(manager).get("vectors") or {}
        return self._vectors


def expiry_of(row: Checkpoint) -> float | None:
    """When an item is gone, in seconds since 1970."""
    expires = row.tags.get(EXPIRES)
    return None if expires is None else float(expires)


@dataclass(frozen=True, slots=True)
class _Known:
    """A job as it was counted, and its items as they were read after that, oldest first."""

    last_seq: int = 0
    checkpoints: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)
    newest: int = 0  # number that was read
    several: frozenset[str] = frozenset()  # items that may have more rows than one


class Recall:
    """Bounded; thread-safe, because what is known of a job is replaced and never changed."""

    def __init__(self, manager: CheckpointManager) -> None:
        self._manager = manager
        self._known: dict[str, _Known] = {}
        self._size_bytes = 0

    def items(self, job: Job) -> Iterator[Entry]:
        """The items of a job that have not expired, newest first. `job`: as it is counted now."""
        if job.size_bytes > _MOST_JOB_BYTES:
            return self._read_backwards(job.name)
        known = self._known.get(job.name)
        if known is None or (known.last_seq, known.checkpoints) != (job.last_seq, job.checkpoints):
            known = self._catch_up(job, known)
            self._keep(job, known)
        if any(entry.is_expired for entry in known.entries.values()):
            known = self._look_again(job, known)
            return (entry for entry in reversed(known.entries.values()) if not entry.is_expired)
        return reversed(known.entries.values())

    def find(self, job: str, item: str) -> Entry | None:
        """The newest version of one item, expired or not, as the store has it."""
        newest = self._manager.catalogue.list_stored(job, Selection(tags={ITEM: [item]}, limit=1))
        return Entry(newest[0]) if newest else None

    def _keep(self, job: Job, known: _Known) -> None:
        self._size_bytes += job.size_bytes
        if self._size_bytes > _MOST_BYTES:
            self._known, self._size_bytes = {}, job.size_bytes
        self._known[job.name] = known

    def _catch_up(self, job: Job, known: _Known | None) -> _Known:
        proved = None if known is None else self._prove(job, self._read_behind(job, known))
        return self._read_behind(job, _Known()) if proved is None else proved

    def _prove(self, job: Job, grown: _Known) -> _Known | None:
        """What is known, if the count proves that all of it is there."""
        rows: dict[str, list[str]] = {item: [] for item in grown.several}  # IDs, oldest first
        several = [*rows]
        for start in range(0, len(several), _PAGE):
            tags = {ITEM: several[start : start + _PAGE]}
            for row, _ in self._manager.catalogue.list_stored(job.name, Selection(tags=tags)):
                rows[row.tags[ITEM]].append(row.id)
        count = len(grown.entries) - len(rows) + sum(map(len, rows.values()))
        if count != job.checkpoints or any(grown.entries[item].row.id not in ids[-1:] for item, ids in rows.items()):
            return None
        now = self._manager.catalogue.job(job.name)
        if now is None or (now.last_seq, now.checkpoints) != (job.last_seq, job.checkpoints):
            return None
        return replace(grown, several=frozenset(item for item, ids in rows.items() if len(ids) > 1))

    def _read_behind(self, job: Job, known: _Known) -> _Known:
        entries, newest, several = dict(known.entries), known.newest, set(known.several)
        while page := self._manager.catalogue.list_stored(job.name, Selection(after=newest, limit=_PAGE)):
            for stored in page:
                entry = Entry(stored)
                if entries.pop(entry.item, None) is not None:
                    several.add(entry.item)
                entries[entry.item] = entry
            newest = page[-1][0].seq
        return _Known(job.last_seq, job.checkpoints, entries, newest, frozenset(several))

    def _look_again(self, job: Job, known: _Known) -> _Known:
        """Another process may have read what has expired here, and so have prolonged it."""
        expired = [item for item, entry in known.entries.items() if entry.is_expired]
        entries = dict(known.entries)
        for start in range(0, len(expired), _PAGE):
            wanted = Selection(tags={ITEM: expired[start : start + _PAGE]})
            for stored in self._manager.catalogue.list_stored(job.name, wanted):
                entry = Entry(stored)
                entries[entry.item] = entry
        looked = replace(known, entries=entries)
        self._known[job.name] = looked
        return looked

    def _read_backwards(self, job: str) -> Iterator[Entry]:
        seen: set[str] = set()
        before: int | None = None
        while page := self._manager.catalogue.list_stored(job, Selection(limit=_PAGE, before=before)):
            for stored in reversed(page):
                entry = Entry(stored)
                if entry.item not in seen:
                    seen.add(entry.item)
                    if not entry.is_expired:
                        yield entry
            before = page[0][0].seq
