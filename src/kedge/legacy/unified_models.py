"""The values of geo's unified checkpoint plan."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any, Self

from kedge.errors import Corrupted, UnsupportedType, Validation
from kedge.model import CheckpointLevel
from kedge.process import resumable


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
    tags: list[str] = field(default_factory=list)
    description: str = ""
    size_bytes: int = 0
    compression: str | None = None
    checksum: str | None = None
    save_duration_ms: float | None = None
    load_duration_ms: float | None = None
    parent_checkpoint_id: str | None = None
    child_checkpoint_ids: list[str] = field(default_factory=list)


def _now() -> datetime:
    return datetime.now(UTC)


@dataclass
class CheckpointData:
    checkpoint_id: str
    level: CheckpointLevel
    status: CheckpointStatus
    data: Any
    metadata: CheckpointMetadata
    created_at: datetime = field(default_factory=_now)
    updated_at: datetime = field(default_factory=_now)
    accessed_at: datetime | None = None
    parent_id: str | None = None

    def mark_accessed(self) -> None:
        self.accessed_at = _now()

    def mark_updated(self) -> None:
        self.updated_at = _now()

    def is_valid(self) -> bool:
        return self.status in (CheckpointStatus.CREATED, CheckpointStatus.VALID)

    def is_stale(self, max_age_hours: float = 24) -> bool:
        return _now() - self.created_at > timedelta(hours=max_age_hours)

    def to_dict(self) -> dict[str, Any]:
        times = {name: getattr(self, name) for name in ("created_at", "updated_at", "accessed_at")}
        return {
            "checkpoint_id": self.checkpoint_id,
            "level": str(self.level),
            "status": str(self.status),
            "data": self.data,
            "metadata": asdict(self.metadata),
            "parent_id": self.parent_id,
            **{name: None if at is None else at.isoformat() for name, at in times.items()},
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        times = {
            name: datetime.fromisoformat(data[name]) if data.get(name) else None
            for name in ("created_at", "updated_at", "accessed_at")
        }
        return cls(
            data["checkpoint_id"],
            CheckpointLevel(data["level"]),
            CheckpointStatus(data["status"]),
            data["data"],
            CheckpointMetadata(**data["metadata"]),
            times["created_at"] or _now(),
            times["updated_at"] or _now(),
            times["accessed_at"],
            data.get("parent_id"),
        )


@dataclass
class StorageConfig:
    """Where checkpoints go. What the store always does, or has limits of its own for, is taken and ignored."""

    backend: StorageBackend = StorageBackend.FILE
    config: dict[str, Any] = field(default_factory=dict)
    base_path: str | os.PathLike[str] | None = None
    database_url: str | None = None
    compression_enabled: bool = True
    encryption_enabled: bool = False
    max_file_size_mb: float = 100
    retention_days: float = 7

    def __post_init__(self) -> None:
        if self.database_url and self.backend is StorageBackend.FILE and self.base_path is None:
            self.backend = StorageBackend.DATABASE  # detected from what is given
        self.backend = StorageBackend(self.backend)

    def validate(self) -> list[str]:
        """What is wrong with it."""
        problems = []
        if self.backend is StorageBackend.DATABASE and not self.database_url:
            problems.append("database_url is missing")
        if self.max_file_size_mb <= 0:
            problems.append("max_file_size_mb must be above 0")
        if self.retention_days <= 0:
            problems.append("retention_days must be above 0")
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
    tags: list[str] | None = None
    parent_id: str | None = None
    limit: int | None = None

    def matches(self, checkpoint: CheckpointData) -> bool:
        return (
            (self.process_name is None or checkpoint.metadata.process_name == self.process_name)
            and (self.level is None or checkpoint.level == self.level)
            and (self.status is None or checkpoint.status == self.status)
            and (self.created_after is None or checkpoint.created_at >= _aware(self.created_after))
            and (self.created_before is None or checkpoint.created_at <= _aware(self.created_before))
            and (not self.tags or set(self.tags) <= set(checkpoint.metadata.tags))
            and (self.parent_id is None or checkpoint.parent_id == self.parent_id)
        )


def _aware(at: datetime) -> datetime:
    return at.astimezone(UTC)


class CheckpointValidator:
    """Checks of single checkpoints. The store verifies every load by itself."""

    def validate(self, checkpoint: CheckpointData) -> bool:
        return bool(checkpoint.checkpoint_id and checkpoint.metadata.process_name) and checkpoint.is_valid()

    def calculate_checksum(self, data: Any) -> str:
        """SHA-256 over JSON with sorted keys and compact separators."""
        try:
            text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise UnsupportedType(
                f"no checksum of this: {error}", hint="the store's own digest takes anything"
            ) from error
        return hashlib.sha256(text.encode()).hexdigest()

    def verify_integrity(self, checkpoint: CheckpointData, checksum: str | None = None) -> bool:
        expected = checksum or checkpoint.metadata.checksum
        if expected is None:
            raise Corrupted(
                f"checkpoint {checkpoint.checkpoint_id} has no checksum", hint="calculate_checksum makes one"
            )
        return self.calculate_checksum(checkpoint.data) == expected


_ID = re.compile(
    r"(?P<prefix>.+?)(?:_(?P<level>pipeline|stage|step|substep))?_(?P<date>\d{8})_(?P<time>\d{6})_[0-9a-f]{8}"
)


def generate_checkpoint_id(prefix: str = "chk", level: CheckpointLevel | str | None = None) -> str:
    """`<prefix>[_<level>]_<YYYYMMDD>_<HHMMSS>_<8 hex>`."""
    middle = "" if level is None else f"_{CheckpointLevel(level)}"
    return f"{prefix}{middle}_{_now():%Y%m%d_%H%M%S}_{os.urandom(4).hex()}"


def parse_checkpoint_id(checkpoint_id: str) -> dict[str, Any]:
    """original_id, prefix, level (or None), timestamp (UTC)."""
    match = _ID.fullmatch(checkpoint_id)
    if match is None:
        raise Validation(
            f"{checkpoint_id[:80]!r} is no ID of generate_checkpoint_id", hint="chk_step_20250725_160211_…"
        )
    level = match["level"]
    return {
        "original_id": checkpoint_id,
        "prefix": match["prefix"],
        "level": None if level is None else CheckpointLevel(level),
        "timestamp": datetime.strptime(match["date"] + match["time"], "%Y%m%d%H%M%S").replace(tzinfo=UTC),
    }


@dataclass(frozen=True, slots=True)
class CheckpointPolicy(resumable.CheckpointPolicy):
    """With the old names, which change nothing: the store always verifies and compresses, and no clock deletes."""

    max_age_hours: float = 24
    validate_on_save: bool = True
    verify_on_load: bool = True
    compress_large_checkpoints: bool = True
    compression_threshold_mb: float = 10
