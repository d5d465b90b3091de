"""Queues: runs to be carried out by workers, on this machine or on others. What is submitted is in `entries`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from kedge.errors import Cancelled, Conflict, NotFound, QueueFull, StepTimeout, Validation
from kedge.manager import CheckpointManager
from kedge.model import MAX_STEP_CHARACTERS, RunStatus, is_utf8
from kedge.ports import Provided, Unmet

from . import final_failures
from .cancellation import cancel
from .declaration import Pipeline, parse_pipeline
from .entries import (
    DEAD,
    HELD,
    PRIORITIES,
    READY,
    STATES,
    Entry,
    EntryFacts,
    call_of,
    entries_of,
    inputs_of,
    new_entry,
    queue_job,
    ready,
    save_entry,
)
from .failure import Failure
from .groups import advance, held_tags
from .history import check_unfinished, run_of
from .inbox import StoreLike, opened, parse_run_key
from .limits import Limits, QueueLimits, save_limits
from .origin import check_same_call, check_same_run, entry_of_run
from .owner import newest_status
from .retry import parse_count
from .wait import parse_seconds

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

LOOK_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class Submission:
    """How a run is submitted: the options of `Queue.submit`."""

    key: str | None = None
    priority: int = 5
    delay_s: float = 0.0
    deduplicate: bool = True
    retries: int = 0
    group: str = ""

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES or isinstance(self.priority, bool):
            raise Validation(f"priority must be a whole number from 0 to 9 (got {self.priority!r})")
        parse_seconds("delay_s", self.delay_s)
        parse_count("retries", self.retries)
        if not isinstance(self.group, str) or len(self.group) > MAX_STEP_CHARACTERS or not is_utf8(self.group):
            raise Validation(
                f"group must be a text of at most {MAX_STEP_CHARACTERS} characters that UTF-8 can hold "
                f"(got {self.group!r:.100})"
            )


_AS_USUAL = Submission()


class Queue:
    """What `kedge.queue(…)` gives: submits runs and says what became of them. `kedge worker` carries them out."""

    def __init__(self, name: str, *, store: StoreLike | None = None) -> None:
        self.name = name
        self._job = queue_job(name)
        self._stack = ExitStack()
        self.store = self._stack.enter_context(opened(store, create=True))
        self._limits = QueueLimits(self.store, name)

    def submit(
        self,
        pipeline: Pipeline[..., R],
        /,
        *args: object,
        key: str | None = None,
        priority: int = 5,
        delay_s: float = 0.0,
        deduplicate: bool = True,
        retries: int = 0,
        group: str = "",
        **kwargs: object,
    ) -> Handle[R]:
        """Have a worker call `pipeline(*args, **kwargs)`; durable when this returns.

        The run's key is `key`, else made of the pipeline and its arguments, so that the same call is the same run, and
        submitting it again changes nothing. With deduplicate=False each submission is a run of its own. Higher
        priorities (0 to 9) go first. A run that fails is tried again `retries` times, after waits that grow. Runs of
        one `group` are carried out one after another (`limit` can allow more), in the order of submission; groups take
        turns. QueueFull when the queue holds as much as it may (`limit`).
        """
        submission = Submission(key, priority, delay_s, deduplicate, retries, group)
        parse_pipeline(pipeline).check_options(args, submission)
        return self.submit_call(pipeline, args, kwargs, submission)

    def submit_call(
        self,
        pipeline: Pipeline[..., R],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        submission: Submission = _AS_USUAL,
    ) -> Handle[R]:
        """`submit` for arguments whose names the options of `submit` have, too."""
        parse_pipeline(pipeline).check_call(args, kwargs or {})
        call = call_of(pipeline.function, args, kwargs or {})
        deduplicate = submission.deduplicate
        name = pipeline.key_of(*call["args"], **call["kwargs"]) if submission.key is None else submission.key
        name = parse_run_key(name if deduplicate else f"{name}-{os.urandom(6).hex()}")
        inputs = inputs_of(pipeline.name, call)
        is_own = submission.key is not None and deduplicate  # else the key is made of them
        handle = Handle[R](self.store, name, self._job, inputs=inputs if is_own else "")
        due_at = time.time() + submission.delay_s if submission.delay_s else 0.0
        priority, retries, group = submission.priority, submission.retries, submission.group
        entry = new_entry(name, pipeline.name, inputs, priority=priority, due_at=due_at, retries=retries, group=group)
        try:
            self._limits.check_room()
            self._put(entry, call, Provided(absent_jobs=(name,), absent_tag=("run", name)) if deduplicate else None)
        except (QueueFull, Unmet):
            if not deduplicate:
                raise
            if earlier := self.store.list(self._job, tags={"run": name}, limit=1):
                check_same_call(name, earlier[0].metadata, inputs)
                return handle
            if is_own:
                check_same_run(self.store, name, inputs)
            self._limits.check_room()
            self._put(entry, call)
        return handle

    def _put(self, entry: EntryFacts, call: object, provided: Provided | None = None) -> None:
        if group := entry["group"]:
            save_entry(self.store, self._job, entry, call, tags=held_tags(group), state=HELD, provided=provided)
            advance(self.store, self._job, group, self._limits.current().group_concurrency)
        else:
            save_entry(self.store, self._job, entry, call, provided=provided)

    def limit(
        self,
        *,
        concurrency: int | None = None,
        rate_per_s: float | None = None,
        max_queued: int | None = None,
        group_concurrency: int | None = None,
        group_rate_per_s: float | None = None,
    ) -> Limits:
        """Limit how many runs all workers together carry out at once, how many they begin in a second, and how many
        may be submitted and not ended; None: no limit. Kept in the store; replaces the limits before.

        `group_concurrency` and `group_rate_per_s` are the same for each group. Without the first, the runs of a group
        are carried out one after another.
        """
        limits = Limits(concurrency, rate_per_s, max_queued, group_concurrency, group_rate_per_s)
        save_limits(self.store, self.name, limits)
        self._limits = QueueLimits(self.store, self.name)
        return limits

    @property
    def limits(self) -> Limits:
        return self._limits.current()

    def handle(self, key: str) -> Handle[Any]:
        """Of a run that was submitted before, by whatever process."""
        return Handle(self.store, parse_run_key(key), self._job)

    def entries(self, state: str | None = None) -> Iterator[Entry]:
        """What has not ended, in the order of submission; only what is in `state`, such as "dead", if one is given."""
        if state is not None and state not in STATES:
            raise Validation(f"state {state!r:.100} is unknown", hint=f"use one of: {', '.join(STATES)}")
        wanted = None if state in (None, READY) else {"state": state}  # what is ready is marked with its priority
        entries = entries_of(self.store.walk(self._job, tags=wanted))
        return (entry for entry in entries if state in (None, entry.state))

    def __len__(self) -> int:
        """How much has not ended."""
        job = self.store.catalogue.job(self._job)
        return 0 if job is None else job.checkpoints

    def retry(self, key: str, *, retry_failed: bool = False) -> list[str]:
        """Have a run that was given up carried out again, from where it stopped.

        Also a completed one, if items of it failed. With `retry_failed`, the steps whose failure the pipeline handled
        run again, too; answers their paths.
        """
        entries = list(entries_of(self.store.list(self._job, tags={"run": key})))
        dead = next((entry for entry in entries if entry.state == DEAD), None)
        run = run_of(self.store, key)
        if dead is None and (entries or run is None or run.status is not RunStatus.COMPLETED or run.queue != self.name):
            raise NotFound(f"queue {self.name} has no dead run {key}", hint=f"kedge queue list {self.name} shows them")
        paths = final_failures.retry_failed(self.store, key) if retry_failed else []
        if dead is not None:
            self._put_back(dead)
        elif run is not None:
            check_unfinished(self.store, run)
            entry_before, call = entry_of_run(self.store, key)
            self._put({**entry_before, "due_at": 0.0, "attempts": 0, "sessions": run.sessions}, call)
        return paths

    def _put_back(self, dead: Entry) -> None:
        if dead.group:
            self.store.tag(dead.id, state=HELD, takeovers="0", note=None, **held_tags(dead.group))
            advance(self.store, self._job, dead.group, self._limits.current().group_concurrency)
        else:
            self.store.tag(dead.id, state=ready(dead.priority), takeovers="0", note=None)

    def close(self) -> None:
        """Close the store, if this has opened it."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Handle(Generic[R_co]):
    """A run that was submitted: its status and result, from anywhere. Also awaitable."""

    def __init__(
        self,
        store: CheckpointManager,
        key: str,
        job: str,
        *,
        inputs: str = "",
        resume: Callable[[], None] | None = None,
    ) -> None:
        """`inputs` is the digest of what the run was called with here: its key may be that of another call.

        `resume` carries out a run that has failed before: once, when somebody asks for its result.
        """
        self.key = key
        self._inputs = inputs
        self._store = store
        self._job = job
        self._resume = resume

    @property
    def status(self) -> str:
        """queued, running, paused, completed, failed (also while another attempt is due), cancelled or abandoned."""
        is_queued = bool(self._store.list(self._job, tags={"run": self.key}, limit=1))  # first: it goes when a run ends
        if (run := run_of(self._store, self.key)) is not None:
            return str(run.status)
        if not is_queued:
            raise self._missing()
        return "queued"

    def _missing(self) -> NotFound:
        return NotFound(f"run {self.key} is not in the queue", hint="submit it")

    def result(self, timeout_s: float | None = None) -> R_co:
        """What the pipeline returned, or raise what it failed with for good; waits for it, for `timeout_s` at most."""
        until = None if timeout_s is None else time.monotonic() + parse_seconds("timeout_s", timeout_s)
        self.resume()
        while (outcome := self.outcome()) is None:
            if until is not None and time.monotonic() >= until:
                raise StepTimeout(
                    f"run {self.key} has not ended within {timeout_s:g} s", hint="it goes on; ask again later"
                )
            time.sleep(LOOK_EVERY_S)
        return outcome[0]

    def __await__(self) -> Generator[object, None, R_co]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> R_co:
        from asyncio import sleep, to_thread

        await to_thread(self.resume)
        while (outcome := await to_thread(self.outcome)) is None:
            await sleep(LOOK_EVERY_S)
        return outcome[0]

    def resume(self) -> None:
        """Have a child that failed in an earlier session of its parent carried out again."""
        resume, self._resume = self._resume, None
        if resume is not None:
            resume()

    def outcome(self) -> tuple[R_co] | None:
        """The result; None while the run has not ended. Raises what it failed with for good."""
        entries = list(entries_of(self._store.list(self._job, tags={"run": self.key}, limit=1)))
        newest = newest_status(self._store, self.key)
        status = None if newest is None else newest.metadata.get("status")
        if newest is not None and status == RunStatus.COMPLETED:
            if any(not entry.has_ended(newest) for entry in entries):
                return None  # it is carried out again
            if self._inputs:
                check_same_run(self._store, self.key, self._inputs)
            state = self._store.load(newest.id)
            if "result" not in state:
                raise Conflict(f"run {self.key} was called directly, and keeps no result", hint="use another key=")
            return (state["result"],)
        if status == RunStatus.CANCELLED:
            raise Cancelled(f"run {self.key} was cancelled", hint="use another key to start anew")
        if entries and entries[0].state != DEAD:
            return None
        if not entries and newest is None:
            raise self._missing()
        if newest is not None and status == RunStatus.FAILED:
            failed = self._store.load(newest.id)
            raise Failure.from_state(failed["failure"]).rebuild()
        if not entries:
            raise Conflict(f"run {self.key} is {status}, and in no queue", hint=f"kedge runs show {self.key} says more")
        raise Conflict(
            f"run {self.key} was given up: {entries[0].note or status}", hint="kedge queue retry tries it again"
        )

    def cancel(self) -> None:
        """End the run for good: before it begins, between steps, or in a step after its grace period."""
        cancel(self._store, self.key)

    def __repr__(self) -> str:
        return f"<kedge run {self.key} of {self._job}>"
