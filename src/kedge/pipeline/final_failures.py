"""Failures that stay failed. A step that failed for good, and whose error the pipeline handled, is a fact.

    failed     the failure is durable, as data, before the pipeline learns of it
    handled    the pipeline went on: the thread or task that entered the run began another step, or any did so while the
               error was being handled (`except`, `finally`)
    released   nobody handled it, and the run, or an item of a map, ended with it: the step runs again when it is asked
               for again. The status records of the run list such steps
    kept       all others: raised again, with class, message and arguments, whenever a later session asks for the step

So a run that compensated (released a reservation because the charge failed) does the same again after a kill. A failure
that is kept is tried again only when somebody asks for it: `retry_failed`, `kedge runs resume --retry-failed`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from kedge.errors import NotFound
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, Checkpoint

from .failure import Failure
from .inbox import post, value_of
from .keys import Path, show
from .owner import newest_status

FINAL = {"failure": "final"}  # the tag of a failure after which a step was not attempted any more
RETRY = "retry"  # the kind of a message that asks for another attempt


@dataclass(slots=True)
class _Failed:
    """A step that failed for good, as far as this session has met it."""

    path: Path
    error: Exception
    is_handled: bool = False


class KeptFailures:
    """The failed steps of a session, by step key. From several threads and tasks at once."""

    def __init__(self, store: CheckpointManager, run: str, newest: Checkpoint | None) -> None:
        """`newest` is the run's status record before this session; None: it is the first."""
        self._store = store
        self._line = _line()
        self._lock = threading.Lock()
        self._failed: dict[str, _Failed] = {}
        self._released: set[str] = set() if newest is None else _released_in(store, newest)
        self._kept: dict[str, Checkpoint | Exception] = {}
        if newest is not None:
            self._kept.update(kept_failures(store, run, newest))

    def take(self, key: str, path: Path) -> Exception | None:
        """What is raised instead of attempting a step."""
        if not self._kept:
            return None
        with self._lock:
            failure = self._kept.pop(key, None)
        if failure is None:
            return None
        if isinstance(failure, Checkpoint):
            state = self._store.load(failure.id)
            error = Failure.from_state(state).rebuild()
            error.add_note(f"It failed in session {failure.metadata.get('session')} of the run; the failure is kept.")
        else:
            error = failure
        self.add(key, path, error)
        return error

    def add(self, key: str, path: Path, error: Exception) -> None:
        """A step failed for good; its record is durable."""
        with self._lock:
            self._released.discard(key)
            self._failed[key] = _Failed(path, error)

    def step_begins(self) -> None:
        """Whoever begins a step after a failure has handled it, if the error had reached them."""
        if not self._failed:
            return
        handling = set(map(id, _chain(sys.exc_info()[1])))
        is_main_line = _line() == self._line
        with self._lock:
            for failed in self._failed.values():
                failed.is_handled = failed.is_handled or is_main_line or id(failed.error) in handling

    def release(self, error: BaseException | None) -> None:
        """The run, a step or an item ends with `error`: what caused it and was not handled may be tried again."""
        ended_by = set(map(id, _chain(error)))
        with self._lock:
            for key, failed in list(self._failed.items()):
                if id(failed.error) in ended_by and not failed.is_handled:
                    del self._failed[key]
                    self._released.add(key)

    def attempt_again(self, path: Path, error: Exception) -> None:
        """The step at `path` is tried again: inside it, handled failures are raised again and others are attempted."""
        self.release(error)
        with self._lock:
            for key, failed in list(self._failed.items()):
                if failed.is_handled and len(failed.path) > len(path) and failed.path[: len(path)] == path:
                    self._kept[key] = self._failed.pop(key).error

    def released(self) -> list[str]:
        with self._lock:
            return sorted(self._released)


def kept_failures(store: CheckpointManager, run: str, newest: Checkpoint) -> dict[str, Checkpoint]:
    """The failures of a run that a new session raises again, by step key; `newest` is its status record."""
    records = {str(record.metadata.get("step_key")): record for record in store.list(run, tags=FINAL)}
    if not records:
        return {}
    released = _released_in(store, newest)
    asked = asked_again(store, run)
    return {
        key: record
        for key, record in records.items()
        if not (key in released and record.seq < newest.seq) and record.seq > asked.get(key, 0)
    }


def retry_failed(store: CheckpointManager, run: str, steps: Collection[str] = ()) -> list[str]:
    """Have kept failures attempted again when the run is resumed: those at these paths, or all; answers their paths."""
    newest = newest_status(store, run)
    failures = {} if newest is None else kept_failures(store, run, newest)
    chosen = {key: record for key, record in failures.items() if not steps or path_of(record) in steps}
    paths = sorted({path_of(record) for record in chosen.values()})
    if unknown := sorted(set(steps) - set(paths)):
        raise NotFound(f"run {run} keeps no failure of step {unknown[0]}", hint=f"kedge runs explain {run} lists them")
    if chosen:
        post(store, run, RETRY, "", {key: record.seq for key, record in chosen.items()})
    return paths


def path_of(record: Checkpoint) -> str:
    path = record.metadata.get("path")
    return show(tuple(map(str, path))) if isinstance(path, list) else record.step


def asked_again(store: CheckpointManager, run: str, since: datetime | None = None) -> dict[str, int]:
    """For which step keys another attempt was asked for, and up to which of their failures."""
    asked: dict[str, int] = {}
    for message in store.list(run + INBOX_SUFFIX, metadata={"kind": RETRY}):
        if since is None or message.created_at >= since:
            value = value_of(store, message)
            entries = value.items() if isinstance(value, Mapping) else ()
            asked.update({key: seq for key, seq in entries if isinstance(key, str) and isinstance(seq, int)})
    return asked


def _released_in(store: CheckpointManager, status: Checkpoint) -> set[str]:
    if not status.metadata.get("released"):
        return set()
    state = store.load(status.id)
    return set(state["released"]) if isinstance(state, Mapping) else set()


def _line() -> tuple[int, int]:
    """The thread, and the task in it, that runs this."""
    task = None
    if (asyncio := sys.modules.get("asyncio")) is not None:  # start time: most pipelines need none
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs here
            pass
    return threading.get_ident(), id(task)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, what it was raised from or while handling, and the members of groups."""
    waiting, seen = [error], set()
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        waiting += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
