"""Waiting for people, other programs, and time. All of it survives kills: what was answered stays answered."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from kedge.errors import Validation

from .account import Waiting
from .approval import Approval, PendingApproval, decision_of, expire
from .inbox import SIGNAL, Taken, signal_tag
from .keys import Path, show
from .session import Session
from .signals import Paused
from .step import Call

if TYPE_CHECKING:
    from .queues import Handle

T = TypeVar("T")
R = TypeVar("R")

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

    def answer(self, key: str, name: str, saved: dict[str, Any]) -> Approval:
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
class WaitCall(Generic[T]):
    """A step that waits, before it is at its place."""

    name: str
    begin: Callable[[Session, Path], Wait[T]]
    tags: Callable[[T], Mapping[str, str]] | None = None
    is_claimed: bool = False

    def call(self, function: Callable[[], R]) -> Call[R]:
        return Call(function, inputs=None, tags=self.tags, is_claimed=self.is_claimed)


def sleep_call(seconds: float, name: str | None, wait_s: float | None) -> WaitCall[None]:
    seconds = parse_seconds("seconds", seconds)
    return WaitCall(name or f"sleep {seconds:g} s", lambda session, path: wait_for_time(session, path, seconds, wait_s))


def signal_call(step: str, name: str, wait_s: float | None) -> WaitCall[Taken]:
    """Wait for the next message under `name`, at the claimed step `step`."""

    def tags(answer: Taken) -> Mapping[str, str]:
        return {"signal": signal_tag(name), "message": str(answer["message"])}

    return WaitCall(step, lambda session, path: wait_for_signal(session, path, name, wait_s), tags, is_claimed=True)


def run_call(handle: Handle[T], wait_s: float | None) -> WaitCall[T]:
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


def wait_for_signal(session: Session, path: Path, name: str, wait_s: float | None) -> Wait[Taken]:
    def look() -> tuple[Taken] | None:
        message = session.messages.take(name)
        return None if message is None else (message,)

    return (yield from _wait(session, path, {"for": SIGNAL, "name": name, "prompt": ""}, look, wait_s))


def wait_for_run(session: Session, path: Path, handle: Handle[T], wait_s: float | None) -> Wait[T]:
    handle.resume()
    return (yield from _wait(session, path, {"for": RUN, "name": handle.key, "prompt": ""}, handle.outcome, wait_s))


def wait_for_approval(session: Session, path: Path, question: Question, wait_s: float | None) -> Wait[dict[str, Any]]:
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


class WaitingRun:
    """The half of `Run` that waits for others; never made by itself."""

    key: str

    def claim(self, name: str) -> str:
        """The first free step of this name."""
        raise NotImplementedError

    def call(self, name: str, call: Call[T]) -> T:
        """A step with parsed options."""
        raise NotImplementedError

    def place_of(self, step: str) -> tuple[Session, Path]:
        """The session of the run, and where a step is."""
        raise NotImplementedError

    def signal(self, name: str, *, wait_s: float | None = None) -> Any:
        """The next value that somebody sends to this run under `name` (`kedge.send`, `kedge runs signal`); kept.

        It may be sent before the run asks. Each call takes one message, in the order of sending; the second call is the
        step "name 2", and so on. After `wait_s` the process pauses and exits; None waits on.
        """
        return self.wait(signal_call(self.claim(name), name, wait_s))["value"]

    def approval(
        self,
        name: str,
        *,
        prompt: str = "",
        expires_s: float | None = None,
        wait_s: float | None = None,
        on_denied: str = "raise",
    ) -> Approval:
        """Wait until somebody approves or denies (`kedge.decide`, `kedge approve`): once, by name, for good.

        After `wait_s` the process pauses and exits, and waiting costs nothing: 0 at once, None never. After `expires_s`
        from the first asking it counts as denied. A denial raises Denied here, now and whenever the run is resumed,
        unless on_denied="return".
        """
        question = parse_question(prompt, expires_s, on_denied)
        call = WaitCall(name, lambda session, path: wait_for_approval(session, path, question, wait_s))
        return question.answer(self.key, name, self.wait(call))

    def result(self, handle: Handle[T], *, wait_s: float | None = None) -> T:
        """What another run returned (`kedge.start`, `Queue.submit`), or raise what it failed with; kept.

        After `wait_s` the process pauses and exits; None waits on.
        """
        return self.wait(run_call(handle, wait_s))

    def sleep(self, seconds: float, *, name: str | None = None, wait_s: float | None = None) -> None:
        """Go on `seconds` after the first time the run came here, whatever happened in between."""
        self.wait(sleep_call(seconds, name, wait_s))

    def wait(self, wait: WaitCall[T]) -> T:
        """A step that waits: its answer is saved like any result."""
        refuse_on_event_loop(wait.name)
        session, path = self.place_of(wait.name)
        return self.call(wait.name, wait.call(lambda: drive(wait.begin(session, path))))

    async def wait_async(self, wait: WaitCall[T]) -> T:
        session, path = self.place_of(wait.name)

        async def answer() -> T:
            return await drive_async(wait.begin(session, path))

        return await self.call(wait.name, wait.call(answer))
