"""Calls of the main thread, run in another thread, where no signal handler can interrupt them.

Python runs signal handlers in the main thread, between any two steps of its work. If it holds a lock, a handler that
saves waits forever for a lock of its own thread. If the handler raises, as Ctrl-C does, an operation stays half-done.
So the main thread holds no lock and changes no state of a store: it hands its calls over and waits. A handler that runs
meanwhile can do the same.

Whole ports are `guarded` this way, except the methods they name in `in_place`: these hold no lock and change nothing,
wherever they are interrupted.

An interrupt of the wait is raised once the call has ended, which it is told to do (`give_up_if_abandoned`), so that
nothing happens unnoticed; at most after `PATIENCE_S`.
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
_LOOK_EVERY_S = 0.05  # for a signal just before the wait: Python checks only when something happens
_MOST_HELPERS = 1000  # as many calls as handlers can interrupt each other


class Abandoned(BaseException):
    """The caller has gone. Never leaves this module, because nobody is there to see it."""


class _Call(Generic[T]):
    """One call on its way through a helper."""

    __slots__ = ("_function", "_turn", "error", "is_abandoned", "is_done", "result", "wake")

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._turn = [True]  # taken by the thread that runs it: popping from a list is atomic
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
            return  # started twice, see `_leave`
        _here.call = self
        try:
            give_up_if_abandoned()
            self.result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            self.error = error
        finally:
            _here.call = None
            self.is_done = True
            self.wake.release()

    def wait(self, begin: Callable[[], None], patience_s: float = PATIENCE_S) -> T:
        """Start the call from the main thread and return its result."""
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
            self.error = None  # its traceback refers to this frame

    def _leave(self, begin: Callable[[], None], patience_s: float) -> None:
        """Abandon the call. Nothing depends on this: if it is interrupted, the call still ends by itself."""
        self.is_abandoned = True
        begin()  # it may not have started; a second start finds it taken
        until = time.monotonic() + patience_s
        while not self.is_done and time.monotonic() < until:
            try:
                self.wake.acquire(timeout=_LOOK_EVERY_S)
            except BaseException:  # noqa: BLE001 - the first interrupt is on its way, and this one would not end sooner
                continue


class _Process:
    """What differs in a forked child: which thread is the main one, and its helpers."""

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
        if self.is_forking:  # by this thread; all others wait until it is done
            raise StorageError("a signal handler cannot use a store while its process forks", hint="try again later")


_process = _Process()
os.register_at_fork(after_in_child=_process.renew)


def forking(is_forking: bool) -> None:
    """Note the beginning or end of a fork. Called by code that stops other threads for it."""
    _process.is_forking = is_forking and threading.get_ident() == _process.main_thread


class _Here(threading.local):
    call: _Call[Any] | None = None


_here = _Here()


def give_up_if_abandoned() -> None:
    """Raise Abandoned if nobody waits. Called between steps of long work, and before its effects become visible."""
    call = _here.call
    if call is not None and call.is_abandoned:
        raise Abandoned


def run(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function(…)` where no signal handler can interrupt it."""
    if not is_exposed():
        return function(*args, **kwargs)
    call = _Call(functools.partial(function, *args, **kwargs))
    return call.wait(lambda: _process.start(call))


def wait_for(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The same for a call that only waits: an interrupt ends the wait at once."""
    if not is_exposed():
        return function(*args, **kwargs)
    call = _Call(functools.partial(function, *args, **kwargs))
    return call.wait(lambda: _process.start(call), patience_s=0.0)


def is_exposed() -> bool:
    """Return whether signal handlers run in this thread."""
    return threading.get_ident() == _process.main_thread


def sheltered(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to run each call with `run`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return run(function, *args, **kwargs)

    return call


class Turns:
    """Calls of the main thread that must stay in order: a handler's save follows the one it interrupted.

    A separate thread runs them, and ends with this object.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._serving = threading.Lock()
        self._has_begun = False
        self._is_closed = False

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. Later calls run in the caller's thread, where they find everything closed."""
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
                self._has_begun = True  # repeated if an interrupt came in between

        return call.wait(begin)


def _serve(queue: SimpleQueue[Callable[[], None] | None], serving: threading.Lock) -> None:
    """Run calls one by one. A surplus thread waits until the end."""
    with serving:
        while (call := queue.get()) is not None:
            call()
            del call  # frees what it refers to before the next one comes
    queue.put(None)


def guarded(port: T) -> T:
    """Wrap an index, blobs or writer. Whoever calls it, an interrupt leaves no lock held in it."""
    return port if isinstance(port, _Guarded) else cast(T, _Guarded(port))


def together(port: object, read: Callable[[], T]) -> T:
    """Run `read`, which calls a port several times. If each call would run in another thread, all of it runs there."""
    is_elsewhere = type(port) is _Guarded and "read" not in getattr(port, "in_place", ())
    return run(read) if is_elsewhere else read()


class _Guarded:
    """Looks like the object it guards, even to isinstance."""

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
        object.__setattr__(self, name, guard)  # the next look-up finds it directly
        return guard

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute. A replaced method affects callers of this object, not the guarded one itself."""
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
        if type(result) is list:  # a save's result; the test for an iterator takes longer
            return result
        if name == "writer":
            return guarded(result)
        return steps(result) if isinstance(result, Iterator) else result

    return call


def steps(items: Iterator[T]) -> Iterator[T]:
    """Run each step of a generator elsewhere, because that is when it works."""
    while (step := run(_next, items)) is not None:
        yield step[0]


def _next(items: Iterator[T]) -> tuple[T] | None:
    for item in items:
        return (item,)
    return None
