"""geo's core manager: `from kedge.legacy.core import get_checkpoint_manager`. Checkpoints by IDs that callers choose.

Corrected: IDs are no paths, a checkpoint that is saved again leaves nothing of the one before, and nothing is pickled:
a value of a class that Kedge does not know is kept as a dictionary of its fields with the key `$class`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from kedge import codec
from kedge.errors import Corrupted, NotFound, UnsupportedType
from kedge.manager import CheckpointManager as Store
from kedge.model import Checkpoint, CheckpointStatus, mapping_of, number_of

from . import open_in
from .importers.common import digest, name_of, step_of
from .importers.geo_core import LEVELS

__all__ = ["CheckpointCorruptedError", "CheckpointManager", "CheckpointMetadata", "get_checkpoint_manager"]

CheckpointCorruptedError = Corrupted

JOB = "geo-core"


@dataclass
class CheckpointMetadata:
    """What the manager knows of a checkpoint."""

    checkpoint_id: str
    timestamp: float
    level: str  # pipeline, phase, step, substep
    parent_id: str | None = None
    status: str = "created"
    data_files: list[str] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    checksum: str | None = None
    validation_checksum: str | None = None
    compressed: bool = False
    compression_type: str | None = None
    size_bytes: int = 0
    file_path: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def file_size_bytes(self) -> int:
        return self.size_bytes


class CheckpointManager:
    """Checkpoints in a directory, `checkpoints` unless another is set. There is one manager in a process."""

    _instance: Any = None
    _lock = threading.Lock()

    def __new__(cls) -> Self:
        with cls._lock:
            if cls._instance is None:
                cls._instance = super().__new__(cls)
                cls._instance.set_checkpoint_directory("checkpoints")
            return cls._instance  # type: ignore[no-any-return]

    def set_checkpoint_directory(self, directory: str | os.PathLike[str] | Store) -> None:
        """Checkpoints of the core manager that lie in it are imported at the first opening."""
        self._store = open_in(directory, "geo-core")
        self._directory = Path(self._store.place if isinstance(directory, Store) else directory)
        self._retention: dict[str, Any] = {"max_checkpoints": 100, "max_age_days": 7}

    @property
    def store(self) -> Store:
        return self._store

    def configure_retention(self, **config: Any) -> None:
        self._retention.update(config)

    def save_checkpoint(
        self,
        checkpoint_id: str,
        data: dict[str, Any],
        level: str = "step",
        parent_id: str | None = None,
        metadata: dict[str, object] | None = None,
        compress: bool = True,
    ) -> str:
        """Save durably; return the path. A checkpoint with the same ID is replaced."""
        about = {"id": checkpoint_id, "level": level, "parent": parent_id, "metadata": storable(metadata or {})}
        self._store.save(
            JOB,
            step_of(checkpoint_id),
            {name: storable(value) for name, value in data.items()},
            level=LEVELS.get(level, LEVELS["step"]),
            tags={"id": _tag(checkpoint_id)},
            metadata={"kind": "core", "core": about},
        )
        return str(self._directory / checkpoint_id)

    def load_checkpoint(self, checkpoint_id: str) -> dict[str, Any]:
        """The data; ValueError when there is none, or it is damaged."""
        checkpoint = self._find(checkpoint_id)
        if checkpoint is None:
            raise ValueError(f"Checkpoint not found: {checkpoint_id}")
        try:
            state: Any = self._store.load(checkpoint.id)
        except Corrupted as error:
            raise Corrupted(f"Checkpoint corrupted: {checkpoint_id}: {error.message}", hint=error.hint) from error
        return state["state"] if checkpoint.metadata.get("kind") == "process" else state  # type: ignore[no-any-return]

    def delete_checkpoint(self, checkpoint_id: str) -> bool:
        doomed = [*self._store.list(JOB, tags={"id": _tag(checkpoint_id)})]
        doomed += [imported] if (imported := self._imported(checkpoint_id)) else []
        return sum(self._store.delete(checkpoint.job, checkpoint.id) for checkpoint in doomed) > 0

    def list_checkpoints(
        self,
        level: str | None = None,
        parent_id: str | None = None,
        processor_name: str | None = None,
        status: str | None = None,
    ) -> list[CheckpointMetadata]:
        """Newest first."""
        chosen = [
            about
            for about in self._all()
            if (not level or about.level == level)
            and (not parent_id or about.parent_id == parent_id)
            and (not processor_name or about.metadata.get("processor_name") == processor_name)
            and (not status or about.status == status)
        ]
        return sorted(chosen, key=lambda about: about.timestamp, reverse=True)

    def get_checkpoint_info(self, checkpoint_id: str) -> CheckpointMetadata | None:
        checkpoint = self._find(checkpoint_id)
        return None if checkpoint is None else self._about(checkpoint)

    def validate_checkpoint(self, checkpoint_id: str) -> bool:
        """Whether it is there and all of it can be read; what was read and is wrong is marked as corrupted."""
        checkpoint = self._find(checkpoint_id)
        if checkpoint is None:
            return False
        try:
            self._store.load(checkpoint.id)
        except Corrupted:
            self._store.set_status(checkpoint.id, CheckpointStatus.CORRUPTED)
            return False
        return True

    def cleanup_old_checkpoints(self) -> int:
        """Delete what is older than max_age_days or beyond max_checkpoints, except the newest of each level. Return the
        number deleted."""
        listed = self.list_checkpoints()
        newest = listed[0].timestamp if listed else 0.0
        oldest = newest - timedelta(days=self._retention["max_age_days"]).total_seconds()
        least = mapping_of(self._retention.get("min_keep_per_level"))
        seen: dict[str, int] = {}
        deleted = 0
        for place, about in enumerate(listed):
            seen[about.level] = seen.get(about.level, 0) + 1
            is_old = about.timestamp < oldest or place >= self._retention["max_checkpoints"]
            if is_old and seen[about.level] > number_of(least.get(about.level, 1)):
                deleted += self.delete_checkpoint(about.checkpoint_id)
        return deleted

    def stop(self) -> None:
        """Nothing runs in the background."""

    def _find(self, checkpoint_id: str) -> Checkpoint | None:
        newest = self._store.list(JOB, tags={"id": _tag(checkpoint_id)}, limit=1)
        return newest[0] if newest else self._imported(checkpoint_id)

    def _imported(self, checkpoint_id: str) -> Checkpoint | None:
        try:
            checkpoint = self._store.get(name_of(checkpoint_id))
        except NotFound:
            return None
        return checkpoint if "legacy" in checkpoint.metadata else None

    def _all(self) -> Iterator[CheckpointMetadata]:
        seen: dict[str, CheckpointMetadata] = {}
        for job in self._store.jobs():
            for checkpoint in self._store.walk(job.name):
                about = mapping_of(checkpoint.metadata.get("core") or checkpoint.metadata.get("legacy"))
                if "id" in about and not job.name.endswith(":salvaged"):
                    seen[str(about["id"])] = self._about(checkpoint)
        return iter(seen.values())

    def _about(self, checkpoint: Checkpoint) -> CheckpointMetadata:
        about = mapping_of(checkpoint.metadata.get("core") or checkpoint.metadata.get("legacy"))
        status = "valid" if checkpoint.status == "created" else str(checkpoint.status)
        return CheckpointMetadata(
            str(about.get("id", checkpoint.id)),
            checkpoint.created_at.timestamp(),
            str(about.get("level") or checkpoint.level),
            about.get("parent", about.get("experiment")),
            status,
            metadata=mapping_of(about.get("metadata")),
            checksum=checkpoint.digest,
            validation_checksum=checkpoint.digest,
            compressed=True,
            compression_type="zstd",
            size_bytes=checkpoint.stored_bytes or checkpoint.size_bytes,
            file_path=str(self._directory / str(about.get("id", checkpoint.id))),
        )


def _tag(checkpoint_id: str) -> str:
    return digest(checkpoint_id)[:32]


def storable(value: Any) -> Any:
    """A value as the store can keep it: itself, or plain data that names its class."""
    try:
        codec.encode(value)
    except UnsupportedType:
        pass
    else:
        return value
    if isinstance(value, Mapping):
        return {name: storable(item) for name, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [storable(item) for item in value]
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if is_dataclass(value) and not isinstance(value, type):
        return {"$class": name, **{f.name: storable(getattr(value, f.name)) for f in fields(value)}}
    if callable(to_dict := getattr(value, "to_dict", None)):  # a Dataset of xarray, and much else
        return {"$class": name, **storable(to_dict())}
    raise UnsupportedType(f"a {name} cannot be saved", hint="give plain data, arrays or dataclasses", path="data")


def get_checkpoint_manager() -> CheckpointManager:
    return CheckpointManager()
