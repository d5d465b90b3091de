"""Cards of the artemis pipeline, in its four forms and in SQLite."""

from __future__ import annotations

import json
import sqlite3
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

START = datetime(2025, 10, 23, 12, 0, 0)  # noqa: DTZ001 - these systems wrote local time


def stage(name: str, place: int, status: str = "completed", **fields: Any) -> dict[str, Any]:
    begin = START + timedelta(minutes=place)
    return {
        "stage_name": name,
        "status": status,
        "start_time": begin.isoformat(),
        "end_time": (begin + timedelta(seconds=45)).isoformat(),
        "duration_seconds": 45.0,
        "result": {"of": name},
        "artifacts": [f"{name}.md"],
        "llm_responses": [{"prompt": f"do {name}", "response": f"did {name}"}],
        "error_message": None if status != "failed" else "it broke",
        "retry_count": 0,
        "metadata": {},
        **fields,
    }


def card(card_id: str, stages: dict[str, dict[str, Any]], **fields: Any) -> dict[str, Any]:
    names = {word: [n for n, s in stages.items() if s["status"] == word] for word in ("completed", "failed", "skipped")}
    return {
        "checkpoint_id": f"checkpoint-{card_id}-1761178645",
        "card_id": card_id,
        "status": "active",
        "created_at": START.isoformat(),
        "updated_at": (START + timedelta(minutes=len(stages), microseconds=200)).isoformat(),
        "completed_stages": names["completed"],
        "failed_stages": names["failed"],
        "skipped_stages": names["skipped"],
        "current_stage": "development",
        "stage_checkpoints": stages,
        "execution_context": {},
        "total_stages": 3,
        "stages_completed": len(names["completed"]),
        "total_duration_seconds": 45.0 * len(stages),
        "estimated_remaining_seconds": 0.0,
        "resume_count": 0,
        "last_resume_time": None,
        "metadata": {},
        **fields,
    }


def index(last: int, results: dict[str, Any]) -> dict[str, Any]:
    return {"last_completed_stage": last, "timestamp": START.isoformat(), "results": results}


def results(card_id: str, stages: dict[str, str], **fields: Any) -> dict[str, Any]:
    return {
        "checkpoint_id": "checkpoint-1a2b3c4d",
        "card_id": card_id,
        "status": "in_progress",
        "created_at": "2025-10-23T12:00:00Z",
        "updated_at": "2025-10-23T12:10:00Z",
        "completed_stages": [n for n, s in stages.items() if s == "completed"],
        "failed_stages": [n for n, s in stages.items() if s == "failed"],
        "current_stage": None,
        "stage_results": {
            name: {"status": status, "artifacts": {"doc": f"{name}.md"}, "result": {"of": name}, "error": None}
            for name, status in stages.items()
        },
        **fields,
    }


def state(card_id: str, done: list[str], **fields: Any) -> dict[str, Any]:
    return {
        "card_id": card_id,
        "status": "running",
        "current_stage": "next",
        "stages_completed": done,
        "stage_results": {name: {"of": name} for name in done},
        "developer_results": [],
        "metrics": {},
        "created_at": START.isoformat(),
        "updated_at": (START + timedelta(minutes=5)).isoformat(),
        "completed_at": None,
        "error": None,
        **fields,
    }


def attempts(card_id: str, *entries: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "card_id": card_id,
            "stage_name": name,
            "status": status,
            "started_at": (START + timedelta(minutes=place)).isoformat(),
            "completed_at": (START + timedelta(minutes=place, seconds=9)).isoformat() if status != "started" else None,
            "result": {"of": name} if status == "completed" else None,
            "error": "it broke" if status == "failed" else None,
        }
        for place, (name, status) in enumerate(entries)
    ]


def call(card_id: str, stage_name: str, cost: float) -> dict[str, Any]:
    return {
        "timestamp": "2025-10-23T12:00:00Z",
        "model": "gpt-4o",
        "provider": "openai",
        "tokens_input": 100,
        "tokens_output": 20,
        "cost": cost,
        "stage": stage_name,
        "card_id": card_id,
        "purpose": "general",
    }


def machine(card_id: str) -> dict[str, Any]:
    """What the state machine saved in `<card>_state.json`, where another part saved its own."""
    return {
        "state": "running",
        "timestamp": START.isoformat(),
        "card_id": card_id,
        "active_stage": "build",
        "health_status": "healthy",
        "circuit_breakers_open": [],
        "active_issues": [],
        "stages": {"plan": {"stage_name": "plan", "state": "completed", "retry_count": 0, "metadata": {}}},
    }


def write_sqlite(path: Path, states: list[dict[str, Any]], stages: list[dict[str, Any]]) -> None:
    with sqlite3.connect(path) as db:
        names = list(states[0])
        db.execute(f"CREATE TABLE pipeline_states ({', '.join(f'{n} TEXT' for n in names)}, PRIMARY KEY (card_id))")
        for row in states:
            values = [json.dumps(v) if isinstance(v, dict | list) else v for v in row.values()]
            db.execute(f"INSERT INTO pipeline_states VALUES ({', '.join('?' * len(names))})", values)
        db.execute(
            "CREATE TABLE stage_checkpoints (card_id TEXT, stage_name TEXT, status TEXT, started_at TEXT, completed_at "
            "TEXT, result TEXT, error TEXT, UNIQUE (card_id, stage_name, started_at))"
        )
        for entry in stages:
            values = [json.dumps(v) if isinstance(v, dict | list) else v for v in entry.values()]
            db.execute("INSERT INTO stage_checkpoints VALUES (?, ?, ?, ?, ?, ?, ?)", values)
    db.close()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
NAMES = st.text(min_size=1, max_size=40).filter(lambda name: name.strip() != "")


@st.composite
def cards(draw: st.DrawFn) -> dict[str, Any]:
    """Any card: unicode, empty, missing optional fields, every status."""
    names = draw(st.lists(NAMES, max_size=4, unique=True))
    stages = {}
    for place, name in enumerate(names):
        made = stage(
            name, place, draw(st.sampled_from(["completed", "failed", "skipped"])), result=draw(st.none() | JSON)
        )
        for optional in draw(st.sets(st.sampled_from(["artifacts", "llm_responses", "metadata", "retry_count"]))):
            del made[optional]
        stages[name] = made
    status = draw(st.sampled_from(["active", "paused", "completed", "failed", "resumed"]))
    made = card(
        draw(NAMES), stages, status=status, execution_context=draw(st.dictionaries(st.text(), JSON, max_size=3))
    )
    for optional in draw(st.sets(st.sampled_from(["metadata", "last_resume_time", "total_stages", "current_stage"]))):
        del made[optional]
    return made
