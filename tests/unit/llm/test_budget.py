"""Budgets: a call that could cost more than is left is not made."""

import gc
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

import kedge
import kedge.llm.flights
from kedge.llm import Budget
from kedge.llm.bills import Bill
from kedge.llm.budget import ASSUMED_OUTPUT, estimate
from kedge.llm.cache import Cache
from kedge.llm.flights import JOB as FLIGHTS
from kedge.llm.keys import Request
from kedge.pipeline.history import CALLS

MODEL = "gpt-4o-mini"
URL = "http://model/v1/chat/completions"
COST = Decimal("0.75")  # of a call below: 1,000,000 tokens in and 1,000,000 out, at 0.15 and 0.60 dollars
USAGE = {"prompt_tokens": 1_000_000, "completion_tokens": 1_000_000}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


class Vendor:
    """Answers every call, and counts them."""

    def __init__(self) -> None:
        self.calls = 0
        self.gate: threading.Event | None = None
        self.is_asked = threading.Semaphore(0)

    def client(self, store: kedge.CheckpointManager, budget: Budget | None, **options: Any) -> httpx2.Client:
        transport = httpx2.MockTransport(self._respond)
        client: httpx2.Client = kedge.llm.http_client(store=store, budget=budget, transport=transport, **options)
        return client

    def _respond(self, request: httpx2.Request) -> httpx2.Response:
        self.calls += 1
        self.is_asked.release()
        if self.gate is not None:
            assert self.gate.wait(60)
        return httpx2.Response(200, json={"model": MODEL, "text": "hello", "usage": USAGE})


@pytest.fixture
def vendor() -> Vendor:
    return Vendor()


def asked(text: object, **options: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": str(text)}], "max_tokens": 1000, **options}


def test_a_day_is_over_before_the_money_is_spent(store: kedge.CheckpointManager, vendor: Vendor) -> None:
    with vendor.client(store, Budget(day=2)) as client:
        for number in range(2):
            client.post(URL, json=asked(number))
        with pytest.raises(kedge.BudgetExceeded, match=r"today: a call of gpt-4o-mini .* \$1.50 is spent") as at:
            client.post(URL, json=asked(2, max_tokens=1_000_000))
        client.post(URL, json=asked(0))  # a hit costs nothing
        client.post(URL, json=asked(2))  # a smaller one fits, by what it may cost
        with pytest.raises(kedge.BudgetExceeded):
            client.post(URL, json=asked(3))
    assert (at.value.code, at.value.http_status, at.value.exit_code) == ("budget_exceeded", 402, 10)
    assert vendor.calls == 3
    Cache.of(store).settle()
    assert store.list(FLIGHTS) == []


def test_each_run_and_each_model_has_its_own(store: kedge.CheckpointManager, vendor: Vendor) -> None:
    budget = Budget(run=0.7, models={"gpt-4o": 0.0001})
    with vendor.client(store, budget) as client:

        def ask(number: int) -> None:
            client.post(URL, json=asked(number))

        for key in ("monday", "tuesday"):
            with kedge.run(key, store=store) as run:
                run.step("first", ask, hash(key))
                with pytest.raises(kedge.BudgetExceeded, match=f"run {key}: "):
                    run.step("second", ask, 1)
        with pytest.raises(kedge.BudgetExceeded, match="model gpt-4o today: "):
            client.post(URL, json=asked(1) | {"model": "gpt-4o"})
        client.post(URL, json=asked("outside of a run"))
    assert vendor.calls == 3
    again = kedge.llm.totals(store, by=("run",))
    assert {key[0]: bill.spent for key, bill in again.items()} == {"monday": COST, "tuesday": COST, "": COST}


def test_what_other_processes_spend_counts(store: kedge.CheckpointManager, vendor: Vendor) -> None:
    with vendor.client(store, Budget(day=1)) as client, vendor.client(store, None) as unlimited:
        with kedge.open(store.url) as another, vendor.client(another, None) as elsewhere:
            elsewhere.post(URL, json=asked("elsewhere"))
            client.post(URL, json=asked("here"))
            unlimited.post(URL, json=asked("also here"))
        with pytest.raises(kedge.BudgetExceeded, match=r"\$2.25 is spent"):
            client.post(URL, json=asked("too much"))


def test_an_answer_that_comes_while_one_waits_costs_nothing(
    store: kedge.CheckpointManager, vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with vendor.client(store, None) as unlimited:
        unlimited.post(URL, json=asked(1))
    cache = Cache.of(store)
    find, looks = cache.find, []

    def find_late(*args: Any) -> Any:
        looks.append(args)
        return None if len(looks) == 1 else find(*args)

    monkeypatch.setattr(cache, "find", find_late)
    with vendor.client(store, Budget(day=0)) as client:
        assert client.post(URL, json=asked(1)).json()["text"] == "hello"
    assert (len(looks), vendor.calls) == (2, 1)


def test_calls_under_way_are_counted(store: kedge.CheckpointManager, vendor: Vendor) -> None:
    vendor.gate = threading.Event()
    cost = estimate(Request("POST", URL, asked("first")))
    with (
        kedge.open(store.url) as another,
        vendor.client(store, Budget(day=2 * cost - Decimal("0.00000001"))) as client,
        vendor.client(another, Budget(day=2 * cost - Decimal("0.00000001"))) as elsewhere,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(client.post, URL, json=asked("first"))
        assert vendor.is_asked.acquire(timeout=60)
        for other in (client, elsewhere):
            with pytest.raises(kedge.BudgetExceeded, match="reserved for calls under way"):
                other.post(URL, json=asked("other"))
        vendor.gate.set()
        assert first.result().status_code == 200
    assert vendor.calls == 1


RESERVE = """
import os, sys, kedge
from kedge.llm.cache import Cache
from kedge.llm.keys import Request
with kedge.open(sys.argv[1]) as store:
    request = Request("POST", "http://m/v1/chat/completions", {"model": "gpt-4o-mini", "max_tokens": 1_000_000})
    assert Cache.of(store).flights.begin(request, "me", kedge.llm.Budget(day=1)) is not None
    os._exit(0)  # with the flight under way
"""


def test_the_reservation_of_a_process_that_died_is_free(store: kedge.CheckpointManager, vendor: Vendor) -> None:
    subprocess.run([sys.executable, "-c", RESERVE, store.url], check=True, timeout=60)
    assert len(store.list(FLIGHTS)) == 1
    with vendor.client(store, Budget(day=0.5)) as client:
        client.post(URL, json=asked("fits"))
    assert vendor.calls == 1


def test_the_reservation_of_another_machine_ends(
    store: kedge.CheckpointManager, vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = {"boot": "another", "pid": 1, "started": 1}
    about = {"owner": owner, "model": MODEL, "run": "", "estimate": "0.6"}
    store.save(FLIGHTS, MODEL, {}, metadata=about, idempotency_key="k")
    with vendor.client(store, Budget(day=0.5)) as client:
        with pytest.raises(kedge.BudgetExceeded, match="reserved"):
            client.post(URL, json=asked("fits"))
        monkeypatch.setattr(kedge.llm.flights, "WAIT_S", -1.0)
        client.post(URL, json=asked("fits"))
    assert vendor.calls == 1
    assert store.list(FLIGHTS) == []


def test_yesterday_does_not_count(
    store: kedge.CheckpointManager, vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kedge.llm.budget

    class Tomorrow(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(UTC) + timedelta(days=1)

    with vendor.client(store, Budget(day=1)) as client:
        client.post(URL, json=asked(1))
        client.post(URL, json=asked(2))
        with pytest.raises(kedge.BudgetExceeded):
            client.post(URL, json=asked(3))
        monkeypatch.setattr(kedge.llm.budget, "datetime", Tomorrow)
        client.post(URL, json=asked(3))
    assert vendor.calls == 3
    assert len(store.list(CALLS)) == 3


def test_what_a_call_may_cost() -> None:
    def cost(body: dict[str, Any]) -> Decimal:
        return estimate(Request("POST", URL, {"model": MODEL, **body}))

    assert cost({"max_tokens": 1_000_000}) == pytest.approx(Decimal("0.6"), rel=Decimal("0.001"))
    assert cost({"max_output_tokens": 1_000_000, "n": 2}) == pytest.approx(Decimal("1.2"), rel=Decimal("0.001"))
    assert cost({"generationConfig": {"maxOutputTokens": 1_000_000}}) > Decimal("0.6")
    assert cost({"generationConfig": {"maxOutputTokens": 1_000_000, "candidateCount": 3}}) > Decimal("1.8")
    assert cost({"max_tokens": 1_000_000, "best_of": 3, "n": 2}) > Decimal("1.8")
    assert cost({"max_tokens": 1_000_000, "prompt": ["a", "b", "c"]}) > Decimal("1.8")
    assert cost({"max_tokens": 1_000_000, "prompt": [1, 2, 3]}) < Decimal("0.7"), "one prompt, by its tokens"
    assert cost({"input": [7] * 1_000_000}) > Decimal("0.15"), "so many tokens"
    assert cost({}) == pytest.approx(cost({"max_tokens": ASSUMED_OUTPUT}), rel=Decimal("0.001"))
    words = "word " * 800_000
    assert cost({"messages": [{"content": words}]}) - cost({}) == pytest.approx(Decimal("0.15"), rel=Decimal("0.01"))
    image = "A" * 4_000_000
    assert cost({"messages": [{"image": image}]}) - cost({}) < Decimal("0.001"), "its size says nothing"
    assert cost({"messages": [{"image": f"data:image/png;base64,{image}"}]}) - cost({}) < Decimal("0.001")


@pytest.mark.parametrize("text", ["\u6587\u5b57\u3002" * 100_000, "a,b;c\n" * 150_000, "x" * 9 + "\ud800" * 300_000])
def test_text_without_spaces_is_no_file(text: str) -> None:
    request = Request("POST", URL, {"model": MODEL, "messages": [{"content": text}], "max_tokens": 1})
    assert estimate(request) == pytest.approx(Decimal("0.0338"), rel=Decimal("0.01")), "900,000 bytes"


STREAM, SOUND = {"content-type": "text/event-stream"}, {"content-type": "audio/mpeg"}
BEGUN = b'data: {"usage": {"input_tokens": 9, "output_tokens": 1}, "model": "gpt-4o-mini"}\n\n'


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        (STREAM, b"data: {}\n\ndata: [DONE]\n\n"),
        (STREAM, b"data: {}\n\n"),
        (STREAM, BEGUN),
        (SOUND, b"\xff\xfb"),
        ({}, b"?"),
    ],
    ids=["no usage", "abandoned", "abandoned after the prompt was counted", "sound", "no answer"],
)
def test_a_call_whose_cost_nobody_says_counts_as_what_it_may_cost(
    store: kedge.CheckpointManager, headers: dict[str, str], content: bytes
) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=headers, content=content))
    with kedge.llm.http_client(store=store, budget=Budget(day=1), transport=transport) as client:
        client.post(URL, json=asked(1, max_tokens=1_000_000))
        with pytest.raises(kedge.BudgetExceeded, match=r"\$0.60 is spent"):
            client.post(URL, json=asked(2, max_tokens=1_000_000))
    assert sum(kedge.llm.totals(store).values(), Bill()).paid == 1


class Broken(httpx2.SyncByteStream):
    """An answer that breaks off."""

    def __iter__(self) -> Iterator[bytes]:
        yield b'{"usage": '
        raise httpx2.ReadError("broken")


def times_out(request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ReadTimeout("no answer")


@pytest.mark.parametrize(
    "respond", [lambda _: httpx2.Response(200, stream=Broken()), times_out], ids=["broken", "late"]
)
def test_a_call_whose_answer_is_lost_counts_as_what_it_may_cost(store: kedge.CheckpointManager, respond: Any) -> None:
    transport = httpx2.MockTransport(respond)
    with kedge.llm.http_client(store=store, budget=Budget(day=1), transport=transport) as client:
        with pytest.raises(httpx2.TransportError):
            client.post(URL, json=asked(1, max_tokens=1_000_000))
        with pytest.raises(kedge.BudgetExceeded, match=r"\$0.60 is spent"):
            client.post(URL, json=asked(2, max_tokens=1_000_000))
    assert sum(kedge.llm.totals(store).values(), Bill()).paid == 1


@pytest.mark.parametrize("url", ["memory:", "a directory"])
def test_a_stream_that_is_dropped_is_paid_by_who_asked(url: str, tmp_path: Path) -> None:
    transport = httpx2.MockTransport(lambda _: httpx2.Response(200, headers=STREAM, content=b"data: {}\n\n"))
    with (
        kedge.open(url if url == "memory:" else tmp_path / "store") as store,
        kedge.llm.http_client(store=store, budget=Budget(day=1), transport=transport) as client,
    ):

        def drop() -> None:
            request = client.build_request("POST", URL, json=asked(1, max_tokens=1_000_000))
            client.send(request, stream=True)

        with kedge.run("r", store=store) as run:
            run.step("drop", drop)
        gc.collect()
        with pytest.raises(kedge.BudgetExceeded, match=r"\$0.60 is spent"):
            client.post(URL, json=asked(2, max_tokens=1_000_000))
        Cache.of(store).settle()
        assert kedge.llm.totals(store, by=("run", "step"))["r", "drop"].paid_unpriced == 1
        assert store.list(FLIGHTS) == []


def test_a_model_without_a_price_is_refused(store: kedge.CheckpointManager, vendor: Vendor) -> None:
    with vendor.client(store, Budget(day=5)) as client, pytest.raises(kedge.Validation, match="no known price"):
        client.post(URL, json=asked(1) | {"model": "nobody-knows-this"})
    assert vendor.calls == 0


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), "5", True])
def test_nonsense(amount: Any) -> None:
    with pytest.raises(kedge.Validation):
        Budget(day=amount)
    with pytest.raises(kedge.Validation):
        kedge.llm.http_client(budget={"day": 5})  # type: ignore[arg-type]


def test_a_store_in_memory(vendor: Vendor) -> None:
    with kedge.open("memory:") as store, vendor.client(store, Budget(day=0.5)) as client:
        client.post(URL, json=asked(1))
        with pytest.raises(kedge.BudgetExceeded):
            client.post(URL, json=asked(2))


def test_in_pipelines(store: kedge.CheckpointManager) -> None:
    calls = []

    def ask(**request: Any) -> dict[str, Any]:
        calls.append(request)
        return {"model": MODEL, "usage": USAGE}

    with kedge.run("r", store=store) as run:
        budget = Budget(run=0.5)
        run.llm("first", ask, model=MODEL, messages=[], budget=budget)
        with pytest.raises(kedge.BudgetExceeded):
            run.llm("second", ask, model=MODEL, messages=[], n=2, budget=budget)
    assert len(calls) == 1


def test_the_vendors_sdks_say_so(store: kedge.CheckpointManager) -> None:
    """And do not take it for a lost connection, which they would try again."""
    http_client = kedge.llm.http_client(store=store, budget=Budget(day=0))
    question: Any = [{"role": "user", "content": "x"}]
    ask: list[Callable[[], object]] = [
        lambda: openai.OpenAI(api_key="k", http_client=http_client).chat.completions.create(
            model=MODEL, messages=question
        ),
        lambda: anthropic.Anthropic(api_key="k", http_client=http_client).messages.create(
            model="claude-haiku-4-5", max_tokens=9, messages=question
        ),
    ]
    for call in ask:
        with pytest.raises(kedge.BudgetExceeded):
            call()
    http_client.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/batches", b'{"input_file_id": "file-1", "endpoint": "/v1/chat/completions"}'),
        ("/v1/messages/batches", b'{"requests": []}'),
        ("/v1beta/models/gemini-2.5-flash:batchGenerateContent", b"{}"),
        ("/v1/images/edits", b"--boundary"),
        ("/v1/audio/transcriptions", b"--boundary"),
        ("/v1/fine_tuning/jobs", b"{}"),
        ("/v1/complete", b'{"model": "claude-2.1", "prompt": "Hello"}'),  # ends as a finished upload does
        ("/v1/conversations", b'{"model": "mistral-small-latest", "inputs": "Hello"}'),
        ("/v1/chat/completions", b'{"model": "gpt-4o-mini", "temperature": NaN}'),  # has no key
    ],
)
def test_what_costs_money_and_has_no_estimate_is_refused(
    path: str, body: bytes, store: kedge.CheckpointManager, vendor: Vendor
) -> None:
    with vendor.client(store, Budget(day=100)) as client:
        with pytest.raises(kedge.Validation, match="no budget can limit it") as refusal:
            client.post(f"http://model{path}", content=body)
        assert "without a budget" in refusal.value.hint
    assert vendor.calls == 0
    with vendor.client(store, None) as client:
        client.post(f"http://model{path}", content=body)
    assert vendor.calls == 1


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/batches/batch_1"),
        ("GET", "/v1/models"),
        ("DELETE", "/v1/files/file-1"),
        ("POST", "/v1/files"),
        ("POST", "/v1/uploads"),
        ("POST", "/v1/uploads/upload_1/parts"),
        ("POST", "/v1/uploads/upload_1/complete"),
        ("POST", "/v1/uploads/upload_1/cancel"),
        ("POST", "/v1/batches/batch_1/cancel"),
        ("POST", "/v1/messages/count_tokens"),
        ("POST", "/v1beta/models/gemini-2.5-flash:countTokens"),
    ],
)
def test_what_costs_nothing_needs_no_budget(
    method: str, path: str, store: kedge.CheckpointManager, vendor: Vendor
) -> None:
    with vendor.client(store, Budget(day=0)) as client:
        assert client.request(method, f"http://model{path}").status_code == 200


def test_without_a_cache_no_budget_holds(store: kedge.CheckpointManager, vendor: Vendor) -> None:
    with pytest.raises(kedge.Validation, match="mode='off' counts no calls"):
        vendor.client(store, Budget(day=2), mode="off")
