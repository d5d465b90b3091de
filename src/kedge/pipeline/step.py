"""The steps of a run: each is answered from the store, or attempted until it succeeds or fails for good, and saved.

path claimed → saved under its key? → that result
             → attempt, attempt, … → result, durable under the key (I1)          every failed attempt is recorded, too
"""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from kedge.errors import Cancelled, Corrupted, LeaseLost, UnsupportedType, Validation
from kedge.model import Checkpoint, parse_step

from . import interruption
from .attempt import TIMEOUT_IN, await_within, call_in_thread
from .failure import Failure, one_line
from .final_failures import FINAL
from .keys import Path, arguments, digest_of, imported_tag, preview, show, step_key
from .place import Attempted, Place, carry
from .retry import Retry, parse_retries, parse_timeout
from .session import Session
from .telemetry import step_span

if TYPE_CHECKING:
    from kedge.llm.calls import Shared

R = TypeVar("R")

UNSET = object()
_OTHER_INPUTS = "pass it plain values, or say what identifies them: run.step(…, inputs=…)"
_SHOWN_INPUTS = 20  # of a step, with its record


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


def is_coroutine_function(function: Callable[..., object]) -> bool:
    """As `inspect` says; of a plain function, at once."""
    if type(function) is FunctionType and not function.__dict__:  # where a mark would be
        return bool(function.__code__.co_flags & inspect.CO_COROUTINE)
    return inspect.iscoroutinefunction(function)


@dataclass(slots=True)
class Call(Generic[R]):
    """A call of a step, as the program makes it. Nobody changes it; freezing it and `Step` takes 2 µs a step."""

    function: Callable[..., R]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    options: Options = PLAIN
    inputs: object = UNSET  # instead of the arguments
    is_saved: bool = True  # else it runs every time
    share: Callable[[Mapping[str, bytes]], Shared] | None = None  # with other runs; takes the digests of its inputs
    tags: Callable[[Any], Mapping[str, str]] | None = None  # of the record of a result
    is_claimed: bool = False  # its path was claimed by `claim_free`


@dataclass(slots=True)
class Step(Generic[R]):
    """A call at its place, with the key its result is saved under. Nobody changes it (see `Call`)."""

    place: Place
    call: Call[R]
    given: Mapping[str, object]  # its inputs
    inputs: Mapping[str, bytes]  # their digests
    key: str
    version: str
    shared: Shared | None
    shown_inputs: dict[str, str] = field(default_factory=dict)  # the first few, in words, once it is to be attempted

    @property
    def path(self) -> Path:
        return self.place.path

    @property
    def title(self) -> str:
        return f"step {show(self.place.path)}"

    def show_inputs(self) -> None:
        """As they are before the function may change them."""
        for name, value in itertools.islice(self.given.items(), _SHOWN_INPUTS):
            self.shown_inputs[name] = preview(name, value)


class Steps:
    """The steps of one session. From several threads and tasks at once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._claimed: set[Path] = set()
        self._ahead: dict[str, tuple[Checkpoint, Callable[[], object]]] = {}
        self._read_to: int | None = None  # the last of them; None: nothing is known to follow
        # Of a run that began here: the keys under which anything is saved. Nobody else saves while we hold its lease
        # (I5), which we do while the session is alone. Else None, and the store is asked.
        self._saved_here: set[str] | None = set() if session.is_first else None

    def run(self, place: Place, call: Call[R]) -> R:
        """The result of a step; durable when this returns."""
        step = self._begin(place, call)
        if (saved := self._saved(step)) is not None:
            result: R = saved["result"]
            return result
        self._raise_kept(step)
        step.show_inputs()
        for attempt in itertools.count(1):
            self._session.pause_point()
            began = time.monotonic()
            try:
                with self._attempting(step, attempt), self._session.signals.in_step():
                    result = self._attempt(step)
            except Exception as error:  # noqa: BLE001 - recorded, and raised unless the step is tried again
                self._session.wait(self._record_failure(step, error, attempt, time.monotonic() - began))
            else:
                self._save(step, result, attempt, time.monotonic() - began)
                return result
        raise AssertionError("unreachable")

    async def run_async(self, place: Place, call: Call[Awaitable[R]]) -> R:
        """The same for a coroutine function; the store is never waited for on the event loop."""
        from asyncio import CancelledError, to_thread

        step = self._begin(place, call)
        if (saved := await to_thread(self._saved, step)) is not None:
            result: R = saved["result"]
            return result
        self._raise_kept(step)
        step.show_inputs()
        for attempt in itertools.count(1):
            await to_thread(self._session.pause_point)
            began = time.monotonic()
            try:
                with self._attempting(step, attempt), self._session.in_task():
                    result = await await_within(self._attempt_async(step), call.options.timeout_s, step.title)
            except CancelledError as error:
                self._session.raise_stopped(error)
                raise
            except Exception as error:  # noqa: BLE001 - recorded, and raised unless the step is tried again
                seconds = time.monotonic() - began
                wait_s = await to_thread(self._record_failure, step, error, attempt, seconds)
                await self._session.wait_async(wait_s)
            else:
                await to_thread(self._save, step, result, attempt, time.monotonic() - began)
                return result
        raise AssertionError("unreachable")

    def claim(self, path: Path) -> None:
        """One path, one step: else two of them would be told apart only by chance."""
        self._session.check_open()
        parse_step(path[-1])
        if len(path) > 1:
            parse_step(show(path))
        with self._lock:
            if path in self._claimed:
                raise Validation(
                    f"run {self._session.key} has two steps with the path {show(path)}",
                    hint="give each call a name of its own, such as one with a number, or use run.map",
                )
            self._claimed.add(path)

    def claim_free(self, place: Place, name: str) -> str:
        """Claim the first free path of "name", "name 2", "name 3", … and answer its last part."""
        self._session.check_open()
        for number in itertools.count(1):
            numbered = parse_step(name if number == 1 else f"{name} {number}")
            with self._lock:
                if (path := place.below(numbered).path) not in self._claimed:
                    self._claimed.add(path)
                    return numbered
        raise AssertionError("unreachable")

    def unclaim_below(self, path: Path) -> None:
        """The steps inside a step that is tried again will be called again."""
        with self._lock:
            for other in [o for o in self._claimed if len(o) > len(path) and o[: len(path)] == path]:
                self._claimed.discard(other)

    def _begin(self, place: Place, call: Call[R]) -> Step[R]:
        if not callable(call.function):
            raise Validation(
                f"step {place.path[-1]!r}: {call.function!r:.100} cannot be called",
                hint="use run.step(name, function, *arguments)",
            )
        if not call.is_claimed:
            self.claim(place.path)
        self._session.failures.step_begins()
        given = arguments(call.function, call.args, call.kwargs) if call.inputs is UNSET else {"inputs": call.inputs}
        inputs = {
            name: digest_of(value, partial(_input_name, place.path, name), _OTHER_INPUTS)
            for name, value in given.items()
        }
        version = f"{self._session.version}/{call.options.version}"
        shared = call.share(inputs) if call.share is not None else None
        return Step(place, call, given, inputs, step_key(place.path, version, inputs), version, shared)

    # What was saved before

    def _saved(self, step: Step[R]) -> Any:
        if not step.call.is_saved:
            return None
        session = self._session
        try:
            result = self._load(step.key)
        except Corrupted as error:
            raise Corrupted(
                f"the result of {step.title} of run {session.key} is damaged: {error.message}",
                hint=f"kedge runs explain {session.key} shows its ID; kedge delete {session.key} ID, and it runs again",
            ) from error
        if result is None and session.is_imported:
            result = self._imported(step)
        if result is not None:
            session.account.reused(show(step.path))
            session.watcher.step(step.path, "reused")
        return result

    def _raise_kept(self, step: Step[R]) -> None:
        """Raise what the step failed with for good in an earlier session, if the pipeline handled that."""
        session = self._session
        if step.call.is_saved and (error := session.failures.take(step.key, step.path)) is not None:
            session.account.reused(show(step.path))
            session.watcher.step(step.path, "failed", note=f"{one_line(error)} (kept)")
            raise error

    def _load(self, key: str) -> object | None:
        """What is saved under a step's key. Steps are mostly asked for in the order in which they were saved."""
        store = self._session.store
        if (ahead := self._ahead.pop(key, None)) is not None:
            return ahead[1]()
        if self._saved_here is not None and key not in self._saved_here and self._session.is_alone:
            return None
        if not self._ahead and self._read_to is not None:
            self._read_ahead(self._read_to)
            if (ahead := self._ahead.pop(key, None)) is not None:
                return ahead[1]()
        if (saved := store.load_by_key(self._session.key, key)) is None:
            return None
        checkpoint, state = saved
        self._read_ahead(checkpoint.seq)
        return state

    def _read_ahead(self, after: int) -> None:
        self._ahead = ahead = self._session.store.read_ahead(self._session.key, after)
        self._read_to = max((checkpoint.seq for checkpoint, _ in ahead.values()), default=None)

    def _imported(self, step: Step[R]) -> object | None:
        """What an older system had done at this path, if that ended well. Who declares a version wants it done anew."""
        if step.version != "/":
            return None
        store = self._session.store
        newest = store.list(self._session.key, tags={"imported": imported_tag(step.path)}, limit=1)
        if not newest or newest[0].metadata.get("kind") != "step":
            return None
        answer: object = store.load(newest[0].id)
        return answer

    # One attempt

    def _attempting(self, step: Step[R], number: int) -> Attempted:
        session = self._session
        place = step.place if number == 1 else replace(step.place)  # which tells one attempt from another
        return Attempted(place, (session.identity, step.key), step_span(session, step.path, number))

    def _attempt(self, step: Step[R]) -> R:
        if step.shared is None:
            return self._call(step)
        from kedge.llm.exchange import drive

        result: R = drive(step.shared.steps(self._session.store), lambda: self._call(step))
        return result

    def _attempt_async(self, step: Step[Awaitable[R]]) -> Awaitable[R]:
        call = step.call
        if step.shared is None:
            return call.function(*call.args, **call.kwargs)
        from kedge.llm.exchange import drive_async

        return drive_async(step.shared.steps(self._session.store), lambda: call.function(*call.args, **call.kwargs))

    def _call(self, step: Step[R]) -> R:
        call, timeout_s = step.call, step.call.options.timeout_s
        if timeout_s is None:
            return interruption.call(call.function, call.args, call.kwargs)
        if call.options.timeout_in == "thread":
            return call_in_thread(call.function, call.args, call.kwargs, timeout_s, step.title)
        carried = carry(self._session.key, show(step.path))
        return self._session.isolation.call(call.function, call.args, call.kwargs, timeout_s, step.title, carried)

    # What is saved of it

    def _record_failure(self, step: Step[R], error: Exception, attempt: int, seconds: float) -> float:
        """Record a failed attempt; answers how long to wait for the next one, or raises what the step failed with."""
        if isinstance(error, LeaseLost | Cancelled):
            raise error
        self._session.raise_stopped(error)
        session, retry = self._session, step.call.options.retry
        is_final = not retry.allows(error, attempt)
        line = one_line(error)
        metadata: dict[str, object] = {
            "kind": "attempt",
            "attempt": attempt,
            "seconds": round(seconds, 6),
            "error": line,
            "given": step.shown_inputs,
        }
        tags = None
        if is_final and step.call.is_saved:
            metadata["step_key"], tags = step.key, FINAL
        session.save(step.path, Failure.of(error).state(), step.place.level, metadata, tags=tags)
        session.watcher.step(step.path, "failed", note=line)
        if is_final:
            if step.call.is_saved:
                session.failures.add(step.key, step.path, error)
            times = "" if attempt == 1 else f", {attempt} times"
            error.add_note(f"It failed in {step.title} of run {session.key}{times}.")
            raise error
        self.unclaim_below(step.path)
        session.failures.attempt_again(step.path, error)
        return retry.wait_s(attempt)

    def _save(self, step: Step[R], result: object, attempts: int, seconds: float) -> None:
        """Durable before the next step begins (I1)."""
        session = self._session
        if step.call.is_saved:
            metadata: dict[str, object] = {
                "kind": "step",
                "attempts": attempts,
                "seconds": round(seconds, 6),
                "version": step.version,
                "inputs": {name: digest.hex()[:16] for name, digest in step.inputs.items()},
                "given": step.shown_inputs,
            }
            if bill := session.account.bill(step.path):
                metadata["llm"] = bill.to_json()
            if self._saved_here is not None:
                self._saved_here.add(step.key)  # before: a save that fails may have been committed
            try:
                tags = None if step.call.tags is None else step.call.tags(result)
                session.save(step.path, {"result": result}, step.place.level, metadata, step.key, tags)
            except UnsupportedType as error:
                _name_result(error, f"the result of {step.title}")
        session.account.ran(show(step.path))
        session.watcher.step(step.path, "ran", seconds, money=session.account.money(step.path))


def _name_result(error: UnsupportedType, what: str) -> NoReturn:
    path = error.path.replace('state["result"]', "result", 1)
    raise UnsupportedType(
        f"{what} cannot be saved: {error.message.replace(error.path, path)}", hint=error.hint, path=path
    ) from error


def _input_name(path: Path, name: str) -> str:
    return f"step {show(path)}, input {name}"
