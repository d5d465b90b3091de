"""Waiting for people, other programs, and time. All of it survives kills: what was answered stays answered."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from kedge.errors import Validation

from .account import Waiting
from .approval import Approval, PendingApproval, decision_of, expire
from .inbox import SIGNAL, signal_tag
from .keys import Path, show
from .session import Session
from .signals import Paused
from .step import Call

if TYPE_CHECKING:
    from .queues import Handle

T = TypeVar("T")

TIME, RUN = "time", "run"
LOOK_EVERY_S = 0.2
LOOK_AT_CLOCK_EVERY_S = 0.02
_LONGEST_S = 10 * 366 * 86_400


@dataclass(frozen=True, slots=True)
class Question:
    """What `run.approval` asks."""

    prompt: str
    expires_s: float | None
    raises_denial: bool

    def answer(self, key: str, name: str, saved: Mapping[str, Any]) -> Approval:
        """The decision, from what was saved; raises Denied if that is what the question asks for."""
        decision = Approval(**saved)
        if not decision.approved and self.raises_denial:
            raise decision.denied(key, name)
        return decision


def parse_question(prompt: str, expires_s: float | None, on_denied: str) -> Question:
    if on_denied not in ("raise", "return"):
        raise Validation(f"on_denied={on_denied!r}", hint='use "raise" or "return"')
    if expires_s is not None:
        parse_seconds("expires_s", expires_s)
    return Question(str(prompt)[:2000], expires_s, on_denied == "raise")


def parse_seconds(name: str, seconds: float) -> float:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= _LONGEST_S:
        raise Validation(f"{name} must be from 0 to {_LONGEST_S} seconds (got {seconds!r})")
    return seconds


Wait = Generator[float, None, T]  # yields for how many seconds to sleep; returns the answer


@dataclass(frozen=True, slots=True)
class WaitCall:
    """A step that waits, before it is at its place."""

    name: str
    begin: Callable[[Session, Path], Wait[Any]]
    tags: Callable[[Any], Mapping[str, str]] | None = None
    is_claimed: bool = False

    def call(self, function: Callable[[], Any]) -> Call:
        return Call(function, inputs=None, tags=self.tags, is_claimed=self.is_claimed)


def sleep_call(seconds: float, name: str | None, wait_s: float | None) -> WaitCall:
    seconds = parse_seconds("seconds", seconds)
    return WaitCall(name or f"sleep {seconds:g} s", lambda session, path: wait_for_time(session, path, seconds, wait_s))


def signal_call(step: str, name: str, wait_s: float | None) -> WaitCall:
    """Wait for the next message under `name`, at the claimed step `step`."""

    def tags(answer: Any) -> Mapping[str, str]:
        return {"signal": signal_tag(name), "message": str(answer["message"])}

    return WaitCall(step, lambda session, path: wait_for_signal(session, path, name, wait_s), tags, is_claimed=True)


def run_call(handle: Handle, wait_s: float | None) -> WaitCall:
    """Wait for another run."""
    if not hasattr(handle, "outcome"):
        raise Validation(
            f"run.result takes a handle (got {handle!r})", hint="kedge.start(…) and queue.submit(…) give one"
        )
    return WaitCall(f"result of {handle.key}", lambda session, path: wait_for_run(session, path, handle, wait_s))


def refuse_on_event_loop(name: str) -> None:
    """Other tasks would stand still for as long as this waits."""
    if (asyncio := sys.modules.get("asyncio")) is None:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise Validation(
        f"{name}: waiting here would block the event loop",
        hint="use await run.aio.signal(…), run.aio.approval(…), run.aio.result(…) or run.aio.sleep(…)",
    )


def wait_for_signal(session: Session, path: Path, name: str, wait_s: float | None) -> Wait[dict[str, Any]]:
    def look() -> tuple[dict[str, Any]] | None:
        message = session.messages.take(name)
        return None if message is None else (message,)

    return (yield from _wait(session, path, {"for": SIGNAL, "name": name, "prompt": ""}, look, wait_s))


def wait_for_run(session: Session, path: Path, handle: Handle, wait_s: float | None) -> Wait[Any]:
    handle.resume()
    return (yield from _wait(session, path, {"for": RUN, "name": handle.key, "prompt": ""}, handle.outcome, wait_s))


def wait_for_approval(
    session: Session, path: Path, question: Question, wait_s: float | None
) -> Wait[dict[str, object]]:
    """The decision as plain data, as it is saved."""
    name, store = show(path), session.store
    asked_at = session.asked_at(path, {"prompt": question.prompt})
    until = None if question.expires_s is None else _moment(asked_at + question.expires_s)
    asked = PendingApproval(session.key, "run", name, name, question.prompt, _moment(asked_at), until)

    def look() -> tuple[Approval] | None:
        decision = decision_of(store, session.key, name)
        if decision is None and asked.is_expired:
            decision = expire(store, asked)
        return None if decision is None else (decision,)

    return asdict((yield from _wait(session, path, asked.waiting(), look, wait_s)))


def wait_for_time(session: Session, path: Path, seconds: float, wait_s: float | None) -> Wait[None]:
    until = session.asked_at(path, {"seconds": seconds}) + seconds
    if time.time() < until:
        waiting: Waiting = {"for": TIME, "name": show(path), "prompt": ""}
        yield from _wait(session, path, waiting, lambda: (None,) if time.time() >= until else None, wait_s)


def _wait(
    session: Session, path: Path, waiting: Waiting, look: Callable[[], tuple[T] | None], wait_s: float | None
) -> Wait[T]:
    """What `look` answers, sooner or later; after `wait_s` the run pauses, and looks again when it is resumed."""
    if wait_s is not None:
        parse_seconds("wait_s", wait_s)
    if (answer := look()) is not None:
        return answer[0]
    give_up = None if wait_s is None else time.monotonic() + wait_s
    with session.waiting(path, waiting):
        while (answer := look()) is None:
            if give_up is not None and time.monotonic() >= give_up:
                raise Paused(f"it waits for {waiting['for']} {waiting['name']}")
            session.pause_point()
            yield LOOK_AT_CLOCK_EVERY_S if waiting["for"] == TIME else LOOK_EVERY_S
    return answer[0]


def drive(wait: Wait[T]) -> T:
    """The answer of a wait; the thread sleeps meanwhile."""
    while True:
        pause_s, answer = _advance(wait)
        if answer is not None:
            return answer[0]
        try:
            time.sleep(pause_s)
        except BaseException as error:  # a signal: the run may still wait for this when it is resumed
            wait.throw(error)
            raise


async def drive_async(wait: Wait[T]) -> T:
    """The same for a task: the event loop neither sleeps nor asks the store."""
    from asyncio import sleep, to_thread

    while True:
        pause_s, answer = await to_thread(_advance, wait)
        if answer is not None:
            return answer[0]
        try:
            await sleep(pause_s)
        except BaseException as error:
            wait.throw(error)
            raise


def _advance(wait: Wait[T]) -> tuple[float, tuple[T] | None]:
    try:
        return next(wait), None
    except StopIteration as end:
        return 0.0, (end.value,)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
