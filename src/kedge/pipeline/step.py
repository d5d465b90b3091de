"""A step: the options it is declared with, where it stands, and the decorator."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

from kedge.errors import Validation
from kedge.model import CheckpointLevel

from .attempt import TIMEOUT_IN
from .keys import Path
from .retry import Retry, parse_retries, parse_timeout

if TYPE_CHECKING:
    from .run import Run

P = ParamSpec("P")
R = TypeVar("R")

UNSET: Any = object()


@dataclass(frozen=True, slots=True)
class Options:
    """How a step is carried out."""

    retry: Retry
    timeout_s: float | None
    timeout_in: str
    version: str


PLAIN = Options(Retry(times=0), None, "process", "")


def parse_options(retries: int | Retry, timeout_s: float | None, timeout_in: str, version: str | int | None) -> Options:
    if type(retries) is int and retries == 0 and timeout_s is None and timeout_in == "process" and version is None:
        return PLAIN
    if timeout_in not in TIMEOUT_IN:
        raise Validation(f"timeout_in={timeout_in!r}", hint=f"use one of: {', '.join(TIMEOUT_IN)}")
    return Options(parse_retries(retries), parse_timeout(timeout_s), timeout_in, parse_version(version))


def parse_version(version: str | int | None) -> str:
    if version is not None and not isinstance(version, str | int):
        raise Validation(f"version={version!r} is not text", hint='use short text, such as "2"')
    return "" if version is None else str(version)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run the code stands that runs now."""

    run: Run
    path: Path = ()
    level: CheckpointLevel = CheckpointLevel.PIPELINE

    def below(self, name: str) -> Place:
        """The place of a step that is called here: a step, or a substep inside another one."""
        is_inner = self.level in (CheckpointLevel.STEP, CheckpointLevel.SUBSTEP)
        return Place(self.run, (*self.path, name), CheckpointLevel.SUBSTEP if is_inner else CheckpointLevel.STEP)

    @contextmanager
    def entered(self) -> Iterator[None]:
        token = _here.set(self)
        try:
            yield
        finally:
            _here.reset(token)


_here: ContextVar[Place | None] = ContextVar("kedge_place", default=None)

# (run, step) for which code works that is in another process than the run
payer: ContextVar[tuple[str, str]] = ContextVar("kedge_payer", default=("", ""))


def here() -> Place | None:
    return _here.get()


def place_in(run: Run) -> Place:
    """Where `run` stands in this thread or task: at its root, unless the code is inside one of its stages or steps."""
    place = _here.get()
    return place if place is not None and place.run is run else Place(run)


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
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    retries: int | Retry = 0,
    timeout_s: float | None = None,
    timeout_in: str = "process",
    version: str | int | None = None,
    cache: bool | Literal["llm"] = True,
) -> Any:
    """Make a function a step of whatever run it is called in; outside a run it is an ordinary function.

    `name` may use the arguments, "fetch {url}", so that calls in a loop have paths of their own. With cache=False it
    is run every time, with the same retries and limits, and its result is not kept. With cache="llm" it is run once for
    all runs of the store that call it with the same arguments, and what it costs is counted (docs/llm.md).
    """
    if cache not in (True, False, "llm"):
        raise Validation(f"cache={cache!r}", hint='use True, False or "llm"')
    options = parse_options(retries, timeout_s, timeout_in, version)  # nonsense is refused where it is written

    def decorate(inner: Callable[..., Any]) -> Callable[..., Any]:
        title = name or inner.__name__
        signature = inspect.signature(inner)

        def title_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
            if name is None or "{" not in name:
                return title
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return name.format(**bound.arguments)

        if inspect.iscoroutinefunction(inner):

            @functools.wraps(inner)
            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                place = here()
                if place is None:
                    return await inner(*args, **kwargs)
                return await place.run.calls.run_async(
                    title_of(args, kwargs), inner, args, kwargs, options, keep=bool(cache), is_shared=cache == "llm"
                )

            return wrapper

        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            place = here()
            if place is None:
                return inner(*args, **kwargs)
            # A process finds a function under its name, which the decorated one bears.
            sent = call if options.timeout_s is not None and options.timeout_in == "process" else inner
            return place.run.calls.run(
                title_of(args, kwargs), sent, args, kwargs, options, keep=bool(cache), is_shared=cache == "llm"
            )

        return call

    return decorate if function is None else decorate(function)
