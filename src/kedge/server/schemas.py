"""What goes over the wire, as types: OpenAPI is made from these. Bodies are strict: no string is taken for a number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kedge.model import CHECKPOINT_JSON

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, examples=["nightly-etl"])]
CheckpointId = Annotated[str, Field(pattern=NAME_PATTERN, examples=["outline_1763461834_1a2b3c4d"])]
Level = Literal["pipeline", "stage", "step", "substep"]
Status = Literal["created", "valid", "corrupted", "archived"]
Json = object


def _whole(value: object) -> object:
    """JSON knows one kind of number: 3.0 is whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]
TagValue = Annotated[str, Field(max_length=1024, pattern=r"^[^\x00]*$")]
Tags = Annotated[
    dict[Name, TagValue],
    Field(max_length=64, json_schema_extra={"additionalProperties": False}),
]


class Body(BaseModel):
    """What callers send."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Answer(BaseModel):
    """What they get."""

    model_config = ConfigDict(extra="forbid")


class Page(Answer):
    """Some of a list. One that looks through jobs for its entries may be empty and still have a next one."""

    next_cursor: str | None = Field(description="Pass it as `cursor` to get the next page; null at the end.")


class Problem(Answer):
    """RFC 9457, with a code for programs, a hint for people and the ID under which our log tells more."""

    type: str = Field(examples=["urn:kedge:problem:not_found"])
    title: str = Field(examples=["Not Found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["checkpoint outline_1763461834_1a2b3c4d not found"])
    code: str = Field(examples=["not_found"])
    hint: str = Field(examples=["kedge list JOB shows what exists"])
    request_id: str = Field(examples=["5b0c5a7c2f4e4d17"])
    errors: list[dict[str, Any]] | None = None


_OF_CHECKPOINT: dict[str, object] = {  # what the annotations of its fields are in JSON
    "CheckpointId": str,
    "CheckpointId | None": str | None,
    "CheckpointLevel": Level,
    "CheckpointStatus": Status,
    "datetime": str,
    "str": str,
    "int": int,
    "bool": bool,
    "Mapping[str, str]": dict[str, str],
    "Mapping[str, object]": dict[str, Json],
}
_EXAMPLES = {
    "id": "outline_1763461834_1a2b3c4d",
    "job": "nightly-etl",
    "seq": 7,
    "step": "outline",
    "created_at": "2025-11-18T10:30:34.123456+00:00",
    "codec": "kedge1",
    "schema_version": "1.0",
}


class Checkpoint(Answer):
    """One checkpoint without its state."""

    __annotations__ = {
        name: Annotated[_OF_CHECKPOINT[kind], Field(examples=[_EXAMPLES[name]] if name in _EXAMPLES else None)]
        for name, (_, kind) in CHECKPOINT_JSON.items()
    }


class CheckpointPage(Page):
    checkpoints: list[Checkpoint]


class Keyed(Answer):
    key: str
    checkpoint: Checkpoint


class KeyList(Answer):
    found: list[Keyed]


class Job(Answer):
    name: str = Field(examples=["nightly-etl"])
    checkpoints: int
    last_seq: int
    size_bytes: int
    stored_bytes: int
    created_at: str
    updated_at: str
    retention: dict[str, Json] | None


class JobPage(Page):
    jobs: list[Job]


class StateView(Answer):
    """A state, or a part of it, as JSON; what JSON has no words for is an object with a "$type"."""

    checkpoint: str
    path: str = Field(examples=["model/layer3"])
    state: Json


class Health(Answer):
    status: Literal["ok"]


class SaveOptions(Body):
    step: Annotated[str, Field(min_length=1, max_length=1024, examples=["outline"])]
    level: Level = "step"
    parent: CheckpointId | None = None
    # A default that is a dict would be copied with deepcopy for each save.
    tags: Tags = Field(default_factory=dict, examples=[{"kind": "best"}], json_schema_extra={"default": {}})
    metadata: dict[str, Json] = Field(
        default_factory=dict, examples=[{"loss": 0.25}], json_schema_extra={"default": {}}
    )
    pin: bool = False
    schema_version: Annotated[str, Field(min_length=1, max_length=64)] = "1.0"
    lease: Whole | None = Field(default=None, description="The token of the caller's lease on the job.")


class Save(SaveOptions):
    """A checkpoint to save. In a multipart request `state` may hold {"$part": "name"} where the bytes of that part
    belong, with "dtype" and "shape" for an array."""

    state: Json = Field(default=None, examples=[{"current_step": 1}])


Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class CopiedFrom(Body):
    """What a checkpoint of another store has besides."""

    seq: Annotated[int, Field(ge=1, le=(1 << 53) - 1)]
    codec: Annotated[str, Field(min_length=1, max_length=32)]
    status: Literal["created", "archived"]
    request_digest: Annotated[str, Field(pattern="^([0-9a-f]{2})*$", max_length=128)] = ""


class SentSave(SaveOptions):
    """The head of a save in chunks (docs/service.md)."""

    idempotency_key: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    takes_key_from: CheckpointId | None = None
    id: CheckpointId | None = None
    created_us: Whole | None = None
    distrusted: list[Digest] = []
    copied: CopiedFrom | None = None


class TagChange(Body):
    tags: dict[Name, TagValue | None] = Field(
        max_length=64,
        description="Names and values; null removes one.",
        examples=[{"kind": "best", "draft": None}],
        json_schema_extra={"additionalProperties": False},
    )


class PinChange(Body):
    pinned: bool = True


class StatusChange(Body):
    status: Status


class Branch(Body):
    job: Name | None = Field(default=None, description="Where to; the same job by default.")
    lease: Whole | None = None


class Copy(Body):
    to: Name = Field(examples=["nightly-etl-copy"])


class Copied(Answer):
    job: str
    checkpoints: int


class DeletedJob(Answer):
    job: str
    deleted: int


class Restore(Body):
    resume: bool = False


class Restored(Answer):
    checkpoint: Checkpoint
    status: Literal["restored", "resumed"]
    state: Json


_Count = Annotated[int, Field(ge=1, le=1_000_000_000), BeforeValidator(_whole)]
_PerLevel = Annotated[dict[Level, _Count], Field(min_length=1)]
_UNSET: Any = None  # of rules that are not given; null is not one


class Policy(Body):
    """What to keep: a checkpoint stays when any rule says so. At least one is needed."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    keep_last: _Count = Field(default=_UNSET, examples=[10])
    keep_last_per_level: _PerLevel = Field(default=_UNSET, examples=[{"stage": 5}])
    keep_within: Annotated[str, Field(pattern="^[1-9][0-9]{0,4}[wdhms]$")] = Field(default=_UNSET, examples=["7d"])
    hourly: _Count = _UNSET
    daily: _Count = _UNSET
    weekly: _Count = _UNSET
    monthly: _Count = _UNSET
    keep_tags: Annotated[
        list[Annotated[str, Field(pattern=f"{NAME_PATTERN[:-1]}(=[^\\x00]{{0,1024}})?$")]],
        Field(min_length=1, max_length=64),
    ] = Field(default=_UNSET, examples=[["release", "env=prod"]])
    min_per_level: _PerLevel = Field(default=_UNSET, examples=[{"stage": 1}])


class PlanRequest(Body):
    job: Name | None = Field(default=None, description="null: all jobs.")
    policy: Policy = Field(examples=[{"keep_last": 10}])


class SetRetention(Body):
    policy: Policy | None = Field(description="null: none any more.", examples=[{"keep_last": 10}])


class KeptCheckpoint(Checkpoint):
    reasons: list[str]


class Plan(Answer):
    """What a policy deletes and keeps; with `applied`, what was deleted and kept."""

    job: str | None
    policy: dict[str, Json]
    applied: bool
    delete: list[Checkpoint]
    keep: list[KeptCheckpoint]
    frees_bytes: int


class Diff(Answer):
    same: bool
    old: str
    new: str
    added: int
    removed: int
    changed: int
    bytes_changed: int
    shared_bytes: int
    changes: list[dict[str, Json]]
    left_out: int


class Stats(Answer):
    model_config = ConfigDict(extra="allow")
    checkpoints: int
    size_bytes: int
    stored_bytes: int


class VerifyRequest(Body):
    job: Name | None = None
    deep: bool = True


class Task(Answer):
    id: str
    kind: Literal["verify", "gc"]
    namespace: str
    actor: str
    status: Literal["running", "completed", "failed"]
    done: int
    total: int
    started_at: str
    ended_at: str | None
    result: dict[str, Json] | None
    error: str | None


class TaskList(Answer):
    tasks: list[Task]


class Event(Answer):
    id: int
    at: str
    actor: str
    action: str
    job: str | None
    checkpoint: str | None
    detail: Json
    chain: str


class EventPage(Page):
    events: list[Event]


class Audit(Answer):
    """Whether the log of changes is whole. Note `entries` and `head` elsewhere: later they prove that no entry up to
    there was rewritten."""

    entries: int
    head: str
    broken_at: int | None
    ok: bool


class Lease(Answer):
    job: str
    token: int
    holder: str
    ttl_s: float


class TakeLease(Body):
    ttl_s: Annotated[float, Field(ge=0.1, le=86_400)] = 30.0
    holder: Annotated[str, Field(min_length=1, max_length=256)]


class LeaseToken(Body):
    token: Annotated[int, Field(ge=0, le=1 << 53), BeforeValidator(_whole)]
    ttl_s: Annotated[float, Field(ge=0.1, le=86_400)] = 30.0


class Session(Body):
    token: Annotated[str, Field(min_length=1, max_length=128)]


class Identity(Answer):
    actor: str
    scope: Literal["read", "write", "admin"]
    namespaces: list[str]
    namespace: str


class LlmGroup(Answer):
    key: dict[str, str] = Field(examples=[{"model": "small-1"}])
    bill: dict[str, Json]


class LlmStats(Answer):
    """Money is dollars as text; `paid` and `found` count calls."""

    answers: int
    size_bytes: int
    total: dict[str, Json]
    groups: list[LlmGroup]
