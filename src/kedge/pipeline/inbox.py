"""What others tell a run. Only its owner may write a run (I5), so that messages to it are a job of their own."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict

from blake3 import blake3

from kedge.errors import InvalidName
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, MAX_STEP_CHARACTERS, Checkpoint, CheckpointId, parse_name, parse_step

CANCEL, SIGNAL, ITEMS = "cancel", "signal", "items"  # what a message is; ITEMS: which failed ones to try again
StoreLike = CheckpointManager | str | os.PathLike[str]
_PAGE = 100


def parse_run_key(key: str) -> str:
    """A run key is a name that leaves room for that of its inbox."""
    name, most = parse_name("run key", key), 128 - len(INBOX_SUFFIX)
    if name.endswith(INBOX_SUFFIX):
        raise InvalidName(f"run key {name!r}: names that end in {INBOX_SUFFIX} are reserved", hint="use another key")
    if len(name) > most:
        raise InvalidName(f"run key {name[:60]}… is too long", hint=f"use at most {most} characters")
    return name


def is_run_key(key: str) -> bool:
    try:
        return bool(parse_run_key(key))
    except InvalidName:
        return False


def opened(store: StoreLike | None, *, create: bool = False) -> AbstractContextManager[CheckpointManager]:
    """The store itself, or the one at a path or URL, which is closed afterwards; None: $KEDGE_STORE, else ./.kedge."""
    return nullcontext(store) if isinstance(store, CheckpointManager) else CheckpointManager(store, create=create)


def send(store: StoreLike, key: str, name: str, value: object = None) -> CheckpointId:
    """Send a value to a run that waits, or will wait, for `run.signal(name)`. `store` may be a path or URL."""
    with opened(store) as manager:
        return post(manager, key, SIGNAL, parse_step(name), value)


def post(
    store: CheckpointManager,
    key: str,
    kind: str,
    name: str,
    value: object = None,
    *,
    idempotency_key: str | None = None,
) -> CheckpointId:
    """Leave a message for a run, durably, whether somebody works on it or not."""
    return store.save(
        parse_run_key(key) + INBOX_SUFFIX,
        f"{kind} {name}".strip()[:MAX_STEP_CHARACTERS],
        {"value": value},
        level="pipeline",
        metadata={"kind": kind, "name": name, "actor": store.actor},
        idempotency_key=idempotency_key,
    )


def value_of(store: CheckpointManager, message: Checkpoint) -> object:
    """What was sent. None for a record that is no message: anybody who may save can write one, and it ends no run."""
    state: object = store.load(message.id)
    return state.get("value") if isinstance(state, Mapping) else None


class Inbox:
    """The messages of one run, read on from where it was last read."""

    def __init__(self, store: CheckpointManager, key: str, seen: int = 0) -> None:
        self._store = store
        self._job = key + INBOX_SUFFIX
        self.seen = seen

    def new(self) -> Iterator[Checkpoint]:
        while page := self._store.list(self._job, after=self.seen, limit=_PAGE):
            for message in page:
                self.seen = message.seq
                yield message


class Taken(TypedDict):
    """A message that a run has taken, as it is saved."""

    value: Any
    message: int  # its number


class SignalMessages:
    """The messages that were sent to a run as signals: each is given to one `run.signal`, in the order of sending."""

    def __init__(self, store: CheckpointManager, key: str) -> None:
        self._store = store
        self._key = key
        self._lock = threading.Lock()
        self._given: dict[str, set[int]] = {}  # sequence numbers, by name; in this session or before
        self._unread: dict[str, deque[Checkpoint]] = {}
        self._seen: dict[str, int] = {}

    def take(self, name: str) -> Taken | None:
        """The next message under a name; None: there is none."""
        with self._lock:
            if name not in self._given:
                given = self._store.list(self._key, tags={"signal": signal_tag(name)})
                self._given[name] = {int(record.tags["message"]) for record in given}
            unread = self._unread.setdefault(name, deque())
            while not unread and (page := self._next_page(name)):
                unread += [message for message in page if message.seq not in self._given[name]]
            if not unread:
                return None
            message = unread.popleft()
            self._given[name].add(message.seq)
        return {"value": value_of(self._store, message), "message": message.seq}

    def _next_page(self, name: str) -> list[Checkpoint]:
        inbox, wanted = self._key + INBOX_SUFFIX, {"kind": SIGNAL, "name": name}
        page = self._store.list(inbox, metadata=wanted, after=self._seen.get(name, 0), limit=_PAGE)
        if page:
            self._seen[name] = page[-1].seq
        return page


def signal_tag(name: str) -> str:
    """By which the answers of a run's signals under one name are found."""
    return blake3(name.encode()).hexdigest(16)
