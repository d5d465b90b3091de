"""artemis: `from kedge.legacy.artemis import CheckpointManager`. A card is a run, saved as an imported one would be.

Corrected: a result that cannot be kept changes nothing, every run that is not completed resumes, a stage is in the list
of its latest attempt only, the cache is one object that is filled again on resuming, and history stays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

from kedge import codec
from kedge.errors import Conflict, Validation
from kedge.manager import CheckpointManager as Store
from kedge.model import mapping_of
from kedge.pipeline.owner import newest_status

from . import open_in
from .artemis_models import (
    CheckpointCreator,
    CheckpointRepository,
    CheckpointStatus,
    CheckpointUpdater,
    CheckpointValidator,
    LLMCacheKeyGenerator,
    LLMCacheManager,
    PipelineCheckpoint,
    ProgressCalculator,
    StageCheckpoint,
    calculate_progress_percent,
    estimate_remaining_time,
    now,
)
from .importers import Options, Report, Verdict
from .importers.artemis import drafts
from .importers.common import SAVED_HERE, Draft
from .importers.export import artemis_card
from .importers.runs import run_key
from .importers.writer import Writer

__all__ = [
    "CheckpointCreator", "CheckpointManager", "CheckpointRepository", "CheckpointRestorer", "CheckpointStateRestorer",
    "CheckpointStatus", "CheckpointUpdater", "CheckpointValidator", "FilesystemCheckpointRepository",
    "LLMCacheKeyGenerator", "LLMCacheManager", "PipelineCheckpoint", "ProgressCalculator", "StageCheckpoint",
    "calculate_progress_percent", "create_checkpoint_manager", "create_checkpoint_repository", "create_state_restorer",
    "estimate_remaining_time", "get_checkpoint_manager",
]  # fmt: skip

_DEFAULT_DIRECTORY = "../../.artemis_data/checkpoints"  # from the current directory, as it always was


class FilesystemCheckpointRepository(CheckpointRepository):
    """Cards in a store in a directory, with their history. Cards that artemis left there are imported first."""

    def __init__(self, checkpoint_dir: str | os.PathLike[str] | Store | None = None) -> None:
        if checkpoint_dir is None:
            checkpoint_dir = os.environ.get("ARTEMIS_CHECKPOINT_DIR", _DEFAULT_DIRECTORY)
        self.store = open_in(checkpoint_dir, "artemis")
        self.checkpoint_dir = Path(self.store.place if isinstance(checkpoint_dir, Store) else checkpoint_dir)

    def save(self, checkpoint: PipelineCheckpoint) -> None:
        document = checkpoint.to_dict()
        codec.encode(document)  # what cannot be kept is refused by its path before anything is written
        report = Report()
        writer = Writer(self.store, report, is_owner=True)
        for draft in drafts(document, "", f"card {checkpoint.card_id}", Options()):
            if isinstance(draft, Draft):
                draft.metadata["legacy"] = {**mapping_of(draft.metadata.get("legacy")), SAVED_HERE: True}
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
        document = artemis_card(self.store, run_key(card_id, ""), lambda c: self.store.load(c.id))
        return PipelineCheckpoint.from_dict(document)

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
            f"unknown storage_type: {storage_type!r}", hint='use "filesystem"; a URL as checkpoint_dir does the rest'
        )
    return FilesystemCheckpointRepository(**options)


class CheckpointRestorer:
    """Loads a card to resume it. Every card that is not completed can be resumed."""

    def __init__(self, repository: CheckpointRepository) -> None:
        self.repository = repository
        self.validator = CheckpointValidator()

    def can_resume(self, card_id: str) -> bool:
        return self.validator.can_resume_checkpoint(self.repository.load(card_id))

    def resume(self, card_id: str) -> PipelineCheckpoint | None:
        card = self.repository.load(card_id)
        if card is None or not self.validator.can_resume_checkpoint(card):
            return None
        card.status = CheckpointStatus.RESUMED
        card.resume_count += 1
        card.last_resume_time = card.updated_at = now()
        self.repository.save(card)
        return card

    def load_checkpoint(self, card_id: str) -> PipelineCheckpoint | None:
        return self.repository.load(card_id)


class CheckpointStateRestorer:
    """Resumes a card and fills the cache with its answers."""

    def __init__(self, repository: CheckpointRepository, cache_manager: LLMCacheManager) -> None:
        self.restorer = CheckpointRestorer(repository)
        self.cache_manager = cache_manager

    def restore_full_state(self, card_id: str) -> PipelineCheckpoint | None:
        card = self.restorer.resume(card_id)
        self.cache_manager.restore_cache_from_checkpoint(card)
        return card

    def can_resume(self, card_id: str) -> bool:
        return self.restorer.can_resume(card_id)


def create_state_restorer(repository: CheckpointRepository, enable_llm_cache: bool = True) -> CheckpointStateRestorer:
    return CheckpointStateRestorer(repository, LLMCacheManager(enable_llm_cache))


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
        self.enable_llm_cache = enable_llm_cache
        self.repository = FilesystemCheckpointRepository(checkpoint_dir)
        self.creator = CheckpointCreator()
        self.updater = CheckpointUpdater()
        self.progress_calculator = ProgressCalculator()
        self.checkpoint_dir = self.repository.checkpoint_dir
        self.cache_manager = LLMCacheManager(enable_llm_cache)
        self.llm_cache = self.cache_manager.cache
        self.state_restorer = CheckpointStateRestorer(self.repository, self.cache_manager)
        self.checkpoint: PipelineCheckpoint | None = None

    def create_checkpoint(
        self, total_stages: int, execution_context: Mapping[str, Any] | None = None
    ) -> PipelineCheckpoint:
        card = self.creator.create_new_checkpoint(self.card_id, total_stages, execution_context)
        self.repository.save(card)
        self.checkpoint = card
        self._say()
        return card

    def save_stage_checkpoint(
        self,
        stage_name: str,
        status: str,
        result: Mapping[str, Any] | None = None,
        artifacts: Iterable[str] | None = None,
        llm_responses: Iterable[Mapping[str, object]] | None = None,
        error_message: str | None = None,
        start_time: datetime | None = None,
        end_time: datetime | None = None,
    ) -> None:
        stage = self.creator.create_stage_checkpoint(
            stage_name, status, start_time, end_time, result, artifacts, llm_responses, error_message
        )
        self._change(lambda card: self.updater.update_with_stage(card, stage))
        self.cache_manager.restore_cache_from_checkpoint(self.checkpoint)

    def set_current_stage(self, stage_name: str) -> None:
        self._change(lambda card: self.updater.set_current_stage(card, stage_name))

    def mark_completed(self) -> None:
        if self.checkpoint is not None:
            self._change(self.updater.mark_completed)

    def mark_failed(self, reason: str) -> None:
        if self.checkpoint is not None:
            self._change(lambda card: self.updater.mark_failed(card, reason))

    def can_resume(self) -> bool:
        return self.state_restorer.can_resume(self.card_id)

    def resume(self) -> PipelineCheckpoint | None:
        card = self.state_restorer.restore_full_state(self.card_id)
        if card is not None:
            self.checkpoint = card
            self._say()
        return card

    def get_cached_llm_response(self, stage_name: str, prompt: str) -> Any:
        return self.cache_manager.get_cached_response(self.card_id, stage_name, prompt)

    def get_next_stage(self, all_stages: Iterable[str]) -> str | None:
        return self.progress_calculator.get_next_stage(self.checkpoint, all_stages)

    def get_progress(self) -> dict[str, Any]:
        return self.progress_calculator.calculate_progress(self.checkpoint)

    def clear_checkpoint(self) -> None:
        if self.repository.delete(self.card_id):
            self.checkpoint = None
            self.cache_manager.clear_cache()

    def _change(self, change: Callable[[PipelineCheckpoint], None]) -> None:
        """Durable first, then ours: what cannot be saved leaves the checkpoint as it was."""
        if self.checkpoint is None:
            raise Validation(
                f"card {self.card_id} has no checkpoint yet", hint="call create_checkpoint or resume first"
            )
        changed = deepcopy(self.checkpoint)
        change(changed)
        self.repository.save(changed)
        vars(self.checkpoint).update(vars(changed))
        self._say()

    def _say(self) -> None:
        if self.verbose and (card := self.checkpoint) is not None:
            sys.stderr.write(f"kedge: card {self.card_id}: {card.status.value}, {card.stages_completed} stages done\n")


def create_checkpoint_manager(
    card_id: str,
    verbose: bool = True,
    checkpoint_dir: str | os.PathLike[str] | Store | None = None,
    enable_llm_cache: bool = True,
) -> CheckpointManager:
    return CheckpointManager(card_id, checkpoint_dir, enable_llm_cache, verbose)


get_checkpoint_manager = CheckpointManager
