"""Two runs side by side: which steps have the same result, and why others do not. From their records alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from kedge.manager import CheckpointManager
from kedge.model import Checkpoint, mapping_of

from .history import StepHistory, find_run, steps_of
from .keys import show


@dataclass(frozen=True, slots=True)
class StepComparison:
    """A step of one run, or of both."""

    path: str
    verdict: str  # same, different, only in the first, only in the second
    reason: str
    first: str | None  # the checkpoints of its newest results, for `kedge diff`
    second: str | None

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def compare_runs(store: CheckpointManager, first: str, second: str) -> Iterator[StepComparison]:
    """Every step of both runs, those of the first in its order."""
    find_run(store, first)
    find_run(store, second)
    ours, theirs = steps_of(store, first), steps_of(store, second)
    for path in dict.fromkeys((*ours, *theirs)):
        yield _compare(show(path), ours.get(path), theirs.get(path))


def _compare(path: str, ours: StepHistory | None, theirs: StepHistory | None) -> StepComparison:
    if ours is None or theirs is None:
        verdict, there = ("only in the second", theirs) if ours is None else ("only in the first", ours)
        newest = _newest(there)
        checkpoints = (None, newest) if ours is None else (newest, None)
        return StepComparison(path, verdict, "", *(None if record is None else record.id for record in checkpoints))
    if ours.is_map and theirs.is_map:
        counts = [(history.items, history.failed_items) for history in (ours, theirs)]
        reason = "" if counts[0] == counts[1] else f"{ours.items:,} and {theirs.items:,} items"
        return StepComparison(path, "different" if reason else "same", reason or f"{ours.items:,} items", None, None)
    before, after = _newest(ours), _newest(theirs)
    ids = (None if before is None else before.id, None if after is None else after.id)
    if before is None or after is None:
        failed = [name for name, record in (("first", before), ("second", after)) if record is None]
        verdict = "same" if len(failed) == 2 else "different"
        return StepComparison(path, verdict, f"failed in the {' and the '.join(failed)}", *ids)
    is_same = before.digest == after.digest
    return StepComparison(path, "same" if is_same else "different", "; ".join(_reasons(before, after, is_same)), *ids)


def _newest(history: StepHistory | None) -> Checkpoint | None:
    return history.results[-1] if history is not None and history.results else None


def _reasons(before: Checkpoint, after: Checkpoint, is_same: bool) -> Iterator[str]:
    """What differs, and the result last: it may be the same all the same."""
    ours, theirs = (mapping_of(record.metadata.get("inputs")) for record in (before, after))
    if changed := sorted(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)):
        yield f"different inputs: {', '.join(changed)}"
    if before.metadata.get("version") != after.metadata.get("version"):
        yield "different version"
    yield "same result" if is_same else "different result"
