"""Runs in the background of this process: `kedge.start`. Inside a run they are its children, with their own history.

    step     in the parent: the key of the child is durable
    lease    whoever has it carries the run out; one that somebody else has is left to them
    entry    in the queue `recovery`, marked running: from here on a worker takes the run over when this process dies
    thread   carries the run out; its end is durable, then the entry is deleted

Killed anywhere, the parent comes to the same child again, and takes it over if nobody else has.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kedge.errors import Conflict, LeaseHeld, LeaseLost, NoSpace, StorageError, Unavailable, Validation
from kedge.manager import CheckpointManager
from kedge.model import Lease, RunStatus

from .declaration import Pipeline, parse_pipeline
from .entries import RECOVERY, Arguments, call_of, drop_entry, inputs_of, queue_job, ready
from .inbox import StoreLike, parse_run_key
from .keys import digest_of
from .origin import check_same_call, check_same_run
from .owner import newest_status, status_of, take_lease, this_command
from .place import here
from .progress import write_line
from .queues import Handle
from .recovery import register
from .retry import Retry
from .run import Run
from .signals import Paused
from .step import Call

R = TypeVar("R")

LEASE_S = 30.0
_PRIORITY = 5
_MOST_CHARACTERS = 100  # of the key of a child that says whose it is
_OUTAGE = Retry(times=5)  # of the store, while a run is at work
_ENDED = (RunStatus.COMPLETED, RunStatus.CANCELLED)
_stores: dict[str, CheckpointManager] = {}  # opened here by path or URL, for as long as this process lives
_running: set[Run] = set()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Background:
    """The options of `start`."""

    key: str | None = None
    store: StoreLike | None = None


def start(
    pipeline: Pipeline[..., R],
    /,
    *args: object,
    key: str | None = None,
    store: StoreLike | None = None,
    **kwargs: object,
) -> Handle[R]:
    """Begin the run `pipeline(*args, **kwargs)` in a thread of this process; durable when this returns.

    Inside a run it is a child: its default key is made of the parent's, and a parent that is resumed comes to the same
    child again. `run.result(handle)` waits for it in a way that survives a restart. If this process dies, a worker
    (`kedge worker FILE.py`) takes the run over, or the next process that starts it. Wait for the handle before the
    program ends: Python takes no more work for pools of threads then, and a run that needs one fails.
    """
    options = Background(key, store)
    parse_pipeline(pipeline).check_options(args, options)
    return start_call(pipeline, args, kwargs, options)


def start_call(
    pipeline: Pipeline[..., R], args: Sequence[object], kwargs: Mapping[str, object], options: Background
) -> Handle[R]:
    """`start` for arguments whose names the options of `start` have, too."""
    parse_pipeline(pipeline).check_call(args, kwargs)
    call = call_of(pipeline.function, args, kwargs)
    key = pipeline.key_of(*call["args"], **call["kwargs"]) if options.key is None else options.key
    if (place := here()) is None:
        start = _Start(_opened(options.store or pipeline.store), pipeline, parse_run_key(key), call, None)
        return start.handle()
    parent = place.run
    if options.store is not None and options.store is not parent.store:
        raise Validation(f"run {parent.key}: a child run is in the store of its parent", hint="leave store= away")
    own = parse_run_key(_child_key(parent.key, key) if options.key is None else key)
    step = Call(lambda: own, inputs=None, tags=lambda _: {"kind": "child", "run": own}, is_claimed=True)
    child = parent.call(parent.claim(f"start {key}"), step)  # in a session before, or a fork, it may have had another
    return _Start(parent.store, pipeline, child, call, parent).handle()


def stop_background(reason: str) -> None:
    """Have the runs in the background of this process pause before their next step: it is to end."""
    for run in list(_running):
        run.stop(reason)


def _child_key(parent: str, key: str) -> str:
    name = f"{parent}:{key}"
    if len(name) <= _MOST_CHARACTERS:
        return name
    return f"{name[: _MOST_CHARACTERS - 13]}-{digest_of(name, 'a key').hex()[:12]}"


def _opened(given: StoreLike | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        return given
    with _lock:
        opened = CheckpointManager(given, create=True)
        if (known := _stores.setdefault(opened.url, opened)) is not opened:
            opened.close()
        return known


@dataclass(frozen=True, slots=True)
class _Start(Generic[R]):
    """A run that is to be carried out in this process, if nobody else has it."""

    store: CheckpointManager
    pipeline: Pipeline[..., R]
    key: str
    call: Arguments
    parent: Run | None

    def _status(self) -> RunStatus | None:
        newest = newest_status(self.store, self.key)
        return None if newest is None else status_of(newest)

    def handle(self) -> Handle[R]:
        status = self._status()
        inputs = inputs_of(self.pipeline.name, self.call)
        for record in self.store.list(queue_job(RECOVERY), tags={"run": self.key}, limit=1):  # it has only begun
            check_same_call(self.key, record.metadata, inputs)
        if status is not None:
            check_same_run(self.store, self.key, inputs)
        handle = partial(Handle[R], self.store, self.key, queue_job(RECOVERY), inputs=inputs)
        if status is RunStatus.FAILED and self.parent is not None:
            # The parent may have handled that, and then it does not ask for the result again (`final_failures`).
            return handle(resume=self.begin)
        if status not in _ENDED:
            self.begin()
        return handle()

    def begin(self) -> None:
        with ExitStack() as stack:
            wait_s = LEASE_S if self._status() is RunStatus.FAILED else 0.0  # whoever failed gives the lease back
            try:
                lease = stack.enter_context(take_lease(self.store, self.key, LEASE_S, wait_s))
            except LeaseHeld:
                return
            if self._status() in _ENDED:
                return
            entry, origin = register(self.store, self.key, self.pipeline.name, self.call)
            if self.parent is None:
                origin = {**this_command(), **origin}
            work = partial(self._work, lease, entry, origin, stack.pop_all())
        threading.Thread(target=self._serve, args=(work,), name=f"kedge-run-{self.key}").start()

    def _serve(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (Conflict, StorageError) as error:  # the store was closed, or is away
            write_line(sys.stderr, f"run {self.key}: {error.message}; if it has not ended, a worker continues it")

    def _work(self, lease: Lease, entry: str, origin: Mapping[str, object], held: ExitStack) -> None:
        with held:
            for attempt in itertools.count(1):
                run = Run(
                    self.key, store=self.store, version=self.pipeline.version, pipeline=self.pipeline.name,
                    signals=False, progress=False, timeout_s=self.pipeline.timeout_s, lease=lease, origin=origin,
                    parent=self.parent,
                )  # fmt: skip
                try:
                    self._carry_out(run)
                except LeaseLost:
                    return  # it belongs to somebody else, and so does its entry
                except Paused:
                    with suppress(StorageError):
                        self.store.tag(entry, state=ready(_PRIORITY))  # a worker continues it
                    return
                except (Unavailable, NoSpace):  # the store comes back; somebody makes room
                    if attempt <= _OUTAGE.times:
                        time.sleep(_OUTAGE.wait_s(attempt))
                        continue
                except BaseException:  # noqa: BLE001 - recorded with the run, and raised by its handle
                    pass
                break
            with suppress(StorageError):  # a worker finds the run ended
                if self._status() in (*_ENDED, RunStatus.FAILED):  # else its end is not durable: a worker continues it
                    drop_entry(self.store, entry)

    def _carry_out(self, run: Run) -> None:
        _running.add(run)
        try:
            self.pipeline.carry_out(run, self.call)
        finally:
            _running.discard(run)
