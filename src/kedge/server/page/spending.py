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
_SHOWN = 100  # models and runs: those that cost most
_KEPT = 10_000  # of each; writers choose their names
_MINUTES = 100_000  # of all models
_DAY_MINUTES = 24 * 60
_PARTS = Decimal(10**9)  # of a dollar: bars are whole numbers


@dataclass(slots=True)
class _Bills:
    """Bills by name, the dearest; the others as one."""

    bills: dict[str, Bill] = field(default_factory=dict)
    others: Bill = field(default_factory=Bill)

    def add(self, name: str, bill: Bill) -> None:
        self.bills[name] = self.bills.get(name, Bill()) + bill
        if len(self.bills) > _KEPT:
            self.bills, self.others = self.dearest(_KEPT // 2)

    def dearest(self, count: int) -> tuple[dict[str, Bill], Bill]:
        """So many, and the sum of all others."""
        ranked = sorted(self.bills, key=lambda name: -self.bills[name].spent)
        others = sum((self.bills[name] for name in ranked[count:]), self.others)
        return {name: self.bills[name] for name in ranked[:count]}, others


@dataclass(slots=True)
class Spending:
    """What is known of a namespace's calls. Thread-safe; one for a namespace."""

    models: _Bills = field(default_factory=_Bills)
    runs: _Bills = field(default_factory=_Bills)
    minutes: dict[tuple[str | None, int], Decimal] = field(default_factory=dict)  # spent, by model and minute
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
        job = store.catalogue.job(CALLS)
        deleted = 0 if job is None else job.last_seq - job.checkpoints
        if deleted != self._deleted:
            self.models, self.runs, self.minutes = _Bills(), _Bills(), {}
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
        self.models.add(model, bill)
        self.runs.add(run, bill)
        if bill.spent:
            minute = model, int(record.created_at.timestamp() // _MINUTE_S)
            self.minutes[minute] = self.minutes.get(minute, Decimal(0)) + bill.spent
            if len(self.minutes) > _MINUTES:
                self._join_minutes()

    def _join_minutes(self) -> None:
        """Of the older half, only what was spent on each day of the last year is kept, whatever the model."""
        newest = sorted(self.minutes, key=lambda key: -key[1])
        minutes = {key: self.minutes[key] for key in newest[: _MINUTES // 2]}
        now = datetime.now(UTC).timestamp()
        for key in newest[_MINUTES // 2 :]:
            if 0 <= now - key[1] * _MINUTE_S <= SPANS["year"][0]:
                day = None, key[1] // _DAY_MINUTES * _DAY_MINUTES
                minutes[day] = minutes.get(day, Decimal(0)) + self.minutes[key]
        self.minutes = minutes

    def _facts(self, span: str) -> dict[str, Any]:
        now = datetime.now(UTC).timestamp()
        first = min((minute * _MINUTE_S for _, minute in self.minutes), default=now)
        chosen = span or next((name for name, (seconds, _) in SPANS.items() if now - first <= seconds), "year")
        by_model, other_models = self.models.dearest(_SHOWN)
        by_run, other_runs = self.runs.dearest(_SHOWN)
        dearest = list(by_model)[:_COLOURS]
        bars, begin, bar_s = self._bars(chosen, now)
        return {
            "by_model": by_model,
            "other_models": other_models,
            "by_run": by_run,
            "other_runs": other_runs,
            "total": sum(by_model.values(), other_models),
            "is_partial": self.is_partial,
            "counted": self._last_seq,
            "span": chosen,
            "spans": SPANS,
            "begin": begin,
            "coloured": [model for model in dearest if by_model[model].spent],
            "has_others": len(by_model) > _COLOURS or any(None in bar for bar in bars),
            "chart": _chart(bars, dearest, begin, bar_s, chosen),
            "highest": dollars(max((sum(bar.values(), Decimal(0)) for bar in bars), default=Decimal(0))),
        }

    def _bars(self, span: str, now: float) -> tuple[list[dict[str | None, Decimal]], datetime, float]:
        seconds, count = SPANS[span]
        bar_s = seconds / count
        begin = (now // bar_s + 1) * bar_s - seconds
        bars: list[dict[str | None, Decimal]] = [{} for _ in range(count)]
        for (model, minute), spent in self.minutes.items():
            bar = int((minute * _MINUTE_S - begin) // bar_s)
            if 0 <= bar < count:
                bars[bar][model] = bars[bar].get(model, Decimal(0)) + spent
        return bars, datetime.fromtimestamp(begin, UTC), bar_s


def _chart(
    bars: list[dict[str | None, Decimal]], models: list[str], begin: datetime, bar_s: float, span: str
) -> object:
    columns = []
    for n, bar in enumerate(bars):
        whole = sum(bar.values(), Decimal(0))
        parts = [bar.get(model, Decimal(0)) for model in models]
        parts += [Decimal(0)] * (_COLOURS - len(parts))
        title = f"{exactly(begin + timedelta(seconds=n * bar_s))[:16]}: {dollars(whole)}"
        columns.append((title, [int(part * _PARTS) for part in (*parts, whole - sum(parts, Decimal(0)))]))
    return stacked_bars(columns, f"spent in the last {span}", lambda part: dollars(Decimal(part) / _PARTS))
