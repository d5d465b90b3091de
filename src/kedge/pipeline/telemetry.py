"""Spans and metrics of runs, steps, items and LLM calls, for programs that have set up OpenTelemetry.

Nothing of it is imported where the program has not done so: each of these is one look into `sys.modules` then. The SDK
decides what is sampled and exported. Metrics have few attributes; spans say which run, step and item.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

from kedge.version import __version__

from .keys import Path, show
from .progress import Tally, Watcher

if TYPE_CHECKING:
    from kedge.llm.bills import Charge

    from .session import Session

Facts = Mapping[str, str | int]
_OFF: AbstractContextManager[Any] = nullcontext()
_LLM = "gen_ai."  # as OpenTelemetry calls what is said of LLM calls


def span(name: str, attributes: Facts | None = None, context: Any = None) -> AbstractContextManager[Any]:
    """A span around a block. An exception that leaves the block is recorded with it. `context`: None for this one's."""
    if (get_tracer := _said_by("trace", "get_tracer")) is None:
        return _OFF
    tracer = get_tracer("kedge", __version__)
    return tracer.start_as_current_span(name, context, attributes=attributes)  # type: ignore[no-any-return]


def trace_here() -> dict[str, str]:
    """The trace that this thread is in, as the program's propagators write it: a worker goes on with it. {}: none."""
    carrier: dict[str, str] = {}
    get_current_span = _said_by("trace", "get_current_span")
    if get_current_span is not None and get_current_span().get_span_context().is_valid:
        from opentelemetry.propagate import inject  # its package is imported

        inject(carrier)
    return carrier


def _context_of(origin: Mapping[str, object]) -> Any:
    """The trace in which a run was submitted; None if there is none, or nobody asks for it."""
    entry = origin.get("entry")
    trace = entry.get("trace") if isinstance(entry, Mapping) else None
    if not isinstance(trace, Mapping) or "opentelemetry.trace" not in sys.modules:
        return None
    from opentelemetry.propagate import extract

    return extract({str(name): str(value) for name, value in trace.items()})


def step_span(session: Session, path: Path, attempt: int) -> AbstractContextManager[Any]:
    if "opentelemetry.trace" not in sys.modules:
        return _OFF
    facts: Facts = {"kedge.run": session.key, "kedge.step": show(path), "kedge.attempt": attempt}
    return span(f"step {show(path)}", facts)


def item_span(run: str, path: Path, label: str, attempt: int) -> AbstractContextManager[Any]:
    if "opentelemetry.trace" not in sys.modules:
        return _OFF
    facts: Facts = {"kedge.run": run, "kedge.step": show(path), "kedge.item": label, "kedge.attempt": attempt}
    return span(f"item of {show(path)}", facts)


@contextmanager
def run_span(session: Session, origin: Mapping[str, object]) -> Iterator[None]:
    """Around all of a session, in the trace of who submitted it; how it ended, `session.leave` has been told."""
    facts: Facts = {
        "kedge.run": session.key, "kedge.session": session.number, "kedge.pipeline": session.pipeline or "",
        "kedge.queue": session.queue, "kedge.parent": session.parent,
    }  # fmt: skip
    began = time.monotonic()
    with span(f"run {session.pipeline or session.key}", facts, _context_of(origin)) as current:
        yield
        status, error = session.ended or ("", None)
        if current is not None:
            current.set_attribute("kedge.status", str(status))
            if isinstance(error, Exception):
                trace = sys.modules["opentelemetry.trace"]
                current.record_exception(error)
                current.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
    if (instruments := _instruments_here()) is not None:
        facts = {"kedge.pipeline": session.pipeline or "", "kedge.status": str(status)}
        instruments["run.duration"].record(time.monotonic() - began, facts)


def measured(watcher: Watcher, pipeline: str | None) -> Watcher:
    """The watcher of a run, which counts what it is told."""
    instruments = _instruments_here()
    return watcher if instruments is None else _Measured(watcher, {"kedge.pipeline": pipeline or ""}, instruments)


def count_llm_call(charge: Charge) -> None:
    """Of a call that was paid, or answered from the cache."""
    tokens = {} if charge.tokens is None else {"input": charge.tokens.input, "output": charge.tokens.output}
    facts: dict[str, str | bool] = {f"{_LLM}request.model": charge.model, "kedge.llm.cached": charge.is_saved}
    if (get_current_span := _said_by("trace", "get_current_span")) is not None:
        used = {f"{_LLM}usage.{kind}_tokens": count for kind, count in tokens.items()}
        current = get_current_span()
        if current.is_recording():
            current.set_attributes({**facts, **used})
    if (instruments := _instruments_here()) is not None:
        instruments["llm.calls"].add(1, facts)
        for kind, count in tokens.items():
            instruments["llm.tokens"].add(count, {**facts, f"{_LLM}token.type": kind})
        if charge.cost is not None:
            instruments["llm.cost"].add(float(charge.cost), facts)


class _Measured(Watcher):
    def __init__(self, inner: Watcher, facts: Mapping[str, str], instruments: Mapping[str, Any]) -> None:
        self._inner = inner
        self._facts = facts
        self._instruments = instruments
        self._counted: dict[tuple[Path, str], int] = {}
        self.stage, self.money, self.say, self.close = inner.stage, inner.money, inner.say, inner.close  # type: ignore[method-assign]

    def step(self, path: Path, verdict: str, seconds: float | None = None, note: str = "", money: str = "") -> None:
        facts = {**self._facts, "kedge.outcome": verdict}
        self._instruments["steps"].add(1, facts)
        if seconds is not None:
            self._instruments["step.duration"].record(seconds, facts)
        self._inner.step(path, verdict, seconds, note, money)

    def items(self, path: Path, tally: Tally, *, is_over: bool) -> None:
        for outcome, count in (("ran", tally.done), ("reused", tally.reused), ("failed", tally.failed)):
            if more := count - self._counted.get((path, outcome), 0):
                self._counted[path, outcome] = count
                self._instruments["items"].add(more, {**self._facts, "kedge.outcome": outcome})
        self._inner.items(path, tally, is_over=is_over)


def _instruments_here() -> Mapping[str, Any] | None:
    get_meter_provider = _said_by("metrics", "get_meter_provider")
    return None if get_meter_provider is None else _instruments(get_meter_provider())


def _said_by(module: str, name: str) -> Any:
    """None where nobody has imported the module, or where another thread is at it and has not come that far."""
    return getattr(sys.modules.get(f"opentelemetry.{module}"), name, None)


@cache
def _instruments(provider: Any) -> Mapping[str, Any]:
    meter = provider.get_meter("kedge", __version__)
    return {
        "run.duration": meter.create_histogram("kedge.run.duration", "s", "Sessions of runs, by status"),
        "steps": meter.create_counter("kedge.steps", "{step}", "Steps that ran, were reused or failed"),
        "step.duration": meter.create_histogram("kedge.step.duration", "s", "Steps that ran"),
        "items": meter.create_counter("kedge.items", "{item}", "Items of maps that ran, were reused or failed"),
        "llm.calls": meter.create_counter("kedge.llm.calls", "{call}", "LLM calls, paid or from the cache"),
        "llm.tokens": meter.create_counter("kedge.llm.tokens", "{token}", "Tokens of LLM calls"),
        "llm.cost": meter.create_counter("kedge.llm.cost", "USD", "What LLM calls cost, or would have cost"),
    }
