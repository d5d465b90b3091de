"""Functions as pipelines and as steps: `@kedge.pipeline`, `@kedge.step`."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Generic, Literal, ParamSpec, TypeVar, Unpack, overload

from kedge.errors import Conflict, Validation, did_you_mean
from kedge.manager import CheckpointManager
from kedge.ports import Then

from .entries import Arguments, call_of, shown_call
from .keys import arguments, digest_of, signature_of
from .keywords import RunKeywords
from .owner import this_command
from .place import here
from .recovery import recoverable
from .retry import Retry, parse_timeout
from .run import Run
from .step import Call, Options, parse_options

if TYPE_CHECKING:
    from kedge.llm.calls import Shared

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@+-]+")


def current_run() -> Run:
    """The run this code is in, for functions that were not handed it."""
    place = here()
    if place is None:
        raise Conflict("there is no run here", hint="call this inside `with kedge.run(…)` or a @kedge.pipeline")
    return place.run


class Pipeline(Generic[P, R_co]):
    """A function that is a run when it is called. Steps, stages and maps inside find it with `current_run()`."""

    def __init__(
        self,
        function: Callable[P, R_co],
        name: str | None,
        version: str | int | None,
        store: CheckpointManager | str | os.PathLike[str] | None,
        recover: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name or function.__name__
        self.version = version
        self.store = store
        self.recover = recover
        self.timeout_s = parse_timeout(timeout_s)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self.at()(*args, **kwargs)

    def at(
        self,
        key: str | None = None,
        *,
        store: CheckpointManager | str | os.PathLike[str] | None = None,
        **options: Unpack[RunKeywords],
    ) -> Callable[P, R_co]:
        """The function to call for a run under `key`, in `store`; options are those of `kedge.run`.

        Without a key it is made of the pipeline's name and its arguments: the same call again is the same run.
        """

        place = self.store if store is None else store

        def enter(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Run]:
            name = self.key_of(*args, **kwargs) if key is None else key
            call = call_of(self.function, args, kwargs)
            origin = {**this_command(), "parameters": call["parameters"], "given": shown_call(call)}
            chosen: RunKeywords = {"timeout_s": self.timeout_s, **options}
            make = functools.partial(Run, name, version=self.version, pipeline=self.name, origin=origin, **chosen)
            if not self.recover:
                return make(store=place)
            return recoverable(lambda opened: make(store=opened), place, call)

        if inspect.iscoroutinefunction(self.function):

            async def start(*args: P.args, **kwargs: P.kwargs) -> object:
                with enter(*args, **kwargs) as run:
                    result = await self.function(*args, **kwargs)  # type: ignore[misc]
                    run.note_result(result)
                    return result

            return start  # type: ignore[return-value]

        def call(*args: P.args, **kwargs: P.kwargs) -> R_co:
            with enter(*args, **kwargs) as run:
                result = self.function(*args, **kwargs)
                run.note_result(result)
                return result

        return call

    def carry_out(
        self,
        run: Run,
        call: Arguments,
        begun: Callable[[], None] = lambda: None,
        then: Then | None = None,
    ) -> None:
        """Call the function in `run`, and keep what it returns with the run; `then` is that of `Run.end`."""
        function: Callable[..., object] = self.function
        if inspect.iscoroutinefunction(function):
            import asyncio  # start time: most pipelines need none

            async def main() -> None:
                async with run:
                    begun()
                    run.end(await function(*call["args"], **call["kwargs"]), then)

            asyncio.run(main())
            return
        with run:
            begun()
            run.end(function(*call["args"], **call["kwargs"]), then)

    def check_call(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raise Validation for arguments with which it can never be called: before there is a run, which would fail."""
        signature = signature_of(self.function)
        self._check_names(signature, kwargs)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise Validation(f"pipeline {self.name}: {error}", hint=f"it takes {signature}") from None

    def _check_names(self, signature: inspect.Signature, kwargs: Mapping[str, object]) -> None:
        """A misspelt name is said to be one, and not that the right one is missing."""
        parameters = signature.parameters
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for name in kwargs:
            if name not in parameters:
                near = did_you_mean(name, [free for free in parameters if free not in kwargs])
                raise Validation(
                    f"pipeline {self.name}: it has no argument {name}", hint=near or f"it takes {signature}"
                )

    def check_options(self, args: Sequence[object], options: object) -> None:
        """Raise Validation for an option that the pipeline has a parameter of the same name for: whose is it?"""
        free = list(signature_of(self.function).parameters)[len(args) :]
        for option in fields(options):  # type: ignore[arg-type] # a dataclass
            if option.name in free and getattr(options, option.name) != option.default:
                raise Validation(
                    f"{option.name}= is an option here, and a parameter of pipeline {self.name}",
                    hint=f"pass the arguments up to {option.name} by position, or all of them as a mapping: "
                    "Queue.submit_call, kedge.pipeline.schedule_call",
                )

    def key_of(self, *args: object, **kwargs: object) -> str:
        """The key of the run that a call with these arguments is."""
        base = _NOT_IN_NAMES.sub("-", self.name)[:80].strip("-._@+") or "pipeline"
        given = arguments(self.function, args, kwargs)
        return f"{base}-{digest_of(given, f'pipeline {self.name}').hex()[:12]}" if given else base


def parse_pipeline(value: Pipeline[P, R]) -> Pipeline[P, R]:
    given: object = value  # whatever its annotation says
    if not isinstance(given, Pipeline):
        name = getattr(value, "__name__", repr(value))
        raise Validation(f"{name:.100} is not a pipeline", hint="decorate the function with @kedge.pipeline")
    return value


@overload
def pipeline(function: Callable[P, R], /) -> Pipeline[P, R]: ...
@overload
def pipeline(
    *,
    name: str | None = None,
    version: str | int | None = None,
    store: CheckpointManager | str | os.PathLike[str] | None = None,
    recover: bool = False,
    timeout_s: float | None = None,
) -> Callable[[Callable[P, R]], Pipeline[P, R]]: ...
def pipeline(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    version: str | int | None = None,
    store: CheckpointManager | str | os.PathLike[str] | None = None,
    recover: bool = False,
    timeout_s: float | None = None,
) -> Pipeline[P, R] | Callable[[Callable[P, R]], Pipeline[P, R]]:
    """Make a function a pipeline: each call is a durable run, resumed when the same call is made again.

    `timeout_s` limits each run as that of `kedge.run` does, also those of queues, schedules and `kedge.start`.

    With `recover`, a worker (`kedge worker FILE.py`) takes the run over when its process dies. The arguments must then
    be something a state can hold.
    """

    def decorate(inner: Callable[P, R]) -> Pipeline[P, R]:
        return Pipeline(inner, name, version, store, recover, timeout_s)

    return decorate if function is None else decorate(function)


@overload
def step(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def step(
    *,
    name: str | None = None,
    retries: int | Retry = 0,
    timeout_s: float | None = None,
    timeout_in: str = "process",
    version: str | int | None = None,
    cache: bool | Literal["llm"] = True,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def step(
    function: Callable[P, R] | None = None,
    /,
    *,
    name: str | None = None,
    retries: int | Retry = 0,
    timeout_s: float | None = None,
    timeout_in: str = "process",
    version: str | int | None = None,
    cache: bool | Literal["llm"] = True,
) -> Callable[P, R] | Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a step of whatever run it is called in; outside a run it is an ordinary function.

    `name` may use the arguments, "fetch {url}", so that calls in a loop have paths of their own. With cache=False it
    runs every time, with the same retries and limits, and its result is not saved. With cache="llm" it runs once for
    all runs of the store that call it with the same arguments, and what it costs is counted (docs/llm.md).
    """
    if cache not in (True, False, "llm"):
        raise Validation(f"cache={cache!r}", hint='use True, False or "llm"')
    declared = _Step(name, parse_options(retries, timeout_s, timeout_in, version), cache)
    return declared.decorate if function is None else declared.decorate(function)


@dataclass(frozen=True, slots=True)
class _Step:
    """What a decorator says about a function."""

    name: str | None
    options: Options
    cache: bool | Literal["llm"]

    def decorate(self, function: Callable[P, R]) -> Callable[P, R]:
        def call_of(sent: Callable[..., T], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Call[T]:
            share = functools.partial(_share, sent, self.options) if self.cache == "llm" else None
            return Call(sent, args, kwargs, self.options, is_saved=bool(self.cache), share=share)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args: P.args, **kwargs: P.kwargs) -> object:
                if (place := here()) is None:
                    return await function(*args, **kwargs)
                return await place.run.call(self._title(function, args, kwargs), call_of(function, args, kwargs))

            return wrapper  # type: ignore[return-value] # R is its coroutine

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if (place := here()) is None:
                return function(*args, **kwargs)
            # A process finds a function under its name, which the decorated one bears.
            is_sent = self.options.timeout_s is not None and self.options.timeout_in == "process"
            title = self._title(function, args, kwargs)
            sent: Callable[P, R] = call if is_sent else function
            return place.run.call(title, call_of(sent, args, kwargs))

        return call

    def _title(self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> str:
        if self.name is None or "{" not in self.name:
            return self.name or function.__name__
        bound = signature_of(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return self.name.format(**bound.arguments)


def _share(function: Callable[..., object], options: Options, inputs: Mapping[str, bytes]) -> Shared:
    from kedge.llm.calls import Shared, step_request  # optional: only steps with cache="llm"
    from kedge.llm.exchange import Policy

    name = getattr(function, "__qualname__", type(function).__qualname__)
    return Shared(step_request(name, options.version, inputs), Policy())
