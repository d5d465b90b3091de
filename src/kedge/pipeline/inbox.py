"""What others tell a run. Only its owner may write a run (I5), so that messages to it are a job of their own."""

from __future__ import annotations

from collections.abc import Iterator

from kedge.errors import InvalidName
from kedge.manager import CheckpointManager
from kedge.model import INBOX_SUFFIX, MAX_STEP_CHARACTERS, Checkpoint, CheckpointId, parse_name

CANCEL = "cancel"
_PAGE = 100


def parse_run_key(key: str) -> str:
    """A run key is a name that leaves room for that of its inbox."""
    name = parse_name("run key", key)
    if len(name) > 128 - len(INBOX_SUFFIX) or name.endswith(INBOX_SUFFIX):
        raise InvalidName(
            f"{key[:80]!r} is not a valid run key", hint=f"use at most {128 - len(INBOX_SUFFIX)} characters"
        )
    return name


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
