"""`run.map`: one function over many items, each of them run once, ever.

The run's own thread takes items from the iterable as they are needed, passes over those that are done, and hands the
others to workers in chunks of about 100 ms of work, a few at a time: its memory does not grow with the number of items,
except by 16 bytes for each, and by the results where they are asked for. The workers make results durable themselves
(`pipeline.worker`). A worker that dies takes at most its chunk with it: what was durable stays, the rest is run again,
one by one, so that only the item that kills its worker fails.
"""

from __future__ import annotations

import inspect
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

from blake3 import blake3

from kedge.errors import Cancelled, CheckpointError, StepTimeout, Validation
from kedge.manager import CheckpointManager
from kedge.urls import reachable

from .attempt import check_picklable
from .digests import DIGEST_BYTES, DigestSet, split
from .executors import RemoteExecutor, WorkerLost, Workers, workers_for
from .failure import ItemError, StepFailed
from .items import FailedItem, maps_of
from .keys import digest_of, map_key, show
from .place import Place, carry
from .progress import Tally
from .retry import Retry, parse_retries, parse_timeout
from .session import Session
from .signals import Paused
from .worker import (
    PAGE,
    Item,
    Outcome,
    Spec,
    load_batch,
    local_runs,
    read_keys,
    save_items,
)

CHUNK_S = 0.1
MAX_CHUNK = 2000
_OTHER_KEY = "say what identifies an item: key=lambda item: …, with plain values"


@dataclass(frozen=True, slots=True)
class MapOptions:
    """How a map is carried out, parsed."""

    workers: int
    executor: str | Executor
    is_ordered: bool
    tolerated: float  # failures that do not end the map
    is_share: bool  # …as a part of all items
    retry: Retry
    timeout_s: float | None
    collect: bool


def parse_map_options(
    workers: int | None,
    executor: str | Executor,
    order: str,
    on_error: str | float,
    retries: int | Retry,
    timeout_s: float | None,
    collect: bool,
) -> MapOptions:
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 1024):
        raise Validation(f"workers must be a whole number from 1 to 1024 (got {workers!r})")
    if not isinstance(executor, Executor) and executor not in ("thread", "process"):
        raise Validation(f"executor={executor!r}", hint='use "thread", "process", or a concurrent.futures.Executor')
    if order not in ("input", "completed"):
        raise Validation(f"order={order!r}", hint='use "input" or "completed"')
    tolerated, is_share = _parse_on_error(on_error)
    parallelism = executor.parallelism if isinstance(executor, RemoteExecutor) else os.cpu_count
    return MapOptions(
        workers or parallelism() or 1,
        executor,
        order == "input",
        tolerated,
        is_share,
        parse_retries(retries),
        parse_timeout(timeout_s),
        collect,
    )


def _parse_on_error(on_error: str | float) -> tuple[float, bool]:
    if on_error == "stop":
        return 0, False
    if on_error == "collect":
        return float("inf"), False
    if isinstance(on_error, int) and not isinstance(on_error, bool) and on_error >= 0:
        return on_error, False
    if isinstance(on_error, float) and 0 <= on_error <= 1:
        return on_error, True
    raise Validation(
        f"on_error={on_error!r}",
        hint='use "stop", "collect", a number of failures to tolerate, or a part of the items, such as 0.01',
    )


T = TypeVar("T")
R = TypeVar("R")


class Results(Generic[R]):
    """The results of a map, read from the store as they are asked for: in the order in which they were saved."""

    def __init__(self, store: CheckpointManager, job: str, tag: str, digests: DigestSet) -> None:
        self._store = store
        self._job = job
        self._tag = tag
        self._digests = digests

    def __len__(self) -> int:
        return len(self._digests)

    def __iter__(self) -> Iterator[R]:
        after = 0
        while page := self._store.list(self._job, tags={"map": self._tag}, after=after, limit=PAGE):
            after = page[-1].seq
            for record in page:
                batch = self._store.load(record.id)
                for digest, result in zip(split(batch["keys"]), batch["results"], strict=True):
                    if digest in self._digests:
                        yield result


class Map(Generic[T, R]):
    """One map under way."""

    def __init__(
        self,
        session: Session,
        place: Place,
        version: str,
        function: Callable[[T], R],
        key: Callable[[T], object] | None,
        options: MapOptions,
    ) -> None:
        self._session = session
        self._run = place.run
        self._key = key
        self._options = options
        is_process = options.executor == "process"
        self._spec = Spec(
            token=place.run.token,
            store=reachable(session.store.url),
            namespace=session.store.namespace,
            identity=session.identity,
            key=session.store.key_source,
            lease=session.lease,
            path=place.path,
            tag=map_key(place.path, version),
            session=session.number,
            carried=carry(session.lease.job, show(place.path)),
            function=function,
            retry=options.retry,
            timeout_s=None if is_process else options.timeout_s,
            stops_at_failure=options.tolerated == 0,
            wants_results=options.collect and not isinstance(options.executor, RemoteExecutor),
        )
        self._done = DigestSet()  # durable, in this session or before
        self._earlier: dict[bytes, R] = {}  # results of earlier sessions, when they are asked for
        self._read_to = 0
        self._seen = DigestSet()
        self._repeats: Counter[bytes] = Counter()
        self._results: dict[int, R | ItemError] = {}  # by number, in the order in which they came
        self._taken = 0
        self._reused = 0
        self._executed = 0
        self._failures = 0
        self._last_failure: ItemError | None = None
        self._held: dict[str, FailedItem] = {}  # not tried again, because somebody chose others
        self._passed: list[tuple[int, FailedItem]] = []  # of these, those that the items had, with their numbers
        self._tally = Tally(None)
        self._chunk = 1
        self._again: deque[Item] = deque()  # items of chunks whose worker died
        self._attempts: Counter[int] = Counter()
        self._pending: dict[Future[Outcome], list[Item]] = {}
        self._unread: dict[bytes, int] = {}  # done elsewhere: results that are in the store only

    def run(self, items: Iterable[T]) -> list[R | ItemError] | Results[R]:
        self._catch_up(with_results=self._options.collect)
        if self._options.executor == "process":
            check_picklable(self._spec, f"map {show(self._spec.path)}", "its items are worked on in other processes")
        local_runs[self._spec.token] = self._run
        self._tally.total = len(items) if isinstance(items, Sized) else None
        self._spec = replace(self._spec, total=self._tally.total)
        self._held = self._failures_to_keep()
        workers = workers_for(
            self._options.executor, self._options.workers, self._options.timeout_s, self._spec, self._session.isolation
        )
        try:
            self._drive(iter(items), workers)
        except BaseException as error:
            try:
                if isinstance(error, Paused | Cancelled | StepTimeout):
                    # A second signal, or the end of the grace period, comes up in here.
                    workers.finish(self._pending, self._session.ends_within_s())
            finally:
                workers.stop()
            raise
        workers.close()
        for number, failed in self._passed:
            self._count_failure(number, ItemError(failed.key, failed.error, failed.traceback, failed.attempts))
        self._read_results()
        self._show(is_over=True)
        if self._executed:
            self._session.account.ran(show(self._spec.path), self._executed)
        elif self._reused:
            self._session.account.reused(show(self._spec.path))
        if self._failures > self._allowed():
            self._raise_failure()
        return self._answer()

    # Work

    def _drive(self, items: Iterator[T], workers: Workers) -> None:
        """Keep the workers busy until nothing is left, or too much has failed."""
        pending = self._pending
        source = self._new_items(items)
        is_open = True
        while is_open or pending or self._again:
            is_open = is_open and self._failures <= self._allowed()
            while len(pending) < 2 * self._options.workers and (self._again or is_open):
                if self._failures > self._allowed():
                    self._again.clear()
                    break
                self._session.pause_point()
                if self._again:
                    chunk = [self._again.popleft()]
                elif not (chunk := self._next_chunk(source)):
                    is_open = False
                    break
                pending[workers.submit(self._spec, chunk, self._read_to)] = chunk
            if not pending:
                continue
            finished, _ = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            if not finished:
                self._session.pause_point()
            for future in finished:
                self._finish(future, pending.pop(future), workers)
            self._show()

    def _show(self, *, is_over: bool = False) -> None:
        tally = self._tally
        tally.done, tally.reused, tally.failed = self._executed, self._reused, self._failures
        tally.money = self._session.account.money(self._spec.path)
        self._session.watcher.items(self._spec.path, tally, is_over=is_over)

    def _next_chunk(self, source: Iterator[Item]) -> list[Item]:
        size = 1 if self._options.executor == "process" and self._options.timeout_s is not None else self._chunk
        chunk = []
        for item in source:
            chunk.append(item)
            if len(chunk) >= size:
                break
        return chunk

    def _new_items(self, items: Iterator[T]) -> Iterator[Item]:
        """The items that are not done yet; those that are go straight to the results."""
        done, collects = self._done, self._options.collect
        for value in items:
            number, self._taken = self._taken, self._taken + 1
            digest, label = self._identify(value)
            if digest in done:
                self._reused += 1
                if collects:
                    self._results[number] = self._earlier[digest]
                continue
            label = label or digest.hex()
            if label in self._held:
                self._passed.append((number, self._held[label]))
                continue
            yield Item(digest, label, number, value)

    def _failures_to_keep(self) -> dict[str, FailedItem]:
        """The failed items that are left as they are: all but those that somebody chose (`items.retry_items`)."""
        session, path = self._session, show(self._spec.path)
        if not session.chosen_items:
            return {}
        failed = next((entry.failed for entry in maps_of(session.store, session.key) if entry.path == path), {})
        chosen = session.chosen_items.get(path, ())
        return {key: item for key, item in failed.items() if key not in chosen}

    def _identify(self, value: T) -> tuple[bytes, str]:
        """What an item is known by: its key, or its content and how often it came before. "" is no name of its own."""
        if self._key is not None:
            key = self._key(value)
            digest = digest_of(key, lambda: f"{self._newest_item()}, its key", _OTHER_KEY)[:DIGEST_BYTES]
            if not self._seen.add(digest):
                raise Validation(
                    f"{self._newest_item()} has the key {key!r} of an earlier one", hint="keys must tell items apart"
                )
            return digest, key if isinstance(key, str) and len(key) <= 100 else ""
        digest = digest_of(value, self._newest_item, _OTHER_KEY)[:DIGEST_BYTES]
        if not self._seen.add(digest):
            self._repeats[digest] += 1
            digest = blake3(digest + self._repeats[digest].to_bytes(8, "big")).digest(DIGEST_BYTES)
            self._seen.add(digest)
        return digest, ""

    def _newest_item(self) -> str:
        return f"map {show(self._spec.path)}, item {self._taken - 1}"

    def _finish(self, future: Future[Outcome], chunk: list[Item], workers: Workers) -> None:
        try:
            outcome = workers.outcome(future, chunk)
        except WorkerLost as lost:
            self._after_loss(lost.error, chunk)
            return
        self._executed += len(outcome.done)
        if self._options.collect and not self._spec.wants_results:
            numbers = set(outcome.done)
            self._unread.update((item.digest, item.number) for item in chunk if item.number in numbers)
        elif self._options.collect:
            for number, result in zip(outcome.done, outcome.results, strict=True):
                self._results[number] = result
        for number, failure in outcome.failed.items():
            self._count_failure(number, failure)
        if outcome.done and outcome.seconds > 0:
            fitting = CHUNK_S * len(outcome.done) / outcome.seconds
            self._chunk = max(1, min(MAX_CHUNK, round(fitting), 4 * self._chunk))

    def _after_loss(self, error: CheckpointError, chunk: list[Item]) -> None:
        """A worker died or was stopped: what it had made durable counts, the rest of its chunk is run one by one."""
        self._earlier.clear()
        self._catch_up(with_results=self._options.collect)
        rest = [item for item in chunk if item.digest not in self._done]
        for item in chunk:
            if item.digest in self._done:
                self._executed += 1
                if self._options.collect:
                    self._results[item.number] = self._earlier[item.digest]
        if len(chunk) > 1:
            self._again.extend(rest)
            return
        for item in rest:
            self._attempts[item.number] += 1
            if self._options.retry.allows(error, self._attempts[item.number]):
                self._again.append(item)
                continue
            failure = ItemError.of(item.label, error, self._attempts[item.number])
            save_items(self._session.store, self._spec, [], [], [(item, failure)])
            self._count_failure(item.number, failure)

    def _catch_up(self, *, with_results: bool) -> None:
        """Learn what is durable, from the records since the last look."""
        store, add = self._session.store, self._done.add
        for record, digests in read_keys(store, self._spec, self._read_to):
            self._read_to = record.seq
            for digest in digests:
                add(digest)
            if with_results:
                state = load_batch(store, self._spec, record)
                self._earlier.update(zip(digests, state["results"], strict=True))

    def _read_results(self) -> None:
        if self._unread:
            self._catch_up(with_results=True)
            for digest, number in self._unread.items():
                self._results[number] = self._earlier.pop(digest)

    # Answers

    def _count_failure(self, number: int, failure: ItemError) -> None:
        self._failures += 1
        self._last_failure = failure
        if self._options.collect:
            self._results[number] = failure

    def _allowed(self) -> float:
        return self._options.tolerated * max(self._taken, 100) if self._options.is_share else self._options.tolerated

    def _raise_failure(self) -> None:
        failure = self._last_failure
        assert failure is not None  # nosec B101 # something failed
        where = f"item {failure.key} of map {show(self._spec.path)} of run {self._session.key}"
        more = "" if self._failures == 1 else f"; {self._failures} items failed"
        error = failure.exception or StepFailed(failure.error)  # one of an earlier session
        error.add_note(f"It failed in {where}{more}.")
        raise error

    def _answer(self) -> list[R | ItemError] | Results[R]:
        if not self._options.collect:
            return Results(self._session.store, self._spec.lease.job, self._spec.tag, self._seen)
        if not self._options.is_ordered:
            return list(self._results.values())
        return [self._results.pop(number) for number in range(self._taken)]


def name_of(function: Callable[..., object]) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def check_call(function: object, items: object, key: object, what: str) -> None:
    """Raise Validation for what cannot be mapped; nothing of it is called."""
    if not callable(function):
        raise Validation(f"{what}: {function!r:.100} is no function", hint="use run.map(function, items)")
    if inspect.iscoroutinefunction(function):
        raise Validation(f"{what}: {name_of(function)} is a coroutine function", hint="use await run.aio.map(…)")
    if not (isinstance(items, Iterable) or hasattr(items, "__getitem__")):
        raise Validation(
            f"{what}: its items are a {type(items).__name__}", hint="use a list, or anything to iterate over"
        )
    if key is not None and not callable(key):
        raise Validation(f"{what}: key={key!r:.100} is no function", hint="use a function of an item")
