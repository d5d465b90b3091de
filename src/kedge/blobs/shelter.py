"""Calls of the main thread, run in another one: no signal handler can interrupt them there.

Python runs signal handlers in the main thread, between any two steps of whatever it is doing. If that holds a lock, a
handler that saves waits for ever for a lock of its own thread; if the handler raises, as Ctrl-C does, what was begun
stays half-done. So the main thread holds no lock and changes no state of a store: it hands over what it wants
done, and waits. A handler that comes meanwhile can do the same.

Whole ports are `guarded` so, but for the methods that they name in their `in_place`: these hold no lock and change
nothing, wherever they are interrupted.

What interrupts the waiting is raised when the call has ended, which it is told to do (`give_up_if_abandoned`), so that
nothing happens behind the caller's back; after `PATIENCE_S` at most.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar, cast

from kedge.errors import StorageError

from .workers import Workers, start

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE_S = 5.0
_LOOK_EVERY_S = 0.05  # for a signal that came just before the waiting began: Python looks only when something happens
_MOST_HELPERS = 1000  # as many calls as handlers interrupt each other


class Abandoned(BaseException):
    """Whoever asked for this has gone. Never leaves this module: nobody is there to see it."""


class _Call(Generic[T]):
    """One call on its way through a helper."""

    __slots__ = ("_function", "_turn", "error", "is_abandoned", "is_done", "result", "wake")

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._turn = [True]  # taken by the thread that runs it: popping from a list is one step
        self.result: T | None = None
        self.error: BaseException | None = None
        self.is_abandoned = False
        self.is_done = False
        self.wake = threading.Lock()
        self.wake.acquire()

    def __call__(self) -> None:
        try:
            self._turn.pop()
        except IndexError:
            return  # begun twice, see `_leave`
        _here.call = self
        try:
            give_up_if_abandoned()
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised where the call came from
            self.error = error
        finally:
            _here.call = None
            self.is_done = True
            self.wake.release()

    def wait(self, begin: Callable[[], None], patience_s: float = PATIENCE_S) -> T:
        """In the main thread: begin, and answer what the call came to."""
        try:
            begin()
            while not self.wake.acquire(timeout=_LOOK_EVERY_S):
                pass
        except BaseException:  # a signal handler raised
            self._leave(begin, patience_s)
            raise
        try:
            if self.error is not None:
                raise self.error
            return cast(T, self.result)
        finally:
            self.error = None  # whose traceback leads here

    def _leave(self, begin: Callable[[], None], patience_s: float) -> None:
        """Nothing depends on this being finished: an interrupt here leaves a call that ends by itself."""
        self.is_abandoned = True
        begin()  # it may not have come to that; who comes second finds it taken
        until = time.monotonic() + patience_s
        while not self.is_done and time.monotonic() < until:
            try:
                self.wake.acquire(timeout=_LOOK_EVERY_S)
            except BaseException:  # noqa: BLE001 - the first one is on its way, and this one would not end sooner
                continue


class _Process:
    """What is different in a forked child: which thread is the main one, and who helps it."""

    def __init__(self) -> None:
        self.is_forking = False
        self.renew()

    def renew(self) -> None:
        self.main_thread = threading.main_thread().ident
        self._helpers = Workers(_MOST_HELPERS, "kedge-call", keep=2)

    def start(self, task: Callable[[], None]) -> None:
        self.refuse_forking()
        self._helpers.start(task)

    def refuse_forking(self) -> None:
        if self.is_forking:  # by this thread, and everybody else waits until it is done
            raise StorageError("a signal handler cannot use a store while its process forks", hint="try again later")


_process = _Process()
os.register_at_fork(after_in_child=_process.renew)


def forking(is_forking: bool) -> None:
    """Called by whoever stops the work of others for a fork, before and after."""
    _process.is_forking = is_forking and threading.get_ident() == _process.main_thread


class _Here(threading.local):
    call: _Call[Any] | None = None


_here = _Here()


def give_up_if_abandoned() -> None:
    """Between two steps of something long, and before what others will see: end here if nobody waits any more."""
    call = _here.call
    if call is not None and call.is_abandoned:
        raise Abandoned


def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """`function(…)`, where no signal handler can interrupt it."""
    if not is_exposed():
        return function(*args, **kwargs)
    call = _Call(functools.partial(function, *args, **kwargs))
    return call.wait(lambda: _process.start(call))


def wait_for(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for what only waits: an interrupt ends the waiting at once."""
    if not is_exposed():
        return function(*args, **kwargs)
    call = _Call(functools.partial(function, *args, **kwargs))
    return call.wait(lambda: _process.start(call), patience_s=0.0)


def is_exposed() -> bool:
    """Whether signal handlers run in this thread."""
    return threading.get_ident() == _process.main_thread


def sheltered(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: every call runs as with `run`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(function, *args, **kwargs)

    return call


class Turns:
    """Calls of the main thread that must not overtake each other: a save from a handler comes behind the one it met.

    A thread of its own runs them, and ends with this object.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._serving = threading.Lock()
        self._has_begun = False
        self._is_closed = False

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. What is called now runs where it is called: it is told that all is closed."""
        self._is_closed = True
        self._queue.put(None)

    def run(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        if self._is_closed or not is_exposed():
            return function(*args, **kwargs)
        call = _Call(functools.partial(function, *args, **kwargs))

        def begin() -> None:
            _process.refuse_forking()
            self._queue.put(call)
            if not self._has_begun:
                start(
                    threading.Thread(target=_serve, args=(self._queue, self._serving), name="kedge-turns", daemon=True)
                )
                self._has_begun = True  # begun again where an interrupt came between

        return call.wait(begin)


def _serve(queue: SimpleQueue[Callable[[], None] | None], serving: threading.Lock) -> None:
    """One call after the other. A thread that was begun too many waits until the end."""
    with serving:
        while (call := queue.get()) is not None:
            call()
            del call  # nothing it refers to lives on until the next one comes
    queue.put(None)


def guarded(port: T) -> T:
    """The same index, blobs or writer. Wherever it is called from, an interrupt leaves no lock held in it."""
    return port if isinstance(port, _Guarded) else cast(T, _Guarded(port))


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
