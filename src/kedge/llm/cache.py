"""LLM answers, saved in the store like everything else: each is a checkpoint of the job `llm:cache`.

A request's key is the idempotency key of its answer, so finding one is a look-up, and keeping one twice is impossible.
Whatever the store does with checkpoints it does with answers: verify, retain, collect, list, show, encrypt.

Of several that ask the same at the same time one makes the call and the others wait for its answer: threads and tasks
by a table of this process, processes by a checkpoint of the job `llm:flights` that says who is at it, then is deleted.
"""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from kedge.errors import Conflict, Corrupted, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, is_utf8
from kedge.pipeline.owner import is_gone, this_process

from .bills import Books, Charge
from .keys import Request
from .pricing import Tokens

JOB = "llm:cache"
FLIGHTS = "llm:flights"
WAIT_S = 600.0  # after so long a call that another process makes is not waited for any more
_PAGE = 500


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said, and what that took."""

    content: Any  # {"headers": …, "body": text} of HTTP calls, {"result": …} of others
    model: str
    tokens: Tokens | None
    cost: Decimal | None

    def charge(self, *, is_saved: bool) -> Charge:
        return Charge(self.model, self.tokens, self.cost, is_saved)


class Cache:
    """The answers of one store. `Cache.of(store)` is the same object for everybody in this process."""

    def __init__(self, store: CheckpointManager) -> None:
        self.store = store
        self.books = Books(store)
        self.counters: Counter[str] = Counter()  # hits, misses, waits
        self._damaged: set[str] = set()
        self._forgotten: list[str] = []  # flights whose end nobody waited for
        store.on_close(self.close)  # which also makes this live as long as its store

    @classmethod
    def of(cls, store: CheckpointManager) -> Cache:
        with _lock:
            if (cache := _caches.get(id(store))) is None:
                cache = _caches[id(store)] = cls(store)
            return cache

    def find(self, request: Request, ttl_s: float | None = None) -> Answer | None:
        """The answer that is kept, unless it is older than `ttl_s`; counted as a hit, and as money saved."""
        try:
            saved = self.store.load_by_key(JOB, request.key)
        except Corrupted as error:
            self._damaged.add(request.key)
            warnings.warn(
                f"a kept answer of {request.model} is damaged and will be asked for again: {error}", stacklevel=2
            )
            return None
        if saved is None:
            return None
        entry, state = saved
        if ttl_s is not None and _age_s(entry) > ttl_s:
            return None
        answer = _answer_of(entry, state)
        self.counters["hits"] += 1
        self.books.charge(answer.charge(is_saved=True))
        return answer

    def keep(self, request: Request, answer: Answer, *, replace: bool = False) -> None:
        """Make an answer durable. The first one stays, unless it is to be replaced."""
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
        state = {"request": asked, "answer": answer.content}
        if replace or request.key in self._damaged:
            if (old := self.store.get_by_key(JOB, request.key)) is not None:
                self.store.delete(JOB, old.id)
            self._damaged.discard(request.key)
        try:
            self.store.save(JOB, answer.model[:200], state, metadata=metadata, idempotency_key=request.key)
        except Conflict:
            pass  # somebody was faster with another answer; one is as good as the other

    def pay(self, answer: Answer) -> None:
        """Write down that an answer was paid for, before it is kept: the books never show less than was paid."""
        self.counters["misses"] += 1
        self.books.charge(answer.charge(is_saved=False))

    # Calls under way

    def begin(self, request: Request, who: object) -> Flight | None:
        """The right to make a call; None while somebody else makes it. `who` never waits for itself."""
        place = (
            self.store.url,
            self.store.namespace,
            id(self.store) if self.store.url.startswith("memory:") else 0,
            request.key,
        )
        with _lock:
            other = _flights.get(place)
            if other is not None:
                return Flight(self, (), who) if other.who == who else None
            flight = _flights[place] = Flight(self, place, who)
        try:
            self._end_forgotten()
            if not self.store.url.startswith("memory:") and not self._claim(request, flight):
                flight.end()
                return None
        except BaseException:
            flight.end()
            raise
        return flight

    def _claim(self, request: Request, flight: Flight) -> bool:
        """Tell other processes. One that died at its call is passed over, and so is one that takes too long."""
        try:
            flight.claim = self.store.save(FLIGHTS, request.model[:200], _this_process(), idempotency_key=request.key)
        except Conflict:
            if (other := self._load_flight(request.key)) is not None:
                record, process = other
                claim, since = _waiting.get(request.key, ("", 0.0))
                if record.id != claim:
                    since = time.monotonic()
                    _waiting[request.key] = record.id, since
                if not is_gone(process) and time.monotonic() - since < WAIT_S:
                    self.counters["waits"] += 1
                    return False
                self.store.delete(FLIGHTS, record.id)
            return self._claim(request, flight)
        _waiting.pop(request.key, None)
        return True

    def _load_flight(self, key: str) -> tuple[Checkpoint, object] | None:
        try:
            return self.store.load_by_key(FLIGHTS, key)
        except NotFound:
            return None  # ended meanwhile

    def _end_forgotten(self) -> None:
        while self._forgotten:
            self.store.delete(FLIGHTS, self._forgotten.pop())

    def close(self) -> None:
        """Write down what is only added up so far."""
        self._end_forgotten()
        self.books.write()

    # Looking after it

    def entries(self, model: str | None = None) -> Iterator[Checkpoint]:
        """All answers, oldest first, without their content."""
        after = 0
        while page := self.store.list(JOB, after=after, limit=_PAGE):
            after = page[-1].seq
            for entry in page:
                if model is None or entry.metadata.get("model") == model:
                    yield entry

    def newest(self, limit: int) -> list[Checkpoint]:
        return list(reversed(self.store.list(JOB, limit=limit)))

    def load(self, entry: Checkpoint) -> tuple[dict[str, Any], Answer]:
        """The request, as `Request.document` gave it, and the answer."""
        state: Any = self.store.load(entry.id)
        return json.loads(state["request"]), _answer_of(entry, state)

    def clear(self, model: str | None = None, older_than_s: float | None = None, *, dry_run: bool = False) -> int:
        """Forget answers, and answer how many; what they cost stays in the books. Pinned ones stay."""
        if older_than_s is not None and older_than_s < 0:
            raise Validation(f"older_than_s={older_than_s!r}", hint="use seconds from 0 on")
        doomed = [
            entry.id
            for entry in self.entries(model)
            if not entry.is_pinned and (older_than_s is None or _age_s(entry) > older_than_s)
        ]
        return len(doomed) if dry_run else sum(self.store.delete(JOB, entry) for entry in doomed)


class Flight:
    """A call under way."""

    def __init__(self, cache: Cache, place: tuple[Any, ...], who: object) -> None:
        self._cache = cache
        self._place = place
        self.who = who
        self.claim: str | None = None

    def end(self) -> None:
        """Let others go on."""
        claim, self.claim = self.claim, None
        try:
            if claim is not None:
                self._cache.store.delete(FLIGHTS, claim)
        finally:
            self.forget()

    def forget(self) -> None:
        """The same without touching the store: for finalizers, which run anywhere."""
        if self.claim is not None:
            self._cache._forgotten.append(self.claim)
            self.claim = None
        if _flights.get(self._place) is self:
            del _flights[self._place]


_lock = threading.Lock()
_caches: weakref.WeakValueDictionary[int, Cache] = weakref.WeakValueDictionary()  # by the identity of their store
_flights: dict[tuple[Any, ...], Flight] = {}
_waiting: dict[str, tuple[str, float]] = {}  # for which flight of another process, and since when
_me: tuple[int, dict[str, object]] | None = None


def _this_process() -> dict[str, object]:
    global _me
    if _me is None or _me[0] != os.getpid():
        _me = (os.getpid(), this_process())
    return _me[1]


def _after_fork() -> None:
    """The calls of the parent go on there."""
    global _lock
    _lock = threading.Lock()
    _flights.clear()


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
