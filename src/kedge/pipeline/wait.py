"""Waiting for people, other programs, and time. All of it survives kills: what was answered stays answered."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from kedge.errors import Conflict, Denied, NotFound, Validation
from kedge.manager import CheckpointManager
from kedge.model import CheckpointId, parse_decision, parse_step

from .inbox import SUFFIX, parse_run_key, post
from .keys import Path, show, step_key
from .owner import newest_status

if TYPE_CHECKING:
    from .run import Run

T = TypeVar("T")

SIGNAL, APPROVAL = "signal", "approval"
LOOK_EVERY_S = 0.2
EXPIRED = "expiry"
_LONGEST_S = 10 * 366 * 86_400


@dataclass(frozen=True, slots=True)
class Approval:
    """A decision: final, and by whom."""

    approved: bool
    actor: str
    comment: str = ""
    decided_at: str = ""

    def denied(self, key: str, name: str) -> Denied:
        why = f": {self.comment}" if self.comment else ""
        return Denied(
            f"approval {name} of run {key} was denied by {self.actor}{why}", hint="a denial is final; use another key"
        )


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: str
    expires_s: float | None
    raises: bool


def parse_ask(prompt: str, expires_s: float | None, on_denied: str) -> Ask:
    if on_denied not in ("raise", "return"):
        raise Validation(f"on_denied={on_denied!r}", hint='use "raise" or "return"')
    if expires_s is not None:
        parse_seconds("expires_s", expires_s)
    return Ask(str(prompt)[:2000], expires_s, on_denied == "raise")


def parse_seconds(name: str, seconds: float) -> float:
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not 0 <= seconds <= _LONGEST_S:
        raise Validation(f"{name}={seconds!r} makes no sense", hint="use seconds from 0 on")
    return seconds


# What others do


def send(store: CheckpointManager, key: str, name: str, value: object = None) -> CheckpointId:
    """Send a value to a run that waits, or will wait, for `run.signal(name)`."""
    return post(store, key, SIGNAL, parse_step(name), value)


def decide(
    store: CheckpointManager, key: str, name: str, approved: bool, *, actor: str | None = None, comment: str = ""
) -> Approval:
    """Approve or deny what a run waits for, for good. Conflict when it was decided, NotFound when nobody asked.

    `name` is the path of the approval, with the stages it is in.
    """
    approved = parse_decision(approved)
    made = decision_of(store, key, name)
    if made is None:
        newest = newest_status(store, parse_run_key(key))
        waits = newest.metadata.get("waiting") if newest else None
        if not any(w.get("for") == APPROVAL and w.get("name") == name for w in waits or ()):  # type: ignore[attr-defined]
            raise NotFound(f"run {key} does not wait for approval {name}", hint="kedge runs show RUN says for what")
        try:
            return _settle(store, key, name, approved, actor or store.actor, comment)
        except Conflict:
            made = decision_of(store, key, name)  # somebody was faster
            if made is None:
                raise
    word = "approved" if made.approved else "denied"
    raise Conflict(f"approval {name} of run {key} was {word} by {made.actor}", hint="a decision is final")


def decision_of(store: CheckpointManager, key: str, name: str) -> Approval | None:
    found = store.load_by_key(parse_run_key(key) + SUFFIX, _decision_key(name))
    state: Any = found[1] if found else None
    return None if state is None else Approval(**state["value"])


def _settle(store: CheckpointManager, key: str, name: str, approved: bool, actor: str, comment: str) -> Approval:
    """The index sees to it that a decision is made once: all of them have the same idempotency key."""
    made = Approval(bool(approved), str(actor)[:200], str(comment)[:2000], datetime.now(UTC).isoformat())
    post(store, key, APPROVAL, name, asdict(made), idempotency_key=_decision_key(name))
    return made


def _decision_key(name: str) -> str:
    return "decision:" + step_key((name,), "", {})


# What a run does


def for_signal(run: Run, path: Path, name: str, wait_s: float | None) -> Any:
    def look() -> tuple[Any] | None:
        wanted = {"kind": SIGNAL, "name": name}
        for message in run.store.list(run.key + SUFFIX, metadata=wanted, after=0, limit=1):
            state: Any = run.store.load(message.id)
            return (state["value"],)
        return None

    return _wait(run, path, SIGNAL, "", look, wait_s)


def for_decision(run: Run, path: Path, ask: Ask, wait_s: float | None) -> dict[str, object]:
    asked = run.asked(path, {"prompt": ask.prompt})
    name = show(path)

    def look() -> tuple[Approval] | None:
        made = decision_of(run.store, run.key, name)
        if made is None and ask.expires_s is not None and time.time() >= asked["asked_at"] + ask.expires_s:
            try:
                made = _settle(run.store, run.key, name, False, EXPIRED, f"nobody decided within {ask.expires_s:g} s")
            except Conflict:
                made = decision_of(run.store, run.key, name)  # at the last moment
        return None if made is None else (made,)

    return asdict(_wait(run, path, APPROVAL, ask.prompt, look, wait_s))


def for_time(run: Run, path: Path, seconds: float, wait_s: float | None) -> None:
    until = run.asked(path, {"seconds": seconds})["asked_at"] + seconds
    if time.time() < until:
        _wait(run, path, "time", "", lambda: (None,) if time.time() >= until else None, wait_s)


def _wait(run: Run, path: Path, what: str, prompt: str, look: Callable[[], tuple[T] | None], wait_s: float | None) -> T:
    """What `look` finds, sooner or later; after `wait_s` the run pauses, and looks again when it is resumed."""
    if wait_s is not None:
        parse_seconds("wait_s", wait_s)
    found = look()
    if found is not None:
        return found[0]
    give_up = None if wait_s is None else time.monotonic() + wait_s
    with run.seen_waiting(path, what, prompt):
        while (found := look()) is None:
            if give_up is not None and time.monotonic() >= give_up:
                run.pause(f"it waits for {what} {show(path)}")
            run.pause_point()
            time.sleep(LOOK_EVERY_S if what != "time" else 0.02)
    return found[0]
