"""A run: one execution of a pipeline under a stable key, owned by one process at a time.

A run is a job of the store. Every finished step is a checkpoint of that job, saved under the step's key (path, inputs,
version) as idempotency key before the next step begins; every change of the run's status is a checkpoint of level
pipeline. What a program calls is here, and goes down once:

    run → step, map or wait → session → store
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, Unpack, cast, overload

from kedge.errors import Conflict, LeaseLost, Validation
from kedge.manager import CheckpointManager
from kedge.model import CheckpointLevel, Lease, RunStatus, parse_step
from kedge.ports import Then

from .inbox import opened, parse_run_key
from .keys import Path, show
from .log import line_of
from .outcome import say_what_follows, status_after
from .owner import this_command
from .place import Place, place_in
from .retry import Retry, parse_timeout
from .session import Session, not_entered
from .session_start import SessionStart, Takeover
from .signals import Paused
from .step import UNSET, Call, Steps, is_coroutine_function, parse_options, parse_version
from .streams import stream_tags
from .telemetry import run_span
from .wait import WaitingRun

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import psycopg

    from kedge.llm.bills import Charge
    from kedge.llm.budget import Budget

    from .aio import AsyncRun
    from .failure import ItemError
    from .keywords import MapKeywords
    from .map import Results
    from .transaction import Transaction


P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Run(WaitingRun):
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
        timeout_s: float | None = None,
        lease: Lease | None = None,
        taking: Takeover | None = None,
        queue: str = "",
        origin: Mapping[str, object] | None = None,
        parent: Run | None = None,
    ) -> None:
        """`progress` shows the run at work on stderr: None where that is a terminal, True and False in any case.

        After `timeout_s` from its first beginning, pauses included, the run fails with StepTimeout. `lease` is that of
        the run, if the caller holds it; `taking` how a worker takes it. `queue` is the one whose worker carries it out.
        `origin` is with what it can be started again: the program (`this_command`), or what was submitted,
        {"entry": …, "call": …}. `parent` is the run in this process that started it.
        """
        self.key = parse_run_key(key)
        if not isinstance(grace_s, int | float) or not 0 <= grace_s <= 86_400:
            raise Validation(f"grace_s must be from 0 to 86400 seconds (got {grace_s!r})")
        self.version = parse_version(version)
        self.pipeline = pipeline
        self._given = store
        self._ttl_s = ttl_s
        self._grace_s = grace_s
        self._wants_signals = signals
        self._progress = progress
        self._timeout_s = parse_timeout(timeout_s)
        self._held = lease
        self._taking = taking
        self._queue = queue
        self._origin = this_command() if origin is None else origin
        self._parent = parent
        self._children: list[Run] = []
        self._stack: ExitStack | None = None
        self._session: Session | None = None  # the newest one, also when it is over
        self._steps: Steps
        self.token = os.urandom(16).hex()  # by which workers in this process find it

    @property
    def session(self) -> int:
        """How many processes have worked on this run so far, this one included; 0 before it is entered."""
        return 0 if self._session is None else self._session.number

    @property
    def identity(self) -> str:
        return self._at_work().identity

    @property
    def store(self) -> CheckpointManager:
        return self._at_work().store

    @property
    def lease(self) -> Lease:
        return self._at_work().lease

    def _at_work(self) -> Session:
        if self._session is None or not self._session.is_open:
            raise not_entered(self.key)
        return self._session

    # Entering and leaving

    def __enter__(self) -> Self:
        if self._stack is not None:
            raise Conflict(f"run {self.key} is entered already", hint="make another one with kedge.run()")
        with ExitStack() as stack:
            store = stack.enter_context(opened(self._given, create=True))
            make = partial(
                Session,
                store,
                version=self.version,
                pipeline=self.pipeline,
                grace_s=self._grace_s,
                progress=self._progress,
                timeout_s=self._timeout_s,
                queue=self._queue,
                parent="" if self._parent is None else self._parent.key,
                then=None if self._held or self._taking else Then(releases_lease=True),
            )
            beginning = SessionStart(store, self.key, self._ttl_s, make, self._origin, self._wants_signals)
            session = beginning.enter(stack, self._held, self._taking)
            stack.enter_context(run_span(session, self._origin))
            stack.enter_context(Place(self).entered())
            self._session, self._steps, self._stack = session, Steps(session), stack.pop_all()
            self.pipeline = session.pipeline
        if self._parent is not None:
            self._parent.adopt(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        stack, self._stack = self._stack, None
        session = self._session
        if stack is None or session is None:
            return
        with stack:
            status = status_after(error)
            session.leave(status, error)
            if status is RunStatus.PAUSED and session.signals.stopping and not isinstance(error, Paused):
                error = Paused(session.signals.stopping)  # asyncio made a cancellation of it
            try:
                if not isinstance(error, LeaseLost):  # else the run belongs to somebody else
                    session.record_end(status, error)
            except Exception as failure:
                if error is None:
                    say_what_follows(session, RunStatus.FAILED, failure)
                    raise
                error.add_note(f"The end of run {self.key} could not be recorded: {failure}")
            if status is RunStatus.PAUSED:
                for child in self._children:
                    child.stop(f"run {self.key} is paused")
            say_what_follows(session, status, error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.__exit__(kind, error, trace)

    # Steps

    @overload  # beside options, Python has no way to say which arguments are the function's
    def step(self, name: str, function: Callable[..., R], /, *args: object, inputs: object, **rest: object) -> R: ...
    @overload
    def step(
        self, name: str, function: Callable[..., R], /, *args: object, retries: int | Retry, **rest: object
    ) -> R: ...
    @overload
    def step(
        self, name: str, function: Callable[..., R], /, *args: object, timeout_s: float | None, **rest: object
    ) -> R: ...
    @overload
    def step(
        self, name: str, function: Callable[..., R], /, *args: object, version: str | int | None, **rest: object
    ) -> R: ...
    @overload
    def step(self, name: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def step(  # type: ignore[misc] # an option is never an argument of the function
        self,
        name: str,
        function: Callable[..., object],
        /,
        *args: object,
        retries: int | Retry = 0,
        timeout_s: float | None = None,
        timeout_in: str = "process",
        version: str | int | None = None,
        inputs: object = UNSET,
        **kwargs: object,
    ) -> object:
        """The result of `function(*args, **kwargs)`, which runs once, ever: its result is durable when this returns.

        A step is the same when its path, its inputs and its version are; whatever else changes, it is not run again.
        `inputs` replaces the arguments where they cannot be encoded or do not say what matters. What a function finds
        by other ways (globals, files, a method's own object) is no input: change `version` when it changes.
        Of a coroutine function this is a coroutine. `timeout_in` is explained in `pipeline.attempt`.
        """
        options = parse_options(retries, timeout_s, timeout_in, version)
        return self.call(name, Call(function, args, kwargs, options, inputs))

    def call(self, name: str, call: Call[R]) -> R:
        """A step with parsed options; a coroutine where its function is one. `step`, `llm` and decorators end here."""
        self._at_work()
        place = place_in(self).below(name)
        if is_coroutine_function(call.function):
            waited: Any = call
            coroutine: Any = self._steps.run_async(place, waited)
            return cast(R, coroutine)
        return self._steps.run(place, call)

    def place_of(self, step: str) -> tuple[Session, Path]:
        """The session, and the path of a step that is called here."""
        return self._at_work(), place_in(self).below(parse_step(step)).path

    def claim(self, name: str) -> str:
        """Claim the first free step of "name", "name 2", "name 3", … at this place, and answer its name."""
        self._at_work()
        return self._steps.claim_free(place_in(self), parse_step(name))

    def llm(
        self,
        name: str,
        call: Callable[..., object],
        *,
        model: str,
        messages: Iterable[object],
        mode: str = "record",
        ttl_s: float | None = None,
        sample: int | None = None,
        budget: Budget | None = None,
        retries: int | Retry = 0,
        timeout_s: float | None = None,
        timeout_in: str = "thread",
        version: str | int | None = None,
        **parameters: object,
    ) -> Any:
        """The answer of `call(model=…, messages=…, **parameters)`, a step that is paid once in all runs of the store.

        Other runs that ask the same of the same function get the same answer, `sample` apart (that of
        `kedge.llm.sample` by default); `mode`, `ttl_s` and `budget` are those of `kedge.llm.http_client`. Tokens and
        money are counted. An object of a vendor's SDK comes back as plain data, text and data as they are.
        """
        from .llm_call import llm_call  # start time

        options = parse_options(retries, timeout_s, timeout_in, version)
        path = (*place_in(self).path, name)
        body = {"model": model, "messages": messages, **parameters}
        return self.call(name, llm_call(self._at_work(), path, call, body, options, sample, mode, ttl_s, budget))

    def transaction(self, conn: psycopg.Connection[Any]) -> Transaction:
        """For steps that write to a PostgreSQL of yours, exactly once: `run.transaction(conn).step(name, f, …)`."""
        from .transaction import Transaction  # optional: psycopg

        return Transaction(self, conn)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Steps inside belong to the stage: its name is part of their paths. Stages may be nested."""
        session, place = self._at_work(), place_in(self)
        if place.level not in (CheckpointLevel.PIPELINE, CheckpointLevel.STAGE):
            raise Validation(f"stage {name!r} is inside step {show(place.path)}", hint="steps inside a step need none")
        path = (*place.path, parse_step(name))
        executed, began = session.account.executed, time.monotonic()
        session.watcher.stage(path)
        with Place(self, path, CheckpointLevel.STAGE).entered():
            yield
        if (steps := session.account.executed - executed) > 0:
            metadata = {"kind": "stage", "seconds": round(time.monotonic() - began, 3)}
            session.save(path, {"steps": steps}, CheckpointLevel.STAGE, metadata)

    @overload
    def map(
        self, function: Callable[[T], R], items: Iterable[T], *, on_error: Literal["stop"] = "stop",
        collect: Literal[True] = True, **rest: Unpack[MapKeywords[T]],
    ) -> list[R]: ...  # fmt: skip
    @overload
    def map(
        self, function: Callable[[T], R], items: Iterable[T], *, on_error: str | float, collect: Literal[True] = True,
        **rest: Unpack[MapKeywords[T]],
    ) -> list[R | ItemError]: ...  # fmt: skip
    @overload
    def map(
        self, function: Callable[[T], R], items: Iterable[T], *, on_error: str | float = "stop",
        collect: Literal[False], **rest: Unpack[MapKeywords[T]],
    ) -> Results[R]: ...  # fmt: skip
    def map(
        self,
        function: Callable[[T], R],
        items: Iterable[T],
        *,
        name: str | None = None,
        key: Callable[[T], object] | None = None,
        workers: int | None = None,
        executor: str | Executor = "thread",
        order: str = "input",
        on_error: str | float = "stop",
        retries: int | Retry = 0,
        timeout_s: float | None = None,
        version: str | int | None = None,
        collect: bool = True,
    ) -> list[R] | list[R | ItemError] | Results[R]:
        """`[function(item) for item in items]` by several workers, each item run once, ever.

        An item is known by `key(item)`, which must tell it from the others, or else by its content. Workers are
        threads, processes, or any Executor. `on_error` ends the map at the first failure ("stop"), never ("collect",
        the result is then an ItemError), or after so many failures, or such a part of them. Failed items are tried
        again when the run is resumed. With collect=False the answer reads results from the store as you iterate over
        it, and nothing but 16 bytes for each item is kept in memory.
        """
        from .map import Map, check_call, name_of, parse_map_options  # start time: processes, executors

        session = self._at_work()
        options = parse_map_options(workers, executor, order, on_error, retries, timeout_s, collect)
        place = place_in(self).below(parse_step(name or name_of(function)))
        check_call(function, items, key, f"map {show(place.path)}")
        self._steps.claim(place.path)
        session.pause_point()
        return Map(session, place, f"{self.version}/{parse_version(version)}", function, key, options).run(items)

    @property
    def aio(self) -> AsyncRun:
        """`sleep`, `signal`, `approval` and `map` for coroutines: they are awaited, and do not block the event loop."""
        from .aio import AsyncRun  # start time: asyncio

        return AsyncRun(self)

    # Telling others

    def progress(self, done: int, total: int | None = None) -> None:
        """Say how far the run is: `kedge runs show` tells it, as of the newest record of the run."""
        if isinstance(done, bool) or not isinstance(done, int) or done < 0 or (total is not None and total < done):
            raise Validation(f"progress must be whole numbers, done ≤ total (got {done!r} of {total!r})")
        self._at_work().record_progress(done, total)

    def log(self, text: str, /, *, level: str = "info", **fields: object) -> None:
        """A line in the history of the run, durable; `level` is debug, info, warning or error.

        What is not plain JSON in `fields`, such as a path or a time, is kept as its text; long texts are cut.
        """
        path = place_in(self).path or ("log",)
        line = line_of(text, level, fields)
        self._at_work().save(path, {}, CheckpointLevel.SUBSTEP, line, tags={"kind": "log"})

    def emit(self, name: str, value: object) -> None:
        """Add a value to the stream `name` of this run, once and durably; `kedge.follow` reads the stream, live.

        A run that is resumed does not repeat it: the first call under a name is the first value, and so on.
        """
        step = self.claim(f"emit {parse_step(name)}")
        self.call(step, Call(lambda: value, inputs=None, tags=lambda _: stream_tags(name), is_claimed=True))

    # What workers and children need

    def adopt(self, child: Run) -> None:
        """A run that is to pause when this one does."""
        self._children.append(child)

    def begin(self) -> None:
        """Raise what keeps the run from going on: it was cancelled before it began, or its time is over."""
        self._at_work().pause_point()

    @property
    def is_stopping(self) -> bool:
        """Whether `begin` raises, by what is known without a look at the store."""
        return self._session is None or not self._session.is_open or self._session.is_stopped

    def end(self, result: object, then: Then | None = None) -> None:
        """Keep what the pipeline returned with the run's last status record, in whose transaction `then` is done."""
        self._at_work().end(result, then)

    def note_result(self, result: object) -> None:
        """Say in the run's last status record, in a few words, what its pipeline returned to its caller."""
        self._at_work().note_result(result)

    def stop(self, reason: str) -> None:
        """From another thread: pause before the next step, unless it has ended."""
        if self._session is not None and self._session.is_open:
            self._session.signals.stopping = reason

    # What code inside a step reaches through its place

    def charge(self, path: Path, charge: Charge) -> None:
        """Count an LLM call for the step at `path`; also one whose answer comes after the end of the session."""
        if self._session is not None:
            self._session.account.charge(path, charge)

    @contextmanager
    def at_item(self, path: Path, label: str, attempt: int) -> Iterator[None]:
        """The place of an item of a map, for steps inside it. An item that is tried again calls them again."""
        session, place = self._at_work(), Place(self, (*path, label), CheckpointLevel.SUBSTEP)
        if attempt > 1:
            self._steps.unclaim_below(place.path)
        try:
            with place.entered(), session.signals.in_step():
                yield
        except Exception as error:
            session.failures.release(error)  # the item is tried again, now or when the run is resumed
            raise
        finally:
            session.account.close_bill(place.path)

    def wait_for_attempt(self, seconds: float) -> None:
        """Before another attempt at an item; raises what keeps the run from going on, as soon as anything does."""
        session = self._at_work()
        session.wait(seconds)
        session.pause_point()

    def __repr__(self) -> str:
        return f"<kedge run {self.key}, session {self.session}>"
