"""Flows of CrewAI in a Kedge store (docs/crewai.md).

    from crewai.flow.flow import Flow
    from crewai.flow.persistence import persist
    from kedge.integrations.crewai import KedgeFlowPersistence

    @persist(KedgeFlowPersistence("my-store"))
    class Report(Flow): ...

A flow is the job `flow:ID`, and the state after each of its methods a checkpoint of it, with the method as its step.
"""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, PrivateAttr

from kedge.errors import missing_extra
from kedge.manager import CheckpointManager

try:
    from crewai.flow.persistence.base import FlowPersistence
except ModuleNotFoundError as error:
    raise missing_extra("kedge.integrations.crewai", "crewai", error) from error
if not issubclass(FlowPersistence, BaseModel):  # pip takes such a one where a newer OpenAI SDK is installed
    raise ImportError(
        "kedge.integrations.crewai needs a newer crewai, such as 1.15. Install it in an environment of its own: "
        'pip install "crewai>=1.15"',
        name="crewai",
    )

from .threads import Threads, job_of

FLOW = "flow"


class KedgeFlowPersistence(FlowPersistence):  # type: ignore[misc]  # CrewAI is not installed where this is checked
    """`store` is a path, a URL or an open CheckpointManager, which then stays the caller's to close."""

    persistence_type: str = "KedgeFlowPersistence"
    store: str | None = None
    _threads: Threads = PrivateAttr()

    def __init__(self, store: str | os.PathLike[str] | CheckpointManager | None = None, /, **fields: object) -> None:
        if store is not None:
            fields["store"] = store.url if isinstance(store, CheckpointManager) else os.fspath(store)
        super().__init__(**fields)
        self._threads = Threads(store if isinstance(store, CheckpointManager) else self.store)

    def init_db(self) -> None:
        """A store needs no preparation."""

    def save_state(self, flow_uuid: str, method_name: str, state_data: dict[str, object] | BaseModel) -> None:
        self._save(flow_uuid, method_name, {"state": _plain(state_data)})

    def load_state(self, flow_uuid: str) -> dict[str, Any] | None:
        return self._threads.read(job_of(FLOW, flow_uuid)).get("state")

    def save_pending_feedback(self, flow_uuid: str, context: Any, state_data: dict[str, object] | BaseModel) -> None:
        """Save the state, and what a flow that waits for somebody's feedback needs to go on."""
        self._save(flow_uuid, context.method_name, {"state": _plain(state_data), "pending": context.to_dict()})

    def load_pending_feedback(self, flow_uuid: str) -> tuple[dict[str, Any], object] | None:
        from crewai.flow.async_feedback.types import PendingFeedbackContext

        stored = self._threads.read(job_of(FLOW, flow_uuid))
        if "pending" not in stored:
            return None
        return stored["state"], PendingFeedbackContext.from_dict(stored["pending"])

    def clear_pending_feedback(self, flow_uuid: str) -> None:
        def cleared(before: dict[str, object]) -> dict[str, object] | None:
            return {"state": before["state"]} if "pending" in before else None

        self._threads.change(job_of(FLOW, flow_uuid), "feedback", cleared)

    def close(self) -> None:
        self._threads.close()

    def _save(self, flow_uuid: str, step: str, state: dict[str, Any]) -> None:
        self._threads.change(job_of(FLOW, flow_uuid), step, lambda before: {**before, **state})


def _plain(state: dict[str, object] | BaseModel) -> dict[str, object]:
    return state.model_dump(mode="json") if isinstance(state, BaseModel) else dict(state)
