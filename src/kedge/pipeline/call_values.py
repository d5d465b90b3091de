"""What the pipeline of a run was called with, and what it returned: in a few words, without credentials, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kedge.manager import CheckpointManager
from kedge.model import RunStatus

from .history import RunSummary
from .owner import newest_status


@dataclass(frozen=True, slots=True)
class CallValues:
    """Texts by name; "" names the only one."""

    texts: Mapping[str, str]
    whole: str  # the checkpoint that holds the values themselves; "" where only these texts are kept


def arguments_of(store: CheckpointManager, run: RunSummary) -> CallValues | None:
    """With what the pipeline was called; None for a run that is no call of one, such as a `with kedge.run(…)` block."""
    for record in store.list(run.key, tags={"kind": "run"}, metadata={"session": run.sessions}, after=0, limit=1):
        if (given := _texts(record.metadata.get("given"))) is not None:
            return CallValues(given, record.id if record.metadata.get("has_entry") is True else "")
    return None


def result_of(store: CheckpointManager, run: RunSummary) -> CallValues | None:
    """What the pipeline returned; None for a run that has not completed, or whose result nobody noted."""
    newest = newest_status(store, run.key) if run.status is RunStatus.COMPLETED else None
    returned = None if newest is None else _texts(newest.metadata.get("returned"))
    if newest is None or returned is None:
        return None
    return CallValues(returned, newest.id if newest.metadata.get("has_result") is True else "")


def _texts(value: object) -> dict[str, str] | None:
    if not isinstance(value, Mapping):  # anybody who may save can write a record, of any form
        return None
    return {str(name): text for name, text in value.items() if isinstance(text, str)}
