"""A run: one execution of a pipeline under a stable key, owned by one process at a time.

A run is a job of the store. Every finished step is a checkpoint of that job, saved under the step's key (path, inputs,
version) as idempotency key before the next step begins; every change of the run's status is a checkpoint of level
pipeline. All are fenced by the run's lease, so that a stale owner is refused at its next write (I5).
"""

from __future__ import annotations

import inspect
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

from kedge.errors import Cancelled, CheckpointError, Conflict, LeaseHeld, LeaseLost, Validation
from kedge.manager import CheckpointManager
from kedge.model import CheckpointLevel, Lease, RunStatus, parse_step
from kedge.urls import reachable

from . import wait as waiting
from .account import Account
from .attempt import Isolation
from .calls import Calls, one_line, traceback_of
from .inbox import CANCEL, Inbox, parse_run_key
from .keys import Path, show, step_key
from .owner import held_by_another, newest_status, save_status, take_lease, this_process
from .progress import watcher
from .retry import Retry
from .signals import Paused, Signals
from .step import PLAIN, UNSET, Place, parse_options, parse_version, place_in

if TYPE_CHECKING:
    from concurrent.futures import Executor

INBOX_EVERY_S = 1.0
PROGRESS_EVERY_S = 10.0


class Run:
    """What `kedge.run(…)` gives. Steps may be called from several threads and tasks at once."""

    def __init__(
        self,
        key: str,
        *,
        store: CheckpointManager | str | os.PathLike[str] | None = None,
        version: str | int | None = None,
        pipeline: str | None = None,
        ttl_s: float = 30.0,
        grace_s: float = 30.0,
        signals: bool = True,
        progress: bool | None = None,
    ) -> None:
        """`progress` shows the run at work on stderr: None where that is a terminal, True and False in any case."""
        self.key = parse_run_key(key)
        if not isinstance(grace_s, int | float) or not 0 <= grace_s <= 86_400:
            raise Validation(f"grace_s={grace_s!r} makes no sense", hint="use 0 to 86400 seconds")
        self.version = parse_version(version)
        self.pipeline = pipeline
        self.session = 0
        self._given = store
        self._ttl_s = ttl_s
        self._signals = Signals(grace_s)
        self._wants_signals = signals
        self.watcher = watcher(progress)
        self.isolation = Isolation()
        self.calls = Calls(self)
        self.account = Account()
        self._inbox_at = 0.0
        self.is_imported = False  # some of its steps were done by an older system
        self._progress_at = 0.0
        self._stack: ExitStack | None = None
        self.token = os.urandom(16).hex()  # by which workers in this process find it
        self.store: CheckpointManager
        self._lease: Lease
        self._inbox: Inbox

    # Entering and leaving

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise Conflict(f"run {self.key} is entered already", hint="make another one with kedge.run()")
        with ExitStack() as stack:
            if isinstance(self._given, CheckpointManager):
                self.store = self._given
            else:
                self.store = stack.enter_context(CheckpointManager(self._given))
            try:
                self._lease = stack.enter_context(take_lease(self.store, self.key, self._ttl_s))
            except LeaseHeld as error:
                raise held_by_another(self.key, error) from error
            self._continue_history()
            stack.callback(self.isolation.close)
            if self._wants_signals:
                self._signals.install()
            stack.callback(self._signals.restore)
            self._record(RunStatus.RUNNING, command=_command())
            stack.enter_context(Place(self).entered())
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        stack, self._stack = self._stack, None
        if stack is None:
            return
        with stack:
            self._signals.disarm()
            self._settle()
            self.watcher.close()
            status = _status_after(error)
            if status is RunStatus.PAUSED and self._signals.stopping and not isinstance(error, Paused):
                error = Paused(self._signals.stopping)  # asyncio made a cancellation of it
            try:
                if not isinstance(error, LeaseLost):  # else the run belongs to somebody else
                    self._record(status, error=error)
            except CheckpointError as failure:
                if error is None:
                    raise
                error.add_note(f"The end of run {self.key} could not be recorded: {failure}")
            self._say_how_to_resume(status, error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    def _continue_history(self) -> None:
        newest = newest_status(self.store, self.key)
        if newest is None:
            if self.store.list(self.key, limit=1):
                raise Conflict(f"job {self.key} is not a run", hint="it holds checkpoints of its own: use another key")
            self._inbox = Inbox(self.store, self.key)
            self.session = 1
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
        self._inbox = Inbox(self.store, self.key, _number(last.get("inbox")))
        self.session = _number(last.get("session")) + 1

    def _record(
        self, status: RunStatus, *, error: BaseException | None = None, command: Mapping[str, object] | None = None
    ) -> None:
        """The run's status as a checkpoint; at the end of a session with what it did."""
        state = self.account.names()
        metadata: dict[str, object] = {
            "session": self.session,
            "version": self.version,
            "pipeline": self.pipeline,
            "inbox": self._inbox.seen,
            "owner": this_process(),
            "token": self._lease.token,
            **self.account.facts(),
        }
        if self.is_imported:
            metadata["imported"] = True
        if command is not None:
            state["command"] = command
        if error is not None and status is not RunStatus.COMPLETED:
            metadata["error"] = one_line(error)
            state["traceback"] = traceback_of(error)
        save_status(self.store, self._lease, status, state, metadata)

    def _say_how_to_resume(self, status: RunStatus, error: BaseException | None) -> None:
        command = resume_command(self.store, self.key)
        if status is RunStatus.PAUSED:
            sys.stderr.write(f"kedge: run {self.key} is paused ({error}); to resume it: {command}\n")
        elif isinstance(error, SystemExit):  # nobody shows its notes
            sys.stderr.write(f"kedge: run {self.key} failed ({error}); to resume it: {command}\n")
        elif status is RunStatus.FAILED and error is not None and not isinstance(error, LeaseLost):
            error.add_note(f"Run {self.key} failed; what is finished is kept. To resume it: {command}")

    # Steps

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        retries: int | Retry = 0,
        timeout_s: float | None = None,
        timeout_in: str = "process",
        version: str | int | None = None,
        inputs: Any = UNSET,
        **kwargs: Any,
    ) -> Any:
        """The result of `function(*args, **kwargs)`, which runs once, ever: its result is durable when this returns.

        A step is the same when its path, its inputs and its version are; whatever else changes, it is not run again.
        `inputs` replaces the arguments where they cannot be encoded or do not say what matters. What a function finds
        by other ways (globals, files, a method's own object) is no input: change `version` when it changes.
        Of a coroutine function this is a coroutine. `timeout_in` is explained in `pipeline.attempt`.
        """
        options = parse_options(retries, timeout_s, timeout_in, version)
        call = self.calls.run_async if inspect.iscoroutinefunction(function) else self.calls.run
        return call(name, function, args, kwargs, options, inputs=inputs)

    def llm(
        self,
        name: str,
        call: Callable[..., Any],
        *,
        model: str,
        messages: Iterable[Any],
        mode: str = "record",
        ttl_s: float | None = None,
        sample: int = 0,
        retries: int | Retry = 0,
        timeout_s: float | None = None,
        timeout_in: str = "thread",
        version: str | int | None = None,
        **parameters: Any,
    ) -> Any:
        """The answer of `call(model=…, messages=…, **parameters)`, a step that is paid once in all runs of the store.

        Other runs that ask the same of the same function get the same answer, `sample` apart; `mode` and `ttl_s` are
        those of `kedge.llm.http_client`. Tokens and money are counted. An object of a vendor's SDK comes back as
        plain data, text and data as they are.
        """
        from kedge.llm.calls import Shared, call_request, imported_request
        from kedge.llm.exchange import Policy

        options = parse_options(retries, timeout_s, timeout_in, version)
        if isinstance(messages, str | bytes | Mapping):
            raise Validation(
                f"step {name}: messages is a {type(messages).__name__}, not a list of messages",
                hint='use messages=[{"role": "user", "content": "…"}]',
            )
        asked = {"model": model, "messages": list(messages), **parameters}
        request = call_request(call, asked, sample, options.version)
        is_old = self.is_imported and not (sample or self.version or options.version)
        older = imported_request(self.key, request.body) if is_old else None
        shared = None if mode == "off" else Shared(request, Policy(mode, ttl_s), older)
        start = self.calls.run_async if inspect.iscoroutinefunction(call) else self.calls.run
        if sample:
            options = replace(options, version=f"{options.version} sample {sample}")
        return start(name, call, (), request.body, options, shared=shared)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Steps inside belong to the stage: its name is part of their paths. Stages may be nested."""
        place = place_in(self)
        if place.level not in (CheckpointLevel.PIPELINE, CheckpointLevel.STAGE):
            raise Validation(f"stage {name!r} is inside step {show(place.path)}", hint="steps inside a step need none")
        path = (*place.path, parse_step(name))
        executed, began = self.account.executed, time.monotonic()
        self.watcher.stage(path)
        with Place(self, path, CheckpointLevel.STAGE).entered():
            yield
        if (steps := self.account.executed - executed) > 0:
            metadata = {"kind": "stage", "session": self.session, "seconds": round(time.monotonic() - began, 3)}
            self.save(path, {"steps": steps}, CheckpointLevel.STAGE, metadata)

    def map(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        *,
        name: str | None = None,
        key: Callable[[Any], object] | None = None,
        workers: int | None = None,
        executor: str | Executor = "thread",
        order: str = "input",
        on_error: str | float = "stop",
        retries: int | Retry = 0,
        timeout_s: float | None = None,
        version: str | int | None = None,
        collect: bool = True,
    ) -> Any:
        """`[function(item) for item in items]` by several workers, each item run once, ever.

        An item is known by `key(item)`, which must tell it from the others, or else by its content. Workers are
        threads, processes, or any Executor. `on_error` ends the map at the first failure ("stop"), never ("collect",
        the result is then an ItemError), or after so many failures, or such a part of them. Failed items are tried
        again when the run is resumed. With collect=False the answer reads results from the store as you iterate over
        it, and nothing but 16 bytes for each item is kept in memory.
        """
        from .map import Map, check_function, name_of, parse_map_options

        options = parse_map_options(workers, executor, order, on_error, retries, timeout_s, collect)
        declared = parse_options(0, None, "process", version).version
        path = place_in(self).below(parse_step(name or name_of(function))).path
        check_function(function, f"map {show(path)}")
        self.calls.claim(path)
        self.pause_point()
        return Map(self, path, f"{self.version}/{declared}", function, key, options).run(items)

    # Waiting for others

    def signal(self, name: str, *, wait_s: float | None = None) -> Any:
        """The value that somebody sends to this run under `name` (`kedge.send`, `kedge runs signal`); kept.

        It may be sent before the run asks. After `wait_s` the process pauses and exits; None waits on.
        """
        return self._wait_for(name, lambda path: waiting.for_signal(self, path, name, wait_s))

    def approval(
        self,
        name: str,
        *,
        prompt: str = "",
        expires_s: float | None = None,
        wait_s: float | None = None,
        on_denied: str = "raise",
    ) -> waiting.Approval:
        """Wait until somebody approves or denies (`kedge.decide`, `kedge approve`): once, by name, for good.

        After `wait_s` the process pauses and exits, and waiting costs nothing: 0 at once, None never. After `expires_s`
        from the first asking it counts as denied. A denial raises Denied here, now and whenever the run is resumed,
        unless on_denied="return".
        """
        ask = waiting.parse_ask(prompt, expires_s, on_denied)
        kept = self._wait_for(name, lambda path: waiting.for_decision(self, path, ask, wait_s))
        decision = waiting.Approval(**kept)
        if not decision.approved and ask.raises:
            raise decision.denied(self.key, name)
        return decision

    def sleep(self, seconds: float, *, name: str | None = None, wait_s: float | None = None) -> None:
        """Go on `seconds` after the first time the run came here, whatever happened in between."""
        seconds = waiting.parse_seconds("seconds", seconds)
        self._wait_for(name or f"sleep {seconds:g} s", lambda path: waiting.for_time(self, path, seconds, wait_s))

    def _wait_for(self, name: str, wait: Callable[[Path], Any]) -> Any:
        """A step that waits: its answer is kept like any result."""
        path = place_in(self).below(parse_step(name)).path
        return self.calls.run(name, wait, (path,), {}, PLAIN, inputs=None)

    def asked(self, path: Path, question: Mapping[str, object]) -> Mapping[str, Any]:
        """The question as it was first asked in this run, with the time of that."""
        key = "asked:" + step_key(path, "", {})
        found = self.store.load_by_key(self.key, key)
        if found is None:
            metadata = {"kind": "asked", "session": self.session}
            self.save(path, {**question, "asked_at": time.time()}, CheckpointLevel.STEP, metadata, key)
            found = self.store.load_by_key(self.key, key)
        state: Any = found[1] if found else {}
        return state  # type: ignore[no-any-return]

    @contextmanager
    def seen_waiting(self, path: Path, what: str, prompt: str = "") -> Iterator[None]:
        """While this lasts, the run says for what it waits."""
        self.account.waits(path, what, prompt)
        self._record(RunStatus.PAUSED)
        try:
            yield
        except Paused:
            raise  # it still waits
        except BaseException:
            self.account.waits_no_more(path)
            raise
        self.account.waits_no_more(path)
        self._record(RunStatus.RUNNING)

    def progress(self, done: int, total: int | None = None) -> None:
        """Say how far the run is: `kedge runs show` tells it, as of the newest record of the run."""
        if isinstance(done, bool) or not isinstance(done, int) or done < 0 or (total is not None and total < done):
            raise Validation(f"progress {done!r} of {total!r} makes no sense", hint="use whole numbers, done ≤ total")
        self.account.progress = {"done": done, "total": total}
        if time.monotonic() >= self._progress_at:
            self._progress_at = time.monotonic() + PROGRESS_EVERY_S
            self._record(RunStatus.RUNNING)

    def log(self, text: str, **fields: object) -> None:
        """A line in the history of the run, durable; `kedge runs show` prints the last ones."""
        path = place_in(self).path
        metadata = {"kind": "log", "session": self.session, "text": str(text)[:2000], "fields": fields}
        self.save(path or ("log",), {}, CheckpointLevel.SUBSTEP, metadata, tags={"kind": "log"})

    # What map and others use

    def save(
        self,
        path: Path,
        state: object,
        level: CheckpointLevel,
        metadata: Mapping[str, object],
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """A checkpoint of this run, fenced by its lease."""
        self.store.save(
            self.key,
            show(path),
            state,
            level=level,
            tags=tags,
            metadata={**metadata, "path": list(path)},
            lease=self._lease,
            idempotency_key=idempotency_key,
        )

    @contextmanager
    def at_item(self, path: Path, label: str, attempt: int) -> Iterator[None]:
        """The place of an item of a map, for steps inside it. An item that is tried again calls them again."""
        place = Place(self, (*path, label), CheckpointLevel.SUBSTEP)
        if attempt > 1:
            self.calls.forget_below(place.path)
        try:
            with place.entered():
                yield
        finally:
            self.account.close_bill(place.path)

    def _settle(self) -> None:
        """At the end: what was answered from the store is written down, and shown."""
        if self.account.bill() is None:
            return
        from kedge.llm.cache import Cache

        Cache.of(self.store).close()
        self.watcher.money(self.account.money())

    def pause(self, reason: str) -> NoReturn:
        raise Paused(reason)

    def rest(self, seconds: float) -> None:
        """Wait before the next attempt, or until the run is asked to stop."""
        self._signals.wait(seconds)

    def check_entered(self) -> None:
        if self._stack is None:
            raise Conflict(f"run {self.key} is not entered", hint="use it in a with block")

    @property
    def lease(self) -> Lease:
        return self._lease

    def pause_point(self) -> None:
        """Between two pieces of work: here a run stops, waits, or learns that it was cancelled."""
        self.check_entered()
        signals = self._signals
        if signals.is_asked_to_record:
            signals.is_asked_to_record = False
            self._record(RunStatus.RUNNING)
        if signals.must_wait():
            self._record(RunStatus.PAUSED)
            while signals.must_wait():
                time.sleep(0.05)
                self._read_inbox()
            if not signals.stopping:
                self._record(RunStatus.RUNNING)
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

    def __repr__(self) -> str:
        return f"<kedge run {self.key}, session {self.session}>"


def resume_command(store: CheckpointManager, key: str) -> str:
    if store.url == "memory:":
        return "run it again in this process (its store is in memory)"
    place = "$KEDGE_STORE" if "://" in store.url else shlex.quote(reachable(store.url))  # a URL may hold a password
    tenant = "" if store.namespace == "default" else f" --namespace {store.namespace}"
    return f"kedge runs resume {key} --store {place}{tenant}"


def _command() -> dict[str, object]:
    """How this process was started, for `kedge runs resume`."""
    return {"argv": list(sys.orig_argv), "cwd": os.getcwd()}


def _status_after(error: BaseException | None) -> RunStatus:
    if error is None:
        return RunStatus.COMPLETED
    if isinstance(error, Cancelled):
        return RunStatus.CANCELLED
    if isinstance(error, SystemExit) and not isinstance(error, Paused):  # sys.exit(1) is how many programs fail
        return RunStatus.PAUSED if error.code in (None, 0) else RunStatus.FAILED
    return RunStatus.FAILED if isinstance(error, Exception) else RunStatus.PAUSED


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
