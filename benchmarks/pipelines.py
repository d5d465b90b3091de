"""Steps and maps of pipelines: what durability costs, and what a finished step costs when it is asked for again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import kedge

from .harness import Bench, Cost, Missing, Row, Stopwatch, interleave, milliseconds, per_second

PAYLOAD = os.urandom(512).hex()  # 1 KB


def one_kilobyte(number: int) -> str:
    return PAYLOAD


def tiny(number: int) -> int:
    return number + 1


def steps(bench: Bench) -> list[Row]:
    """A durable step with a result of 1 KB, the same one found again, and a run of one step."""
    count = 200 if bench.quick else 500
    store = kedge.open(bench.fresh("steps") / "store")
    keys = iter(range(10**9))
    durable: dict[str, Callable[[], float]] = {"kedge": lambda: run_steps(store, f"r{next(keys)}", count)}
    found: dict[str, Callable[[], float]] = {"kedge": lambda: run_steps(store, "again", count)}
    whole: dict[str, Callable[[], float]] = {"kedge": lambda: run_whole(store, f"whole-{next(keys)}", count)}
    skipped = ""
    try:
        peer = Dbos(f"sqlite:///{bench.workspace / 'steps' / 'dbos.sqlite'}")
    except Missing as missing:
        skipped = str(missing)
    else:
        durable["dbos"] = lambda: peer.run(count)
        found["dbos"] = lambda: peer.replay(count)
        whole["dbos"] = lambda: peer.run_whole(count)
    ran = interleave(bench.rounds, durable)
    run_steps(store, "again", count)
    replayed = interleave(bench.rounds, found)
    one = interleave(bench.rounds, whole)
    quietest = [run_steps(store, "again", count, group=100) for _ in range(10)]
    store.close()
    rows = [
        Row("finished step, 1 KB, quietest 100", quietest, target=100e-6, kind="limit", show=milliseconds, best=True),
    ]
    if skipped:
        return [*rows, Row("durable step, replay of a finished step", skipped=skipped)]
    peer.close()
    return [
        Row("durable step, 1 KB", ran["kedge"], "DBOS", ran["dbos"], target=6, show=per_second),
        Row("finished step, 1 KB", replayed["kedge"], "DBOS", replayed["dbos"], target=15, show=milliseconds),
        Row("a whole run of one step", one["kedge"], "DBOS", one["dbos"], target=2.5, show=per_second),
        *rows,
    ]


def run_steps(store: kedge.CheckpointManager, key: str, count: int, group: int = 0) -> float:
    """Seconds each; of the fastest `group` in a row when one is given, as a busy machine disturbs the others."""
    with kedge.run(key, store=store, progress=False) as run:
        numbers = iter(range(count))
        return quietest_of(lambda: run.step(f"step {(n := next(numbers))}", one_kilobyte, n), count, group or count)


def run_whole(store: kedge.CheckpointManager, key: str, count: int) -> float:
    """Seconds for a run of one step, from its beginning to its end."""
    since = Stopwatch()
    for number in range(count):
        with kedge.run(f"{key}-{number}", store=store, progress=False) as run:
            run.step("only", one_kilobyte, 1)
    return since.cost() / count


def quietest_of(work: Callable[[], object], count: int, group: int) -> float:
    """Seconds each call takes, in the fastest `group` in a row of `count`."""
    best = float("inf")
    for _ in range(count // group):
        since = Stopwatch()
        for _ in range(group):
            work()
        best = min(best, since.cost() / group)
    return best


def _cost(seconds: float, cpu_s: float) -> Cost:
    cost = Cost(seconds)
    cost.cpu_s = cpu_s
    return cost


class Dbos:
    """Workflows of steps and a queue, as its documentation sets them up; the queue is polled often."""

    def __init__(self, url: str) -> None:
        try:
            from dbos import DBOS, SetWorkflowID
        except ImportError:
            raise Missing("DBOS is not installed (pip install dbos)") from None
        self._dbos, self._named = DBOS, SetWorkflowID
        DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR"})
        step: Any = DBOS.step()(one_kilobyte)

        @DBOS.workflow()
        def workflow(count: int) -> tuple[float, float]:
            since = Stopwatch()
            for number in range(count):
                step(number)
            cost = since.cost() / count
            return float(cost), cost.cpu_s

        @DBOS.workflow()
        def nothing(number: int) -> int:
            return number

        self._workflow: Any = workflow
        self._nothing: Any = nothing
        self._finished = ""
        DBOS.launch()
        DBOS.register_queue("q", polling_interval_sec=0.02)

    def run(self, count: int) -> float:
        self._finished = os.urandom(8).hex()
        with self._named(self._finished):
            return _cost(*self._workflow(count))

    def replay(self, count: int) -> float:
        """A copy of a workflow whose steps are all finished: it runs again, and its steps are found."""
        return _cost(*self._dbos.fork_workflow(self._finished, count + 1).get_result())

    def run_whole(self, count: int) -> float:
        """Seconds for a workflow of one step, from its call to its result."""
        since = Stopwatch()
        for _ in range(count):
            self._workflow(1)
        return since.cost() / count

    def enqueue(self, count: int) -> float:
        """Seconds for each of `count` workflows that do nothing, from the first submission to the last result."""
        began = time.perf_counter()
        handles = [self._dbos.enqueue_workflow("q", self._nothing, number) for number in range(count)]
        for handle in handles:
            handle.get_result(polling_interval_sec=0.02)
        return (time.perf_counter() - began) / count

    def close(self) -> None:
        self._dbos.destroy(destroy_registry=True)


def models(bench: Bench) -> list[Row]:
    """An answer of a model from the store: in the transport, and as a vendor's SDK sees it."""
    try:
        import httpx2
        import openai
    except ImportError as error:
        raise Missing(f"{error.name} is not installed") from None
    answer = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "gpt-4o-mini",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": PAYLOAD}}],
        "usage": {"prompt_tokens": 300, "completion_tokens": 300, "total_tokens": 600},
    }  # fmt: skip
    calls = []

    def respond(request: Any) -> Any:
        calls.append(request)
        return httpx2.Response(200, json=answer)

    count = 200
    asked: Any = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": PAYLOAD}]}
    store = kedge.open(bench.fresh("models") / "store")
    client = kedge.llm.http_client(store=store, transport=httpx2.MockTransport(respond))
    plain = httpx2.Client(transport=httpx2.MockTransport(respond))
    sdk = openai.OpenAI(api_key="none", base_url="http://model/v1", http_client=client)
    without = openai.OpenAI(api_key="none", base_url="http://model/v1", http_client=plain)
    sdk.chat.completions.create(**asked)
    request = client.build_request("POST", "http://model/v1/chat/completions", json=asked)
    transport = client._transport

    def each(work: Callable[[], object]) -> float:
        return quietest_of(work, count, count)

    paid = len(calls)
    quietest = [quietest_of(lambda: transport.handle_request(request), 1000, 20) for _ in range(5)]
    if len(calls) != paid:
        raise RuntimeError("an answer was not found")
    whole = interleave(
        bench.rounds,
        {
            "kedge": lambda: each(lambda: sdk.chat.completions.create(**asked)),
            "without": lambda: each(lambda: without.chat.completions.create(**asked)),
        },
    )
    sdk.close()
    without.close()
    store.close()
    return [
        Row("model's answer from the store, transport, quietest 20", quietest, target=200e-6, kind="limit",
            show=milliseconds, best=True),
        Row("the same through OpenAI's SDK", whole["kedge"], "an answer at once", whole["without"], kind="share",
            show=milliseconds),
    ]  # fmt: skip


def maps(bench: Bench) -> list[Row]:
    """Tiny items in 2 processes: what each costs; and how soon a map that is 99 % done is at work again."""
    count = 20_000 if bench.quick else 100_000
    overhead, resumed = [], []
    for round_number in range(min(bench.rounds, 3)):
        place = bench.fresh(f"map{round_number}") / "store"
        with kedge.run("map", store=place, progress=False) as run:
            run.step("warm", abs, -1, timeout_s=60)
            began = time.perf_counter()
            run.map(tiny, range(count * 99 // 100), executor="process", workers=2, collect=False)
            overhead.append((time.perf_counter() - began) / (count * 99 // 100))
        with kedge.run("map", store=place, progress=False) as run:
            began = time.perf_counter()
            run.map(_Clock(began), range(count), name="tiny", workers=1, collect=False)
            resumed.append(_Clock.first)
    return [
        Row(f"map of {count:,} tiny items, 2 processes, each", overhead, target=60e-6, kind="limit", show=milliseconds),
        Row("map 99 % done, until it works again", resumed, target=1, kind="limit", show=milliseconds),
    ]


class _Clock:
    """Notes when the first item is worked on."""

    first = 0.0

    def __init__(self, began: float) -> None:
        self.began = began
        _Clock.first = 0.0

    def __call__(self, number: int) -> int:
        if not _Clock.first:
            _Clock.first = time.perf_counter() - self.began
        return number + 1
