"""A session of a run: one process at work on it, from when it takes the run's lease until it gives that back.

All that a run makes durable is saved here, fenced by the lease, so that a stale owner is refused at its next write
(I5). Steps, maps and waits are given the session and call nothing above it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kedge.errors import Cancelled, Conflict
from kedge.manager import CheckpointManager
from kedge.model import CheckpointLevel, Lease, RunStatus

from .account import Account, Waiting
from .attempt import Isolation
from .failure import one_line, traceback_of
from .inbox import CANCEL, Inbox
from .keys import Path, show, step_key
from .owner import newest_status, save_status, this_process
from .progress import watcher
from .signals import Paused, Signals

INBOX_EVERY_S = 1.0
PROGRESS_EVERY_S = 10.0


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
    ) -> None:
        """Raises Conflict when the job is no run, or that of another pipeline, and Cancelled when it was cancelled."""
        self.store = store
        self.lease = lease
        self.key = lease.job
        self.version = version
        self.pipeline = pipeline
        self.number = 1
        self.is_imported = False  # some of the run's steps were done by an older system
        self.is_open = True
        self.signals = Signals(grace_s)
        self.watcher = watcher(progress)
        self.isolation = Isolation()
        self.account = Account()
        self._inbox = Inbox(store, self.key)
        self._inbox_at = 0.0
        self._progress_at = 0.0
        self._continue_history()

    def _continue_history(self) -> None:
        newest = newest_status(self.store, self.key)
        if newest is None:
            if self.store.list(self.key, limit=1):
                raise Conflict(f"job {self.key} is not a run", hint="it holds checkpoints of its own: use another key")
            return
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
        self.is_imported = last.get("imported") is True
        self._inbox.seen = _number(last.get("inbox"))
        self.number = _number(last.get("session")) + 1

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

    def record(self, status: RunStatus, *, error: BaseException | None = None, with_command: bool = False) -> None:
        """The run's status as a checkpoint, with what this session has done so far."""
        state = self.account.names()
        metadata: dict[str, object] = {
            "session": self.number,
            "version": self.version,
            "pipeline": self.pipeline,
            "inbox": self._inbox.seen,
            "owner": this_process(),
            "token": self.lease.token,
            **self.account.facts(),
        }
        if self.is_imported:
            metadata["imported"] = True
        if with_command:  # how this process was started, for `kedge runs resume`
            state["command"] = {"argv": list(sys.orig_argv), "cwd": os.getcwd()}
        if error is not None and status is not RunStatus.COMPLETED:
            metadata["error"] = one_line(error)
            state["traceback"] = traceback_of(error)
        save_status(self.store, self.lease, status, state, metadata)

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
            if not signals.stopping:
                self.record(RunStatus.RUNNING)
        if signals.stopping:
            raise Paused(signals.stopping)
        self._read_inbox()

    def _read_inbox(self) -> None:
        now = time.monotonic()
        if now < self._inbox_at:
            return
        self._inbox_at = now + INBOX_EVERY_S
        for message in self._inbox.new():
            if message.metadata.get("kind") == CANCEL:
                raise Cancelled(
                    f"run {self.key} was cancelled by {message.metadata.get('actor')}",
                    hint="what it finished is kept; use another key to start anew",
                )

    # The end

    def settle(self) -> None:
        """Write down, and show, what was saved by answers from the LLM cache."""
        if self.account.bill() is None:
            return
        from kedge.llm.cache import Cache  # only where calls were made

        Cache.of(self.store).close()
        self.watcher.money(self.account.money())


def not_entered(key: str) -> Conflict:
    return Conflict(f"run {key} is not entered", hint="use it in a with block")


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
