"""The keyword arguments of `kedge.run` and `run.map`, for those that pass them on and for type checkers."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Generic, TypedDict, TypeVar

from .retry import Retry

T = TypeVar("T")


class RunKeywords(TypedDict, total=False):
    """Those of `kedge.run`, but for the ones that a pipeline says itself."""

    ttl_s: float
    grace_s: float
    signals: bool
    progress: bool | None
    timeout_s: float | None


class MapKeywords(TypedDict, Generic[T], total=False):
    """Those of `run.map`, but for the ones that change what it answers."""

    name: str | None
    key: Callable[[T], object] | None
    workers: int | None
    executor: str | Executor
    order: str
    retries: int | Retry
    timeout_s: float | None
    version: str | int | None
