"""Injected faults, for tests of everything that uses a port.

    plan = Plan(Fault("commit", error=StorageError("boom")))        # the first commit fails before it happens
    blobs = inject(PackBlobs(folder), plan)
    index = inject(SqliteIndex(path), Plan(Fault("commit", 2, after=True, kill=True)))  # dies once it is durable

A plan counts calls by method name, over all threads and all writers of the object it wraps.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault at the `call`th call of `method`: it waits, then dies, then raises, as specified.

    after      only once the method has done its work, like an answer lost on the way
    until      the last call that is hit, for lasting faults; by default `call`
    flip_bit   the number of a bit to flip in what `read_into` read (I2)
    """

    method: str
    call: int = 1
    until: int | None = None
    after: bool = False
    error: BaseException | None = None
    delay_s: float = 0.0
    kill: bool = False
    flip_bit: int | None = None

    def strike(self) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.error is not None:
            raise self.error


class Plan:
    """Faults to come. `calls` counts calls by method; `struck` lists the faults that have happened."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = list(faults)
        self.calls: Counter[str] = Counter()
        self.struck: list[Fault] = []
        self._lock = threading.Lock()

    def due(self, method: str) -> list[Fault]:
        """Count a call and return the faults for it."""
        with self._lock:
            self.calls[method] += 1
            number = self.calls[method]
            due = [
                fault
                for fault in self.faults
                if fault.method == method and fault.call <= number <= (fault.until or fault.call)
            ]
            self.struck += due
            return due

    def around(self, method: str, action: Callable[[], _T], target: memoryview | None = None) -> _T:
        """Run `action` as a call of `method`, with the planned faults."""
        faults = self.due(method)
        for fault in faults:
            if not fault.after and fault.flip_bit is None:
                fault.strike()
        result = action()
        for fault in faults:
            if fault.flip_bit is not None and target is not None and target.nbytes:
                data = target.cast("B")
                data[fault.flip_bit // 8 % len(data)] ^= 1 << fault.flip_bit % 8
            if fault.after:
                fault.strike()
        return result


def inject(inner: _T, plan: Plan) -> _T:
    """Wrap blobs, an index or anything else, with the plan around each method, including those of its writers."""
    return cast(_T, _Injected(inner, plan))


class _Injected:
    def __init__(self, inner: object, plan: Plan) -> None:
        self._inner = inner
        self._plan = plan

    def __getattr__(self, name: str) -> object:
        value = getattr(self._inner, name)
        if not callable(value):
            return value

        def call(*args: object, **kwargs: object) -> object:
            target = args[-1] if name == "read_into" else None
            result = self._plan.around(
                name, lambda: value(*args, **kwargs), target if isinstance(target, memoryview) else None
            )
            return inject(result, self._plan) if name == "writer" else result

        return call
