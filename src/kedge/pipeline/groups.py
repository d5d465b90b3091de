"""Groups: the runs of one tenant, customer or file begin in the order of submission, one after another unless the
limits of the queue allow more at once; groups take turns.

An entry of a group is held until it is its turn. Then a new entry takes its place, at the end of the line, so that a
group with many entries does not keep the others waiting. Which is next is read from the store, in this order:

    1. the oldest held entry
    2. how many of the group are active: if as many as may be, nothing is done

So two who look at the same time find the same entry, and only one of them replaces it: the idempotency key of the new
entry is taken while that is there, and when it is gone, so is the held one, which is its parent. All that were held
before the entry of step 1 are active by then, so step 2 counts them, or they have ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from .entries import HELD, drop_entry, facts_of, save_entry

_LANE = "lane"


def held_tags(group: str) -> dict[str, str]:
    return {_LANE: f"held-{group_digest(group)}"}


def active_tags(group: str) -> dict[str, str]:
    return {_LANE: f"active-{group_digest(group)}"} if group else {}


def advance(store: CheckpointManager, job: str, group: str, most: int | None = None, *, leaving: str = "") -> None:
    """Let the next runs of a group have their turn, if fewer than `most` (None: 1) have it.

    `leaving` is the entry of a run that ended.
    """
    for _ in range(most := most or 1):
        if not (held := store.list(job, tags=held_tags(group), after=0, limit=1)):
            return
        active = store.list(job, tags=active_tags(group), limit=most + 1)
        if sum(record.id != leaving for record in active) >= most:
            return
        _activate(store, held[0], group)


def advance_all(store: CheckpointManager, job: str, after: int, limit: int, most: int | None = None) -> int:
    """`advance` of groups whose turn was lost with a process that died; answers where to go on, 0: at the beginning."""
    page = store.list(job, tags={"state": HELD}, after=after, limit=limit)
    for group in dict.fromkeys(_groups(page)):
        advance(store, job, group, most)
    return page[-1].seq if len(page) == limit else 0


def _groups(records: Iterable[Checkpoint]) -> Iterable[str]:
    return (group for record in records if isinstance(group := record.metadata.get("group"), str) and group)


def _activate(store: CheckpointManager, held: Checkpoint, group: str) -> None:
    try:
        save_entry(store, held.job, facts_of(held), store.load(held.id), after=held.id, tags=active_tags(group))
    except NotFound:
        return  # somebody else did this
    drop_entry(store, held.id)


def group_digest(group: str) -> str:
    return blake3(group.encode()).hexdigest(16)
