"""A run: one execution of a pipeline under a stable key, owned by one process at a time.

A run is a job of the store. Every finished step is a checkpoint of that job, saved under the step's key (path, inputs,
version) as idempotency key before the next step begins; every change of the run's status is a checkpoint of level
pipeline. All are fenced by the run's lease, so that a stale owner is refused at its next write (I5).
"""

from __future__ import annotations

import inspect
import itertools
import os
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Self

from holdfast.errors import (
    Cancelled,
    CheckpointError,
    Conflict,
    Corrupted,
    LeaseHeld,
    LeaseLost,
    UnsupportedType,
    Validation,
)
from holdfast.manager import CheckpointManager
from holdfast.model import Checkpoint, CheckpointLevel, Lease, RunStatus, parse_step
from holdfast.opening import reachable

from . import waiting
from .attempt import Isolation, await_within, call_in_thread
from .inbox import CANCEL, Inbox, parse_run_key
from .keys import Path, arguments, digest_of, imported_tag, show, step_key
from .owner import held_by_another, newest_status, save_status, take_lease, this_process
from .progress import watcher
from .retry import Retry
from .signals import Paused, Signals
from .step import PLAIN, UNSET, Options, Place, parse_options, parse_version, place_in

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from holdfast.llm.bills import Bill, Charge
    from holdfast.llm.calls import Shared

INBOX_EVERY_S = 1.0
PROGRESS_EVERY_S = 10.0
MAX_ERROR_CHARACTERS = 500
MAX_TRACEBACK_CHARACTERS = 20_000
MAX_LISTED = 10_000  # steps named in the record of a session


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a step."""

    place: Place
    key: str
    inputs: Mapping[str, bytes]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Options
    shared: Shared | None = None  # answered from the store's other runs, too

    @property
    def title(self) -> str:
        return f"step {show(self.place.path)}"


class Run:
    """What `holdfast.run(…)` gives. Steps may be called from several threads and tasks at once."""

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
        self._lock = threading.Lock()
        self._claimed: set[Path] = set()
        self._ahead: dict[str, tuple[Checkpoint, Callable[[], object]]] = {}
        self._ran: list[str] = []
        self._reused: list[str] = []
        self._executed = 0
        self._inbox_at = 0.0
        self._is_imported = False  # some of its steps were done by an older system
        self._waiting: dict[Path, dict[str, str]] = {}
        self._progress: dict[str, int | None] | None = None
        self._progress_at = 0.0
        self._bills: dict[Path, Bill] = {}  # () is that of the whole session
        self._stack: ExitStack | None = None
        self.token = os.urandom(16).hex()  # by which workers in this process find it
        self.store: CheckpointManager
        self._lease: Lease
        self._inbox: Inbox

    # Entering and leaving

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise Conflict(f"run {self.key} is entered already", hint="make another one with holdfast.run()")
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
        self._is_imported = last.get("imported") is True
        self._inbox = Inbox(self.store, self.key, _number(last.get("inbox")))
        self.session = _number(last.get("session")) + 1

    def _record(
        self, status: RunStatus, *, error: BaseException | None = None, command: Mapping[str, object] | None = None
    ) -> None:
        """The run's status as a checkpoint; at the end of a session with what it did."""
        state: dict[str, object] = {"ran": self._ran[:MAX_LISTED], "reused": self._reused[:MAX_LISTED]}
        metadata: dict[str, object] = {
            "session": self.session,
            "version": self.version,
            "pipeline": self.pipeline,
            "inbox": self._inbox.seen,
            "ran": self._executed,
            "reused": len(self._reused),
            "waiting": list(self._waiting.values()),
            "progress": self._progress,
            "owner": this_process(),
            "token": self._lease.token,
        }
        if bill := self._bills.get(()):
            metadata["llm"] = bill.to_json()
        if self._is_imported:
            metadata["imported"] = True
        if command is not None:
            state["command"] = command
        if error is not None and status is not RunStatus.COMPLETED:
            metadata["error"] = _one_line(error)
            state["traceback"] = _traceback(error)
        save_status(self.store, self._lease, status, state, metadata)

    def _say_how_to_resume(self, status: RunStatus, error: BaseException | None) -> None:
        command = resume_command(self.store, self.key)
        if status is RunStatus.PAUSED:
            sys.stderr.write(f"holdfast: run {self.key} is paused ({error}); to resume it: {command}\n")
        elif isinstance(error, SystemExit):  # nobody shows its notes
            sys.stderr.write(f"holdfast: run {self.key} failed ({error}); to resume it: {command}\n")
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
        call = self.call_async if inspect.iscoroutinefunction(function) else self.call
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
        those of `holdfast.llm.http_client`. Tokens and money are counted. An object of a vendor's SDK comes back as
        plain data, text and data as they are.
        """
        from holdfast.llm.calls import Shared, call_request, imported_request
        from holdfast.llm.exchange import Policy

        options = parse_options(retries, timeout_s, timeout_in, version)
        if isinstance(messages, str | bytes | Mapping):
            raise Validation(
                f"step {name}: messages is a {type(messages).__name__}, not a list of messages",
                hint='use messages=[{"role": "user", "content": "…"}]',
            )
        asked = {"model": model, "messages": list(messages), **parameters}
        request = call_request(call, asked, sample, options.version)
        is_old = self._is_imported and not (sample or self.version or options.version)
        older = imported_request(self.key, request.body) if is_old else None
        shared = None if mode == "off" else Shared(request, Policy(mode, ttl_s), older)
        start = self.call_async if inspect.iscoroutinefunction(call) else self.call
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
        executed, began = self._executed, time.monotonic()
        self.watcher.stage(path)
        with Place(self, path, CheckpointLevel.STAGE).entered():
            yield
        if self._executed > executed:
            metadata = {"kind": "stage", "session": self.session, "seconds": round(time.monotonic() - began, 3)}
            self.save(path, {"steps": self._executed - executed}, CheckpointLevel.STAGE, metadata)

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
        from .fanout import Map, check_function, name_of, parse_map_options

        options = parse_map_options(workers, executor, order, on_error, retries, timeout_s, collect)
        declared = parse_options(0, None, "process", version).version
        path = place_in(self).below(parse_step(name or name_of(function))).path
        check_function(function, f"map {show(path)}")
        self.claim(path)
        self.pause_point()
        return Map(self, path, f"{self.version}/{declared}", function, key, options).run(items)

    # Waiting for others

    def signal(self, name: str, *, wait_s: float | None = None) -> Any:
        """The value that somebody sends to this run under `name` (`holdfast.send`, `holdfast runs signal`); kept.

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
        """Wait until somebody approves or denies (`holdfast.decide`, `holdfast approve`): once, by name, for good.

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
        return self.call(name, wait, (path,), {}, PLAIN, inputs=None)

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
        about = {"for": what, "name": show(path), "prompt": prompt}
        with self._lock:
            self._waiting[path] = about
        self._record(RunStatus.PAUSED)
        try:
            yield
        except Paused:
            raise  # it still waits
        except BaseException:
            self._waiting.pop(path, None)
            raise
        self._waiting.pop(path, None)
        self._record(RunStatus.RUNNING)

    def progress(self, done: int, total: int | None = None) -> None:
        """Say how far the run is: `holdfast runs show` tells it, as of the newest record of the run."""
        if isinstance(done, bool) or not isinstance(done, int) or done < 0 or (total is not None and total < done):
            raise Validation(f"progress {done!r} of {total!r} makes no sense", hint="use whole numbers, done ≤ total")
        self._progress = {"done": done, "total": total}
        if time.monotonic() >= self._progress_at:
            self._progress_at = time.monotonic() + PROGRESS_EVERY_S
            self._record(RunStatus.RUNNING)

    def log(self, text: str, **fields: object) -> None:
        """A line in the history of the run, durable; `holdfast runs show` prints the last ones."""
        path = place_in(self).path
        metadata = {"kind": "log", "session": self.session, "text": str(text)[:2000], "fields": fields}
        self.save(path or ("log",), {}, CheckpointLevel.SUBSTEP, metadata, tags={"kind": "log"})

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        inputs: Any = UNSET,
        keep: bool = True,
        is_shared: bool = False,
        shared: Shared | None = None,
    ) -> Any:
        """A step with parsed options; `step`, `llm` and the decorator end here."""
        work = self._begin(name, function, args, kwargs, options, inputs, shared, is_shared)
        if keep and (kept := self._kept(work)) is not None:
            return kept["result"]
        for attempt in itertools.count(1):
            self.pause_point()
            began = time.monotonic()
            try:
                with work.place.entered():
                    result = self._attempt(work)
            except Exception as error:  # noqa: BLE001 - recorded, and raised unless the step is tried again
                self._signals.wait(self._failed(work, error, attempt))
            else:
                self._keep(work, result, attempt, time.monotonic() - began, keep=keep)
                return result
        raise AssertionError("unreachable")

    async def call_async(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        inputs: Any = UNSET,
        keep: bool = True,
        is_shared: bool = False,
        shared: Shared | None = None,
    ) -> Any:
        """The same for a coroutine function; the store is never waited for on the event loop."""
        import asyncio

        work = self._begin(name, function, args, kwargs, options, inputs, shared, is_shared)
        if keep and (kept := await asyncio.to_thread(self._kept, work)) is not None:
            return kept["result"]
        for attempt in itertools.count(1):
            await asyncio.to_thread(self.pause_point)
            began = time.monotonic()
            try:
                with work.place.entered():
                    result = await await_within(self._awaited(work), options.timeout_s, work.title)
            except Exception as error:  # noqa: BLE001 - recorded, and raised unless the step is tried again
                wait_s = await asyncio.to_thread(self._failed, work, error, attempt)
                await asyncio.to_thread(self._signals.wait, wait_s)
            else:
                seconds = time.monotonic() - began
                await asyncio.to_thread(self._keep, work, result, attempt, seconds, keep=keep)
                return result
        raise AssertionError("unreachable")

    def _begin(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        inputs: Any,
        shared: Shared | None,
        is_shared: bool,
    ) -> Work:
        place = place_in(self).below(name)
        if not callable(function):
            raise Validation(
                f"step {name!r}: {function!r:.100} cannot be called", hint="use run.step(name, function, *arguments)"
            )
        self.claim(place.path)
        given = arguments(function, args, kwargs) if inputs is UNSET else {"inputs": inputs}
        digests = {
            arg: digest_of(value, lambda arg=arg: f"step {show(place.path)}, input {arg}")  # type: ignore[misc]
            for arg, value in given.items()
        }
        key = step_key(place.path, f"{self.version}/{options.version}", digests)
        if is_shared:
            shared = _shared_step(function, options, digests)
        return Work(place, key, digests, function, args, kwargs, options, shared)

    def claim(self, path: Path) -> None:
        """One path, one step: else two of them would be told apart only by chance."""
        if self._stack is None:
            raise Conflict(f"run {self.key} is not entered", hint="use it in a with block")
        parse_step(path[-1])
        if len(path) > 1:
            parse_step(show(path))
        with self._lock:
            if path in self._claimed:
                raise Validation(
                    f"run {self.key} has two steps with the path {show(path)}",
                    hint="give each call a name of its own, such as one with a number, or use run.map",
                )
            self._claimed.add(path)

    def _kept(self, work: Work) -> Any:
        try:
            found = self._load_kept(work.key)
        except Corrupted as error:
            raise Corrupted(
                f"the result of {work.title} of run {self.key} is damaged: {error.message}",
                hint=f"holdfast runs explain {self.key} shows its ID; holdfast delete {self.key} ID, and it runs again",
            ) from error
        if found is None and self._is_imported:
            found = self._imported(work)
        if found is None:
            return None
        self._reused.append(show(work.place.path))
        self.watcher.step(work.place.path, "reused")
        return found[1]

    def _imported(self, work: Work) -> tuple[Checkpoint, object] | None:
        """What an older system had done at this path, if that ended well. Who declares a version wants it done anew."""
        if self.version or work.options.version:
            return None
        newest = self.store.list(self.key, tags={"imported": imported_tag(work.place.path)}, limit=1)
        if not newest or newest[0].metadata.get("kind") != "step":
            return None
        return newest[0], self.store.load(newest[0].id)

    def _load_kept(self, key: str) -> tuple[Checkpoint, Any] | None:
        """What is saved under a step's key. Steps are mostly asked for in the order in which they were saved."""
        if (ahead := self._ahead.pop(key, None)) is not None:
            return ahead[0], ahead[1]()
        if (found := self.store.load_by_key(self.key, key)) is not None:
            self._ahead = self.store.read_ahead(self.key, found[0].seq)
        return found

    def _attempt(self, work: Work) -> Any:
        if work.shared is None:
            return self._carry_out(work)
        from holdfast.llm.exchange import drive

        return drive(work.shared.steps(self.store), lambda: self._carry_out(work))

    def _awaited(self, work: Work) -> Awaitable[Any]:
        if work.shared is None:
            return work.function(*work.args, **work.kwargs)  # type: ignore[no-any-return]
        from holdfast.llm.exchange import drive_async

        return drive_async(work.shared.steps(self.store), lambda: work.function(*work.args, **work.kwargs))

    def _carry_out(self, work: Work) -> Any:
        timeout_s = work.options.timeout_s
        if timeout_s is None:
            return work.function(*work.args, **work.kwargs)
        if work.options.timeout_in == "thread":
            return call_in_thread(work.function, work.args, work.kwargs, timeout_s, work.title)
        payer = (self.key, show(work.place.path))
        return self.isolation.call(work.function, work.args, work.kwargs, timeout_s, work.title, payer)

    def _failed(self, work: Work, error: Exception, attempt: int) -> float:
        """Record a failed attempt; answers how long to wait for the next one, or raises what the step failed with."""
        if isinstance(error, LeaseLost | Cancelled):
            raise error
        path = work.place.path
        metadata = {
            "kind": "attempt",
            "session": self.session,
            "attempt": attempt,
            "error": _one_line(error),
        }
        self.save(path, {"traceback": _traceback(error)}, work.place.level, metadata)
        self.watcher.step(path, "failed", note=_one_line(error))
        if not work.options.retry.allows(error, attempt):
            times = "" if attempt == 1 else f", {attempt} times"
            error.add_note(f"It failed in {work.title} of run {self.key}{times}.")
            raise error
        self._forget_below(path)
        return work.options.retry.wait_s(attempt)

    def _forget_below(self, path: Path) -> None:
        """The steps inside a step that is tried again will be called again."""
        with self._lock:
            for other in [o for o in self._claimed if len(o) > len(path) and o[: len(path)] == path]:
                self._claimed.discard(other)

    def _keep(self, work: Work, result: object, attempt: int, seconds: float, *, keep: bool) -> None:
        """Durable before the next step begins (I1)."""
        path = show(work.place.path)
        if keep:
            metadata = {
                "kind": "step",
                "session": self.session,
                "attempts": attempt,
                "seconds": round(seconds, 6),
                "version": f"{self.version}/{work.options.version}",
                "inputs": {name: digest.hex()[:16] for name, digest in work.inputs.items()},
            }
            if bill := self._bills.get(work.place.path):
                metadata["llm"] = bill.to_json()
            try:
                self.save(work.place.path, {"result": result}, work.place.level, metadata, work.key)
            except UnsupportedType as error:
                _name_result(error, f"the result of {work.title}")
        self.count(path)
        self.watcher.step(work.place.path, "ran", seconds, money=self.money(work.place.path))

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
            self._forget_below(place.path)
        try:
            with place.entered():
                yield
        finally:
            self._bills.pop(place.path, None)  # it is in that of the map

    def charge(self, path: Path, charge: Charge) -> None:
        """Count a call of a model for the step that made it, and for all that this is part of."""
        from holdfast.llm.bills import Bill

        with self._lock:
            for length in range(len(path) + 1):
                self._bills[path[:length]] = self._bills.get(path[:length], Bill()).add(charge)

    def money(self, path: Path = ()) -> str:
        """What calls of models cost in this session, as text; "" when there were none."""
        return str(self._bills.get(path, ""))

    def _settle(self) -> None:
        """At the end: what was answered from the store is written down, and shown."""
        if () not in self._bills:
            return
        from holdfast.llm.cache import Cache

        Cache.of(self.store).close()
        self.watcher.money(self.money())

    def count_items(self, path: str, executed: int, reused: int) -> None:
        with self._lock:
            self._executed += executed
            if executed and len(self._ran) < MAX_LISTED:
                self._ran.append(path)
            elif reused and not executed:
                self._reused.append(path)

    def count(self, path: str) -> None:
        with self._lock:
            self._executed += 1
            if len(self._ran) < MAX_LISTED:
                self._ran.append(path)

    def pause(self, reason: str) -> NoReturn:
        raise Paused(reason)

    @property
    def lease(self) -> Lease:
        return self._lease

    def pause_point(self) -> None:
        """Between two pieces of work: here a run stops, waits, or learns that it was cancelled."""
        if self._stack is None:
            raise Conflict(f"run {self.key} is not entered", hint="use it in a with block")
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
        return f"<holdfast run {self.key}, session {self.session}>"


def resume_command(store: CheckpointManager, key: str) -> str:
    if store.url == "memory:":
        return "run it again in this process (its store is in memory)"
    place = "$HOLDFAST_STORE" if "://" in store.url else shlex.quote(reachable(store.url))  # a URL may hold a password
    tenant = "" if store.namespace == "default" else f" --namespace {store.namespace}"
    return f"holdfast runs resume {key} --store {place}{tenant}"


def _shared_step(function: Callable[..., Any], options: Options, inputs: Mapping[str, bytes]) -> Shared:
    from holdfast.llm.calls import Shared, step_request
    from holdfast.llm.exchange import Policy

    name = getattr(function, "__qualname__", type(function).__qualname__)
    return Shared(step_request(name, options.version, inputs), Policy())


def _command() -> dict[str, object]:
    """How this process was started, for `holdfast runs resume`."""
    return {"argv": list(sys.orig_argv), "cwd": os.getcwd()}


def _status_after(error: BaseException | None) -> RunStatus:
    if error is None:
        return RunStatus.COMPLETED
    if isinstance(error, Cancelled):
        return RunStatus.CANCELLED
    if isinstance(error, SystemExit) and not isinstance(error, Paused):  # sys.exit(1) is how many programs fail
        return RunStatus.PAUSED if error.code in (None, 0) else RunStatus.FAILED
    return RunStatus.FAILED if isinstance(error, Exception) else RunStatus.PAUSED


def _name_result(error: UnsupportedType, what: str) -> NoReturn:
    path = error.path.replace('state["result"]', "result", 1)
    raise UnsupportedType(
        f"{what} cannot be kept: {error.message.replace(error.path, path)}", hint=error.hint, path=path
    ) from error


def _one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip().encode("utf-8", "replace").decode()
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]


def _traceback(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TRACEBACK_CHARACTERS else "…\n" + text[-MAX_TRACEBACK_CHARACTERS:]


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
