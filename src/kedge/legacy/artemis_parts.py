"""The parts of artemis that only compute: on cards, and on answers of models."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from kedge.errors import CheckpointError

from .artemis_models import CheckpointStatus, PipelineCheckpoint, StageCheckpoint


class CheckpointCreator:
    """Makes checkpoints; saves nothing."""

    @staticmethod
    def create_new_checkpoint(
        card_id: str, total_stages: int, execution_context: Mapping[str, Any] | None = None
    ) -> PipelineCheckpoint:
        return PipelineCheckpoint.new(card_id, total_stages, dict(execution_context or {}))

    @staticmethod
    def create_stage_checkpoint(stage_name: str, status: str = "completed", **fields: Any) -> StageCheckpoint:
        return StageCheckpoint.new(stage_name, status, **fields)


class ProgressCalculator:
    @staticmethod
    def calculate_progress(checkpoint: PipelineCheckpoint) -> dict[str, Any]:
        total, done = checkpoint.total_stages, checkpoint.stages_completed
        end = checkpoint.updated_at
        return {
            "progress_percent": round(100 * done / total, 2) if total else 0.0,
            "stages_completed": done,
            "total_stages": total,
            "current_stage": checkpoint.current_stage,
            "elapsed_seconds": (end - checkpoint.created_at).total_seconds(),
            "estimated_remaining_seconds": ProgressCalculator.estimate_remaining(checkpoint),
        }

    @staticmethod
    def estimate_remaining(checkpoint: PipelineCheckpoint) -> float:
        """The mean time of a stage for each that remains."""
        done = checkpoint.stages_completed
        left = max(0, checkpoint.total_stages - done)
        return checkpoint.total_duration_seconds / done * left if done else 0.0


class CheckpointUpdater:
    @staticmethod
    def update_with_stage(checkpoint: PipelineCheckpoint, stage: StageCheckpoint) -> PipelineCheckpoint:
        """The checkpoint with a stage in the one list it belongs to; a repeated one counts as a retry."""
        card = PipelineCheckpoint.from_dict(checkpoint.to_dict())
        if stage.stage_name in card.stage_checkpoints:
            stage.retry_count = card.stage_checkpoints[stage.stage_name].retry_count + 1
        card.stage_checkpoints[stage.stage_name] = stage
        for word in ("completed", "failed", "skipped"):
            others = [name for name in getattr(card, f"{word}_stages") if name != stage.stage_name]
            setattr(card, f"{word}_stages", [*others, stage.stage_name] if stage.status == word else others)
        card.stages_completed = len(card.completed_stages)
        stages = card.stage_checkpoints.values()
        card.total_duration_seconds = sum(s.duration_seconds for s in stages if s.status == "completed")
        card.estimated_remaining_seconds = ProgressCalculator.estimate_remaining(card)
        card.updated_at = datetime.now()  # noqa: DTZ005 - these cards have local times
        return card


class LLMCacheKeyGenerator:
    @staticmethod
    def generate_key(card_id: str, stage_name: str, prompt: str) -> str:
        return f"{card_id}:{stage_name}:{hashlib.sha256(prompt.encode()).hexdigest()[:16]}"


class LLMCacheManager:
    """Answers by card, stage and prompt. New code uses `kedge.llm`, which knows model and parameters too."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._answers: dict[tuple[str, str, str], Any] = {}
        self._counts: Counter[str] = Counter()

    def store_response(self, card_id: str, stage_name: str, prompt: str, response: Any) -> None:
        if self.enabled:
            self._answers[card_id, stage_name, prompt] = response

    def get_cached_response(self, card_id: str, stage_name: str, prompt: str) -> Any:
        if not self.enabled:
            return None
        key = (card_id, stage_name, prompt)
        self._counts["hits" if key in self._answers else "misses"] += 1
        return self._answers.get(key)

    def restore_cache_from_checkpoint(self, checkpoint: PipelineCheckpoint) -> int:
        """Take over the answers of all stages; says how many."""
        count = 0
        for stage in checkpoint.stage_checkpoints.values():
            for entry in stage.llm_responses:
                if isinstance(entry, dict) and "prompt" in entry:
                    self.store_response(checkpoint.card_id, stage.stage_name, entry["prompt"], entry.get("response"))
                    count += 1
        return count

    def clear_cache(self) -> None:
        self._answers.clear()

    def get_cache_stats(self) -> dict[str, Any]:
        hits, misses = self._counts["hits"], self._counts["misses"]
        rate = hits / (hits + misses) if hits + misses else 0.0
        return {"enabled": self.enabled, "size": len(self._answers), "hits": hits, "misses": misses, "hit_rate": rate}


class CheckpointValidator:
    @staticmethod
    def can_resume_checkpoint(checkpoint: PipelineCheckpoint | None) -> bool:
        return checkpoint is not None and checkpoint.status is not CheckpointStatus.COMPLETED

    @staticmethod
    def validate_checkpoint_data(data: Any) -> bool:
        """Whether a card can be made of it."""
        try:
            PipelineCheckpoint.from_dict(data)
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
            return False
        return True


class CheckpointStateRestorer:
    @staticmethod
    def get_next_stage(checkpoint: PipelineCheckpoint | None, all_stages: Iterable[str]) -> str | None:
        done = set() if checkpoint is None else {*checkpoint.completed_stages, *checkpoint.skipped_stages}
        return next((stage for stage in all_stages if stage not in done), None)
