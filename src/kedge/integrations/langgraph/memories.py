"""KedgeStore: LangGraph's long-term memory, shared by all threads, in a Kedge store.

A namespace of memories is a job; an item is its newest checkpoint with the item's tag. Putting an item saves it first
and deletes what it replaces afterwards: whatever happens in between, one of the two is there (I1).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import partial
from heapq import merge
from itertools import islice
from typing import Any, TypeVar

from langgraph.store.base import (
    BaseStore,
    GetOp,
    IndexConfig,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    TTLConfig,
    validate_op_namespace,
)

from kedge.blobs.shelter import together
from kedge.errors import Conflict, NotFound, Validation
from kedge.integrations.agents import StoreOwner, finished, in_thread
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, Job, is_utf8

from . import history, names
from .filters import Filter, told_of
from .recall import EXPIRES, ITEM, Entry, Recall
from .recent import Recent
from .vectors import Meaning, Vectors, closeness, embedding_here

T = TypeVar("T")
Namespace = tuple[str, ...]
Loaded = tuple[Checkpoint, dict[str, Any]]  # a row with its state

_JOBS_AT_ONCE = 1000
_MOST_NAMESPACES = 100_000  # whose names are remembered
_PAGE = 64
_SMALL_BYTES = 1 << 16


class KedgeStore(StoreOwner, BaseStore):
    """`graph.compile(checkpointer=KedgeSaver(manager), store=KedgeStore(manager))`.

    `store` is a path, a URL or an open CheckpointManager, which then stays the caller's to close. Items are searched by
    namespace and filter, newest first; with `index`, as LangGraph's own stores take it, also by meaning. `ttl` is as in
    LangGraph too; an item that has expired is not given any more, and deleted by `sweep_ttl`.
    """

    supports_ttl = True

    def __init__(
        self,
        store: str | os.PathLike[str] | CheckpointManager | None = None,
        *,
        index: IndexConfig | None = None,
        ttl: TTLConfig | None = None,
    ) -> None:
        super().__init__(store)
        self.ttl_config = ttl
        self._meaning = None if index is None else Meaning(index)
        self._recall = Recall(self.manager)
        self._recent = Recent(self.manager.catalogue)
        self._namespaces: dict[str, Namespace] = {}  # of jobs

    def batch(self, ops: Iterable[Op]) -> list[Result]:
        """One after the other: what is put is durable, and seen by those behind it."""
        answers: list[Result] = []
        for op in ops:
            validate_op_namespace(op)
            if isinstance(op, GetOp):
                answers.append(self._get(op))
            elif isinstance(op, PutOp):
                self._put(op)
                answers.append(None)
            elif isinstance(op, SearchOp):
                answers.append(self._search(op))
            elif isinstance(op, ListNamespacesOp):
                answers.append(self._list(op))
            else:
                raise Validation(f"{type(op).__name__} is no operation of a store", hint="use get, put, search, …")
        return answers

    async def abatch(self, ops: Iterable[Op]) -> list[Result]:
        with embedding_here():
            return await finished(self.batch, ops)

    def _get(self, op: GetOp) -> Item | None:
        job, item = names.memory_job(op.namespace), _item_of(op.key)
        find = partial(self._recall.find, job, item)
        while (entry := self._recent.look(job, item, find, _is_small)) is not None and not entry.is_expired:
            try:
                fields = self._fields(entry.row, entry.state(self.manager))
            except NotFound:
                continue  # replaced while it was read
            if op.refresh_ttl:
                self._refresh(entry.row)
            return Item(**fields)
        return None

    def _put(self, op: PutOp) -> None:
        job, tag = names.memory_job(op.namespace), {ITEM: _item_of(op.key)}
        older = self.manager.list(job, tags=tag)
        if op.value is None:
            if pinned := [checkpoint.id for checkpoint in older if checkpoint.is_pinned]:
                raise Conflict(f"memory {op.key!r} is pinned", hint=f"unpin it first: kedge pin --off {pinned[0]}")
        else:
            if not isinstance(op.value, Mapping):
                raise Validation(f"the value of {op.key!r} is a {type(op.value).__name__}", hint="use a dictionary")
            metadata = {"namespace": list(op.namespace), "key": op.key, **told_of(op.value)}
            if older and not Entry((older[-1], b"")).is_expired:
                metadata["created_at"] = _created(older[0]).isoformat()
            if op.ttl is not None:
                metadata["ttl_minutes"] = float(op.ttl)
                tag = tag | _expiry(op.ttl)
            state: dict[str, Any] = {"value": dict(op.value)}
            if self._meaning is not None and op.index is not False:
                state["vectors"] = self._meaning.vectors(op.value, op.index)
            self.manager.save(job, "item", state, tags=tag, metadata=metadata)
        if gone := [checkpoint.id for checkpoint in older if not checkpoint.is_pinned]:
            self.manager.catalogue.delete(gone, actor=self.manager.actor)

    def _search(self, op: SearchOp) -> list[SearchItem]:
        wanted, last = Filter(op.filter or {}), op.offset + op.limit
        jobs = [job for job, _ in self._jobs(tuple(op.namespace_prefix))]
        entries: Iterator[Entry] = merge(*(self._may_fit(job, wanted) for job in jobs), key=_age)
        by_score: Iterable[tuple[Loaded, float | None]]
        if op.query and self._meaning is not None:
            by_score = self._closest(entries, wanted, self._meaning.query(op.query))
        else:
            by_score = ((item, None) for item in self._fitting(entries, wanted, last))
        results = []
        for (row, state), score in [*islice(by_score, op.offset, last)]:  # all read before any is renewed
            if op.refresh_ttl:
                self._refresh(row)
            results.append(SearchItem(**self._fields(row, state), score=score))
        return results

    def _may_fit(self, job: Job, wanted: Filter) -> Iterator[Entry]:
        return (entry for entry in self._recall.items(job) if wanted.by_row(entry.row.metadata) is not False)

    def _fitting(self, entries: Iterator[Entry], wanted: Filter, most: int) -> Iterator[Loaded]:
        """Rows whose items fit, with their states, read as far as the caller goes."""
        size = min(max(most, 1), _PAGE)
        while page := together(self.manager.catalogue, partial(self._load, entries, size)):
            for row, state in page:
                if wanted.fits(state["value"]):
                    yield row, state

    def _load(self, entries: Iterator[Entry], size: int) -> list[Loaded]:
        """The next rows with their states; nothing when there are no more."""
        loaded: list[Loaded] = []
        for entry in entries:
            if (read := self._read(entry, self._state)) is not None:
                loaded.append((read[0].row, read[1]))
            if len(loaded) == size:
                break
        return loaded

    def _closest(self, entries: Iterator[Entry], wanted: Filter, query: bytes) -> Iterator[tuple[Loaded, float | None]]:
        """Rows whose items fit, with their states and how close they are, the closest first; of the others only the
        vectors are read."""
        fitting: list[tuple[Entry, Vectors]] = []
        while (page := together(self.manager.catalogue, partial(self._with_vectors, entries, wanted))) is not None:
            fitting += page
        scores = closeness(query, [vectors for _, vectors in fitting])
        order = sorted(range(len(fitting)), key=lambda n: (scores[n] is None, -(scores[n] or 0.0)))
        for n in order:
            read = self._read(fitting[n][0], self._state)
            if read is not None and wanted.fits(read[1]["value"]):
                yield (read[0].row, read[1]), scores[n]

    def _with_vectors(self, entries: Iterator[Entry], wanted: Filter) -> list[tuple[Entry, Vectors]] | None:
        """Of the next entries those that fit; None when there are no more."""
        page = [*islice(entries, _PAGE)]
        fitting: list[tuple[Entry, Vectors]] = []
        for entry in page:
            read = self._read(entry, partial(self._vectors_if_fitting, wanted))
            if read is not None and read[1] is not None:
                fitting.append((read[0], read[1]))
        return fitting if page else None

    def _vectors_if_fitting(self, wanted: Filter, entry: Entry) -> Vectors | None:
        is_fitting = wanted.by_row(entry.row.metadata)
        if is_fitting is None:
            is_fitting = wanted.fits(self._state(entry)["value"])
        return entry.vectors(self.manager) if is_fitting else None

    def _state(self, entry: Entry) -> Any:
        return entry.state(self.manager)

    def _read(self, entry: Entry, what: Callable[[Entry], T]) -> tuple[Entry, T] | None:
        """Something of an item, or of what has replaced it since; None when it was deleted."""
        current: Entry | None = entry
        while current is not None:
            try:
                return current, what(current)
            except NotFound:
                current = self._recall.find(entry.row.job, entry.item)
        return None

    def _refresh(self, row: Checkpoint) -> None:
        """An item that was read lives as long again."""
        minutes = row.metadata.get("ttl_minutes")
        if isinstance(minutes, float):
            try:
                self.manager.tag(row.id, **_expiry(minutes))
            except NotFound:
                pass  # replaced meanwhile

    def sweep_ttl(self) -> int:
        """Delete what has expired and is not pinned; answers how many items that were."""
        swept = 0
        for job in [*history.jobs(self.manager, names.MEMORY)]:
            for row in [*history.newest_first(self.manager, job)]:
                if Entry((row, b"")).is_expired and not row.is_pinned and self.manager.delete(job, row.id):
                    swept += 1
        return swept

    asweep_ttl = in_thread(sweep_ttl)

    def _list(self, op: ListNamespacesOp) -> list[Namespace]:
        conditions = op.match_conditions or ()
        matching = [namespace for _, namespace in self._jobs(()) if all(_matches(namespace, c) for c in conditions)]
        cut = sorted({namespace[: op.max_depth] for namespace in matching})
        return cut[op.offset : op.offset + op.limit]

    def _jobs(self, prefix: Namespace) -> Iterator[tuple[Job, Namespace]]:
        """The jobs, and the namespaces with this prefix, that hold an item."""
        after: str | None = None
        begins = names.memory_prefix(prefix)
        while page := self._recent.look(
            None, (begins, after), partial(self.manager.jobs, begins, _JOBS_AT_ONCE, after)
        ):
            for job in page:
                namespace = self._namespaces.get(job.name) or self._look_up(job)
                if job.checkpoints and namespace and namespace[: len(prefix)] == prefix:
                    yield job, namespace
            after = page[-1].name

    def _look_up(self, job: Job) -> Namespace | None:
        """The namespace a job stands for, which its name may tell only in part; None for jobs of others."""
        newest = self.manager.list(job.name, limit=1)
        namespace = newest[0].metadata.get("namespace") if newest else None
        if not isinstance(namespace, list):
            return None
        if len(self._namespaces) >= _MOST_NAMESPACES:
            self._namespaces = {}
        self._namespaces[job.name] = tuple(namespace)
        return tuple(namespace)

    def _fields(self, row: Checkpoint, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "value": state["value"],
            "key": row.metadata["key"],
            "namespace": tuple(row.metadata["namespace"]),  # type: ignore[arg-type]
            "created_at": _created(row),
            "updated_at": row.created_at,
        }


def _item_of(key: str) -> str:
    """The value of the tag of an item."""
    if not isinstance(key, str) or not key or not is_utf8(key):
        raise Validation(f"key={key!r}", hint="use text")
    return hashlib.sha256(key.encode()).hexdigest()[:40]


def _is_small(entry: Entry | None) -> bool:
    """Whether it is worth remembering."""
    return entry is None or entry.row.size_bytes <= _SMALL_BYTES


def _age(entry: Entry) -> float:
    return -entry.row.created_at.timestamp()


def _created(checkpoint: Checkpoint) -> datetime:
    first = checkpoint.metadata.get("created_at")
    return datetime.fromisoformat(first) if isinstance(first, str) else checkpoint.created_at


def _matches(namespace: Namespace, condition: MatchCondition) -> bool:
    path = condition.path
    if len(namespace) < len(path):
        return False
    part = namespace[: len(path)] if condition.match_type == "prefix" else namespace[len(namespace) - len(path) :]
    return all(expected in ("*", label) for label, expected in zip(part, path, strict=True))


def _expiry(minutes: float) -> dict[str, str]:
    return {EXPIRES: f"{time.time() + minutes * 60:.3f}"}
