"""What was moved or put back in an encrypted index, which no single row shows (I10).

A row proves its own tags and idempotency key. Only the whole index shows that a key was taken from a row, or that a row
was put back to a state before its tags changed: the event log knows how often they did.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from kedge.crypto import NameKey
from kedge.errors import Corrupted, NotFound
from kedge.model import Checkpoint
from kedge.ports import Index, pages

from .sealed_rows import Proof

_PAGE = 256

Proved = Callable[[Checkpoint], tuple[Checkpoint, Proof]]
Suspect = tuple[Checkpoint, str]  # a row as the index has it, and its problem


def row_problems(inner: Index, proved: Proved, names: NameKey) -> Iterator[str]:
    """Yield problems of keys and tags that a second look confirms (I2), because others may be changing them."""
    first = list(_suspects(inner, _pages(inner), proved, names))
    second = _suspects(inner, [_again(inner, [row for row, _ in first])], proved, names)
    now = {(row.id, what): row.metadata for row, what in second}
    for row, what in first:
        if now.get((row.id, what)) == row.metadata:
            yield f"checkpoint {row.id}: {what}"


def _suspects(inner: Index, pages: Iterable[Sequence[Checkpoint]], proved: Proved, names: NameKey) -> Iterator[Suspect]:
    changes = _tag_changes(inner)
    for rows in pages:
        keys = inner.keys_of([row.id for row in rows])
        for row in rows:
            try:
                _, proof = proved(row)
            except Corrupted:
                continue  # reported by other checks
            if changes[row.id] != proof.revision:
                yield row, "it was put back as it was before its tags were changed"
            if keys.get(row.id) != _key(proof, names) and not _is_taken_over(inner, row, proof, proved, names):
                yield row, "its idempotency key was removed, or belongs to another checkpoint"


def _key(proof: Proof, names: NameKey) -> tuple[str, bytes] | None:
    """Return key and request digest as stored in the index."""
    if proof.key is None:
        return None
    return names.token("key", proof.key), names.seal("request", proof.request_digest)


def _is_taken_over(inner: Index, row: Checkpoint, proof: Proof, proved: Proved, names: NameKey) -> bool:
    """Return whether a newer checkpoint has the key now, as after a copy that reused it (`takes_key_from`)."""
    if proof.key is None:
        return False
    for holder, _ in inner.find(row.job, [names.token("key", proof.key)]).values():
        with suppress(Corrupted):
            return holder.seq > row.seq and proved(holder)[1].key == proof.key
    return False


def _tag_changes(inner: Index) -> Counter[str]:
    """Count the tag changes of each checkpoint since it was saved."""
    changes: Counter[str] = Counter()
    position = 0
    while events := inner.events(position, _PAGE):
        for event in events:
            if event.checkpoint is not None and event.action == "tag":
                changes[event.checkpoint] += 1
            elif event.checkpoint is not None and event.action == "save":
                changes.pop(event.checkpoint, None)
        position = events[-1].id
    return changes


def _pages(inner: Index) -> Iterator[Sequence[Checkpoint]]:
    for job in inner.jobs():
        yield from pages(inner.list, job.name, _PAGE)


def _again(inner: Index, rows: Iterable[Checkpoint]) -> list[Checkpoint]:
    current: dict[str, Checkpoint] = {}
    for row in rows:
        with suppress(NotFound):
            current[row.id] = inner.get(row.id)
    return list(current.values())
