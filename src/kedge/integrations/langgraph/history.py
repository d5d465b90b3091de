"""Threads as jobs of a store: finding them, walking their histories, copying them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import get_checkpoint_id

from kedge.blobs.shelter import together
from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, own_copy
from kedge.ports import NEWEST_INTACT, Selection
from kedge.store.request import Request, branch_listed, request_again

from . import names
from .recent import Recent
from .record import address_of, filterable, graph_metadata, own_metadata

_NEWEST_STEP = replace(NEWEST_INTACT, level=CheckpointLevel.STEP)
_PAGE = 64
_FEW = 8
_SMALL_BYTES = 1 << 18  # of rows that are remembered
Stored = tuple[Checkpoint, bytes]


@dataclass(frozen=True, slots=True)
class Reading:
    """A checkpoint as stored, and the writes for it, in the order they came."""

    stored: Stored
    writes: list[Stored]


def read(manager: CheckpointManager, recent: Recent, job: str, checkpoint_id: str | None) -> tuple[Reading | None, int]:
    """A checkpoint, or the newest, and the sequence number of the newest."""
    look = partial(_look, manager, job, checkpoint_id)
    return recent.look(job, checkpoint_id, look, lambda result: _are_small(result[:1]))


def _look(manager: CheckpointManager, job: str, checkpoint_id: str | None) -> tuple[Reading | None, int]:
    if checkpoint_id is None:
        stored = next(iter(manager.catalogue.list_stored(job, _NEWEST_STEP)), None)
        seq = 0 if stored is None else stored[0].seq
    else:
        stored = _read(manager, names.id_of(job, checkpoint_id))
        seq = newest(manager, job)
    return (None if stored is None else _with_writes(manager, job, [stored])[0]), seq


def read_pages(
    manager: CheckpointManager,
    recent: Recent,
    job: str,
    checkpoint_id: str | None,
    filter: Mapping[str, object],
    before: RunnableConfig | None,
    most: int | None,
) -> Iterator[Sequence[Reading]]:
    """The checkpoints that `walk` finds with these arguments, in pages of at most `most`."""
    pages = _read_pages(manager, job, checkpoint_id, filter, before, most)
    if checkpoint_id is None and not filter and before is None and most is not None:
        first = recent.look(job, most, partial(next, pages, None), lambda page: _are_small(page or ()))
        if first is None:
            return
        yield first
        if len(first) >= most:
            return
        pages = _read_pages(manager, job, None, {}, None, most, below=first[-1].stored[0].seq)
    while (page := together(manager.catalogue, partial(next, pages, None))) is not None:
        yield page


def _are_small(readings: Iterable[Reading | None]) -> bool:
    """Whether they are worth remembering."""
    stored = (stored for reading in readings if reading for stored in (reading.stored, *reading.writes))
    return sum(len(packed) for _, packed in stored) <= _SMALL_BYTES


def _read_pages(
    manager: CheckpointManager,
    job: str,
    checkpoint_id: str | None,
    filter: Mapping[str, object],
    before: RunnableConfig | None,
    most: int | None,
    below: int | None = None,
) -> Iterator[list[Reading]]:
    """`below`: of a whole history, those with a lower number."""
    size = min(most or _PAGE, _PAGE)
    if checkpoint_id is None and before is None and not filterable(filter):
        wanted = Selection(level=CheckpointLevel.STEP, limit=size, before=below)
        while page := manager.catalogue.list_stored(job, wanted):
            yield _with_writes(manager, job, page[::-1])
            wanted = replace(wanted, before=page[0][0].seq)
        return
    checkpoints = walk(manager, job, checkpoint_id, filter, before, most)
    while rows := [*islice(checkpoints, size)]:
        read = [_read(manager, checkpoint.id) for checkpoint in rows]
        yield _with_writes(manager, job, [stored for stored in read if stored is not None])


def read_ancestors(
    manager: CheckpointManager, stored: Stored, parent_of: Callable[[Stored], CheckpointId | None]
) -> Iterator[Reading]:
    """The parent of a checkpoint, the parent of that, and so on: nearly always they stand one before the other."""
    job, page, size = stored[0].job, {}, _FEW
    while (parent := parent_of(stored)) is not None:
        if parent not in page:
            page = together(manager.catalogue, partial(_page_of, manager, job, parent, stored[0].seq, size))
            size = min(2 * size, _PAGE)
            if parent not in page:
                return
        yield page[parent]
        stored = page[parent].stored


def _page_of(manager: CheckpointManager, job: str, wanted: CheckpointId, before: int, size: int) -> dict[str, Reading]:
    """Checkpoints up to `wanted`, by ID; none if that was deleted."""
    rows = manager.catalogue.list_stored(job, Selection(level=CheckpointLevel.STEP, limit=size, before=before))
    if all(stored[0].id != wanted for stored in rows):  # a fork: it stands further before
        parent = _read(manager, wanted)
        if parent is None:
            return {}
        before = parent[0].seq
        rows = [
            *manager.catalogue.list_stored(job, Selection(level=CheckpointLevel.STEP, limit=size, before=before)),
            parent,
        ]
    return {reading.stored[0].id: reading for reading in _with_writes(manager, job, rows)}


def _with_writes(manager: CheckpointManager, job: str, page: Sequence[Stored]) -> list[Reading]:
    writes: dict[str, list[Stored]] = {names.plain_id(stored[0].id): [] for stored in page}
    for stored in manager.catalogue.list_stored(job, Selection(tags={"of": [*writes]})) if writes else ():
        writes[stored[0].tags["of"]].append(stored)
    return [Reading(stored, writes[names.plain_id(stored[0].id)]) for stored in page]


def _read(manager: CheckpointManager, checkpoint_id: CheckpointId) -> Stored | None:
    try:
        return manager.catalogue.read(checkpoint_id)
    except NotFound:
        return None  # deleted meanwhile


def jobs(manager: CheckpointManager, prefix: str) -> Iterator[str]:
    """The names of all jobs that begin so."""
    after: str | None = None
    while page := manager.jobs(prefix, limit=_PAGE, after=after):
        yield from (job.name for job in page)
        after = page[-1].name


def jobs_of_thread(manager: CheckpointManager, thread_id: str) -> Iterator[str]:
    root = names.prefix_of(thread_id)
    if any(job.name == root for job in manager.jobs(root, limit=1)):
        yield root
    yield from jobs(manager, root + "@")


def newest(manager: CheckpointManager, job: str) -> int:
    """The sequence number of the newest checkpoint; 0 when there is none."""
    last = manager.list(job, level=CheckpointLevel.STEP, limit=1)
    return last[0].seq if last else 0


def newest_first(
    manager: CheckpointManager,
    job: str,
    *,
    level: CheckpointLevel | None = None,
    metadata: Mapping[str, object] | None = None,
    before: int | None = None,
    most: int | None = None,
) -> Iterator[Checkpoint]:
    """Checkpoints of a job below sequence number `before`, in pages; `most`: as many as are wanted, probably."""
    size = min(most or _PAGE, _PAGE)
    while page := manager.list(job, level=level, metadata=metadata, limit=size, before=before):
        yield from reversed(page)
        before = page[0].seq


def writes_of(manager: CheckpointManager, checkpoint: Checkpoint) -> list[Checkpoint]:
    """The checkpoints that hold the writes for a checkpoint, in the order they came."""
    tags = {"of": names.plain_id(checkpoint.id)}
    return manager.list(checkpoint.job, level=CheckpointLevel.SUBSTEP, tags=tags)


def walk(
    manager: CheckpointManager,
    job: str,
    checkpoint_id: str | None,
    filter: Mapping[str, object],
    before: RunnableConfig | None,
    most: int | None = None,
) -> Iterator[Checkpoint]:
    """Checkpoints of a job, newest first. `filter` is applied as far as the index can; the caller compares exactly."""
    limit_id = get_checkpoint_id(before) if before else None
    limit = None if limit_id is None else _find(manager, job, limit_id)
    if checkpoint_id is not None:
        only = _find(manager, job, checkpoint_id)
        if only is not None and (limit is None or only.seq < limit.seq):
            yield only
        return
    below = None if limit is None else limit.seq
    is_compared = limit_id is not None and limit is None  # IDs grow with time
    for checkpoint in newest_first(
        manager, job, level=CheckpointLevel.STEP, metadata=filterable(filter) or None, before=below, most=most
    ):
        if not is_compared or names.plain_id(checkpoint.id) < str(limit_id):
            yield checkpoint


def rows(
    manager: CheckpointManager, recent: Recent, job: str, filter: Mapping[str, object], most: int | None
) -> Iterable[Checkpoint]:
    """As `walk`; the newest few are remembered, and given out as the caller's own."""
    if filter or most is None or not 0 < most <= _PAGE:
        return walk(manager, job, None, filter, None, most)
    known = recent.look(job, ("rows", most), lambda: [*islice(walk(manager, job, None, {}, None, most), most)])
    return map(own_copy, known)


def _find(manager: CheckpointManager, job: str, checkpoint_id: str) -> Checkpoint | None:
    try:
        return manager.get(names.id_of(job, checkpoint_id))
    except NotFound:
        return None


def copy_job(manager: CheckpointManager, job: str, target_thread: str) -> None:
    """Copy the job of one namespace to another thread, in order, writes included."""
    steps = manager.list(job, level=CheckpointLevel.STEP, limit=1)
    if not steps:
        return  # nothing but writes for checkpoints that are gone, or not yet there
    target = names.Address(target_thread, address_of(steps[0]).namespace)
    for source in manager.walk(job):
        parent = None if source.parent is None else names.id_of(target.job, names.plain_id(source.parent))
        branch_listed(manager.store, source.id, parent, partial(_copy_to, target), actor=manager.actor)


def _copy_to(target: names.Address, source: Checkpoint, parent: CheckpointId | None) -> Request:
    metadata = graph_metadata(source.metadata) | own_metadata(target)
    own_id = names.id_of(target.job, names.plain_id(source.id))
    return request_again(
        source,
        job=target.job,
        checkpoint_id=own_id if source.level is CheckpointLevel.STEP else None,
        parent=parent,
        metadata_json=json.dumps(metadata, ensure_ascii=False, separators=(",", ":")),
        idempotency_key=f"copy:{source.id}",
    )
