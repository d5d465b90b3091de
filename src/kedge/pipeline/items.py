"""The items of a run's maps, from the records of their workers alone: which are done, where, and which failed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kedge.errors import Corrupted, NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointId, list_of, number_of

from .digests import DIGEST_BYTES, split
from .inbox import ITEMS, post, value_of
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
    number: int | None = None  # its place among the items


@dataclass(slots=True)
class MapItems:
    """The items of one map."""

    path: str
    records: list[Checkpoint] = field(default_factory=list)
    done: int = 0
    failed: dict[str, FailedItem] = field(default_factory=dict)

    @property
    def total(self) -> int | None:
        """How many items the newest session was given, where its map could tell."""
        total = self.records[-1].metadata.get("of") if self.records else None
        return total if isinstance(total, int) else None


@dataclass(frozen=True, slots=True)
class FoundItem:
    """One item of a map: the record of its result, its index there, and its failures, oldest first."""

    key: str
    number: int | None
    record: Checkpoint | None
    index: int
    failures: Sequence[tuple[FailedItem, Checkpoint]]

    @property
    def status(self) -> str:
        return "done" if self.record is not None else "failed" if self.failures else "pending"


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
        items.done += number_of(record.metadata.get("items"))
        if failing:
            for digest in failing.keys() & _done_in(store, record):
                items.failed.pop(failing[digest], None)
        if record.metadata.get("failed"):
            for item in failures_in(store, record):
                items.failed[item.key] = item
                failing.update((digest, item.key) for digest in _digests(item.key))


def places_in(record: Checkpoint) -> list[tuple[int, int]]:
    """Where the items of a record are among all items: (first, how many), in the order of its results."""
    return [
        (place[0], place[1])
        for place in list_of(record.metadata.get("at"))
        if isinstance(place, list) and len(place) == 2 and all(type(part) is int and part >= 0 for part in place)
    ]


def find_item(store: CheckpointManager, items: MapItems, *, key: str = "", number: int | None = None) -> FoundItem:
    """An item by its key, as text, or by its place; NotFound for a key that no record has."""
    failed = [
        (item, record)
        for record in items.records
        if record.metadata.get("failed")
        for item in failures_in(store, record)
        if (item.number == number if number is not None else item.key == key)
    ]
    newest = failed[-1][0] if failed else None
    digests: set[bytes] = set()
    if newest is not None:
        digests.update(_digests(newest.key))
    elif number is None:
        digests.update(_digests(key), _digest_of_number(key))
    for record in reversed(items.records):
        index = _index(store, record, digests, number)
        if index is not None:
            place = number if number is not None else _number_at(record, index)
            return FoundItem(newest.key if newest else key, place, record, index, failed)
    if newest is None and number is None:
        raise NotFound(f"map {items.path} has no item {key}", hint="items are found by their key, or as #place")
    return FoundItem(newest.key if newest else key, newest.number if newest else number, None, 0, failed)


def _digest_of_number(text: str) -> list[bytes]:
    """By which an item is known whose key, or which itself, is this number."""
    is_number = text.removeprefix("-").isdecimal() and text.isascii() and len(text) < 19
    return [digest_of(int(text), "a key")[:DIGEST_BYTES]] if is_number else []


def _index(store: CheckpointManager, record: Checkpoint, digests: Collection[bytes], number: int | None) -> int | None:
    """Which of a record's results is that of an item."""
    if digests:
        return next((n for n, digest in enumerate(_done_in(store, record)) if digest in digests), None)
    before = 0
    for first, count in places_in(record):
        if number is not None and first <= number < first + count:
            return before + number - first
        before += count
    return None


def _number_at(record: Checkpoint, index: int) -> int | None:
    for first, count in places_in(record):
        if index < count:
            return first + index
        index -= count
    return None


def retry_items(store: CheckpointManager, run: str, items: Collection[str]) -> list[CheckpointId]:
    """Have only these failed items, as MAP/KEY, tried again when the run is resumed; answers the messages."""
    return [post(store, run, ITEMS, path, keys) for path, keys in failed_items(store, run, items).items()]


def keys_in(store: CheckpointManager, message: Checkpoint) -> list[str]:
    """The keys that a message of `retry_items` holds."""
    keys = value_of(store, message)
    return [key for key in keys if isinstance(key, str)] if isinstance(keys, list) else []


def failed_items(store: CheckpointManager, run: str, items: Collection[str]) -> dict[str, list[str]]:
    """The keys of these failed items, given as MAP/KEY, by the path of their map."""
    failed = {f"{entry.path}/{key}": (entry.path, key) for entry in maps_of(store, run) for key in entry.failed}
    if unknown := [item for item in items if item not in failed]:
        raise NotFound(f"run {run} has no failed item {unknown[0]}", hint=f"kedge runs show {run} lists them")
    chosen: dict[str, list[str]] = {}
    for path, key in (failed[item] for item in items):
        chosen.setdefault(path, []).append(key)
    return chosen


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
        state = store.load(record.id, only="failed/*")
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
            number if type(number := failure.get("at")) is int else None,
        )
        for failure in failures
        if isinstance(failure, dict)
    ]
