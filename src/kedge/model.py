"""The values all other modules use: checkpoints, jobs, leases, events, and the grammar of names."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields, make_dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from types import UnionType
from typing import Any, NewType, TypeVar

from .errors import InvalidName, Validation

CheckpointId = NewType("CheckpointId", str)
Document = dict[str, object]  # JSON, the same for commands, the service and its client

MAX_STEP_CHARACTERS = 1024
LOG_LEVELS = ("debug", "info", "warning", "error")  # of a run's log lines
INBOX_SUFFIX = ":inbox"  # of the job that holds a run's messages
QUEUE_PREFIX = "queue:"  # of jobs that hold the entries of a queue
MAX_TAGS = 64
MAX_TAG_VALUE_CHARACTERS = 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}")
_NAMED = {"job", "namespace", "queue", "schedule", "session", "tag", "type"}
_NOT_SLUG = re.compile(r"[^A-Za-z0-9._:@+-]+")

_random = random.Random()  # nosec B311 - nobody else seeds it, and it makes no system call that stops other threads
_draw = _random.getrandbits
os.register_at_fork(after_in_child=_random.seed)


class CheckpointLevel(StrEnum):
    PIPELINE = "pipeline"
    STAGE = "stage"
    STEP = "step"
    SUBSTEP = "substep"


class CheckpointStatus(StrEnum):
    """Integrity, not progress. `created`: durable, digests recorded. `valid`: read back and verified since."""

    CREATED = "created"
    VALID = "valid"
    CORRUPTED = "corrupted"
    ARCHIVED = "archived"


class RunStatus(StrEnum):
    """The status of a run. A run can be resumed unless it is completed or cancelled."""

    RUNNING = "running"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ABANDONED = "abandoned"  # never recorded: it says running, but its process is gone (`pipeline.owner.status_of`)
    UNREADABLE = "unreadable"  # never recorded: the record has no valid status


_E = TypeVar("_E", bound=StrEnum)


def parse_limit(limit: int | None) -> int | None:
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise Validation(f"limit={limit!r}", hint="use a whole number from 1 on, or none")
    return limit


def parse_decision(approved: object) -> bool:
    """Accept only True or False: a decision is final, and the text "no" would count as a yes."""
    if not isinstance(approved, bool):
        raise Validation(f"approved={approved!r} is not a decision", hint="use True or False")
    return approved


def parse_choice(kind: type[_E], value: str) -> _E:
    """Return the member of `kind` for a member or its string value."""
    if type(value) is kind:
        return value
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(kind)
        raise Validation(f"{value!r} is not a {kind.__name__}", hint=f"use one of: {allowed}") from None


def parse_name(what: str, text: str) -> str:
    """Return `text` if it is a valid name (job, namespace, tag, ID); nothing else ever reaches an index or a path."""
    if not isinstance(text, str) or _NAME.fullmatch(text) is None:
        shown = repr(text) if len(repr(text)) <= 80 else repr(text)[:77] + "…"
        raise InvalidName(
            f"{shown} is not a valid {what}{' name' if what in _NAMED else ''}",
            hint="use 1 to 128 characters of A-Z a-z 0-9 . _ : @ + - that start with a letter or digit",
        )
    return text


def mapping_of(value: object) -> dict[str, Any]:
    """Return a part of a document that anybody may have written; {} if it is no mapping."""
    return value if isinstance(value, dict) else {}


def list_of(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def text_of(value: object) -> str:
    return value if isinstance(value, str) else ""


def number_of(value: object, default: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def parse_step(text: str) -> str:
    """Return `text` if it is a valid step name: any text of 1 to 1,024 characters that UTF-8 can hold."""
    if not isinstance(text, str) or not 1 <= len(text) <= MAX_STEP_CHARACTERS or not is_utf8(text):
        is_long = isinstance(text, str) and len(text) > MAX_STEP_CHARACTERS
        raise InvalidName(
            f"a step name must be text of 1 to {MAX_STEP_CHARACTERS:,} characters that UTF-8 can hold, got "
            + (f"{len(text):,} characters" if isinstance(text, str) else type(text).__name__),
            hint="shorten it, and put details into metadata=" if is_long else "name the step by what it does, as text",
        )
    return text


def parse_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    """Return the tags. Names follow the grammar of names; values are short text."""
    if not tags:
        return {}
    if not isinstance(tags, Mapping):
        raise Validation(f"tags of type {type(tags).__name__}", hint='use names and values: {"env": "prod"}')
    if len(tags) > MAX_TAGS:
        raise Validation(f"{len(tags)} tags given", hint=f"use at most {MAX_TAGS}; larger data belongs into metadata=")
    for name, value in tags.items():
        parse_name("tag", name)
        if not isinstance(value, str) or len(value) > MAX_TAG_VALUE_CHARACTERS or "\0" in value or not is_utf8(value):
            raise Validation(
                f"the value of tag {name!r} must be text of at most {MAX_TAG_VALUE_CHARACTERS} characters, without NUL",
                hint="convert it with str(), or put it into metadata=",
            )
    return dict(tags)


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can hold `text`: a str may have halves of surrogate pairs, which no index accepts."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def new_checkpoint_id(step: str, created_us: int) -> CheckpointId:
    """Return `<step-slug>_<epoch s>_<8 hex>`. The index enforces uniqueness; order never comes from the ID (I4)."""
    return CheckpointId(f"{_slug(step)}_{created_us // 1_000_000}_{_draw(32):08x}")


@lru_cache(256)
def _slug(step: str) -> str:
    return _NOT_SLUG.sub("-", step)[:100].strip("-._:@+") or "step"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One immutable checkpoint, without its state. Only tags, pin and status may change after the save."""

    id: CheckpointId
    job: str
    seq: int
    step: str
    level: CheckpointLevel
    parent: CheckpointId | None
    created_at: datetime
    status: CheckpointStatus
    size_bytes: int  # of the encoded state
    stored_bytes: int  # added to the store by this save
    digest: str  # BLAKE3 of the manifest, hex: the root of all digests in it
    codec: str
    schema_version: str
    tags: Mapping[str, str] = field(default_factory=dict)
    is_pinned: bool = False
    metadata: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> Document:
        """Return the fields as JSON, for commands and the service."""
        document = dict(zip(CHECKPOINT_JSON, _of_checkpoint(self), strict=True))
        document["level"], document["status"] = str(self.level), str(self.status)
        document["created_at"] = self.created_at.isoformat()
        document["tags"], document["metadata"] = dict(self.tags), dict(self.metadata)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Checkpoint:
        """Return the checkpoint. Raises ValueError, KeyError or TypeError for fields that `to_json` never gives."""
        values = {own: document[name] for name, (own, _) in CHECKPOINT_JSON.items()}
        for own, kind in CHECKPOINT_JSON.values():
            if not isinstance(values[own], _PARSED.get(kind, str)):
                raise TypeError(f"{own} of a checkpoint is {values[own]!r}")
        values["level"], values["status"] = CheckpointLevel(values["level"]), CheckpointStatus(values["status"])
        values["created_at"] = datetime.fromisoformat(values["created_at"])
        return cls(**values)

    # Names from the jobs system (docs/coming-from.md).
    @property
    def checkpoint_id(self) -> str:
        return self.id

    @property
    def job_id(self) -> str:
        return self.job

    @property
    def step_name(self) -> str:
        return self.step

    @property
    def timestamp(self) -> str:
        return self.created_at.isoformat()

    @property
    def workflow_version(self) -> str:
        return self.schema_version


_UNCHANGING = frozenset({str, int, float, bool, type(None)})
_Draft: Any = make_dataclass("_Draft", [field.name for field in fields(Checkpoint)], slots=True)


def new_checkpoint(*values: Any) -> Checkpoint:
    """`Checkpoint(*values)` with a value for each field, in a sixth of the time.

    A frozen class sets each field by a separate call, in every save and for every row read. So the values go into a
    draft with the same fields that is not frozen, which then changes its class.
    """
    draft = _Draft(*values)
    draft.__class__ = Checkpoint
    return draft  # type: ignore[no-any-return]


# For each name in a checkpoint's JSON, the field and its annotation.
CHECKPOINT_JSON = {
    {"is_pinned": "pinned"}.get(field.name, field.name): (field.name, str(field.type)) for field in fields(Checkpoint)
}
_of_checkpoint = attrgetter(*(own for own, _ in CHECKPOINT_JSON.values()))
_PARSED: dict[str, type | UnionType] = {  # JSON types of annotations; all others are text
    "int": int,
    "bool": bool,
    "CheckpointId | None": str | None,
    "Mapping[str, str]": dict,
    "Mapping[str, object]": dict,
}


def own_copy(checkpoint: Checkpoint) -> Checkpoint:
    """Return an equal checkpoint that shares no mutable value."""
    copied = new_checkpoint(*_of_checkpoint(checkpoint))
    metadata = {
        name: value if value.__class__ in _UNCHANGING else deepcopy(value) for name, value in copied.metadata.items()
    }
    object.__setattr__(copied, "tags", {**copied.tags})
    object.__setattr__(copied, "metadata", metadata)
    return copied


@dataclass(frozen=True, slots=True)
class Job:
    """A job with the index's counters; reading it never scans the job's history (I6)."""

    name: str
    checkpoints: int
    last_seq: int
    size_bytes: int
    stored_bytes: int
    created_at: datetime
    updated_at: datetime
    retention: str | None = None  # JSON of the RetentionPolicy applied after saves

    def to_json(self) -> Document:
        """Return the fields as JSON, for commands and the service."""
        times = {"created_at": self.created_at.isoformat(), "updated_at": self.updated_at.isoformat()}
        return {**_own(self), **times, "retention": None if self.retention is None else json.loads(self.retention)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Job:
        fields = dict(document)
        retention = fields.pop("retention")
        return cls(
            created_at=datetime.fromisoformat(fields.pop("created_at")),
            updated_at=datetime.fromisoformat(fields.pop("updated_at")),
            retention=None if retention is None else json.dumps(retention, separators=(",", ":")),
            **fields,
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write to a job. `token` grows with every acquisition and is checked in the write's transaction."""

    job: str
    token: int
    holder: str
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the append-only log, which is both a feed for watchers and an audit trail.

    `chain` is SHA-256 over the previous entry's chain and this entry, so that a changed or removed entry is detected.
    """

    id: int
    at: datetime
    actor: str
    action: str  # save, delete, tag, pin, lease, release, status, retention, gc, repair, …
    job: str | None
    checkpoint: str | None
    detail: str  # JSON
    chain: str

    def to_json(self) -> Document:
        """Return the fields as JSON, for commands and the service."""
        return {**_own(self), "at": self.at.isoformat(), "detail": json.loads(self.detail)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Event:
        fields = dict(document)
        return cls(
            at=datetime.fromisoformat(fields.pop("at")),
            detail=json.dumps(fields.pop("detail"), separators=(",", ":"), ensure_ascii=False),
            **fields,
        )


@dataclass(frozen=True, slots=True)
class EventChain:
    """The result of verifying the event log from its beginning."""

    entries: int
    head: str  # `chain` of the last entry that follows from all before it, hex
    broken_at: int | None = None  # the first that does not: it, or an earlier one, was altered or removed


def _own(value: Job | Event) -> Document:
    return {name: getattr(value, name) for name in value.__slots__}


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def now_us() -> int:
    """Return this machine's time, which is informative only (I4)."""
    return time.time_ns() // 1000


def to_us(moment: datetime) -> int:
    """Return integer microseconds since the epoch, exactly."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def to_datetime(microseconds: int) -> datetime:
    """Return the UTC datetime of microseconds since the epoch, the form that indexes store."""
    return _EPOCH + timedelta(microseconds=microseconds)
