"""What happens where the items of a map are worked on: in a thread of the run, or in another process.

The worker itself makes results durable, under the lease of the run. Items are saved in batches: a batch is closed when
about 50 ms of work are in it, so that tiny items share a commit and slow ones have one of their own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

from kedge import codec
from kedge.errors import CheckpointError, Conflict, Corrupted, LeaseLost
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointLevel, Lease

from .attempt import call_in_thread
from .digests import split
from .failure import Failure, ItemError
from .interruption import Interrupted, call
from .keys import Path, show
from .place import Carried, attempted
from .retry import Retry
from .telemetry import item_span
from .watch import watch_here

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from .run import Run

PAGE = 500
T = TypeVar("T")

BATCH_S = 0.05
BATCH_ITEMS = 1000
BATCH_BYTES = 256 * 1024
WAIT_S = 0.5  # that results wait for a slow item behind them
KEYS_IN_METADATA = 16  # items of a batch whose digests are listed with it, so that resuming need not read it

_IMMUTABLE = (int, float, bool, type(None), complex)


@dataclass(frozen=True, slots=True)
class Spec:
    """What all items of a map share."""

    token: str  # of the Run object, for workers in its own process
    store: str
    namespace: str
    identity: str  # of the run
    lease: Lease
    path: Path
    tag: str
    session: int
    carried: Carried
    function: Callable[[Any], object]
    retry: Retry
    timeout_s: float | None  # enforced here; None where the pool does it
    stops_at_failure: bool
    wants_results: bool
    total: int | None = None  # items, where the map knows
    key: bytes | str | None = field(default=None, repr=False)  # of the store, as it was given; None: the environment's


@dataclass(frozen=True, slots=True)
class Item:
    digest: bytes
    label: str
    number: int  # its position among the items
    value: object


@dataclass(slots=True)
class Outcome:
    """What became of some items: number → result, number → error; the rest was not begun."""

    done: list[int] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    failed: dict[int, ItemError] = field(default_factory=dict)
    seconds: float = 0.0


local_runs: WeakValueDictionary[str, Run] = WeakValueDictionary()
_stores: dict[tuple[int, str, str], CheckpointManager] = {}
_halt: Event | None = None  # in a worker process: whether it may begin items


def prepare(halt: Event) -> None:
    """At the start of a worker process: leave Ctrl-C to the process that owns the run, and do not outlive it."""
    global _halt
    _halt = halt
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_owner, name="kedge-owner", daemon=True).start()


def _end_with_owner() -> None:
    """Whatever this process is at. For the kernel it is a child of the server that forks such processes."""
    if (owner := parent_process()) is not None:
        owner.join()
        os.kill(os.getpid(), signal.SIGKILL)


def work(spec: Spec, items: list[Item]) -> Outcome:
    """Run the items one after another; what is in the outcome is durable."""
    if _halt is not None and _halt.is_set():
        return Outcome()
    began = time.monotonic()
    run = local_runs.get(spec.token)
    store = run.store if run is not None else _open(spec)
    outcome = Outcome()
    batch = Batch(store, spec, outcome)
    try:
        with _working_for(spec.carried, is_elsewhere=run is None), _flushing(batch):
            for item in items:
                _check_may_begin(run)
                failure = _work_on(spec, item, run, batch)
                if failure is not None:
                    batch.fail(item, failure)
                    if spec.stops_at_failure:
                        break
    finally:
        batch.flush()  # also what was done before an item that ends the run, or pauses it
    outcome.seconds = time.monotonic() - began
    return outcome


def work_unfinished(spec: Spec, items: list[Item], after: int) -> Outcome:
    """As `work`, where a scheduler may run the same task again: what it made durable before is not run again (I1).

    `after` is how far the run had read its records when it sent the items.
    """
    run = local_runs.get(spec.token)
    store = run.store if run is not None else _open(spec)
    durable = {digest for _, digests in read_keys(store, spec, after) for digest in digests}
    outcome = work(spec, [item for item in items if item.digest not in durable])
    outcome.done += [item.number for item in items if item.digest in durable]
    return outcome


def read_keys(store: CheckpointManager, spec: Spec, after: int) -> Iterator[tuple[Checkpoint, list[bytes]]]:
    """The records of a map behind number `after`, a page at a time, each with the digests of the items in it."""
    while page := store.list(spec.lease.job, tags={"map": spec.tag}, after=after, limit=PAGE):
        after = page[-1].seq
        for record in page:
            short = record.metadata.get("keys")
            if isinstance(short, str):
                keys = bytes.fromhex(short)
            else:
                keys = load_batch(store, spec, record)["keys"]
            yield record, split(keys)


def load_batch(store: CheckpointManager, spec: Spec, record: Checkpoint) -> Any:
    try:
        return store.load(record.id)
    except Corrupted as error:
        raise Corrupted(
            f"results of map {show(spec.path)} of run {spec.lease.job} are damaged: {error.message}",
            hint=f"kedge delete {spec.lease.job} {record.id}, and their items run again",
        ) from error


def call_for(
    carried: Carried, function: Callable[..., T], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[T] | Failure:
    """A function in a process of its own, on the account of a step: its result, or the failure as data."""
    with _working_for(carried, is_elsewhere=True):
        try:
            return (function(*args, **kwargs),)
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            return Failure.of(error)


@contextmanager
def _working_for(carried: Carried, *, is_elsewhere: bool) -> Iterator[None]:
    """LLM calls of another process are written down at the end: it may be killed between two pieces of work."""
    try:
        with carried.entered():
            yield
    finally:
        if is_elsewhere and (bills := sys.modules.get("kedge.llm.bills")) is not None:
            bills.write_all()


def _work_on(spec: Spec, item: Item, run: Run | None, batch: Batch) -> ItemError | None:
    """One item with its retries; answers the last failure."""
    attempt = 0
    while True:
        attempt += 1
        try:
            place = run.at_item(spec.path, item.label, attempt) if run is not None else nullcontext()
            traced = item_span(spec.lease.job, spec.path, item.label, attempt)
            with place, attempted(spec.identity, spec.tag, item.digest), traced:
                if spec.timeout_s is None:
                    result = call(spec.function, (item.value,), {})
                else:
                    what = f"item {item.label} of {show(spec.path)}"
                    result = call_in_thread(spec.function, (item.value,), {}, spec.timeout_s, what)
            batch.add(item, result)
        except LeaseLost:
            raise
        except Interrupted:
            _check_may_begin(run)  # raises what ended the run
            raise
        except Exception as error:  # noqa: BLE001 - the item's own; it is recorded with the batch
            if not spec.retry.allows(error, attempt):
                return ItemError.of(item.label, error, attempt)
            _wait(run, spec.retry.wait_s(attempt))
        else:
            return None


def _wait(run: Run | None, seconds: float) -> None:
    """Between two attempts at an item. Raises if the run is to stop meanwhile."""
    if run is not None:
        run.wait_for_attempt(seconds)
    elif _halt is None:
        time.sleep(seconds)
    else:
        _halt.wait(seconds)
        _check_may_begin(run)


def _check_may_begin(run: Run | None) -> None:
    """Raise if the run is to stop: an item that is not begun runs when it is resumed."""
    if run is not None:
        if run.is_stopping:  # asked at every item: quickly
            run.begin()
    elif _halt is not None and _halt.is_set():
        raise CheckpointError("the map is stopped")  # to nobody: its run looks at no outcome any more


class Batch:
    """Results on their way to a commit."""

    def __init__(self, store: CheckpointManager, spec: Spec, outcome: Outcome) -> None:
        self._store = store
        self._spec = spec
        self._outcome = outcome
        self._items: list[Item] = []
        self._results: list[object] = []
        self._failed: list[tuple[Item, ItemError]] = []
        self._size_bytes = 0
        self._since = time.monotonic()
        self._lock = threading.Lock()

    def add(self, item: Item, result: object) -> None:
        """Keep a result; what cannot be encoded raises and is not kept.

        Until the batch is saved the function may change what it returned: a copy is kept, or, of a result with large
        buffers, the batch is saved at once.
        """
        is_large = False
        if type(result) not in _IMMUTABLE:
            encoded = codec.encode(result)
            self._size_bytes += len(encoded.tree)
            is_large = bool(encoded.buffers)
            if not is_large:
                result = codec.decode(encoded.tree, _no_buffers)
        with self._lock:
            self._items.append(item)
            self._results.append(result)
            if (
                is_large
                or len(self._items) >= BATCH_ITEMS
                or self._size_bytes >= BATCH_BYTES
                or time.monotonic() - self._since >= BATCH_S
            ):
                self._flush()

    def fail(self, item: Item, failure: ItemError) -> None:
        with self._lock:
            self._failed.append((item, failure))

    def flush(self) -> None:
        with self._lock:
            self._flush()

    def flush_behind(self) -> None:
        """While the worker is at an item that takes its time: what was done before it does not wait for it."""
        with self._lock:
            if (self._items or self._failed) and time.monotonic() - self._since >= WAIT_S:
                try:
                    self._flush()
                except BaseException:  # noqa: BLE001 - the worker meets it itself, at the end of its item
                    self._since = time.monotonic()

    def _flush(self) -> None:
        """Make all of it durable, then, and only then, part of the outcome (I1)."""
        items, results, failed = self._items, self._results, self._failed
        if items or failed:
            save_items(self._store, self._spec, items, results, failed)
        outcome = self._outcome
        outcome.done += [item.number for item in items]
        if self._spec.wants_results:
            outcome.results += results
        outcome.failed.update({item.number: failure for item, failure in failed})
        self._items, self._results, self._failed, self._size_bytes = [], [], [], 0
        self._since = time.monotonic()


def _flushing(batch: Batch) -> AbstractContextManager[None]:
    """While the block runs, a thread makes durable what waits behind slow items."""
    return watch_here(WAIT_S / 2, "kedge-flush").calling(batch.flush_behind)


def save_items(
    store: CheckpointManager, spec: Spec, items: list[Item], results: list[object], failed: list[tuple[Item, ItemError]]
) -> None:
    keys = b"".join(item.digest for item in items)
    state: dict[str, object] = {"keys": keys, "results": results}
    metadata: dict[str, object] = {
        "kind": "items",
        "path": list(spec.path),
        "session": spec.session,
        "items": len(items),
        "at": _runs_of([item.number for item in items]),
        "of": spec.total,
    }
    if len(items) <= KEYS_IN_METADATA:
        metadata["keys"] = keys.hex()
    if failed:
        metadata["failed"] = len(failed)
        state["failed"] = [
            {
                "key": failure.key,
                "at": item.number,
                "error": failure.error,
                "attempts": failure.attempts,
                "traceback": failure.traceback,
            }
            for item, failure in failed
        ]
    store.save(
        spec.lease.job,
        show(spec.path),
        state,
        level=CheckpointLevel.SUBSTEP,
        tags={"map": spec.tag},
        metadata=metadata,
        lease=spec.lease,
    )


def _runs_of(numbers: list[int]) -> list[list[int]]:
    """Numbers as [first, how many] of those that follow each other."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def _no_buffers(number: int) -> bytes:
    raise CheckpointError(f"a result without buffers refers to buffer {number}")


def _open(spec: Spec) -> CheckpointManager:
    """The store of a run in another process; opened once."""
    url, namespace = spec.store, spec.namespace
    if url.startswith("memory:"):
        raise Conflict(
            "a store in memory cannot be written by other processes", hint='use executor="thread", or a directory'
        )
    key = (os.getpid(), url, namespace)
    if key not in _stores:
        _stores[key] = CheckpointManager(url, namespace=namespace, create=False, key=spec.key)
    return _stores[key]
