"""The costs of LLM calls: each paid call is recorded, with the run and step that made it.

`llm:calls` is the job of these records. A paid call has its own record, saved before its response is cached, so that
the books never show less than was paid. Cache hits are added up and recorded every few seconds: a kill loses some of
the savings, never any spending.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation

from kedge import codec
from kedge.errors import CheckpointError
from kedge.exit import save_at_end
from kedge.manager import CheckpointManager
from kedge.model import CheckpointLevel, number_of
from kedge.pipeline.history import CALLS
from kedge.pipeline.place import here, payer
from kedge.pipeline.telemetry import count_llm_call
from kedge.store import Save
from kedge.store.request import parse_request

from .pricing import Tokens, dollars

WRITE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class Charge:
    """One call, either paid or answered from the cache and so saved."""

    model: str
    tokens: Tokens | None  # None: not reported by the vendor
    cost: Decimal | None  # None: unpriced
    is_saved: bool
    run: str = ""
    step: str = ""


@dataclass(frozen=True, slots=True)
class Bill:
    """Many calls, added up. Spent and saved are never mixed."""

    paid: int = 0  # calls
    found: int = 0
    spent: Decimal = Decimal(0)
    saved: Decimal = Decimal(0)
    paid_unpriced: int = 0
    found_unpriced: int = 0
    tokens_paid: Tokens = field(default_factory=Tokens)
    tokens_found: Tokens = field(default_factory=Tokens)

    def __bool__(self) -> bool:
        return bool(self.paid or self.found)

    def add(self, charge: Charge) -> Bill:
        tokens, cost = charge.tokens or Tokens(), charge.cost or Decimal(0)
        is_unpriced = int(charge.cost is None)
        if charge.is_saved:
            return replace(
                self,
                found=self.found + 1,
                saved=self.saved + cost,
                found_unpriced=self.found_unpriced + is_unpriced,
                tokens_found=self.tokens_found + tokens,
            )
        return replace(
            self,
            paid=self.paid + 1,
            spent=self.spent + cost,
            paid_unpriced=self.paid_unpriced + is_unpriced,
            tokens_paid=self.tokens_paid + tokens,
        )

    def __add__(self, other: Bill) -> Bill:
        return Bill(*(getattr(self, name) + getattr(other, name) for name in Bill.__slots__))

    def to_json(self) -> dict[str, object]:
        return {
            "paid": self.paid,
            "found": self.found,
            "spent": format(self.spent, "f"),
            "saved": format(self.saved, "f"),
            "paid_unpriced": self.paid_unpriced,
            "found_unpriced": self.found_unpriced,
            "tokens_paid": self.tokens_paid.to_json(),
            "tokens_found": self.tokens_found.to_json(),
        }

    @classmethod
    def from_json(cls, document: object) -> Bill:
        given: Mapping[str, object] = document if isinstance(document, Mapping) else {}
        return cls(
            paid=number_of(given.get("paid")),
            found=number_of(given.get("found")),
            spent=amount_of(given.get("spent")),
            saved=amount_of(given.get("saved")),
            paid_unpriced=number_of(given.get("paid_unpriced")),
            found_unpriced=number_of(given.get("found_unpriced")),
            tokens_paid=Tokens.from_json(given.get("tokens_paid")),
            tokens_found=Tokens.from_json(given.get("tokens_found")),
        )

    def __str__(self) -> str:
        """`3 calls, $0.012 spent; 2 found, $0.008 saved`; unpriced calls are listed, never counted as free."""
        parts = []
        if self.paid:
            parts.append(_part(self.paid, "paid", self.spent, "spent", self.paid_unpriced))
        if self.found:
            parts.append(_part(self.found, "found", self.saved, "saved", self.found_unpriced))
        return "; ".join(parts)


def _part(calls: int, how: str, amount: Decimal, verb: str, unpriced: int) -> str:
    if unpriced == calls:
        return f"{calls:,} {how}, unpriced"
    note = f" and {unpriced:,} unpriced" if unpriced else ""
    return f"{calls:,} {how}, {dollars(amount)} {verb}{note}"


@dataclass(slots=True)
class Meter:
    """Counts the calls made inside a block, by any thread."""

    bill: Bill = field(default_factory=Bill)
    model: str = ""  # of the last call
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, charge: Charge) -> None:
        with self._lock:  # several threads may work on the items of a map inside
            self.bill, self.model = self.bill.add(charge), charge.model


_meter: ContextVar[Meter | None] = ContextVar("kedge_llm_meter", default=None)


@contextmanager
def metered() -> Iterator[Meter]:
    meter = Meter()
    token = _meter.set(meter)
    try:
        yield meter
    finally:
        _meter.reset(token)


class Books:
    """The records of one store."""

    def __init__(self, store: CheckpointManager) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._found: list[Charge] = []  # not recorded yet
        self._due = time.monotonic() + WRITE_EVERY_S
        _open_books.add(self)

    def pay(self, charge: Charge, estimate: Decimal | None) -> Save:
        """Count a paid call. Return its record, to be saved before anybody gets the response.

        Budgets count `estimate` if the vendor reported no usage, or not all of it.
        """
        return self.record(_counted(charge), estimate)

    def record(self, charge: Charge, estimate: Decimal | None) -> Save:
        """Return the record of a finished call that is counted nowhere else."""
        return self._record((charge.run, charge.step, charge.model), Bill().add(charge), estimate)

    def found(self, charge: Charge) -> None:
        """Count a cache hit."""
        charge = _counted(charge)
        with self._lock:
            self._found.append(charge)
        if time.monotonic() >= self._due:
            self.write()

    def forget(self) -> None:
        self._lock = threading.Lock()
        self._found = []

    def write(self) -> None:
        """Make the counted cache hits durable."""
        with self._lock:
            charges, self._found = self._found, []
            self._due = time.monotonic() + WRITE_EVERY_S
        bills: dict[tuple[str, str, str], Bill] = {}
        for charge in charges:
            key = (charge.run, charge.step, charge.model)
            bills[key] = bills.get(key, Bill()).add(charge)
        if bills:
            save_all(self._store, [self._record(key, bill) for key, bill in bills.items()])

    def _record(self, key: tuple[str, str, str], bill: Bill, estimate: Decimal | None = None) -> Save:
        run, step, model = key
        metadata = {"model": model, "run": run, "step": step, **bill.to_json()}
        if estimate is not None:
            metadata["estimate"] = format(estimate, "f")
        request = parse_request(
            CALLS,
            model[:200] or "unknown",
            level=CheckpointLevel.SUBSTEP,
            tags={"run": run} if run else None,
            metadata=metadata,
        )
        return request, codec.encode({}), self._store.actor


def _counted(charge: Charge) -> Charge:
    """Return the charge with its payer, counted for the step and the meter around it."""
    run, step = payer()
    charge = replace(charge, run=run, step=step)
    count_llm_call(charge)
    if (meter := _meter.get()) is not None:
        meter.add(charge)
    if (place := here()) is not None:
        place.run.charge(place.path, charge)
    return charge


def save_all(store: CheckpointManager, saves: Sequence[Save]) -> None:
    """Save these in one commit if they are small. Raises an error of any of them."""
    for outcome in store.save_many(saves):
        if isinstance(outcome, BaseException):
            raise outcome


_open_books: weakref.WeakSet[Books] = weakref.WeakSet()


def _after_fork() -> None:
    """Forget the parent's counts, which it records itself."""
    for books in list(_open_books):
        books.forget()


os.register_at_fork(after_in_child=_after_fork)


@save_at_end
def write_all() -> None:
    """Write the books of this process."""
    for books in list(_open_books):
        try:
            books.write()
        except CheckpointError:
            continue  # its store is closed, and wrote them then


def totals(
    store: CheckpointManager | str | os.PathLike[str] | None = None, *, run: str | None = None, by: tuple[str, ...] = ()
) -> dict[tuple[str, ...], Bill]:
    """Return bills by the given fields ("model", "run", "step"), of one run or all; `store` may be a path or URL."""
    if not isinstance(store, CheckpointManager):
        with CheckpointManager(store, create=False) as opened:
            return totals(opened, run=run, by=by)
    bills: dict[tuple[str, ...], Bill] = {}
    for record in store.walk(CALLS, tags={"run": run} if run else None):
        key = tuple(str(record.metadata.get(name, "")) for name in by)
        bills[key] = bills.get(key, Bill()) + Bill.from_json(record.metadata)
    return bills


def amount_of(value: object) -> Decimal:
    """Return an amount of dollars from the text in a record; 0 for anything else."""
    try:
        amount = Decimal(value) if isinstance(value, str) else Decimal(0)
    except InvalidOperation:
        return Decimal(0)
    return amount if amount.is_finite() else Decimal(0)
