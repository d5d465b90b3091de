"""Checkpoints, executions and whole jobs as the jobs system wrote them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from .artemis import JSON, NAMES

START = datetime(2025, 11, 18, 10, 30, 34, 123456, tzinfo=UTC)


def checkpoint(job: str, step: str, state: Any, place: int = 0, **fields: Any) -> dict[str, Any]:
    at = START + timedelta(seconds=place)
    return {
        "checkpoint_id": f"{step}_{int(at.timestamp())}_{place:08x}",
        "job_id": job,
        "step_name": step,
        "state": state,
        "timestamp": at.isoformat(),
        "workflow_version": "1.0",
        **fields,
    }


def write(folder: Path, document: dict[str, Any]) -> Path:
    place = folder / document["job_id"]
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"{document['checkpoint_id']}.json"
    path.write_text(json.dumps(document, indent=2))
    return path


def step(name: str, state: str = "completed", **fields: Any) -> dict[str, Any]:
    return {
        "checkpoint_name": name,
        "agent_id": "writer",
        "correlation_id": "c1",
        "state": state,
        "started_at": START.isoformat(),
        "completed_at": START.isoformat() if state == "completed" else None,
        "input_data": {"topic": "tea"},
        "output_data": {"text": "…"} if state == "completed" else None,
        "error_details": None,
        "approval_required": False,
        "approval_status": None,
        "metadata": {},
        **fields,
    }


def execution(correlation: str, steps: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "execution_id": f"exec_{correlation}_1763461834",
        "correlation_id": correlation,
        "workflow_name": "blog",
        "started_at": START.isoformat(),
        "current_checkpoint": steps[-1]["checkpoint_name"] if steps else None,
        "state": "running",
        "checkpoints": steps,
        "global_data": {"n": 1},
        "completed_at": None,
        **fields,
    }


def truncated(document: dict[str, Any]) -> str:
    """As real files are: cut right after `"state": ` of checkpoint 0."""
    text = json.dumps(document, indent=2)
    inside = text.index('"checkpoints"')
    return text[: text.index('"state": ', inside) + len('"state": ')]


def whole_job(job: str) -> dict[str, Any]:
    return {
        "job_id": job,
        "state": {
            "status": "running",
            "current_step": "draft",
            "completed_steps": ["outline"],
            "failed_steps": [],
            "outputs": {"outline": "1. 2. 3."},
            "context": {},
            "errors": [],
        },
        "timestamp": START.isoformat(),
    }


@st.composite
def checkpoints(draw: st.DrawFn) -> dict[str, Any]:
    made = checkpoint(draw(NAMES), draw(NAMES), draw(JSON), draw(st.integers(0, 1000)))
    if draw(st.booleans()):
        del made["workflow_version"]
    return made
