"""Waiting for people, other programs, and time. All of it survives kills: what was answered stays answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar

from kedge.errors import Validation
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, CheckpointId, parse_step

from .account import Waiting
from .approval import Approval, PendingApproval, decision_of, expire
from .inbox import post
from .keys import Path, show
from .session import Session
from .signals import Paused

T = TypeVar("T")

SIGNAL, TIME = "signal", "time"
LOOK_EVERY_S = 0.2
LOOK_AT_CLOCK_EVERY_S = 0.02
_LONGEST_S = 10 * 366 * 86_400


@dataclass(frozen=True, slots=True)
class Question:
    """What `run.approval` asks."""

    prompt: str
    expires_s: float | None
    raises_denial: bool


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


def send(store: CheckpointManager, key: str, name: str, value: object = None) -> CheckpointId:
    """Send a value to a run that waits, or will wait, for `run.signal(name)`."""
    return post(store, key, SIGNAL, parse_step(name), value)


def wait_for_signal(session: Session, path: Path, name: str, wait_s: float | None) -> Any:
    def look() -> tuple[Any] | None:
        first = session.store.list(
            session.key + INBOX_SUFFIX, metadata={"kind": SIGNAL, "name": name}, after=0, limit=1
        )
        if not first:
            return None
        state: Any = session.store.load(first[0].id)
        return (state["value"],)

    return _wait(session, path, {"for": SIGNAL, "name": show(path), "prompt": ""}, look, wait_s)


def wait_for_approval(session: Session, path: Path, question: Question, wait_s: float | None) -> dict[str, object]:
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

    return asdict(_wait(session, path, asked.waiting(), look, wait_s))


def wait_for_time(session: Session, path: Path, seconds: float, wait_s: float | None) -> None:
    until = session.asked_at(path, {"seconds": seconds}) + seconds
    if time.time() < until:
        waiting: Waiting = {"for": TIME, "name": show(path), "prompt": ""}
        _wait(session, path, waiting, lambda: (None,) if time.time() >= until else None, wait_s)


def _wait(
    session: Session, path: Path, waiting: Waiting, look: Callable[[], tuple[T] | None], wait_s: float | None
) -> T:
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
            time.sleep(LOOK_AT_CLOCK_EVERY_S if waiting["for"] == TIME else LOOK_EVERY_S)
    return answer[0]


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
