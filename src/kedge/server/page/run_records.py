"""The records of the runs that people looked at last: read again only when a run has changed.

A run changes by saves and deletions, and its job counts both; so the counts say whether what was read still holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from threading import Lock

from kedge.manager import CheckpointManager
from kedge.model import parse_name
from kedge.pipeline.history import Explanation, StepHistory, explain, steps_of
from kedge.pipeline.items import MapItems, maps_of

_MOST_RECORDS = 30_000  # of all runs together; one with more is read each time


@dataclass(frozen=True, slots=True)
class RunRecords:
    """Shared by all who ask: nobody changes it."""

    steps: Mapping[tuple[str, ...], StepHistory]
    maps: Sequence[MapItems]
    explanations: Sequence[Explanation]


@dataclass(frozen=True, slots=True)
class _Read:
    state: tuple[datetime, int, int]  # of the job: when it began, its last number, how many are there
    records: RunRecords

    @property
    def count(self) -> int:
        return self.state[2]


class RunMemory:
    """Thread-safe; one for an application."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[str, str], _Read] = OrderedDict()  # by namespace and key
        self._lock = Lock()

    def records(self, store: CheckpointManager, key: str) -> RunRecords:
        job = store.catalogue.job(parse_name("run key", key))  # before the records: what comes meanwhile is next
        state = (job.created_at, job.last_seq, job.checkpoints) if job is not None else None
        place = (store.namespace, key)
        with self._lock:
            known = self._runs.get(place)
            if known is not None and known.state == state:
                self._runs.move_to_end(place)
                return known.records
        steps, maps = steps_of(store, key), maps_of(store, key)
        records = RunRecords(steps, maps, explain(store, key, steps, maps))
        if state is not None:
            with self._lock:
                self._runs[place] = _Read(state, records)
                self._runs.move_to_end(place)
                while sum(read.count for read in self._runs.values()) > _MOST_RECORDS:
                    self._runs.popitem(last=False)
        return records
