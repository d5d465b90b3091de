"""Groups: the runs of one tenant, customer or file, one after another in the order of submission; groups take turns.

An entry of a group is held until it is its turn. Then a new entry takes its place, at the end of the line, so that a
group with many entries does not keep the others waiting. Which is next is read from the store, in this order:

    1. the oldest held entry
    2. whether another one of the group is active: then nothing is done

So two who look at the same time find the same entry, and only one of them replaces it: the idempotency key of the new
entry is taken while that is there, and when it is gone, so is the held one, which is its parent. An entry that is found
later than step 1 of somebody else is not active before that one has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from blake3 import blake3

from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint

from .entries import HELD, drop_entry, save_entry

_LANE = "lane"


def held_tags(group: str) -> dict[str, str]:
    return {_LANE: f"held-{_digest(group)}"}


def active_tags(group: str) -> dict[str, str]:
    return {_LANE: f"active-{_digest(group)}"} if group else {}


def advance(store: CheckpointManager, job: str, group: str, *, leaving: str = "") -> None:
    """Let the next run of a group have its turn, if none has it; `leaving` is the entry of a run that ended."""
    if not (held := store.list(job, tags=held_tags(group), after=0, limit=1)):
        return
    if any(record.id != leaving for record in store.list(job, tags=active_tags(group), limit=2)):
        return
    _activate(store, held[0], group)


def advance_all(store: CheckpointManager, job: str, after: int, limit: int) -> int:
    """`advance` of groups whose turn was lost with a process that died; answers where to go on, 0: at the beginning."""
    page = store.list(job, tags={"state": HELD}, after=after, limit=limit)
    for group in dict.fromkeys(_groups(page)):
        advance(store, job, group)
    return page[-1].seq if len(page) == limit else 0


def _groups(records: Iterable[Checkpoint]) -> Iterable[str]:
    return (group for record in records if isinstance(group := record.metadata.get("group"), str) and group)


def _activate(store: CheckpointManager, held: Checkpoint, group: str) -> None:
    try:
        save_entry(store, held.job, held.metadata, store.load(held.id), after=held.id, tags=active_tags(group))
    except NotFound:
        return  # somebody else did this
    drop_entry(store, held.id)


def _digest(group: str) -> str:
    return blake3(group.encode()).hexdigest(16)
