"""A session of a run: one process at work on it, from when it takes the run's lease until it gives that back.

All that a run makes durable is saved here, fenced by the lease, so that a stale owner is refused at its next write
(I5). Steps, maps and waits are given the session and call nothing above it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kedge.errors import Cancelled, CheckpointError, Conflict, Denied, LeaseLost, StepTimeout, StorageError
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, Checkpoint, CheckpointLevel, Lease, RunStatus, number_of
from kedge.ports import Mark, Provided, Then
from kedge.store.lease import boot_clock_s
from kedge.store.request import Request

from .account import Account, Waiting
from .attempt import Isolation
from .failure import Failure, one_line, traceback_of
from .final_failures import KeptFailures
from .inbox import CANCEL, ITEMS, Inbox, SignalMessages
from .items import keys_in
from .keys import Path, previews, show, step_key
from .owner import newest_status, save_status, status_request, this_process
from .progress import watcher
from .signals import Paused, Signals
from .telemetry import measured

if TYPE_CHECKING:
    from asyncio import Task

INBOX_EVERY_S = 1.0
PROGRESS_EVERY_S = 10.0
REACHED_WITHIN_S = 3.0  # code of a step or an item that can be ended, after the grace period
WAKE_EVERY_S = 0.1  # of what waits, to see whether the run is to stop


class Session:
    """Used by several threads and tasks at once."""

    def __init__(
        self,
        store: CheckpointManager,
        lease: Lease,
        *,
        version: str,
        pipeline: str | None,
        grace_s: float,
        progress: bool | None,
        timeout_s: float | None = None,
        queue: str = "",
        parent: str = "",
        then: Then | None = None,
        is_first: bool = False,
    ) -> None:
        """Raises Conflict when the job is no run, or that of another pipeline, and Cancelled when it was cancelled.

        `timeout_s` counts from when the run first began, in whatever session. `queue` is the one whose worker this is,
        `parent` the run that started this one. `is_first`: nothing was saved before, and nobody has told it anything.
        """
        self.store = store
        self.lease = lease
        self.key = lease.job
        self.version, self.pipeline = version, pipeline
        self.queue, self.parent = queue, parent
        self.number, self.is_first = 1, is_first
        self._alone_until = boot_clock_s() + lease.ttl_s / 2 if is_first else 0.0
        self.is_open, self.is_imported = True, False  # some of the run's steps were done by an older system
        self.signals = Signals(grace_s)
        self.isolation = Isolation()
        self.account = Account()
        self.tasks: set[Task[Any]] = set()  # that carry out steps now
        self.began_at = self.session_began_at = time.time()  # of the run; of this session
        self.result: tuple[object] | None = None  # of the whole run, where somebody asks for it later
        self._returned: Mapping[str, str] | None = None  # the same for people, in a few words
        self.then = then  # what else is done in the transaction in which the run is completed
        self.is_released: Callable[[], None] = lambda: None  # called when that was to release the lease
        self.completed_at: datetime | None = None  # in an earlier session
        self.chosen_items: dict[str, set[str]] = {}  # by map: only these of the failed ones are tried again
        self._timeout_s = timeout_s
        self._inbox = Inbox(store, self.key)
        self._inbox_at, self._has_read_inbox = 0.0, False
        self._inbox_lock = threading.RLock()
        self._stopped_by: CheckpointError | None = None  # a cancellation, or the end of the run's time
        self._end_at, self._has_ended_steps = 0.0, False  # when steps under way are ended, once the run was stopped
        self._progress_at = 0.0
        self.messages = SignalMessages(store, self.key)
        self.failures = KeptFailures(store, self.key, self._continue_history())
        self.watcher = measured(watcher(progress), self.pipeline)
        self.ended: tuple[RunStatus, BaseException | None] | None = None

    def _continue_history(self) -> Checkpoint | None:
        """The newest status record of the sessions before this one; what it says is taken over."""
        job = None if self.is_first else self.store.catalogue.job(self.key)
        if job is None or not job.checkpoints:
            if self.is_first or not self.queue:  # what nobody submitted cannot be cancelled before it has a record
                self._inbox_at, self._has_read_inbox = time.monotonic() + INBOX_EVERY_S, True
            return None
        newest = newest_status(self.store, self.key)
        if newest is None:
            raise Conflict(f"job {self.key} is not a run", hint="it holds checkpoints of its own: use another key")
        last = newest.metadata
        known = last.get("pipeline")
        if self.pipeline is not None and known is not None and known != self.pipeline:
            raise Conflict(
                f"run {self.key} belongs to pipeline {known}, not to {self.pipeline}",
                hint="use another key for another pipeline",
            )
        self.pipeline = self.pipeline or (known if isinstance(known, str) else None)
        if last.get("status") == RunStatus.CANCELLED:
            raise Cancelled(f"run {self.key} was cancelled", hint="use another key to start anew")
        if last.get("status") == RunStatus.COMPLETED:
            self.completed_at = newest.created_at
        if isinstance(parent := last.get("parent"), str):
            self.parent = parent
        self.is_imported = last.get("imported") is True
        if last.get("has_choice") is True:
            state = self.store.load(newest.id)
            self.chosen_items = {path: set(keys) for path, keys in state["chosen_items"].items()}
        self._inbox.seen = number_of(last.get("inbox"))
        self.number = number_of(last.get("session")) + 1
        if isinstance(began_at := last.get("began_at"), float):
            self.began_at = began_at
        return newest

    @property
    def identity(self) -> str:
        """What tells this run from one that had the same key before it was deleted."""
        return f"{self.store.namespace}:{self.key}:{self.began_at!r}"

    @property
    def is_alone(self) -> bool:
        """Whether all there is of the run was surely saved by this session: the lease that began it cannot have run
        out. A process that was suspended finds that it may have, and looks what the next owner has done."""
        return self.is_first and boot_clock_s() < self._alone_until

    # Records

    def save(
        self,
        path: Path,
        state: object,
        level: CheckpointLevel,
        metadata: Mapping[str, object],
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """A checkpoint of the run; durable when this returns (I1), refused when the lease was lost (I5)."""
        self.store.save(
            self.key,
            show(path),
            state,
            level=level,
            tags=tags,
            metadata={**metadata, "session": self.number, "path": list(path)},
            lease=self.lease,
            idempotency_key=idempotency_key,
        )

    def record(
        self, status: RunStatus, *, error: BaseException | None = None, origin: Mapping[str, object] | None = None
    ) -> None:
        """The run's status as a checkpoint, with what this session has done so far; `origin`: how it was started."""
        then = self.then if status is RunStatus.COMPLETED else None
        save_status(self.store, self.lease, status, *self._described(status, error, origin), then)
        if then is not None and then.releases_lease:
            self.is_released()

    def first_record(self, origin: Mapping[str, object], marks: Mark | None) -> tuple[Request, object]:
        """The status record with which a run begins: it takes the lease of a run that there is not yet (I5)."""
        state, metadata = self._described(RunStatus.RUNNING, None, origin)
        provided = Provided(absent_jobs=(self.key + INBOX_SUFFIX,), takes=self.lease, marks=marks)
        return replace(status_request(self.lease, RunStatus.RUNNING, metadata), provided=provided), state

    def _described(
        self, status: RunStatus, error: BaseException | None, origin: Mapping[str, object] | None
    ) -> tuple[dict[str, object], dict[str, object]]:
        """State and metadata of a status record."""
        state: dict[str, object] = {**self.account.names(), **(origin or {})}
        metadata: dict[str, object] = {
            "session": self.number,
            "began_at": self.began_at,
            "session_began_at": self.session_began_at,
            "version": self.version,
            "pipeline": self.pipeline,
            "inbox": self._inbox.seen,
            "owner": this_process(),
            "token": self.lease.token,
            **self.account.facts(),
        }
        if self.is_imported:
            metadata["imported"] = True
        if released := self.failures.released():  # steps that failed, and run again when the run is resumed
            metadata["released"] = len(released)
            state["released"] = released
        if self.chosen_items and status in (RunStatus.RUNNING, RunStatus.PAUSED):  # once it ends, so does the choice
            metadata["has_choice"] = True
            state["chosen_items"] = {path: sorted(keys) for path, keys in self.chosen_items.items()}
        if self.queue:
            metadata["queue"] = self.queue
        if self.parent:
            metadata["parent"] = self.parent
        if origin and "entry" in origin:
            metadata["has_entry"] = True
        if origin and "given" in origin:
            metadata["given"] = state.pop("given")
        if error is not None and status is not RunStatus.COMPLETED:
            metadata["error"] = one_line(error)
            metadata["is_denied"] = isinstance(error, Denied)
            state["traceback"] = traceback_of(error)
            state["failure"] = Failure.of(error).state()
        if status is RunStatus.COMPLETED and self.result is not None:
            state["result"] = self.result[0]
            metadata["has_result"] = True
        if status is RunStatus.COMPLETED and self._returned is not None:
            metadata["returned"] = self._returned
        return state, metadata

    def record_progress(self, done: int, total: int | None) -> None:
        """Durable with the next status record; one is made for it every ten seconds."""
        self.account.progress = {"done": done, "total": total}
        if time.monotonic() >= self._progress_at:
            self._progress_at = time.monotonic() + PROGRESS_EVERY_S
            self.record(RunStatus.RUNNING)

    def asked_at(self, path: Path, question: Mapping[str, object]) -> float:
        """When the run first came to this question, in this session or an earlier one."""
        key = "asked:" + step_key(path, "", {})
        if (asked := self.store.load_by_key(self.key, key)) is None:
            state = {**question, "asked_at": time.time()}
            self.save(path, state, CheckpointLevel.STEP, {"kind": "asked"}, key)
            return state["asked_at"]  # type: ignore[return-value]
        earlier: Any = asked[1]
        return float(earlier["asked_at"])

    @contextmanager
    def waiting(self, path: Path, waiting: Waiting) -> Iterator[None]:
        """While this lasts, the run says for what it waits."""
        self.account.waits(path, waiting)
        self.record(RunStatus.PAUSED)
        try:
            yield
        except Paused:
            raise  # it still waits
        except BaseException:
            self.account.waits_no_more(path)
            raise
        self.account.waits_no_more(path)
        self.record(RunStatus.RUNNING)

    # Between two pieces of work

    def check_open(self) -> None:
        if not self.is_open:
            raise not_entered(self.key)

    def pause_point(self) -> None:
        """Here a run stops, waits, or learns that it was cancelled."""
        self.check_open()
        signals = self.signals
        if signals.is_asked_to_record:
            signals.is_asked_to_record = False
            self.record(RunStatus.RUNNING)
        if signals.must_wait():
            self.record(RunStatus.PAUSED)
            while signals.must_wait():
                time.sleep(0.05)
                self._read_inbox()
                self.raise_stopped()
            if not signals.stopping:
                self.record(RunStatus.RUNNING)
        if signals.stopping:
            raise Paused(signals.stopping)
        self._read_inbox()
        self.raise_stopped()

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until the run is to stop: `pause_point` says why."""
        for pause_s in self._pauses(seconds):
            time.sleep(pause_s)

    async def wait_async(self, seconds: float) -> None:
        """The same for a task: it takes none of the few threads in which others save."""
        from asyncio import sleep

        for pause_s in self._pauses(seconds):
            await sleep(pause_s)

    def _pauses(self, seconds: float) -> Iterator[float]:
        until = time.monotonic() + seconds
        while not self.is_stopped and (left := until - time.monotonic()) > 0:
            yield min(left, WAKE_EVERY_S)

    @property
    def is_stopped(self) -> bool:
        """Whether the run is to pause, was cancelled, or its time is over."""
        return bool(self.signals.stopping) or self._stopped_by is not None

    def raise_stopped(self, cause: BaseException | None = None) -> None:
        """Raise what ended the run from outside, if anything did."""
        if (stopped := self._stopped_by) is not None:
            raise type(stopped)(stopped.message, hint=stopped.hint) from cause

    def _read_inbox(self) -> None:
        """Learn what the run was told, and whether its time is over; asks the store once a second at most.

        What another thread reads is waited for the first time: a run that was cancelled before does not begin.
        """
        if self._timeout_s is not None and time.time() >= self.began_at + self._timeout_s:
            hint = "what it finished is kept; give it more with timeout_s= and start it again"
            self._stop(StepTimeout(f"run {self.key} took longer than {self._timeout_s:g} s", hint=hint), 0)
        now, is_first = time.monotonic(), not self._has_read_inbox
        if (now < self._inbox_at and not is_first) or not self._inbox_lock.acquire(blocking=is_first):
            return
        try:
            if is_first and self._has_read_inbox:
                return
            self._inbox_at = now + INBOX_EVERY_S
            for message in self._inbox.new():
                if message.metadata.get("kind") == CANCEL:
                    text = f"run {self.key} was cancelled by {message.metadata.get('actor')}"
                    hint = "what it finished is kept; use another key to start anew"
                    self._stop(Cancelled(text, hint=hint), self.signals.grace_s)
                elif message.metadata.get("kind") == ITEMS and (keys := keys_in(self.store, message)):
                    self.chosen_items.setdefault(str(message.metadata.get("name")), set()).update(keys)
            self._has_read_inbox = True
        finally:
            self._inbox_lock.release()

    @contextmanager
    def in_task(self) -> Iterator[None]:
        """Around the attempt of a step that is a coroutine: its task can be cancelled."""
        from asyncio import current_task

        task = current_task()
        assert task is not None  # nosec B101 # a coroutine runs in a task
        self.tasks.add(task)
        try:
            yield
        finally:
            self.tasks.discard(task)

    def _stop(self, reason: CheckpointError, grace_s: float) -> None:
        if self._stopped_by is None:
            self._stopped_by = reason
            self._end_at = time.monotonic() + grace_s

    def ends_within_s(self) -> float | None:
        """How long a run that was ended from outside waits for what is under way, which is ended, too; None: no limit.

        A little longer than the grace period: then `look` has reached all that can be reached.
        """
        return None if self._stopped_by is None else max(0.0, self._end_at - time.monotonic()) + REACHED_WITHIN_S

    def look(self) -> None:
        """Called once a second by another thread (`watch`): ends steps under way that outlast the grace period."""
        self._read_inbox()
        if self._stopped_by is None or time.monotonic() < self._end_at or not self.is_open:
            return
        if not self._has_ended_steps:
            self._has_ended_steps = True
            for task in list(self.tasks):
                with suppress(RuntimeError):  # it has ended, and its loop is closed
                    task.get_loop().call_soon_threadsafe(task.cancel)
            self.isolation.close()
            if not self.tasks:
                self.signals.interrupt(self._stopped_by)
        self.signals.interrupt_threads()

    # The end

    def end(self, result: object, then: Then | None) -> None:
        """Keep what the pipeline returned, and what is done when that is made durable."""
        self.result, self.then = (result,), then or self.then
        self.note_result(result)

    def note_result(self, result: object) -> None:
        self._returned = previews(result)

    def leave(self, status: RunStatus, error: BaseException | None) -> None:
        """From here on there are no steps, and no signal raises: the end of the run is being recorded."""
        self.is_open, self.ended = False, (status, error)
        self.signals.disarm()
        self._settle()
        self.failures.release(error)

    def record_end(self, status: RunStatus, error: BaseException | None) -> None:
        """The last status record. A run whose result cannot be saved has failed: that is recorded, and raised."""
        try:
            self.record(status, error=error)
        except (LeaseLost, StorageError):
            raise  # the run belongs to somebody else, or may be recorded as completed all the same
        except Exception as failure:
            if status is RunStatus.COMPLETED:
                self.ended = (RunStatus.FAILED, failure)
                self.record(RunStatus.FAILED, error=failure)
            raise

    def _settle(self) -> None:
        """Write down, and show, what was saved by answers from the LLM cache."""
        if self.account.bill() is None:
            return
        from kedge.llm.cache import Cache  # only where calls were made

        Cache.of(self.store).settle()
        self.watcher.money(self.account.money())


def not_entered(key: str) -> Conflict:
    return Conflict(f"run {key} is not entered", hint="use it in a with block")
