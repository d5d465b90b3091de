"""How a session of a run ended, and what its user is told to do next."""

from __future__ import annotations

import shlex
import sys

from kedge.errors import Cancelled, Denied, LeaseLost
from kedge.manager import CheckpointManager
from kedge.model import RunStatus
from kedge.urls import reachable

from .progress import write_line
from .session import Session
from .signals import Paused


def say_what_follows(session: Session, status: RunStatus, error: BaseException | None) -> None:
    key, follows = session.key, what_follows(session.store, session.key, session.queue)
    if status is RunStatus.COMPLETED and session.completed_at is not None and not session.account.executed:
        session.watcher.say(f"run {key} already completed on {session.completed_at:%Y-%m-%d %H:%M} UTC; nothing to do")
    session.watcher.close()
    if isinstance(error, Denied):
        error.add_note(f"Run {key} ends here: a denial is final.")
    elif status is RunStatus.PAUSED or isinstance(error, SystemExit):  # nobody shows their notes
        if not session.queue:  # else its worker says it
            word = "is paused" if status is RunStatus.PAUSED else "failed"
            write_line(sys.stderr, f"run {key} {word} ({error}); to resume it: {follows}")
    elif status is RunStatus.FAILED and error is not None and not isinstance(error, LeaseLost):
        how = follows if session.queue else f"to resume it: {follows}"
        error.add_note(f"Run {key} failed; what is finished is kept; {how}")


def what_follows(store: CheckpointManager, key: str, queue: str) -> str:
    """How a run goes on that has stopped; `queue` is the one it belongs to, "": none."""
    if store.url == "memory:":
        return "run it again in this process (its store is in memory)"
    place = "$KEDGE_STORE" if "://" in store.url else shlex.quote(reachable(store.url))  # a URL may hold a password
    tenant = "" if store.namespace == "default" else f" --namespace {store.namespace}"
    where = f"--store {place}{tenant}"
    if queue:
        return f"a worker of queue {queue} continues it; if it is dead: kedge queue retry {queue} {key} {where}"
    return f"kedge runs resume {key} {where}"


def status_after(error: BaseException | None) -> RunStatus:
    if error is None:
        return RunStatus.COMPLETED
    if isinstance(error, Cancelled):
        return RunStatus.CANCELLED
    if isinstance(error, SystemExit) and not isinstance(error, Paused):  # sys.exit(1) is how many programs fail
        return RunStatus.PAUSED if error.code in (None, 0) else RunStatus.FAILED
    return RunStatus.FAILED if isinstance(error, Exception) else RunStatus.PAUSED
