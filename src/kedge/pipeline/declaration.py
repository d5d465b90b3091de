"""Functions as pipelines: `@kedge.pipeline`."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar, overload

from kedge.errors import Conflict
from kedge.manager import CheckpointManager

from .keys import arguments, digest_of
from .run import Run
from .step import here

P = ParamSpec("P")
R = TypeVar("R")

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._@+-]+")


def current_run() -> Run:
    """The run this code is in, for functions that were not handed it."""
    place = here()
    if place is None:
        raise Conflict("there is no run here", hint="call this inside `with kedge.run(…)` or a @kedge.pipeline")
    return place.run


class Pipeline(Generic[P, R]):
    """A function that is a run when it is called. Steps, stages and maps inside find it with `current_run()`."""

    def __init__(
        self,
        function: Callable[P, R],
        name: str | None,
        version: str | int | None,
        store: CheckpointManager | str | os.PathLike[str] | None,
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = name or function.__name__
        self.version = version
        self.store = store

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.at()(*args, **kwargs)

    def at(
        self,
        key: str | None = None,
        *,
        store: CheckpointManager | str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Callable[P, R]:
        """The function to call for a run under `key`, in `store`; options are those of `kedge.run`.

        Without a key it is made of the pipeline's name and its arguments: the same call again is the same run.
        """

        def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
            return Run(
                self.key_of(*args, **kwargs) if key is None else key,
                store=self.store if store is None else store,
                version=self.version,
                pipeline=self.name,
                **options,
            )

        if inspect.iscoroutinefunction(self.function):

            async def start(*args: Any, **kwargs: Any) -> Any:
                async with make(args, kwargs):
                    return await self.function(*args, **kwargs)  # type: ignore[misc]

            return start  # type: ignore[return-value]

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with make(args, kwargs):
                return self.function(*args, **kwargs)

        return call

    def key_of(self, *args: Any, **kwargs: Any) -> str:
        """The key of the run that a call with these arguments is."""
        base = _NOT_IN_NAMES.sub("-", self.name)[:80].strip("-._@+") or "pipeline"
        given = arguments(self.function, args, kwargs)
        return f"{base}-{digest_of(given, f'pipeline {self.name}').hex()[:12]}" if given else base


@overload
def pipeline(function: Callable[P, R], /) -> Pipeline[P, R]: ...
@overload
def pipeline(
    *,
    name: str | None = None,
    version: str | int | None = None,
    store: CheckpointManager | str | os.PathLike[str] | None = None,
) -> Callable[[Callable[P, R]], Pipeline[P, R]]: ...
def pipeline(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    version: str | int | None = None,
    store: CheckpointManager | str | os.PathLike[str] | None = None,
) -> Any:
    """Make a function a pipeline: each call is a durable run, resumed when the same call is made again."""

    def decorate(inner: Callable[..., Any]) -> Pipeline[..., Any]:
        return Pipeline(inner, name, version, store)

    return decorate if function is None else decorate(function)
