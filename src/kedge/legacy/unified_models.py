"""The values of geo's checkpoint tree, as its own modules have them: naive local times, plain enums, tags by name."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Self

from kedge.errors import Validation
from kedge.model import CheckpointLevel


class CheckpointStatus(StrEnum):
    CREATED = "created"
    VALID = "valid"
    CORRUPTED = "corrupted"
    ARCHIVED = "archived"
    DELETED = "deleted"


class StorageBackend(StrEnum):
    FILE = "file"
    DATABASE = "database"
    MEMORY = "memory"


@dataclass
class CheckpointMetadata:
    process_name: str
    process_version: str = "1.0.0"
    tags: dict[str, str] = field(default_factory=dict)
    description: str | None = None
    size_bytes: int = 0
    compression: str | None = None
    checksum: str | None = None
    save_duration_ms: float = 0.0
    load_duration_ms: float = 0.0
    parent_checkpoint_id: str | None = None
    child_checkpoint_ids: list[str] = field(default_factory=list)


def now() -> datetime:
    return datetime.now()  # noqa: DTZ005 - all times of these values are local


def generate_checkpoint_id(prefix: str = "chk", level: CheckpointLevel | None = None) -> str:
    """`<prefix>[_<level>]_<YYYYMMDD>_<HHMMSS>_<8 hex>`."""
    middle = "" if level is None else f"_{CheckpointLevel(level)}"
    return f"{prefix}{middle}_{now():%Y%m%d_%H%M%S}_{os.urandom(4).hex()}"


def parse_checkpoint_id(checkpoint_id: str) -> dict[str, object]:
    """original_id and prefix, and where the ID tells them, level and timestamp."""
    parts = checkpoint_id.split("_")
    parsed: dict[str, Any] = {"original_id": checkpoint_id, "prefix": parts[0]}
    if level := next((str(level) for level in CheckpointLevel if level in parts), None):
        parsed["level"] = level
    moments = [part for part in parts if len(part) in (6, 8) and part.isdecimal()]
    if len(moments) >= 2:
        try:
            parsed["timestamp"] = datetime.strptime("_".join(moments[:2]), "%Y%m%d_%H%M%S")  # noqa: DTZ007
        except ValueError:
            pass  # digits, but no time
    return parsed


_TIMES = ("created_at", "updated_at", "accessed_at")


@dataclass
class CheckpointData:
    checkpoint_id: str
    level: CheckpointLevel
    status: CheckpointStatus = CheckpointStatus.CREATED
    data: Any = field(default_factory=dict)
    metadata: CheckpointMetadata = field(default_factory=lambda: CheckpointMetadata("unknown"))
    created_at: datetime = field(default_factory=now)
    updated_at: datetime = field(default_factory=now)
    accessed_at: datetime | None = None
    parent_id: str | None = None

    generate_id = staticmethod(generate_checkpoint_id)

    def __post_init__(self) -> None:
        self.checkpoint_id = self.checkpoint_id or self.generate_id()
        if self.metadata.parent_checkpoint_id is None:
            self.metadata.parent_checkpoint_id = self.parent_id

    def mark_accessed(self) -> None:
        self.accessed_at = now()

    def mark_updated(self) -> None:
        self.updated_at = now()

    def is_valid(self) -> bool:
        return self.status is CheckpointStatus.VALID

    def is_stale(self, max_age_hours: float = 24.0) -> bool:
        return now() - self.created_at > timedelta(hours=max_age_hours)

    def to_dict(self) -> dict[str, Any]:
        moments = {name: getattr(self, name) for name in _TIMES}
        times = {name: None if at is None else at.isoformat() for name, at in moments.items()}
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        words = {"level": str(self.level), "status": str(self.status), "metadata": asdict(self.metadata)}
        return {**known, **words, **times}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        about = {f.name: data["metadata"][f.name] for f in fields(CheckpointMetadata) if f.name in data["metadata"]}
        times = {name: data[name] and datetime.fromisoformat(data[name]) for name in _TIMES if name in data}
        values = {
            "level": CheckpointLevel(data["level"]),
            "status": CheckpointStatus(data["status"]),
            "metadata": CheckpointMetadata(**{"process_name": "unknown", **about}),
        }
        return cls(**{**known, **values, **times})


@dataclass
class StorageConfig:
    """Where checkpoints go. What the store always does, or has limits of its own for, is taken and ignored."""

    backend: StorageBackend = StorageBackend.FILE
    config: dict[str, Any] = field(default_factory=dict)
    base_path: str | os.PathLike[str] | None = None
    database_url: str | None = None
    compression_enabled: bool = True
    encryption_enabled: bool = False
    max_file_size_mb: float = 100.0
    retention_days: int = 7

    def __post_init__(self) -> None:
        if self.database_url and self.backend is StorageBackend.FILE and self.base_path is None:
            self.backend = StorageBackend.DATABASE  # detected from what is given
        self.backend = StorageBackend(self.backend)

    def validate(self) -> list[str]:
        """What is wrong with it."""
        problems = []
        if self.backend is StorageBackend.FILE and not self.base_path:
            problems.append("File storage requires base_path")
        if self.backend is StorageBackend.DATABASE and not self.database_url:
            problems.append("Database storage requires database_url")
        if self.max_file_size_mb <= 0:
            problems.append("max_file_size_mb must be positive")
        if self.retention_days < 0:
            problems.append("retention_days must be non-negative")
        if self.encryption_enabled:
            problems.append("encryption_enabled: open an encrypted store with kedge.open(key=…) and give that")
        return problems


@dataclass
class CheckpointFilter:
    process_name: str | None = None
    level: CheckpointLevel | str | None = None
    status: CheckpointStatus | str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    tags: dict[str, str] = field(default_factory=dict)
    parent_id: str | None = None
    limit: int | None = None

    def matches(self, checkpoint: CheckpointData) -> bool:
        wanted = (
            (self.process_name, checkpoint.metadata.process_name),
            (self.level, checkpoint.level),
            (self.status, checkpoint.status),
            (self.parent_id, checkpoint.parent_id),
        )
        return (
            all(not chosen or chosen == value for chosen, value in wanted)
            and (self.created_after is None or checkpoint.created_at >= self.created_after)
            and (self.created_before is None or checkpoint.created_at <= self.created_before)
            and all(checkpoint.metadata.tags.get(name) == value for name, value in self.tags.items())
        )


class CheckpointValidator(ABC):
    """Checks of single checkpoints. The store verifies every load by itself."""

    @abstractmethod
    def validate(self, checkpoint: CheckpointData) -> bool: ...

    @abstractmethod
    def calculate_checksum(self, data: Any) -> str: ...

    @abstractmethod
    def verify_integrity(self, checkpoint: CheckpointData) -> bool: ...


class DefaultCheckpointValidator(CheckpointValidator):
    def validate(self, checkpoint: CheckpointData) -> bool:
        """True, or Validation with what is wrong."""
        is_plain = isinstance(checkpoint.data, dict)
        for is_wrong, problem in (
            (not checkpoint.checkpoint_id, "it has no checkpoint_id"),
            (not checkpoint.level, "it has no level"),
            (not is_plain, "its data is not a dictionary"),
            (is_plain and not self.verify_integrity(checkpoint), "its checksum does not match its data"),
        ):
            if is_wrong:
                raise Validation(f"checkpoint {checkpoint.checkpoint_id}: {problem}", hint="correct it before saving")
        return True

    def calculate_checksum(self, data: Any) -> str:
        """SHA-256 over JSON with sorted keys and compact separators."""
        return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def verify_integrity(self, checkpoint: CheckpointData) -> bool:
        """Whether the checksum fits; there being none is no fault."""
        expected = checkpoint.metadata.checksum
        return not expected or self.calculate_checksum(checkpoint.data) == expected
