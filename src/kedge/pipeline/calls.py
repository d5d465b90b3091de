"""The calls of steps: a step is found as it was kept, or carried out until it succeeds or fails for good, and kept.

claim its path → found under its key? → its result
               → attempt, attempt, … → its result, durable under the key (I1)        fails: every attempt is kept, too
"""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from kedge.errors import Cancelled, Corrupted, LeaseLost, UnsupportedType, Validation
from kedge.model import Checkpoint, parse_step

from .attempt import await_within, call_in_thread
from .keys import Path, arguments, digest_of, imported_tag, show, step_key
from .step import UNSET, Options, Place, place_in

if TYPE_CHECKING:
    from kedge.llm.calls import Shared

    from .run import Run

MAX_ERROR_CHARACTERS = 500
MAX_TRACEBACK_CHARACTERS = 20_000


@dataclass(frozen=True, slots=True)
class Work:
    """One call of a step."""

    place: Place
    key: str
    inputs: Mapping[str, bytes]
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    options: Options
    shared: Shared | None = None  # answered from the store's other runs, too

    @property
    def title(self) -> str:
        return f"step {show(self.place.path)}"


class Calls:
    """Those of one run. From several threads and tasks at once."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._claimed: set[Path] = set()
        self._ahead: dict[str, tuple[Checkpoint, Callable[[], object]]] = {}

    def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        inputs: Any = UNSET,
        keep: bool = True,
        is_shared: bool = False,
        shared: Shared | None = None,
    ) -> Any:
        """A step with parsed options; `step`, `llm` and the decorator end here."""
        work = self._begin(name, function, args, kwargs, options, inputs, shared, is_shared)
        if keep and (kept := self._kept(work)) is not None:
            return kept["result"]
        for attempt in itertools.count(1):
            self._run.pause_point()
            began = time.monotonic()
            try:
                with work.place.entered():
                    result = self._attempt(work)
            except Exception as error:  # noqa: BLE001 - recorded, and raised unless the step is tried again
                self._run.rest(self._failed(work, error, attempt))
            else:
                self._keep(work, result, attempt, time.monotonic() - began, keep=keep)
                return result
        raise AssertionError("unreachable")

    async def run_async(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        *,
        inputs: Any = UNSET,
        keep: bool = True,
        is_shared: bool = False,
        shared: Shared | None = None,
    ) -> Any:
        """The same for a coroutine function; the store is never waited for on the event loop."""
        import asyncio

        work = self._begin(name, function, args, kwargs, options, inputs, shared, is_shared)
        if keep and (kept := await asyncio.to_thread(self._kept, work)) is not None:
            return kept["result"]
        for attempt in itertools.count(1):
            await asyncio.to_thread(self._run.pause_point)
            began = time.monotonic()
            try:
                with work.place.entered():
                    result = await await_within(self._awaited(work), options.timeout_s, work.title)
            except Exception as error:  # noqa: BLE001 - recorded, and raised unless the step is tried again
                wait_s = await asyncio.to_thread(self._failed, work, error, attempt)
                await asyncio.to_thread(self._run.rest, wait_s)
            else:
                seconds = time.monotonic() - began
                await asyncio.to_thread(self._keep, work, result, attempt, seconds, keep=keep)
                return result
        raise AssertionError("unreachable")

    def _begin(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: Options,
        inputs: Any,
        shared: Shared | None,
        is_shared: bool,
    ) -> Work:
        place = place_in(self._run).below(name)
        if not callable(function):
            raise Validation(
                f"step {name!r}: {function!r:.100} cannot be called", hint="use run.step(name, function, *arguments)"
            )
        self.claim(place.path)
        given = arguments(function, args, kwargs) if inputs is UNSET else {"inputs": inputs}
        digests = {
            arg: digest_of(value, lambda arg=arg: f"step {show(place.path)}, input {arg}")  # type: ignore[misc]
            for arg, value in given.items()
        }
        key = step_key(place.path, f"{self._run.version}/{options.version}", digests)
        if is_shared:
            shared = _shared_step(function, options, digests)
        return Work(place, key, digests, function, args, kwargs, options, shared)

    def claim(self, path: Path) -> None:
        """One path, one step: else two of them would be told apart only by chance."""
        self._run.check_entered()
        parse_step(path[-1])
        if len(path) > 1:
            parse_step(show(path))
        with self._lock:
            if path in self._claimed:
                raise Validation(
                    f"run {self._run.key} has two steps with the path {show(path)}",
                    hint="give each call a name of its own, such as one with a number, or use run.map",
                )
            self._claimed.add(path)

    def _kept(self, work: Work) -> Any:
        try:
            found = self._load_kept(work.key)
        except Corrupted as error:
            raise Corrupted(
                f"the result of {work.title} of run {self._run.key} is damaged: {error.message}",
                hint=f"kedge runs explain {self._run.key} shows its ID; "
                f"kedge delete {self._run.key} ID, and it runs again",
            ) from error
        if found is None and self._run.is_imported:
            found = self._imported(work)
        if found is None:
            return None
        self._run.account.reused(show(work.place.path))
        self._run.watcher.step(work.place.path, "reused")
        return found[1]

    def _imported(self, work: Work) -> tuple[Checkpoint, object] | None:
        """What an older system had done at this path, if that ended well. Who declares a version wants it done anew."""
        if self._run.version or work.options.version:
            return None
        newest = self._run.store.list(self._run.key, tags={"imported": imported_tag(work.place.path)}, limit=1)
        if not newest or newest[0].metadata.get("kind") != "step":
            return None
        return newest[0], self._run.store.load(newest[0].id)

    def _load_kept(self, key: str) -> tuple[Checkpoint, Any] | None:
        """What is saved under a step's key. Steps are mostly asked for in the order in which they were saved."""
        if (ahead := self._ahead.pop(key, None)) is not None:
            return ahead[0], ahead[1]()
        if (found := self._run.store.load_by_key(self._run.key, key)) is not None:
            self._ahead = self._run.store.read_ahead(self._run.key, found[0].seq)
        return found

    def _attempt(self, work: Work) -> Any:
        if work.shared is None:
            return self._carry_out(work)
        from kedge.llm.exchange import drive

        return drive(work.shared.steps(self._run.store), lambda: self._carry_out(work))

    def _awaited(self, work: Work) -> Awaitable[Any]:
        if work.shared is None:
            return work.function(*work.args, **work.kwargs)  # type: ignore[no-any-return]
        from kedge.llm.exchange import drive_async

        return drive_async(work.shared.steps(self._run.store), lambda: work.function(*work.args, **work.kwargs))

    def _carry_out(self, work: Work) -> Any:
        timeout_s = work.options.timeout_s
        if timeout_s is None:
            return work.function(*work.args, **work.kwargs)
        if work.options.timeout_in == "thread":
            return call_in_thread(work.function, work.args, work.kwargs, timeout_s, work.title)
        payer = (self._run.key, show(work.place.path))
        return self._run.isolation.call(work.function, work.args, work.kwargs, timeout_s, work.title, payer)

    def _failed(self, work: Work, error: Exception, attempt: int) -> float:
        """Record a failed attempt; answers how long to wait for the next one, or raises what the step failed with."""
        if isinstance(error, LeaseLost | Cancelled):
            raise error
        path = work.place.path
        metadata = {
            "kind": "attempt",
            "session": self._run.session,
            "attempt": attempt,
            "error": one_line(error),
        }
        self._run.save(path, {"traceback": traceback_of(error)}, work.place.level, metadata)
        self._run.watcher.step(path, "failed", note=one_line(error))
        if not work.options.retry.allows(error, attempt):
            times = "" if attempt == 1 else f", {attempt} times"
            error.add_note(f"It failed in {work.title} of run {self._run.key}{times}.")
            raise error
        self.forget_below(path)
        return work.options.retry.wait_s(attempt)

    def forget_below(self, path: Path) -> None:
        """The steps inside a step that is tried again will be called again."""
        with self._lock:
            for other in [o for o in self._claimed if len(o) > len(path) and o[: len(path)] == path]:
                self._claimed.discard(other)

    def _keep(self, work: Work, result: object, attempt: int, seconds: float, *, keep: bool) -> None:
        """Durable before the next step begins (I1)."""
        path = show(work.place.path)
        if keep:
            metadata = {
                "kind": "step",
                "session": self._run.session,
                "attempts": attempt,
                "seconds": round(seconds, 6),
                "version": f"{self._run.version}/{work.options.version}",
                "inputs": {name: digest.hex()[:16] for name, digest in work.inputs.items()},
            }
            if bill := self._run.account.bill(work.place.path):
                metadata["llm"] = bill.to_json()
            try:
                self._run.save(work.place.path, {"result": result}, work.place.level, metadata, work.key)
            except UnsupportedType as error:
                _name_result(error, f"the result of {work.title}")
        self._run.account.ran(path)
        self._run.watcher.step(work.place.path, "ran", seconds, money=self._run.account.money(work.place.path))


def _shared_step(function: Callable[..., Any], options: Options, inputs: Mapping[str, bytes]) -> Shared:
    from kedge.llm.calls import Shared, step_request
    from kedge.llm.exchange import Policy

    name = getattr(function, "__qualname__", type(function).__qualname__)
    return Shared(step_request(name, options.version, inputs), Policy())


def _name_result(error: UnsupportedType, what: str) -> NoReturn:
    path = error.path.replace('state["result"]', "result", 1)
    raise UnsupportedType(
        f"{what} cannot be kept: {error.message.replace(error.path, path)}", hint=error.hint, path=path
    ) from error


def one_line(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip().encode("utf-8", "replace").decode()
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]


def traceback_of(error: BaseException) -> str:
    text = "".join(traceback.format_exception(error)).encode("utf-8", "replace").decode()
    return text if len(text) <= MAX_TRACEBACK_CHARACTERS else "…\n" + text[-MAX_TRACEBACK_CHARACTERS:]
