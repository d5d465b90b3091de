"""KedgeStore: LangGraph's long-term memory, shared by all threads, in a Kedge store.

A namespace of memories is a job; an item is its newest checkpoint with the item's tag. Putting an item saves it first
and deletes what it replaces afterwards: whatever happens in between, one of the two is there (I1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from operator import eq, ge, gt, le, lt, ne
from typing import Any

from langgraph.store.base import (
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    MatchCondition,
    Op,
    PutOp,
    Result,
    SearchItem,
    SearchOp,
    validate_op_namespace,
)

from kedge.errors import Conflict, NotFound, Validation
from kedge.model import Checkpoint, is_utf8

from . import history, names
from .opened import Opened, in_thread

Namespace = tuple[str, ...]

_ITEM = "item"  # the tag by which an item is found
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"$eq": eq, "$ne": ne, "$gt": gt, "$gte": ge, "$lt": lt, "$lte": le}


class KedgeStore(Opened, BaseStore):
    """`graph.compile(checkpointer=KedgeSaver(manager), store=KedgeStore(manager))`.

    `store` is a path, a URL or an open CheckpointManager, which then stays the caller's to close. Items are searched by
    namespace and filter, newest first; searching by meaning, which needs embeddings, is refused.
    """

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
            try:
                return Item(**self._fields(newest[0]))
            except NotFound:
                continue  # replaced while it was read
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
            metadata = {"namespace": list(op.namespace), "key": op.key}
            if older:
                metadata["created_at"] = _created(older[0]).isoformat()
            self.manager.save(job, "item", dict(op.value), tags=tag, metadata=metadata)
        for checkpoint in older:  # the oldest first: until the last is gone, it is the newest that counts
            if not checkpoint.is_pinned:
                self.manager.delete(job, checkpoint.id)

    def _search(self, op: SearchOp) -> list[SearchItem]:
        if op.query:
            raise Validation(
                "memories are not searched by meaning here", hint="use filter=, or a store with an index of embeddings"
            )
        fitting = (fields for fields in self._items(op.namespace_prefix) if _fits(fields["value"], op.filter or {}))
        newest_first = sorted(fitting, key=lambda fields: fields["updated_at"], reverse=True)
        return [SearchItem(**fields) for fields in newest_first[op.offset : op.offset + op.limit]]

    def _items(self, prefix: Namespace) -> Iterator[dict[str, Any]]:
        for job, namespace in self._jobs(prefix):
            seen: set[str] = set()
            for checkpoint in history.newest_first(self.manager, job):
                if (item := checkpoint.tags.get(_ITEM, "")) not in seen:
                    seen.add(item)
                    try:
                        yield self._fields(checkpoint)
                    except NotFound:  # replaced, or deleted, since the page was read
                        if (now := self._get(GetOp(namespace, str(checkpoint.metadata["key"])))) is not None:
                            yield {name: getattr(now, name) for name in Item.__slots__}

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

    def _fields(self, checkpoint: Checkpoint) -> dict[str, Any]:
        return {
            "value": self.manager.load(checkpoint.id),
            "key": checkpoint.metadata["key"],
            "namespace": tuple(checkpoint.metadata["namespace"]),  # type: ignore[arg-type]
            "created_at": _created(checkpoint),
            "updated_at": checkpoint.created_at,
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


def _fits(value: Any, filter: Any) -> bool:
    """Whether a value has what a filter asks for: equality by key, and comparisons such as {"age": {"$gte": 18}}."""
    if not isinstance(filter, Mapping):
        return bool(value == filter)
    if any(str(name).startswith("$") for name in filter):
        return all(_compares(value, name, operand) for name, operand in filter.items())
    return isinstance(value, Mapping) and all(_fits(value.get(name), expected) for name, expected in filter.items())


def _compares(value: Any, name: str, operand: Any) -> bool:
    if name not in _COMPARE:
        raise Validation(f"the filter has {name!r}", hint=f"use one of {', '.join(_COMPARE)}")
    try:
        return bool(_COMPARE[name](value, operand))
    except TypeError:
        return False  # of kinds that have no order: a text is not greater than 5
