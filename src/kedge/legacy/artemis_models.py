"""What artemis spoke of: the status, stages and whole of a card, and where cards are kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import Enum
from typing import Any, Self


class CheckpointStatus(Enum):
    ACTIVE = "active"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    RESUMED = "resumed"


def now() -> datetime:
    return datetime.now()  # noqa: DTZ005 - these cards have local times


def _iso(at: datetime | None) -> str | None:
    return None if at is None else at.isoformat()


def _time(value: Any) -> Any:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


@dataclass
class StageCheckpoint:
    stage_name: str
    status: str  # completed, failed, skipped
    start_time: datetime
    end_time: datetime | None = None
    duration_seconds: float = 0.0
    result: dict[str, Any] | None = None
    artifacts: list[str] = field(default_factory=list)
    llm_responses: list[dict[str, Any]] = field(default_factory=list)
    error_message: str | None = None
    retry_count: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**known, "start_time": _iso(self.start_time), "end_time": _iso(self.end_time)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        times = {"start_time": _time(data.get("start_time")) or now(), "end_time": _time(data.get("end_time"))}
        return cls(**{**known, **times})


_TIMES = ("created_at", "updated_at", "last_resume_time")


@dataclass
class PipelineCheckpoint:
    checkpoint_id: str
    card_id: str
    status: CheckpointStatus
    created_at: datetime
    updated_at: datetime
    completed_stages: list[str] = field(default_factory=list)
    failed_stages: list[str] = field(default_factory=list)
    skipped_stages: list[str] = field(default_factory=list)
    current_stage: str | None = None
    stage_checkpoints: dict[str, StageCheckpoint] = field(default_factory=dict)
    execution_context: dict[str, Any] = field(default_factory=dict)
    total_stages: int = 0
    stages_completed: int = 0
    total_duration_seconds: float = 0.0
    estimated_remaining_seconds: float = 0.0
    resume_count: int = 0
    last_resume_time: datetime | None = None
    metadata: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        stages = {name: stage.to_dict() for name, stage in self.stage_checkpoints.items()}
        times = {name: _iso(known[name]) for name in _TIMES}
        lists = {name: list(value) for name, value in known.items() if isinstance(value, list)}
        return {**known, **lists, "status": self.status.value, "stage_checkpoints": stages, **times}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        stages = {name: StageCheckpoint.from_dict(s) for name, s in (data.get("stage_checkpoints") or {}).items()}
        times = {name: _time(data[name]) for name in _TIMES if name in data}
        return cls(**{**known, "status": CheckpointStatus(data["status"]), "stage_checkpoints": stages, **times})


def calculate_progress_percent(stages_completed: int, total_stages: int) -> float:
    return round(stages_completed / total_stages * 100, 2) if total_stages else 0.0


def estimate_remaining_time(total_duration_seconds: float, stages_completed: int, total_stages: int) -> float:
    """The mean time of a stage for each that remains."""
    if not stages_completed:
        return 0.0
    return round(total_duration_seconds / stages_completed * (total_stages - stages_completed), 2)


class CheckpointRepository(ABC):
    """Where cards are kept."""

    @abstractmethod
    def save(self, checkpoint: PipelineCheckpoint) -> None: ...

    @abstractmethod
    def load(self, card_id: str) -> PipelineCheckpoint | None: ...

    @abstractmethod
    def exists(self, card_id: str) -> bool: ...

    @abstractmethod
    def delete(self, card_id: str) -> bool: ...

    @abstractmethod
    def list_all(self) -> list[str]: ...
