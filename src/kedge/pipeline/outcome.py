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
    key, command = session.key, resume_command(session.store, session.key)
    if status is RunStatus.COMPLETED and session.completed_at is not None and not session.account.executed:
        session.watcher.say(f"run {key} already completed on {session.completed_at:%Y-%m-%d %H:%M} UTC; nothing to do")
    session.watcher.close()
    if isinstance(error, Denied):
        error.add_note(f"Run {key} ends here: a denial is final.")
    elif status is RunStatus.PAUSED:
        write_line(sys.stderr, f"run {key} is paused ({error}); to resume it: {command}")
    elif isinstance(error, SystemExit):  # nobody shows its notes
        write_line(sys.stderr, f"run {key} failed ({error}); to resume it: {command}")
    elif status is RunStatus.FAILED and error is not None and not isinstance(error, LeaseLost):
        error.add_note(f"Run {key} failed; what is finished is kept. To resume it: {command}")


def resume_command(store: CheckpointManager, key: str) -> str:
    if store.url == "memory:":
        return "run it again in this process (its store is in memory)"
    place = "$KEDGE_STORE" if "://" in store.url else shlex.quote(reachable(store.url))  # a URL may hold a password
    tenant = "" if store.namespace == "default" else f" --namespace {store.namespace}"
    return f"kedge runs resume {key} --store {place}{tenant}"


def status_after(error: BaseException | None) -> RunStatus:
    if error is None:
        return RunStatus.COMPLETED
    if isinstance(error, Cancelled):
        return RunStatus.CANCELLED
    if isinstance(error, SystemExit) and not isinstance(error, Paused):  # sys.exit(1) is how many programs fail
        return RunStatus.PAUSED if error.code in (None, 0) else RunStatus.FAILED
    return RunStatus.FAILED if isinstance(error, Exception) else RunStatus.PAUSED
