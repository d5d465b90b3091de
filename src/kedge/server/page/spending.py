"""What LLM calls cost: spent and saved, never mixed; by model, by run, and over time.

Each look reads what was recorded since the one before, some thousand records at most, so that a page that follows the
store costs the same however many calls there were (I6).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from threading import Lock
from typing import Any

from kedge.llm.bills import Bill
from kedge.llm.pricing import dollars
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.pipeline.history import CALLS
from kedge.terminal.text import exactly

from .charts import stacked_bars
from .growth import SPANS

_PAGE = 1000
_READ_AT_ONCE = 10_000  # records, by one look
_MINUTE_S = 60
_COLOURS = 5
_RUNS = 100  # those that cost most
_PARTS = Decimal(10**9)  # of a dollar: bars are whole numbers


@dataclass(slots=True)
class Spending:
    """What is known of a namespace's calls. Thread-safe; one for a namespace."""

    by_model: dict[str, Bill] = field(default_factory=dict)
    by_run: dict[str, Bill] = field(default_factory=dict)
    minutes: dict[tuple[str, int], Decimal] = field(default_factory=dict)  # spent, by model and minute
    is_partial: bool = False  # more are still to be read
    _last_seq: int = 0
    _deleted: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False)

    def look(self, store: CheckpointManager, span: str = "") -> dict[str, Any]:
        """What a page shows; `span` is one of SPANS, or "" for the shortest that has everything."""
        with self._lock:
            self._read(store)
            return self._facts(span)

    def _read(self, store: CheckpointManager) -> None:
        job = store.store.job(CALLS)
        deleted = 0 if job is None else job.last_seq - job.checkpoints
        if deleted != self._deleted:
            self.by_model, self.by_run, self.minutes = {}, {}, {}
            self._last_seq, self._deleted = 0, deleted
        for _ in range(0, _READ_AT_ONCE, _PAGE):
            page = store.list(CALLS, after=self._last_seq, limit=_PAGE)
            for record in page:
                self._add(record)
            self._last_seq = page[-1].seq if page else self._last_seq
            self.is_partial = len(page) == _PAGE
            if not self.is_partial:
                return

    def _add(self, record: Checkpoint) -> None:
        bill = Bill.from_json(record.metadata)
        model, run = (str(record.metadata.get(name, "")) for name in ("model", "run"))
        self.by_model[model] = self.by_model.get(model, Bill()) + bill
        self.by_run[run] = self.by_run.get(run, Bill()) + bill
        if bill.spent:
            minute = model, int(record.created_at.timestamp() // _MINUTE_S)
            self.minutes[minute] = self.minutes.get(minute, Decimal(0)) + bill.spent

    def _facts(self, span: str) -> dict[str, Any]:
        now = datetime.now(UTC).timestamp()
        first = min((minute * _MINUTE_S for _, minute in self.minutes), default=now)
        chosen = span or next((name for name, (seconds, _) in SPANS.items() if now - first <= seconds), "year")
        dearest = sorted(self.by_model, key=lambda model: -self.by_model[model].spent)
        runs = sorted(self.by_run, key=lambda run: -self.by_run[run].spent)[:_RUNS]
        bars, begin, bar_s = self._bars(chosen, now)
        return {
            "by_model": {model: self.by_model[model] for model in dearest},
            "by_run": {run: self.by_run[run] for run in runs},
            "runs_left_out": max(0, len(self.by_run) - _RUNS),
            "total": sum(self.by_model.values(), Bill()),
            "is_partial": self.is_partial,
            "counted": self._last_seq,
            "span": chosen,
            "spans": SPANS,
            "begin": begin,
            "coloured": [model for model in dearest[:_COLOURS] if self.by_model[model].spent],
            "chart": _chart(bars, dearest[:_COLOURS], begin, bar_s, chosen),
            "highest": dollars(max((sum(bar.values(), Decimal(0)) for bar in bars), default=Decimal(0))),
        }

    def _bars(self, span: str, now: float) -> tuple[list[dict[str, Decimal]], datetime, float]:
        seconds, count = SPANS[span]
        bar_s = seconds / count
        begin = (now // bar_s + 1) * bar_s - seconds
        bars: list[dict[str, Decimal]] = [{} for _ in range(count)]
        for (model, minute), spent in self.minutes.items():
            bar = int((minute * _MINUTE_S - begin) // bar_s)
            if 0 <= bar < count:
                bars[bar][model] = bars[bar].get(model, Decimal(0)) + spent
        return bars, datetime.fromtimestamp(begin, UTC), bar_s


def _chart(bars: list[dict[str, Decimal]], models: list[str], begin: datetime, bar_s: float, span: str) -> Any:
    columns = []
    for n, bar in enumerate(bars):
        whole = sum(bar.values(), Decimal(0))
        parts = [bar.get(model, Decimal(0)) for model in models]
        parts += [Decimal(0)] * (_COLOURS - len(parts))
        title = f"{exactly(begin + timedelta(seconds=n * bar_s))[:16]}: {dollars(whole)}"
        columns.append((title, [int(part * _PARTS) for part in (*parts, whole - sum(parts, Decimal(0)))]))
    return stacked_bars(columns, f"spent in the last {span}")
