"""KedgeStore: LangGraph's long-term memory, shared by all threads, in a Kedge store.

A namespace of memories is a job; an item is its newest checkpoint with the item's tag. Putting an item saves it first
and deletes what it replaces afterwards: whatever happens in between, one of the two is there (I1).
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from heapq import merge
from itertools import islice
from typing import Any

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

from kedge.blobs import shelter
from kedge.errors import Conflict, NotFound, Validation
from kedge.integrations.opened import Opened, in_thread
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, is_utf8

from . import history, names
from .filters import fits, told_of, verdict
from .vectors import Meaning, closeness

Namespace = tuple[str, ...]

_ITEM = "item"  # the tag by which an item is found
_EXPIRES = "expires"  # the tag that says when it is gone, in seconds since 1970
_PAGE = 64


class KedgeStore(Opened, BaseStore):
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

    abatch = in_thread(batch)

    def _get(self, op: GetOp) -> Item | None:
        job, tag = names.memory_job(op.namespace), _tag(op.key)
        while newest := self.manager.list(job, tags=tag, limit=1):
            if _is_expired(newest[0]):
                return None
            try:
                item = Item(**self._fields(newest[0], self.manager.load(newest[0].id)))
            except NotFound:
                continue  # replaced while it was read
            if op.refresh_ttl:
                self._refresh(newest[0])
            return item
        return None

    def _put(self, op: PutOp) -> None:
        job, tag = names.memory_job(op.namespace), _tag(op.key)
        older = self.manager.list(job, tags=tag)
        if op.value is None:
            if pinned := [checkpoint.id for checkpoint in older if checkpoint.is_pinned]:
                raise Conflict(f"memory {op.key!r} is pinned", hint=f"unpin it first: kedge pin --off {pinned[0]}")
        else:
            if not isinstance(op.value, Mapping):
                raise Validation(f"the value of {op.key!r} is a {type(op.value).__name__}", hint="use a dictionary")
            metadata = {"namespace": list(op.namespace), "key": op.key, **told_of(op.value)}
            if older and not _is_expired(older[-1]):
                metadata["created_at"] = _created(older[0]).isoformat()
            if op.ttl is not None:
                metadata["ttl_minutes"] = float(op.ttl)
                tag = tag | _expiry(op.ttl)
            state: dict[str, Any] = {"value": dict(op.value)}
            if self._meaning is not None and op.index is not False:
                state["vectors"] = self._meaning.vectors(op.value, op.index)
            self.manager.save(job, "item", state, tags=tag, metadata=metadata)
        for checkpoint in older:  # the oldest first: until the last is gone, it is the newest that counts
            if not checkpoint.is_pinned:
                self.manager.delete(job, checkpoint.id)

    def _search(self, op: SearchOp) -> list[SearchItem]:
        filter = op.filter or {}
        jobs = [self._rows(job) for job, _ in self._jobs(op.namespace_prefix)]
        newest_first = merge(*jobs, key=lambda row: row.created_at, reverse=True)
        rows = (row for row in newest_first if verdict(row.metadata, filter) is not False)
        fitting = self._fitting(rows, filter, op.offset + op.limit)
        if op.query and self._meaning is not None:
            items = [*fitting]
            scores = closeness(self._meaning.query(op.query), [state.get("vectors") or {} for _, state in items])
            by_score = sorted(zip(items, scores, strict=True), key=lambda pair: (pair[1] is None, -(pair[1] or 0.0)))
        else:
            by_score = [(item, None) for item in islice(fitting, op.offset + op.limit)]
        results = []
        for (row, state), score in by_score[op.offset : op.offset + op.limit]:
            if op.refresh_ttl:
                self._refresh(row)
            results.append(SearchItem(**self._fields(row, state), score=score))
        return results

    def _fitting(
        self, rows: Iterator[Checkpoint], filter: Mapping[str, Any], most: int
    ) -> Iterator[tuple[Checkpoint, dict[str, Any]]]:
        """Rows whose items fit, with their states, read as far as the caller goes."""
        size = min(max(most, 1), _PAGE)
        while page := shelter.run(self._load, rows, size):
            for row, state in page:
                if fits(state["value"], filter):
                    yield row, state

    def _load(self, rows: Iterator[Checkpoint], size: int) -> list[tuple[Checkpoint, dict[str, Any]]]:
        """The next rows with their states; nothing when there are no more."""
        loaded: list[tuple[Checkpoint, dict[str, Any]]] = []
        for row in rows:
            current: Checkpoint | None = row
            while current is not None:
                try:
                    loaded.append((current, self.manager.load(current.id)))
                    break
                except NotFound:  # replaced, or deleted, since the page was read
                    newest = self.manager.list(row.job, tags={_ITEM: row.tags.get(_ITEM, "")}, limit=1)
                    current = newest[0] if newest else None
            if len(loaded) == size:
                break
        return loaded

    def _rows(self, job: str) -> Iterator[Checkpoint]:
        """The newest row of each item that has not expired, newest first."""
        seen: set[str] = set()
        for checkpoint in history.newest_first(self.manager, job):
            if (item := checkpoint.tags.get(_ITEM, "")) not in seen:
                seen.add(item)
                if not _is_expired(checkpoint):
                    yield checkpoint

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
                if _is_expired(row) and not row.is_pinned and self.manager.delete(job, row.id):
                    swept += 1
        return swept

    asweep_ttl = in_thread(sweep_ttl)

    def _list(self, op: ListNamespacesOp) -> list[Namespace]:
        conditions = op.match_conditions or ()
        matching = [namespace for _, namespace in self._jobs(()) if all(_matches(namespace, c) for c in conditions)]
        cut = sorted({namespace[: op.max_depth] for namespace in matching})
        return cut[op.offset : op.offset + op.limit]

    def _jobs(self, prefix: Namespace) -> Iterator[tuple[str, Namespace]]:
        """The namespaces with this prefix that hold an item."""
        for job in history.jobs(self.manager, names.memory_prefix(prefix)):
            newest = self.manager.list(job, limit=1)
            namespace = newest[0].metadata.get("namespace") if newest else None
            if isinstance(namespace, list) and tuple(namespace[: len(prefix)]) == prefix:
                yield job, tuple(namespace)

    def _fields(self, row: Checkpoint, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "value": state["value"],
            "key": row.metadata["key"],
            "namespace": tuple(row.metadata["namespace"]),  # type: ignore[arg-type]
            "created_at": _created(row),
            "updated_at": row.created_at,
        }


def _tag(key: str) -> dict[str, str]:
    if not isinstance(key, str) or not key or not is_utf8(key):
        raise Validation(f"key={key!r}", hint="use text")
    return {_ITEM: hashlib.sha256(key.encode()).hexdigest()[:40]}


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
    return {_EXPIRES: f"{time.time() + minutes * 60:.3f}"}


def _is_expired(row: Checkpoint) -> bool:
    expires = row.tags.get(_EXPIRES)
    return expires is not None and float(expires) <= time.time()
