"""LLM responses, saved in the store as checkpoints of the job `llm:cache`.

A request's key is the idempotency key of its answer: finding an answer is one look-up, and none can be saved twice.
Whatever the store does with checkpoints it does with answers: verify, retain, collect, list, show, encrypt.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from kedge import codec
from kedge.errors import Conflict, Corrupted, IdempotencyConflict, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, is_utf8
from kedge.store import Save
from kedge.store.request import parse_request

from .bills import Books, Charge, save_all
from .budget import possible_cost
from .flights import Flights
from .keys import Request
from .pricing import Tokens

JOB = "llm:cache"
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Answer:
    """A model's response, its tokens and its cost."""

    content: Any  # {"headers": …, "body": text, or audio bytes} of HTTP calls, {"result": …} of others
    model: str
    tokens: Tokens | None
    cost: Decimal | None

    def charge(self, *, is_saved: bool) -> Charge:
        return Charge(self.model, self.tokens, self.cost, is_saved)


class Cache:
    """The answers of one store. `Cache.of(store)` is the same object throughout this process."""

    def __init__(self, store: CheckpointManager) -> None:
        self.store = store
        self.books = Books(store)
        self.counters: Counter[str] = Counter()  # hits, misses, waits
        self.flights = Flights(store, self.counters, self.write_dropped)
        self._damaged: set[str] = set()
        self.restart()
        store.on_close(self.close)  # also makes this live as long as its store

    def restart(self) -> None:
        """Start empty, as in a forked child: the parent records what it dropped itself."""
        self._lock = threading.Lock()
        self._dropped: deque[tuple[Request, str, str]] = deque()  # requests and payers

    @classmethod
    def of(cls, store: CheckpointManager) -> Cache:
        with _lock:
            if (cache := _caches.get(id(store))) is None:
                cache = _caches[id(store)] = cls(store)
            return cache

    def find(self, request: Request, ttl_s: float | None = None) -> Answer | None:
        """Return the cached answer, unless it is older than `ttl_s`. Counts a hit, and its cost as saved."""
        try:
            saved = self.store.load_by_key(JOB, request.key)
        except Corrupted as error:
            self._damaged.add(request.key)
            warnings.warn(
                f"a cached response of {request.model} is damaged, and will be requested again: {error}", stacklevel=2
            )
            return None
        if saved is None:
            return None
        entry, state = saved
        if ttl_s is not None and _age_s(entry) > ttl_s:
            return None
        answer = _answer_of(entry, state)
        self.counters["hits"] += 1
        self.books.found(answer.charge(is_saved=True))
        return answer

    def pay(self, request: Request, answer: Answer, *, is_whole: bool = True) -> None:
        """Record the payment for an answer that is not cached."""
        self.counters["misses"] += 1
        save_all(self.store, [self._payment(request, answer, is_whole=is_whole)])

    def _payment(self, request: Request, answer: Answer, *, is_whole: bool = True) -> Save:
        is_known = is_whole and answer.cost is not None
        return self.books.pay(answer.charge(is_saved=False), None if is_known else possible_cost(request))

    def drop(self, request: Request, run: str, step: str) -> None:
        """Note that nobody waits for a paid answer any more. For finalizers, which must not take a lock.

        It is recorded before anybody checks a budget, or the record of its flight is deleted.
        """
        self._dropped.append((request, run, step))

    def write_dropped(self) -> None:
        """Record what dropped answers may have cost."""
        with self._lock:
            while self._dropped:
                request, run, step = self._dropped[0]
                charge = Charge(request.model, None, None, is_saved=False, run=run, step=step)
                save_all(self.store, [self.books.record(charge, possible_cost(request))])
                self._dropped.popleft()

    def keep(self, request: Request, answer: Answer, *, is_paid: bool = False, replace: bool = False) -> None:
        """Make an answer and its payment durable in one commit: the books never show less than was paid.

        The first answer stays, unless it is to be replaced: then it is deleted once the new one is durable.
        """
        saves: list[Save] = []
        if is_paid:
            self.counters["misses"] += 1
            saves.append(self._payment(request, answer))
        old: Checkpoint | None = None
        try:
            if replace or request.key in self._damaged:
                old = self.store.get_by_key(JOB, request.key)
            saves.append(self._entry(request, answer, old))
        finally:  # the payment is recorded even if the answer cannot be saved
            with suppress(IdempotencyConflict):  # another caller was faster; either answer will do
                save_all(self.store, saves)
        self._damaged.discard(request.key)
        if old is not None:
            with suppress(Conflict):  # it is pinned, and stays without its key
                self.store.delete(JOB, old.id)

    def _entry(self, request: Request, answer: Answer, old: Checkpoint | None) -> Save:
        metadata: dict[str, object] = {
            "kind": "llm",
            "model": answer.model,
            "url": request.where[:2000],
            "sample": request.sample,
        }
        if answer.tokens is not None:
            metadata["tokens"] = answer.tokens.to_json()
        if answer.cost is not None:
            metadata["cost"] = format(answer.cost, "f")
        asked = json.dumps(request.document(), ensure_ascii=False)
        if not is_utf8(asked):
            asked = json.dumps(request.document())
        about = parse_request(JOB, answer.model[:200], metadata=metadata, idempotency_key=request.key)
        if old is not None:
            about = dataclasses.replace(about, takes_key_from=old.id)
        return about, codec.encode({"request": asked, "answer": answer.content}), self.store.actor

    def settle(self) -> None:
        """Make counted hits durable, and delete the records of finished flights."""
        self.write_dropped()
        self.flights.settle()
        self.books.write()

    def close(self) -> None:
        try:
            self.write_dropped()
            self.books.write()
        finally:
            self.flights.close()

    # Maintenance

    def entries(self, model: str | None = None) -> Iterator[Checkpoint]:
        """Yield all answers, oldest first, without their content."""
        after = 0
        while page := self.store.list(JOB, after=after, limit=_PAGE):
            after = page[-1].seq
            for entry in page:
                if model is None or entry.metadata.get("model") == model:
                    yield entry

    def newest(self, limit: int) -> list[Checkpoint]:
        return list(reversed(self.store.list(JOB, limit=limit)))

    def load(self, entries: Iterable[Checkpoint]) -> Iterator[tuple[Checkpoint, dict[str, Any], Answer]]:
        """Yield each entry with its `Request.document` and its answer; skips those deleted meanwhile."""
        for entry in entries:
            try:
                state: Any = self.store.load(entry.id)
            except NotFound:
                continue
            yield entry, json.loads(state["request"]), _answer_of(entry, state)

    def clear(self, model: str | None = None, older_than_s: float | None = None, *, dry_run: bool = False) -> int:
        """Delete answers and return how many; the books keep their costs. Pinned answers stay."""
        if older_than_s is not None and older_than_s < 0:
            raise Validation(f"older_than_s={older_than_s!r}", hint="use seconds from 0 on")
        doomed = [
            entry.id
            for entry in self.entries(model)
            if not entry.is_pinned and (older_than_s is None or _age_s(entry) > older_than_s)
        ]
        return len(doomed) if dry_run else sum(self.store.delete(JOB, entry) for entry in doomed)


_lock = threading.Lock()
_caches: weakref.WeakValueDictionary[int, Cache] = weakref.WeakValueDictionary()  # by the identity of their store


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    for cache in list(_caches.values()):
        cache.restart()


os.register_at_fork(after_in_child=_after_fork)


def _answer_of(entry: Checkpoint, state: Any) -> Answer:
    about: Mapping[str, Any] = entry.metadata
    tokens, cost = about.get("tokens"), about.get("cost")
    return Answer(
        state["answer"],
        str(about.get("model")),
        None if tokens is None else Tokens.from_json(tokens),
        None if cost is None else Decimal(cost),
    )


def _age_s(entry: Checkpoint) -> float:
    return (datetime.now(UTC) - entry.created_at).total_seconds()
