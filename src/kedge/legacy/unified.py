"""unified (geo): `from kedge.legacy.unified import UnifiedCheckpointManager, CheckpointableProcess, …`.

Corrected: integrity comes from the store, order from sequence numbers, nothing is swallowed, the caller's data is not
changed, and what cannot be kept is named by its path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

from kedge import codec
from kedge.errors import CheckpointError, Corrupted, NotFound, StorageError, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, CheckpointId, CheckpointLevel, mapping_of, to_us
from kedge.store.request import parse_request

from . import move_in, store_in
from .importers.common import clean, name_of, step_of
from .unified_models import (
    CheckpointData,
    CheckpointFilter,
    CheckpointMetadata,
    CheckpointStatus,
    CheckpointValidator,
    DefaultCheckpointValidator,
    StorageBackend,
    StorageConfig,
    generate_checkpoint_id,
    now,
    parse_checkpoint_id,
)
from .unified_process import (
    CheckpointableProcess,
    CheckpointPolicy,
    ResumableProcess,
    SimpleCheckpointableProcess,
    checkpoint_on_interval,
    make_checkpointable,
)

CheckpointNotFoundError = NotFound
CheckpointCorruptedError = Corrupted
CheckpointValidationError = Validation
StorageBackendError = StorageError

__all__ = [
    "CheckpointCorruptedError", "CheckpointData", "CheckpointError", "CheckpointFilter", "CheckpointLevel",
    "CheckpointMetadata", "CheckpointNotFoundError", "CheckpointPolicy", "CheckpointRegistry", "CheckpointStatus",
    "CheckpointStorage", "CheckpointValidationError", "CheckpointValidator", "CheckpointableProcess", "Corrupted",
    "DefaultCheckpointValidator", "NotFound", "ResumableProcess", "SimpleCheckpointableProcess", "StorageBackend",
    "StorageBackendError", "StorageBackendFactory", "StorageConfig", "UnifiedCheckpointManager", "Validation",
    "checkpoint_on_interval", "generate_checkpoint_id", "get_checkpoint_manager", "make_checkpointable",
    "parse_checkpoint_id",
]  # fmt: skip


class CheckpointStorage:
    """CheckpointData in a store. `config` says where: a directory, a database URL, or memory."""

    def __init__(self, config: StorageConfig | CheckpointManager | None = None) -> None:
        if isinstance(config, CheckpointManager):
            self.store = config
            self.config = StorageConfig(base_path=config.place)
            self.backend_type = self.config.backend
            return
        self.config = config or StorageConfig(base_path="checkpoints")
        self.backend_type = self.config.backend
        if problems := self.config.validate():
            raise StorageError(f"Invalid storage config: {problems}", hint="correct the StorageConfig")
        self.store = CheckpointManager(_place(self.config))
        if self.backend_type is StorageBackend.FILE:
            move_in(str(self.config.base_path), self.store, "auto")

    def save(self, checkpoint: CheckpointData) -> str:
        """Durable when this returns; where it is. The parent, if any, must exist."""
        about = checkpoint.metadata
        request = parse_request(
            name_of(about.process_name),
            step_of(about.description or about.process_name),
            level=checkpoint.level,
            parent=checkpoint.parent_id or about.parent_checkpoint_id,
            metadata={
                "kind": "unified",
                "process_name": clean(about.process_name),
                "process_version": about.process_version,
                "tags": dict(about.tags),
                "description": clean(about.description),
            },
        )
        created_us = to_us(checkpoint.created_at.astimezone())
        named = replace(request, checkpoint_id=CheckpointId(name_of(checkpoint.checkpoint_id)), created_us=created_us)
        self.store.commit(named, codec.encode(checkpoint.data))
        return f"{self.store.place}#{named.checkpoint_id}"

    def load(self, checkpoint_id: str) -> CheckpointData:
        """With its data, verified; NotFound, or Corrupted."""
        checkpoint = self.store.get(checkpoint_id)
        return self._data(checkpoint, self.store.load(checkpoint.id))

    def exists(self, checkpoint_id: str) -> bool:
        return self.store.exists(checkpoint_id)

    def delete(self, checkpoint_id: str) -> bool:
        if not self.store.exists(checkpoint_id):
            return False
        return self.store.delete(self.store.get(checkpoint_id).job, checkpoint_id)

    def list(self, filter_criteria: CheckpointFilter | None = None) -> Any:
        """CheckpointData without data, oldest first within each process; with a limit, the newest ones."""
        chosen = filter_criteria or CheckpointFilter()
        jobs = [name_of(chosen.process_name)] if chosen.process_name else [job.name for job in self.store.jobs()]
        every = [
            c for job in jobs for c in self.store.walk(job, level=chosen.level) if c.metadata.get("kind") == "unified"
        ]
        matching = [data for c in every if chosen.matches(data := self._data(c, None))]
        return matching if chosen.limit is None else matching[-chosen.limit :]

    def cleanup(self, max_age_days: float = 7, max_count: int | None = None) -> int:
        """Delete what is older, or beyond `max_count` of a process; never its newest, nor a parent of one kept."""
        limit = (now() - timedelta(days=max_age_days)).astimezone()
        removed = 0
        for job in self.store.jobs():
            own = [c for c in self.store.walk(job.name) if c.metadata.get("kind") == "unified"]
            beyond = set() if max_count is None else {c.id for c in own[: max(0, len(own) - max(1, max_count))]}
            doomed = [c for c in own[:-1] if c.id in beyond or c.created_at < limit]
            needed = {c.parent for c in own if c not in doomed}
            for checkpoint in reversed(doomed):
                if checkpoint.id in needed or checkpoint.is_pinned:
                    needed.add(checkpoint.parent)
                else:
                    removed += self.store.delete(job.name, checkpoint.id)
        return removed

    def get_stats(self) -> dict[str, Any]:
        return {"backend_type": str(self.backend_type), "config": vars(self.config), **self.store.stats()}

    def children_of(self, checkpoint_id: str) -> Any:
        """The IDs of the checkpoints whose parent this one is."""
        job = self.store.get(checkpoint_id).job
        return [str(checkpoint.id) for checkpoint in self.store.walk(job) if checkpoint.parent == checkpoint_id]

    def _data(self, checkpoint: Checkpoint, state: Any) -> CheckpointData:
        about = checkpoint.metadata
        children = [] if state is None else self.children_of(checkpoint.id)
        metadata = CheckpointMetadata(
            process_name=str(about.get("process_name", checkpoint.job)),
            process_version=str(about.get("process_version", "1.0.0")),
            tags=dict(mapping_of(about.get("tags"))),
            description=str(about.get("description") or "") or None,
            size_bytes=checkpoint.size_bytes,
            checksum=checkpoint.digest,
            parent_checkpoint_id=checkpoint.parent,
            child_checkpoint_ids=children,
        )
        status = CheckpointStatus.VALID if checkpoint.status == "created" else CheckpointStatus(checkpoint.status)
        at = checkpoint.created_at.astimezone().replace(tzinfo=None)
        return CheckpointData(checkpoint.id, checkpoint.level, status, state, metadata, at, at, None, checkpoint.parent)


def _place(config: StorageConfig) -> str:
    if config.backend is StorageBackend.MEMORY:
        return "memory:"
    if config.backend is StorageBackend.DATABASE:
        return str(config.database_url)
    return store_in(config.base_path or "checkpoints")


class StorageBackendFactory:
    """One storage for each place."""

    def __init__(self) -> None:
        self._open: dict[str, CheckpointStorage] = {}

    def create(self, config: StorageConfig) -> CheckpointStorage:
        place = _place(config)
        if place not in self._open:
            self._open[place] = CheckpointStorage(config)
        return self._open[place]


class UnifiedCheckpointManager:
    """save, load, load_latest, resume_from, list, delete by process name."""

    def __init__(self, config: StorageConfig | CheckpointManager | CheckpointStorage | None = None) -> None:
        self.storage = config if isinstance(config, CheckpointStorage) else CheckpointStorage(config)

    def save(
        self,
        process_name: str | CheckpointData,
        data: Any = None,
        level: CheckpointLevel | str = CheckpointLevel.STEP,
        *,
        parent_id: str | None = None,
        tags: Mapping[str, str] | None = None,
        description: str | None = None,
        process_version: str = "1.0.0",
    ) -> str:
        """Save a checkpoint, given whole or in parts; return its ID."""
        if isinstance(process_name, CheckpointData):
            self.storage.save(process_name)
            return process_name.checkpoint_id
        chosen = CheckpointLevel(level)
        checkpoint = CheckpointData(
            generate_checkpoint_id(level=chosen),
            chosen,
            CheckpointStatus.CREATED,
            data,
            CheckpointMetadata(process_name, process_version, dict(tags or {}), description),
            parent_id=parent_id,
        )
        self.storage.save(checkpoint)
        return checkpoint.checkpoint_id

    def load(self, checkpoint_id: str) -> CheckpointData:
        return self.storage.load(checkpoint_id)

    def load_latest(self, process_name: str, level: CheckpointLevel | str | None = None) -> CheckpointData | None:
        latest = self.storage.store.load_latest(name_of(process_name), level=level)
        return None if latest is None else self.storage._data(*latest)

    def load_latest_for_process(self, process_id: str) -> CheckpointData | None:
        """The newest checkpoint that a CheckpointableProcess with this ID saved."""
        own = self.storage.list(CheckpointFilter(tags={"process_id": process_id}))
        return self.storage.load(own[-1].checkpoint_id) if own else None

    def resume_from(self, checkpoint_id: str) -> Any:
        """The data of a checkpoint, which becomes the newest of its process again."""
        return self.storage.store.resume_from(checkpoint_id)[1]

    def list(self, filter_criteria: CheckpointFilter | None = None, **wanted: Any) -> Any:
        return self.storage.list(filter_criteria or CheckpointFilter(**wanted))

    def delete(self, checkpoint_id: str) -> bool:
        return self.storage.delete(checkpoint_id)


class CheckpointRegistry:
    """Who is whose parent, and cleaning up. The store is the registry: there is nothing to keep in step with it."""

    def __init__(self, storage: CheckpointStorage) -> None:
        self._storage = storage

    def parent_of(self, checkpoint_id: str) -> str | None:
        return self._storage.store.get(checkpoint_id).parent

    def children_of(self, checkpoint_id: str) -> Any:
        return self._storage.children_of(checkpoint_id)

    def cleanup(self, max_age_days: float = 7, max_count: int | None = None) -> int:
        return self._storage.cleanup(max_age_days, max_count)


@cache
def _manager_of(place: str) -> UnifiedCheckpointManager:
    return UnifiedCheckpointManager(CheckpointManager(place))


def get_checkpoint_manager(config: StorageConfig | Mapping[str, Any] | None = None) -> UnifiedCheckpointManager:
    """The one manager of a place in this process; without a config, of $KEDGE_STORE or ./checkpoints."""
    if config is None:
        return _manager_of(os.environ.get("KEDGE_STORE") or store_in("checkpoints"))
    return _manager_of(_place(config if isinstance(config, StorageConfig) else StorageConfig(**config)))
