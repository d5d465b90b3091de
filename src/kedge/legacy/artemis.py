"""artemis: `from kedge.legacy.artemis import CheckpointManager`. A card is a run, saved as an imported one would be.

Corrected: a result that cannot be kept changes nothing, every run that is not completed resumes, a stage is in the list
of its latest attempt only, the cache is one object that is filled again on resuming, and history stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from kedge import codec
from kedge.errors import Conflict, Validation
from kedge.manager import CheckpointManager as Store
from kedge.pipeline.owner import newest_status

from . import open_in
from .artemis_models import CheckpointRepository, CheckpointStatus, PipelineCheckpoint, StageCheckpoint
from .artemis_parts import (
    CheckpointCreator,
    CheckpointStateRestorer,
    CheckpointUpdater,
    CheckpointValidator,
    LLMCacheKeyGenerator,
    LLMCacheManager,
    ProgressCalculator,
)
from .importers import Options, Report, Verdict
from .importers.artemis import drafts
from .importers.common import Draft
from .importers.export import artemis_files
from .importers.runs import run_key
from .importers.writer import Writer

__all__ = [
    "CheckpointCreator", "CheckpointManager", "CheckpointRepository", "CheckpointRestorer", "CheckpointStateRestorer",
    "CheckpointStatus", "CheckpointUpdater", "CheckpointValidator", "FilesystemCheckpointRepository",
    "LLMCacheKeyGenerator", "LLMCacheManager", "PipelineCheckpoint", "ProgressCalculator", "StageCheckpoint",
    "create_checkpoint_repository",
]  # fmt: skip


class FilesystemCheckpointRepository(CheckpointRepository):
    """Cards in a store in a directory, with their history."""

    def __init__(self, checkpoint_dir: str | os.PathLike[str] | Store | None = None) -> None:
        self.store = open_in(checkpoint_dir or os.environ.get("ARTEMIS_CHECKPOINT_DIR") or "checkpoints")

    def save(self, checkpoint: PipelineCheckpoint) -> None:
        document = checkpoint.to_dict()
        codec.encode(document)  # what cannot be kept is refused by its path before anything is written
        report = Report()
        writer = Writer(self.store, report, is_owner=True)
        for draft in drafts(document, "", f"card {checkpoint.card_id}", Options()):
            if isinstance(draft, Draft):
                if draft.tags.get("kind") == "run":
                    draft.key += os.urandom(8).hex()  # what was said before may be said again
                writer.add(draft)
        writer.flush()
        if refused := report.of(Verdict.SKIPPED):
            raise Conflict(f"card {checkpoint.card_id} was not saved: {refused[0].reason}", hint="nothing was changed")

    def load(self, card_id: str) -> PipelineCheckpoint | None:
        """The card with what any program has done on it since; None when there is none."""
        if not self.exists(card_id):
            return None
        ((_, document),) = artemis_files(self.store, run_key(card_id, ""), lambda c: self.store.load(c.id))
        return PipelineCheckpoint.from_dict(document)  # type: ignore[arg-type]

    def exists(self, card_id: str) -> bool:
        return newest_status(self.store, run_key(card_id, "")) is not None

    def delete(self, card_id: str) -> bool:
        history = self.store.list(run_key(card_id, ""))
        return bool([self.store.delete(checkpoint.job, checkpoint.id) for checkpoint in history])

    def list_all(self) -> list[str]:
        cards = []
        for job in self.store.jobs():
            record = newest_status(self.store, job.name)
            if record is not None:
                legacy: Any = record.metadata.get("legacy") or {}
                cards.append(str(legacy.get("job", job.name)))
        return cards


def create_checkpoint_repository(storage_type: str = "filesystem", **options: Any) -> CheckpointRepository:
    if storage_type != "filesystem":
        raise Validation(
            f"storage_type={storage_type!r}", hint='use "filesystem"; a URL as checkpoint_dir does the rest'
        )
    return FilesystemCheckpointRepository(**options)


class CheckpointRestorer:
    """Loads a card to go on with it, and fills the cache that is in use."""

    def __init__(self, repository: CheckpointRepository, llm_cache: LLMCacheManager | None = None) -> None:
        self._repository = repository
        self._cache = llm_cache

    def can_resume(self, card_id: str) -> bool:
        return CheckpointValidator.can_resume_checkpoint(self._repository.load(card_id))

    def resume(self, card_id: str) -> PipelineCheckpoint | None:
        card = self._repository.load(card_id)
        if card is None or not CheckpointValidator.can_resume_checkpoint(card):
            return None
        card.status = CheckpointStatus.RESUMED
        card.resume_count += 1
        card.last_resume_time = datetime.now()  # noqa: DTZ005 - local, as all of them
        self._repository.save(card)
        if self._cache is not None:
            self._cache.restore_cache_from_checkpoint(card)
        return card


class CheckpointManager:
    """The card of one pipeline. Every change is durable when the call returns."""

    def __init__(
        self,
        card_id: str,
        checkpoint_dir: str | os.PathLike[str] | Store | None = None,
        enable_llm_cache: bool = True,
        verbose: bool = True,
    ) -> None:
        self.card_id = card_id
        self.verbose = verbose
        self.repository = FilesystemCheckpointRepository(checkpoint_dir)
        self.llm_cache = LLMCacheManager(enable_llm_cache)
        self._restorer = CheckpointRestorer(self.repository, self.llm_cache)
        self.checkpoint: PipelineCheckpoint | None = None

    def create_checkpoint(
        self, total_stages: int, execution_context: Mapping[str, Any] | None = None
    ) -> PipelineCheckpoint:
        return self._keep(CheckpointCreator.create_new_checkpoint(self.card_id, total_stages, execution_context))

    def save_stage_checkpoint(
        self,
        stage_name: str,
        status: str,
        result: Mapping[str, Any] | None = None,
        artifacts: Iterable[str] | None = None,
        llm_responses: Iterable[Mapping[str, Any]] | None = None,
        error_message: str | None = None,
        start_time: datetime | None = None,
        end_time: datetime | None = None,
    ) -> None:
        stage = StageCheckpoint.new(
            stage_name,
            status,
            result=None if result is None else dict(result),
            artifacts=list(artifacts or ()),
            llm_responses=[dict(entry) for entry in llm_responses or ()],
            error_message=error_message,
            start_time=start_time,
            end_time=end_time,
        )
        card = self._keep(CheckpointUpdater.update_with_stage(self._current(), stage))
        self.llm_cache.restore_cache_from_checkpoint(card)

    def set_current_stage(self, stage_name: str) -> None:
        self._change(current_stage=stage_name)

    def mark_completed(self) -> None:
        self._change(status=CheckpointStatus.COMPLETED, current_stage=None)

    def mark_failed(self, reason: str) -> None:
        self._change(status=CheckpointStatus.FAILED, metadata={**self._current().metadata, "failure_reason": reason})

    def can_resume(self) -> bool:
        return self._restorer.can_resume(self.card_id)

    def resume(self) -> PipelineCheckpoint | None:
        self.checkpoint = self._restorer.resume(self.card_id) or self.checkpoint
        return self.checkpoint

    def get_cached_llm_response(self, stage_name: str, prompt: str) -> Any:
        return self.llm_cache.get_cached_response(self.card_id, stage_name, prompt)

    def get_next_stage(self, all_stages: Iterable[str]) -> str | None:
        return CheckpointStateRestorer.get_next_stage(self.checkpoint, all_stages)

    def get_progress(self) -> dict[str, Any]:
        return ProgressCalculator.calculate_progress(self._current())

    def clear_checkpoint(self) -> None:
        self.repository.delete(self.card_id)
        self.llm_cache.clear_cache()
        self.checkpoint = None

    def _current(self) -> PipelineCheckpoint:
        if self.checkpoint is None:
            raise Validation(
                f"card {self.card_id} has no checkpoint yet", hint="call create_checkpoint or resume first"
            )
        return self.checkpoint

    def _change(self, **fields: Any) -> None:
        changed = PipelineCheckpoint.from_dict(self._current().to_dict())
        for name, value in fields.items():
            setattr(changed, name, value)
        changed.updated_at = datetime.now()  # noqa: DTZ005 - local, as all of them
        self._keep(changed)

    def _keep(self, card: PipelineCheckpoint) -> PipelineCheckpoint:
        """Durable first, then ours: what cannot be saved leaves the checkpoint as it was."""
        self.repository.save(card)
        self.checkpoint = card
        if self.verbose:
            sys.stderr.write(f"kedge: card {self.card_id}: {card.status.value}, {card.stages_completed} stages done\n")
        return card
