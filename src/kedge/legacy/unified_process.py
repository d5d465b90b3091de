"""geo's processes that save themselves, through the manager they are given.

Corrected: a save or a load that fails raises, and the caller's data is not changed.
"""

from __future__ import annotations

import functools
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from kedge.errors import Corrupted, Validation
from kedge.model import CheckpointLevel

from .unified_models import (
    CheckpointData,
    CheckpointFilter,
    CheckpointMetadata,
    CheckpointValidator,
    DefaultCheckpointValidator,
    now,
)


@dataclass
class CheckpointPolicy:
    interval_items: int = 100
    interval_seconds: float = 300.0
    interval_memory_mb: float = 500.0
    max_checkpoints: int = 5
    max_age_hours: float = 24.0
    keep_failed_checkpoints: bool = True
    validate_on_save: bool = True
    verify_on_load: bool = True
    auto_cleanup: bool = True
    compress_large_checkpoints: bool = True
    compression_threshold_mb: float = 10.0
    async_save: bool = False

    def should_checkpoint_by_items(self, items_processed: int, last_checkpoint_items: int) -> bool:
        return items_processed - last_checkpoint_items >= self.interval_items

    def should_checkpoint_by_time(self, last_checkpoint_time: float) -> bool:
        return time.time() - last_checkpoint_time >= self.interval_seconds

    def should_checkpoint_by_memory(self, memory_increase_mb: float) -> bool:
        return memory_increase_mb >= self.interval_memory_mb


class ResumableProcess(ABC):
    @abstractmethod
    def get_state(self) -> dict[str, Any]: ...

    @abstractmethod
    def restore_state(self, state: dict[str, Any]) -> None: ...

    @abstractmethod
    def get_progress(self) -> dict[str, Any]: ...

    def can_resume_from(self, checkpoint: CheckpointData) -> bool:
        return checkpoint.metadata.process_name == type(self).__name__


class CheckpointableProcess:
    """`set_checkpoint_manager(UnifiedCheckpointManager(…))`, then it saves itself as it goes."""

    def __init__(
        self,
        checkpoint_policy: CheckpointPolicy | None = None,
        checkpoint_validator: CheckpointValidator | None = None,
        process_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._checkpoint_policy = checkpoint_policy or CheckpointPolicy()
        self._checkpoint_validator = checkpoint_validator or DefaultCheckpointValidator()
        self._process_id = process_id or f"{type(self).__name__}_{now():%Y%m%d_%H%M%S}_{uuid.uuid4().hex[:8]}"
        self._checkpoint_manager: Any = None
        self._current_checkpoint_id: str | None = None
        self._checkpoint_count = 0
        self._items_processed = self._last_checkpoint_items = 0
        self._total_items: int | None = None
        self._last_checkpoint_memory_mb = 0.0
        self._start_time = self._last_checkpoint_time = time.time()

    @property
    def process_id(self) -> str:
        return self._process_id

    @property
    def checkpoint_interval(self) -> int:
        return self._checkpoint_policy.interval_items

    def set_checkpoint_manager(self, checkpoint_manager: Any) -> None:
        self._checkpoint_manager = checkpoint_manager

    def save_checkpoint(
        self,
        level: CheckpointLevel = CheckpointLevel.STEP,
        data: dict[str, Any] | None = None,
        description: str | None = None,
        tags: dict[str, str] | None = None,
    ) -> str | None:
        """The ID of a new checkpoint; None without a manager."""
        if self._checkpoint_manager is None:
            return None
        content = {
            **(data or {}),
            **(self.get_state() if isinstance(self, ResumableProcess) else {}),
            "items_processed": self._items_processed,
            "total_items": self._total_items,
            "start_time": self._start_time,
            "checkpoint_time": time.time(),
            "progress_percentage": self.get_progress_percentage(),
        }
        about = CheckpointMetadata(
            type(self).__name__,
            description=description or f"Checkpoint at {self._items_processed} items",
            tags={"process_id": self._process_id, **(tags or {})},
        )
        checkpoint = CheckpointData("", level, data=content, metadata=about)
        if self._checkpoint_policy.validate_on_save and not self._checkpoint_validator.validate(checkpoint):
            raise Validation(f"process {self._process_id}: its validator refused the checkpoint")
        self._current_checkpoint_id = self._checkpoint_manager.save(checkpoint)
        self._last_checkpoint_time = time.time()
        self._last_checkpoint_items = self._items_processed
        self._checkpoint_count += 1
        return self._current_checkpoint_id

    def load_checkpoint(self, checkpoint_id: str | None = None) -> CheckpointData | None:
        """Go on from a checkpoint, or from the newest of this process; None when there is none."""
        if self._checkpoint_manager is None:
            return None
        checkpoint: CheckpointData | None = (
            self._checkpoint_manager.load(checkpoint_id)
            if checkpoint_id
            else self._checkpoint_manager.load_latest_for_process(self._process_id)
        )
        if checkpoint is None:
            return None
        validator = self._checkpoint_validator
        has_own = self._checkpoint_policy.verify_on_load and not isinstance(validator, DefaultCheckpointValidator)
        if has_own and not validator.verify_integrity(checkpoint):
            raise Corrupted(f"process {self._process_id}: its validator refused {checkpoint.checkpoint_id}")
        if isinstance(self, ResumableProcess):
            self.restore_state(checkpoint.data)
        self._items_processed = self._last_checkpoint_items = checkpoint.data.get("items_processed", 0)
        self._total_items = checkpoint.data.get("total_items")
        self._start_time = checkpoint.data.get("start_time", time.time())
        self._last_checkpoint_time = checkpoint.data.get("checkpoint_time", time.time())
        self._current_checkpoint_id = checkpoint.checkpoint_id
        return checkpoint

    def should_checkpoint(self, force_check: bool = False) -> bool:
        policy = self._checkpoint_policy
        if policy.should_checkpoint_by_items(self._items_processed, self._last_checkpoint_items):
            return True
        if policy.should_checkpoint_by_time(self._last_checkpoint_time):
            return True
        memory_mb = self.get_memory_usage_mb() if hasattr(self, "get_memory_usage_mb") else None
        if memory_mb is None or not policy.should_checkpoint_by_memory(memory_mb - self._last_checkpoint_memory_mb):
            return False
        self._last_checkpoint_memory_mb = memory_mb
        return True

    def auto_checkpoint(self, force: bool = False) -> str | None:
        if not force and not self.should_checkpoint():
            return None
        return self.save_checkpoint(description=f"Auto checkpoint at {self._items_processed} items")

    def update_progress(self, items_processed: int | None = None, total_items: int | None = None) -> None:
        self._items_processed = self._items_processed if items_processed is None else items_processed
        self._total_items = self._total_items if total_items is None else total_items
        self.auto_checkpoint()

    def get_progress_percentage(self) -> float:
        return min(100.0, self._items_processed / self._total_items * 100.0) if self._total_items else 0.0

    def get_checkpoint_info(self) -> dict[str, Any]:
        policy = self._checkpoint_policy
        return {
            "process_id": self._process_id,
            "current_checkpoint_id": self._current_checkpoint_id,
            "checkpoint_count": self._checkpoint_count,
            "last_checkpoint_time": self._last_checkpoint_time,
            "last_checkpoint_items": self._last_checkpoint_items,
            "items_processed": self._items_processed,
            "total_items": self._total_items,
            "progress_percentage": self.get_progress_percentage(),
            "policy": {n: getattr(policy, n) for n in ("interval_items", "interval_seconds", "max_checkpoints")},
        }

    def cleanup_checkpoints(self) -> int:
        """Delete what is older than the policy says, but the newest `max_checkpoints` of that; return how many."""
        policy = self._checkpoint_policy
        if self._checkpoint_manager is None or not policy.auto_cleanup:
            return 0
        before = now() - timedelta(hours=policy.max_age_hours)
        old = self._checkpoint_manager.list(CheckpointFilter(type(self).__name__, created_before=before))
        doomed = sorted(old, key=lambda checkpoint: checkpoint.created_at)[: -policy.max_checkpoints]
        return sum(bool(self._checkpoint_manager.delete(checkpoint.checkpoint_id)) for checkpoint in doomed)


class SimpleCheckpointableProcess(CheckpointableProcess, ResumableProcess):
    """A process whose state is a dictionary."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._custom_state: dict[str, object] = {}

    def get_state(self) -> dict[str, Any]:
        return {
            "custom_state": dict(self._custom_state),
            "class_name": type(self).__name__,
            "process_id": self._process_id,
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        self._custom_state = state.get("custom_state", {})

    def get_progress(self) -> dict[str, Any]:
        return {
            "items_processed": self._items_processed,
            "total_items": self._total_items,
            "progress_percentage": self.get_progress_percentage(),
            "elapsed_time_seconds": time.time() - self._start_time,
            "custom_state_keys": list(self._custom_state),
        }

    def set_state(self, key: str, value: Any) -> None:
        self._custom_state[key] = value

    def get_state_value(self, key: str, default: Any = None) -> object:
        return self._custom_state.get(key, default)


def make_checkpointable(checkpoint_policy: CheckpointPolicy | None = None) -> Callable[[type], type]:
    """Give a class what a CheckpointableProcess has."""

    def decorate(cls: type) -> type:
        def begin(self: Any, *args: Any, **kwargs: Any) -> None:
            policy = kwargs.pop("checkpoint_policy", checkpoint_policy)
            own = {name: kwargs.pop(name, None) for name in ("checkpoint_validator", "process_id")}
            cls.__init__(self, *args, **kwargs)  # type: ignore[misc]
            CheckpointableProcess.__init__(self, policy, **own)

        body = {"__init__": begin, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        return type(cls.__name__, (cls, CheckpointableProcess), body)

    return decorate


def checkpoint_on_interval(items: int = 100, seconds: float = 300.0) -> Callable[[Callable[..., Any]], Any]:
    """After each call of the method, save if so many items or seconds went by since the last checkpoint."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *args: object, **kwargs: object) -> Any:
            result = method(self, *args, **kwargs)
            if isinstance(self, CheckpointableProcess):
                usual = self._checkpoint_policy
                self._checkpoint_policy = replace(usual, interval_items=items, interval_seconds=seconds)
                try:
                    self.auto_checkpoint()
                finally:
                    self._checkpoint_policy = usual
            return result

        return wrapper

    return decorate
