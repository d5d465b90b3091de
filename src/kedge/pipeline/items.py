"""The items of a run's maps, from the records of their workers alone: how many are done, and which still fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.errors import Corrupted
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from .digests import DIGEST_BYTES, split
from .keys import digest_of, show

_PAGE = 5000


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item whose last try failed."""

    key: str
    error: str
    traceback: str
    attempts: int
    checkpoint: str  # of the record that tells it


@dataclass(slots=True)
class MapItems:
    """The items of one map."""

    path: str
    records: list[Checkpoint] = field(default_factory=list)
    done: int = 0
    failed: dict[str, FailedItem] = field(default_factory=dict)


def maps_of(store: CheckpointManager, key: str) -> list[MapItems]:
    """The maps of a run in the order in which they began. What failed and was done later has not failed."""
    maps: dict[str, MapItems] = {}
    after = 0
    while page := store.list(key, after=after, limit=_PAGE, level="substep"):
        after = page[-1].seq
        for record in page:
            if record.metadata.get("kind") == "items" and isinstance(path := record.metadata.get("path"), list):
                name = show(tuple(map(str, path)))
                maps.setdefault(name, MapItems(name)).records.append(record)
    for items in maps.values():
        _count(store, items)
    return list(maps.values())


def _count(store: CheckpointManager, items: MapItems) -> None:
    failing: dict[bytes, str] = {}  # digest by which an item is known when it is done → its key
    for record in items.records:
        done = record.metadata.get("items")
        items.done += done if isinstance(done, int) else 0
        if failing:
            for digest in _done_in(store, record):
                if (key := failing.get(digest)) is not None:
                    items.failed.pop(key, None)
        if record.metadata.get("failed"):
            for item in failures_in(store, record):
                items.failed[item.key] = item
                failing.update((digest, item.key) for digest in _digests(item.key))


def _digests(key: str) -> Iterator[bytes]:
    """An item is called by its key where that is a text, else by the digest it is known by."""
    yield digest_of(key, "a key")[:DIGEST_BYTES]
    if len(key) == 2 * DIGEST_BYTES:
        try:
            yield bytes.fromhex(key)
        except ValueError:
            return


def _done_in(store: CheckpointManager, record: Checkpoint) -> Sequence[bytes]:
    if not record.metadata.get("items"):
        return ()
    listed = record.metadata.get("keys")
    try:
        state: Any = {"keys": bytes.fromhex(listed)} if isinstance(listed, str) else store.load(record.id, only="keys")
    except Corrupted:
        return ()  # what cannot be read is done again
    return split(state["keys"])


def failures_in(store: CheckpointManager, record: Checkpoint) -> list[FailedItem]:
    """The failures one record tells; of one that is damaged, that it is."""
    try:
        state: Any = store.load(record.id, only="failed/*")
    except Corrupted as error:
        return [FailedItem(f"record {record.id}", error.message, "", 0, record.id)]
    failures = state.get("failed", []) if isinstance(state, dict) else []
    return [
        FailedItem(
            str(failure.get("key")),
            str(failure.get("error", "")),
            str(failure.get("traceback", "")),
            int(failure.get("attempts") or 1),
            record.id,
        )
        for failure in failures
        if isinstance(failure, dict)
    ]
