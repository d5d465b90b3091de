"""Ports behind which the main thread is safe from signals: every call of it runs in another thread (`shelter`).

But for those that a port names in its `in_place`: they hold no lock and change nothing, wherever they are interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from .shelter import is_exposed, run, wait_for

P = TypeVar("P")
T = TypeVar("T")


def guarded(port: P) -> P:
    """The same index, blobs or writer. Wherever it is called from, an interrupt leaves no lock held in it."""
    return port if isinstance(port, _Guarded) else cast(P, _Guarded(port))


def together(port: object, read: Callable[[], T]) -> T:
    """`read()`, which asks a port several times: if each call were to run in another thread, all of it runs there."""
    is_elsewhere = type(port) is _Guarded and "read" not in getattr(port, "in_place", ())
    return run(read) if is_elsewhere else read()


class _Guarded:
    """Looks like what it guards, also to isinstance."""

    def __init__(self, port: Any) -> None:
        object.__setattr__(self, "_port", port)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._port)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._port, name)
        if name.startswith("_") or not callable(value):
            return value
        guard = _guard(self._port, name)
        object.__setattr__(self, name, guard)  # found at once the next time
        return guard

    def __setattr__(self, name: str, value: object) -> None:
        """A method that somebody puts in the place of ours is called by who calls this, not by what is guarded."""
        if name.startswith("_"):
            setattr(self._port, name, value)
        else:
            object.__setattr__(self, name, value)


def _guard(port: Any, name: str) -> Callable[..., object]:
    calling = wait_for if name == "wait_for_event" else run
    is_in_place = name in getattr(port, "in_place", ())

    def call(*args: Any, **kwargs: Any) -> Any:
        function = getattr(port, name)
        result = function(*args, **kwargs) if is_in_place or not is_exposed() else calling(function, *args, **kwargs)
        if type(result) is list:  # what a save answers; asking for its interface takes longer
            return result
        if name == "writer":
            return guarded(result)
        return _steps(result) if isinstance(result, Iterator) else result

    return call


def _steps(items: Iterator[Any]) -> Iterator[object]:
    """A generator works when it is asked for the next item: that too must happen elsewhere."""
    end = object()
    while (item := run(next, items, end)) is not end:
        yield item
