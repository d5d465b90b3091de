"""The five checkpoint formats of the geo code base."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import sys
import types
from pathlib import Path
from typing import Any

EPOCH = 1753401600.52


def checksum(folder: Path) -> str:
    """One SHA-256 over all files but metadata.json, sorted by path: name, then content."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name != "metadata.json":
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def core(
    root: Path, checkpoint_id: str, state: dict[str, Any], *, is_v1: bool = False, compressed: bool = True,
    protocol: int = 4, register: bool = True, **fields: Any,
) -> dict[str, Any]:  # fmt: skip
    folder = root / checkpoint_id
    folder.mkdir(parents=True)
    names = []
    for key, value in state.items():
        name = f"{key}.pkl.gz" if compressed else f"{key}.pkl"
        data = pickle.dumps(value, protocol)
        (folder / name).write_bytes(gzip.compress(data, mtime=0) if compressed else data)
        names.append(f"{checkpoint_id}/{name}")
    about: dict[str, Any] = {
        "checkpoint_id": checkpoint_id,
        "timestamp": EPOCH,
        "level": "pipeline",
        "parent_id": "9f0c",
        "status": "created",
        "data_files": names,
        "metadata": {"phase": "resampling"},
        "checksum": checksum(folder),
        "validation_checksum": None,
        "compressed": compressed,
        "compression_type": "gzip" if compressed else None,
        "size_bytes": sum(p.stat().st_size for p in folder.iterdir()),
        "file_path": f"checkpoints/{checkpoint_id}",
        **fields,
    }
    if is_v1:
        for name in ("validation_checksum", "compression_type", "file_path"):
            del about[name]
    (folder / "metadata.json").write_text(json.dumps(about))
    if register:
        registry = root / "registry.json"
        known = json.loads(registry.read_text()) if registry.exists() else {}
        registry.write_text(json.dumps({**known, checkpoint_id: about}))
    return about


def stage(root: Path, experiment: str, name: str, minute: int, **fields: Any) -> Path:
    folder = root / experiment
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "experiment_id": experiment,
        "stage": name,
        "timestamp": f"2025-07-25T16:{minute:02}:11.104233",
        "completed_stages": [],
        "shared_data": {"loaded_datasets": ["birds"], "merged_dataset": "<Dataset object>"},
        "metadata": {
            "experiment_name": "run7",
            "start_time": "2025-07-25 15:58:03.771920",
            "pipeline_version": "1.0.0",
        },
        "quality_metrics": {},
        "stage_results": {name: {"success": True, "metrics": {"n": 2}, "warnings": []}},
        "progress": {"completed_stages": 0, "stages": {}},
        **fields,
    }
    path = folder / f"checkpoint_{name}.json"
    path.write_text(json.dumps(document))
    return path


def pickled_as(module: str, name: str, fields: dict[str, Any], protocol: int = 4) -> bytes:
    """An object of a class that exists nowhere any more."""
    cls = type(name, (), {"__module__": module})
    parts = module.split(".")
    added = [".".join(parts[: n + 1]) for n in range(len(parts)) if ".".join(parts[: n + 1]) not in sys.modules]
    for part in added:
        sys.modules[part] = types.ModuleType(part)
    setattr(sys.modules[module], name, cls)
    try:
        made = cls()
        made.__dict__.update(fields)
        out = io.BytesIO()
        pickle.Pickler(out, protocol).dump(made)
        return out.getvalue()
    finally:
        for part in added:
            del sys.modules[part]


def tiles(done: list[str], failed: list[str] = (), total: int = 9, at: float = EPOCH, protocol: int = 4) -> bytes:  # type: ignore[assignment]
    fields = {
        "timestamp": at,
        "completed_tiles": done,
        "failed_tiles": list(failed),
        "total_tiles": total,
        "processing_parameters": {"size": 256},
    }
    return pickled_as("src.base.tile_processor", "ProcessingCheckpoint", fields, protocol)


def chunk(experiment: str, method: str, place: int, total: int, state: Any) -> tuple[str, bytes]:
    name = f"{experiment}_{method}_chunk_{place:04d}_{place:08x}"
    fields = {
        "checkpoint_id": name,
        "experiment_name": experiment,
        "analysis_method": method,
        "timestamp": f"2025-07-25T16:02:{place:02}",
        "chunk_idx": place,
        "total_chunks": total,
        "progress_percent": 100 * (place + 1) / total,
        "analysis_state": state,
        "metadata": {},
    }
    module = "src.processors.data_preparation.analysis_checkpoint"
    return name, pickled_as(module, "AnalysisCheckpoint", fields)


TABLE = """
CREATE TABLE pipeline_checkpoints (
  id UUID PRIMARY KEY DEFAULT gen_random_uuid(), checkpoint_id VARCHAR(255) UNIQUE NOT NULL,
  level VARCHAR(50) NOT NULL CHECK (level IN ('pipeline', 'phase', 'step', 'substep')),
  parent_id VARCHAR(255) REFERENCES pipeline_checkpoints(checkpoint_id) ON DELETE CASCADE,
  processor_name VARCHAR(255) NOT NULL, data_summary JSONB NOT NULL DEFAULT '{}', file_path TEXT NOT NULL,
  file_size_bytes BIGINT NOT NULL, compression_type VARCHAR(50),
  status VARCHAR(50) DEFAULT 'created' CHECK (status IN ('created', 'valid', 'corrupted', 'deleted')),
  validation_checksum VARCHAR(64), validation_result JSONB, error_message TEXT,
  created_at TIMESTAMPTZ DEFAULT now(), updated_at TIMESTAMPTZ DEFAULT now())
"""
