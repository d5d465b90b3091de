"""What goes over the wire, as types: OpenAPI is made from these. Bodies are strict: no string is taken for a number."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@+-]{0,127}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN, examples=["nightly-etl"])]
CheckpointId = Annotated[str, Field(pattern=NAME_PATTERN, examples=["outline_1763461834_1a2b3c4d"])]
Level = Literal["pipeline", "stage", "step", "substep"]
Status = Literal["created", "valid", "corrupted", "archived"]
Json = Any


class Body(BaseModel):
    """What callers send."""

    model_config = ConfigDict(strict=True, extra="forbid")


class Answer(BaseModel):
    """What they get."""

    model_config = ConfigDict(extra="forbid")


class Problem(Answer):
    """RFC 9457, with a code for programs, a hint for people and the ID under which our log tells more."""

    type: str = Field(examples=["urn:holdfast:problem:not_found"])
    title: str = Field(examples=["Not Found"])
    status: int = Field(examples=[404])
    detail: str = Field(examples=["checkpoint outline_1763461834_1a2b3c4d not found"])
    code: str = Field(examples=["not_found"])
    hint: str = Field(examples=["holdfast list JOB shows what exists"])
    request_id: str = Field(examples=["5b0c5a7c2f4e4d17"])
    errors: list[dict[str, Any]] | None = None


class Checkpoint(Answer):
    """One checkpoint without its state."""

    id: str = Field(examples=["outline_1763461834_1a2b3c4d"])
    job: str = Field(examples=["nightly-etl"])
    seq: int = Field(examples=[7])
    step: str = Field(examples=["outline"])
    level: Level
    parent: str | None
    created_at: str = Field(examples=["2025-11-18T10:30:34.123456+00:00"])
    status: Status
    size_bytes: int
    stored_bytes: int
    digest: str
    codec: str = Field(examples=["hf1"])
    schema_version: str = Field(examples=["1.0"])
    tags: dict[str, str]
    pinned: bool
    metadata: dict[str, Json]


class CheckpointPage(Answer):
    checkpoints: list[Checkpoint]
    next_cursor: str | None = Field(description="Ask again with it for what comes next; null at the end.")


class Job(Answer):
    name: str = Field(examples=["nightly-etl"])
    checkpoints: int
    last_seq: int
    size_bytes: int
    stored_bytes: int
    created_at: str
    updated_at: str
    retention: dict[str, Json] | None


class JobPage(Answer):
    jobs: list[Job]
    next_cursor: str | None


class StateView(Answer):
    """A state, or a part of it, as JSON; what JSON has no words for is an object with a "$type"."""

    checkpoint: str
    path: str = Field(examples=["model/layer3"])
    state: Json


class Health(Answer):
    status: Literal["ok"]
