"""What a saver remembers of its threads: the checkpoints it has seen last, and from where they may be continued."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kedge.codec.fragments import decode_fragment

from .layout import Channel, Item

MOST_CHECKPOINTS = 128
MOST_VIEWS = 4096
MOST_TREES = 512
_SMALL_BYTES = 32768
_MOST_READERS = 16

T = TypeVar("T")
Key = tuple[str, str | None]  # job, LangGraph's checkpoint ID; None: before the first


@dataclass(frozen=True, slots=True)
class Laid:
    """A checkpoint as it was saved: valid for as long as the store has the same digest for it."""

    digest: str
    head: bytes
    channels: Mapping[str, Channel]
    versions: Mapping[str, object]

    def new_head(self) -> dict[str, Any]:
        """What the head is made of, shared with nobody."""
        head: Any = decode_fragment(self.head)
        return dict(head)


class Memory:
    """Bounded; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._laid: OrderedDict[Key, Laid] = OrderedDict()
        self._trees: OrderedDict[Key, Item] = OrderedDict()  # what tasks wrote, by job and digest
        self._views: OrderedDict[Key, list[int]] = OrderedDict()

    def laid(self, key: Key) -> Laid | None:
        with self._lock:
            return self._laid.get(key)

    def keep(self, key: Key, laid: Laid) -> None:
        with self._lock:
            _keep(self._laid, key, laid, MOST_CHECKPOINTS)

    def tree(self, key: Key) -> Item | None:
        with self._lock:
            return self._trees.get(key)

    def keep_tree(self, key: Key, tree: Item) -> None:
        if len(tree.data) <= _SMALL_BYTES:
            with self._lock:
                _keep(self._trees, key, tree, MOST_TREES)

    def saw(self, key: Key, newest: int) -> None:
        """Somebody was given this checkpoint while `newest` was the number of the thread's newest."""
        with self._lock:
            views = [*self._views.get(key, ()), newest]
            _keep(self._views, key, views[-_MOST_READERS:], MOST_VIEWS)

    def continues(self, key: Key) -> int | None:
        """The newest number known to whoever now continues this checkpoint; None when nobody was given it."""
        with self._lock:
            views = self._views.get(key)
            return views.pop() if views else None

    def forget(self, job: str) -> None:
        """Forget what was saved, parts of which have been deleted; runs still go on from where they have read."""
        with self._lock:
            for known in (self._laid, self._trees):
                for key in [key for key in known if key[0] == job]:
                    del known[key]


def _keep(known: OrderedDict[Key, T], key: Key, value: T, most: int) -> None:
    """Enter a value as the newest; the oldest goes where there are more than `most`."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)
