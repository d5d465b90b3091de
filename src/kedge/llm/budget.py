"""Budgets limit the cost of LLM calls. A call that could cost more than is left is not made.

A call's possible cost is computed first: its prompt at four bytes a token, plus all the output tokens it allows. The
books (`bills`) have the costs of this and other processes, and the records of flights those of calls in progress. If
two calls are checked at the same moment, each counts the other.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal

from kedge.errors import BudgetExceeded, Validation
from kedge.manager import CheckpointManager
from kedge.model import Checkpoint
from kedge.pipeline.history import CALLS

from .bills import amount_of
from .keys import Request
from .pricing import Tokens, dollars, price

ASSUMED_OUTPUT = 4096  # tokens of a call without a limit
_BYTES_PER_TOKEN = 4  # of UTF-8
_TOKENS_OF_A_FILE = 2000  # an image or document in a request, whose size tells nothing
_LEAST_FILE = 4096  # characters
_FILE = re.compile(r"data:[^,\s]*,\S*|[A-Za-z0-9+/_-]+={0,2}")  # a data: URL, or base64
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "maxOutputTokens")
_ANSWERS = ("n", "best_of", "candidateCount")
_PAGE = 500

Amounts = defaultdict[str, Decimal]  # by scope of a limit
TODAY = "today"


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits in dollars: per run, per day (UTC), and per model and day. None means no limit."""

    run: Decimal | float | None = None
    day: Decimal | float | None = None
    models: Mapping[str, Decimal | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, amount in [("run", self.run), ("day", self.day), *self.models.items()]:
            if amount is not None and not _is_amount(amount):
                raise Validation(f"budget {what}={amount!r}", hint="use dollars from 0 on, such as 2.50")

    def limits(self, run: str, model: str) -> Iterable[tuple[str, Decimal]]:
        """Yield the limits for a call, each with its scope."""
        if run and self.run is not None:
            yield _of_run(run), Decimal(str(self.run))
        if self.day is not None:
            yield TODAY, Decimal(str(self.day))
        if model in self.models:
            yield f"model {model} today", Decimal(str(self.models[model]))


def estimate(request: Request) -> Decimal:
    """Return what a call may cost. Raises Validation if the price is unknown."""
    cost = possible_cost(request)
    if cost is None:
        raise Validation(
            f"model {request.model} has no known price, so no budget can hold it",
            hint="pip install '.[llm]' for prices, or call it by a client without a budget",
        )
    return cost


def possible_cost(request: Request) -> Decimal | None:
    """Return what a call may cost; None if the price is unknown."""
    body = request.body if isinstance(request.body, Mapping) else {}
    output = _output_tokens(body) * _answers(body)
    return price(request.model, Tokens(_size_bytes(body) // _BYTES_PER_TOKEN + 1, output), request.where)


class Spending:
    """The spending of today and of runs in a store's books, read on as they grow."""

    def __init__(self, store: CheckpointManager) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._day = date.min
        self._read_to = 0
        self._today: Amounts = defaultdict(Decimal)
        self._runs: dict[str, Decimal] = {}

    def check(self, budget: Budget, run: str, model: str, cost: Decimal, flights: Iterable[Checkpoint]) -> None:
        """Raise BudgetExceeded if the cost does not fit beside what was spent and calls in progress."""
        reserved: Amounts = defaultdict(Decimal)
        for flight in flights:
            for scope in (TODAY, _of_model(flight), _of_run(str(flight.metadata.get("run")))):
                reserved[scope] += amount_of(flight.metadata.get("estimate"))
        with self._lock:
            spent = self._read(run)
        for scope, limit in budget.limits(run, model):
            if cost > limit - spent[scope] - reserved[scope]:
                raise BudgetExceeded(
                    f"{scope}: a call of {model} may cost {dollars(cost)}; of the budget of {dollars(limit)}, "
                    f"{dollars(spent[scope])} is spent and {dollars(reserved[scope])} reserved for calls under way",
                    hint="nothing was sent; raise the budget, or lower max_tokens",
                )

    def _read(self, run: str) -> Amounts:
        """Return the spending by scope, up to the newest record."""
        today = datetime.now(UTC).date()
        if self._day != today:
            self._day, self._read_to = today, self._last_before(today)
            self._today.clear()
            self._runs.clear()
        for record in self._store.walk(CALLS, after=self._read_to):
            self._read_to = record.seq
            spent, payer = _spent(record), str(record.metadata.get("run"))
            for scope in (TODAY, _of_model(record)):
                self._today[scope] += spent
            if payer in self._runs:
                self._runs[payer] += spent
        if run and run not in self._runs:
            records = self._store.walk(CALLS, tags={"run": run}, before=self._read_to + 1)
            self._runs[run] = sum(map(_spent, records), Decimal(0))
        return defaultdict(Decimal, {**self._today, _of_run(run): self._runs.get(run, Decimal(0))})

    def _last_before(self, day: date) -> int:
        """Return the number of the newest record before a day; 0 if there is none."""
        before: int | None = None
        while page := self._store.list(CALLS, before=before, limit=_PAGE):
            for record in reversed(page):
                if record.created_at.date() < day:
                    return record.seq
            before = page[0].seq
        return 0


def _spent(record: Checkpoint) -> Decimal:
    """Return a call's cost, or its possible cost if the vendor reported no usage, or not all of it."""
    return max(amount_of(record.metadata.get("spent")), amount_of(record.metadata.get("estimate")))


def _of_run(run: str) -> str:
    return f"run {run}"


def _of_model(record: Checkpoint) -> str:
    return f"model {record.metadata.get('model')} today"


def _output_tokens(body: Mapping[str, object]) -> int:
    return _largest(body, _LIMITS) or ASSUMED_OUTPUT


def _answers(body: Mapping[str, object]) -> int:
    """Return how many answers a call asks for: of each of its prompts, if it has several."""
    prompts = body.get("prompt")
    several = isinstance(prompts, list) and not all(type(token) is int for token in prompts)
    return max(_largest(body, _ANSWERS), 1) * (len(prompts) if several and isinstance(prompts, list) else 1)


def _largest(body: Mapping[str, object], names: Sequence[str]) -> int:
    settings = body.get("generationConfig")
    places = (body, settings) if isinstance(settings, Mapping) else (body,)
    return max(_number(place.get(name)) for place in places for name in names)


def _size_bytes(value: object) -> int:
    if isinstance(value, str):
        if len(value) >= _LEAST_FILE and _FILE.fullmatch(value):
            return _TOKENS_OF_A_FILE * _BYTES_PER_TOKEN
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, Mapping):
        return sum(_size_bytes(name) + _size_bytes(inner) for name, inner in value.items())
    if isinstance(value, list):
        return sum(map(_size_bytes, value))
    return _BYTES_PER_TOKEN  # a number may be the ID of a token


def _number(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool) and 0 <= value < float("inf")
