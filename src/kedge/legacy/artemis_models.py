"""The values of artemis, and its parts that only compute: on cards, and on LLM responses."""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
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


class CheckpointCreator:
    """Makes checkpoints; saves nothing."""

    @staticmethod
    def create_new_checkpoint(
        card_id: str, total_stages: int, execution_context: Mapping[str, Any] | None = None
    ) -> PipelineCheckpoint:
        at = now()
        return PipelineCheckpoint(
            f"checkpoint-{card_id}-{int(time.time())}", card_id, CheckpointStatus.ACTIVE, at, at,
            execution_context=dict(execution_context or {}), total_stages=total_stages,
        )  # fmt: skip

    @staticmethod
    def create_stage_checkpoint(
        stage_name: str,
        status: str,
        start_time: datetime | None = None,
        end_time: datetime | None = None,
        result: Mapping[str, Any] | None = None,
        artifacts: Iterable[str] | None = None,
        llm_responses: Iterable[Mapping[str, Any]] | None = None,
        error_message: str | None = None,
    ) -> StageCheckpoint:
        seconds = (end_time - start_time).total_seconds() if start_time and end_time else 0.0
        return StageCheckpoint(
            stage_name, status, start_time or now(), end_time or now(), seconds,
            result=None if result is None else dict(result), artifacts=list(artifacts or ()),
            llm_responses=[dict(entry) for entry in llm_responses or ()], error_message=error_message,
        )  # fmt: skip


class CheckpointUpdater:
    """Changes checkpoints in place; saves nothing."""

    def update_with_stage(self, checkpoint: PipelineCheckpoint, stage_checkpoint: StageCheckpoint) -> None:
        """Put a stage into the one list it belongs to; a repeated one counts as a retry."""
        card, stage = _given(checkpoint), stage_checkpoint
        name = stage.stage_name
        if name in card.stage_checkpoints:
            stage.retry_count = card.stage_checkpoints[name].retry_count + 1
        card.stage_checkpoints[name] = stage
        for word in ("completed", "failed", "skipped"):
            listed = getattr(card, f"{word}_stages")
            others = [other for other in listed if other != name]
            listed[:] = [*others, name] if stage.status == word else others
        card.stages_completed = len(card.completed_stages)
        card.total_duration_seconds += stage.duration_seconds
        card.estimated_remaining_seconds = ProgressCalculator.calculate_progress(card)["estimated_remaining_seconds"]
        card.updated_at = now()

    def set_current_stage(self, checkpoint: PipelineCheckpoint, stage_name: str) -> None:
        _given(checkpoint).current_stage = stage_name
        checkpoint.updated_at = now()

    def mark_completed(self, checkpoint: PipelineCheckpoint) -> None:
        _given(checkpoint).status = CheckpointStatus.COMPLETED
        checkpoint.current_stage = None
        checkpoint.updated_at = now()

    def mark_failed(self, checkpoint: PipelineCheckpoint, reason: str) -> None:
        _given(checkpoint).status = CheckpointStatus.FAILED
        checkpoint.metadata["failure_reason"] = reason
        checkpoint.updated_at = now()


def _given(checkpoint: PipelineCheckpoint | None) -> PipelineCheckpoint:
    if checkpoint is None:
        raise ValueError("Cannot update None checkpoint")
    return checkpoint


class ProgressCalculator:
    @staticmethod
    def calculate_progress(checkpoint: PipelineCheckpoint | None) -> dict[str, Any]:
        if checkpoint is None:
            numbers = ("progress_percent", "stages_completed", "total_stages")
            times = ("elapsed_seconds", "estimated_remaining_seconds")
            return {**dict.fromkeys(numbers, 0), "current_stage": None, **dict.fromkeys(times, 0)}
        done, total = checkpoint.stages_completed, checkpoint.total_stages
        remaining = estimate_remaining_time(checkpoint.total_duration_seconds, done, total)
        return {
            "progress_percent": calculate_progress_percent(done, total),
            "stages_completed": done,
            "total_stages": total,
            "current_stage": checkpoint.current_stage,
            "elapsed_seconds": round((now() - checkpoint.created_at).total_seconds(), 2),
            "estimated_remaining_seconds": remaining,
        }

    @staticmethod
    def get_next_stage(checkpoint: PipelineCheckpoint | None, all_stages: Iterable[str]) -> str | None:
        """The first stage that is not completed."""
        done = set() if checkpoint is None else set(checkpoint.completed_stages)
        return next((stage for stage in all_stages if stage not in done), None)


class LLMCacheKeyGenerator:
    @staticmethod
    def generate_cache_key(card_id: str, stage_name: str, prompt: str) -> str:
        return f"{card_id}:{stage_name}:{hashlib.sha256(prompt.encode()).hexdigest()[:16]}"


class LLMCacheManager:
    """Answers by card, stage and prompt. New code uses `kedge.llm`, which knows model and parameters too."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.cache: dict[str, Any] = {}
        self.key_generator = LLMCacheKeyGenerator()

    def store_response(self, card_id: str, stage_name: str, prompt: str, response: Any) -> None:
        if self.enabled:
            self.cache[self.key_generator.generate_cache_key(card_id, stage_name, prompt)] = response

    def get_cached_response(self, card_id: str, stage_name: str, prompt: str) -> Any:
        """The entry as it was saved, with all of its keys; None when there is none."""
        if not self.enabled:
            return None
        return self.cache.get(self.key_generator.generate_cache_key(card_id, stage_name, prompt))

    def restore_cache_from_checkpoint(self, checkpoint: PipelineCheckpoint | None) -> None:
        stages = {} if checkpoint is None else checkpoint.stage_checkpoints
        for name, stage in stages.items():
            for entry in stage.llm_responses:
                if isinstance(entry, dict) and entry.get("prompt"):
                    self.store_response(checkpoint.card_id, name, entry["prompt"], entry)  # type: ignore[union-attr]

    def clear_cache(self) -> None:
        self.cache.clear()

    def get_cache_stats(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "cached_responses": len(self.cache), "cache_keys": list(self.cache)}


class CheckpointValidator:
    @staticmethod
    def can_resume_checkpoint(checkpoint: PipelineCheckpoint | None) -> bool:
        return checkpoint is not None and checkpoint.status is not CheckpointStatus.COMPLETED

    @staticmethod
    def validate_checkpoint_data(data: Any) -> bool:
        """Whether it has what every card has."""
        return isinstance(data, Mapping) and all(
            name in data for name in ("checkpoint_id", "card_id", "status", "created_at", "updated_at")
        )
