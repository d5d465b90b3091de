"""How a session of a run begins: in one transaction with the run itself, or behind earlier sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

from kedge.errors import LeaseHeld
from kedge.manager import CheckpointManager
from kedge.model import Lease, RunStatus
from kedge.ports import Mark, Unmet
from kedge.store.lease import FIRST_TOKEN, check_ttl, default_holder

from .owner import held_by_another, take_lease
from .session import Session
from .watch import watch_here

LOOK_EVERY_S = 1.0  # whether a run is to be ended


def first_lease(key: str, ttl_s: float) -> Lease:
    """The first one of a run, for this process."""
    return Lease(key, FIRST_TOKEN, default_holder(), ttl_s)


class MakeSession(Protocol):
    def __call__(self, lease: Lease, *, is_first: bool) -> Session: ...


@dataclass(frozen=True, slots=True)
class Takeover:
    """How a worker takes a run that nobody has begun: who holds the lease that is taken, and which entry is marked."""

    lease: Lease
    hold: Callable[[Callable[[], Lease]], object]
    marks: Mark


@dataclass(frozen=True, slots=True)
class SessionStart:
    """A session that is to begin."""

    store: CheckpointManager
    key: str
    ttl_s: float
    make: MakeSession
    origin: Mapping[str, object]
    has_signals: bool

    def enter(self, stack: ExitStack, held: Lease | None, taking: Takeover | None) -> Session:
        """The session, whose beginning is durable. `held`: the lease, if the caller has it; with `taking`, Unmet if
        somebody has begun the run, or has the entry."""
        if held is None:
            try:
                session = self._begin_run(stack, taking)
            except Unmet:
                if taking is not None:
                    raise
            else:
                self._guard(stack, session)
                return session
            held = self._lease(stack)
        session = self.make(held, is_first=False)
        self._guard(stack, session)
        session.record(RunStatus.RUNNING, origin=self.origin)
        return session

    def _begin_run(self, stack: ExitStack, taking: Takeover | None) -> Session:
        """Lease and first record in one commit; Unmet if the run exists."""
        check_ttl(self.ttl_s)
        lease = first_lease(self.key, self.ttl_s) if taking is None else taking.lease
        session = self.make(lease, is_first=True)
        request, state = session.first_record(self.origin, None if taking is None else taking.marks)
        if taking is None:
            holding = stack.enter_context(self.store.begin(request, state))
            session.is_released = holding.forget
            return session

        def take() -> Lease:
            self.store.save_request(request, state)
            return lease

        taking.hold(take)
        return session

    def _lease(self, stack: ExitStack) -> Lease:
        try:
            return stack.enter_context(take_lease(self.store, self.key, self.ttl_s))
        except LeaseHeld as error:
            raise held_by_another(self.key, error) from error

    def _guard(self, stack: ExitStack, session: Session) -> None:
        """What ends with the session, and from here on reaches into its steps."""
        stack.callback(session.isolation.close)
        stack.enter_context(watch_here(LOOK_EVERY_S, "kedge-watch").calling(session.look))
        if self.has_signals:
            session.signals.install()
        stack.callback(session.signals.restore)
