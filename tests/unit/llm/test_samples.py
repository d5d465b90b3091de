"""`kedge.llm.sample` and other context variables, wherever the items of a map are worked on."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextvars import ContextVar
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge.pipeline.place import sample

TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kedge.CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def sample_of(number: int) -> int:
    return sample.get()


@pytest.mark.parametrize("kind", ["thread", "process", "pool of threads", "pool of processes"])
def test_the_items_of_a_map(store: kedge.CheckpointManager, kind: str) -> None:
    executor: str | Executor = kind
    if kind == "pool of threads":
        executor = ThreadPoolExecutor(2)
    elif kind == "pool of processes":
        executor = ProcessPoolExecutor(2, get_context("spawn"))
    try:
        with kedge.run("r", store=store) as run:
            for number in range(2):
                with kedge.llm.sample(number):
                    name = f"sample {number}"
                    assert run.map(sample_of, range(4), name=name, workers=2, executor=executor) == [number] * 4
    finally:
        if isinstance(executor, Executor):
            executor.shutdown()


def test_tasks_and_steps_with_a_time_limit(store: kedge.CheckpointManager) -> None:
    async def of_task(number: int) -> int:
        return sample.get()

    async def main() -> list[int]:
        async with kedge.run("a", store=store) as run:
            with kedge.llm.sample(3):
                return list(await run.aio.map(of_task, range(3), workers=2))

    assert asyncio.run(main()) == [3, 3, 3]
    with kedge.run("b", store=store) as run, kedge.llm.sample(4):
        for place in ("thread", "process"):
            assert run.step(place, sample_of, 1, timeout_s=60, timeout_in=place) == 4


def test_context_variables_of_the_user_reach_threads(store: kedge.CheckpointManager) -> None:
    def tenant(number: int) -> str:
        return TENANT.get()

    TENANT.set("seven")
    with kedge.run("r", store=store) as run, ThreadPoolExecutor(2) as pool:
        assert run.map(tenant, range(3), workers=2) == ["seven"] * 3
        assert run.map(tenant, range(3), name="pool", executor=pool) == ["seven"] * 3
    TENANT.set("nobody")


def test_run_llm_has_the_sample_around_it(store: kedge.CheckpointManager) -> None:
    calls: list[int] = []

    def ask(**request: Any) -> str:
        calls.append(sample.get())
        return f"answer {len(calls)}"

    @kedge.step(cache="llm")
    def judge(text: str) -> str:
        calls.append(sample.get())
        return f"verdict {len(calls)}"

    def both() -> list[str]:
        asked = [run.llm("ask", ask, model="m", messages=[])]
        with kedge.llm.sample(1):
            asked.append(run.llm("ask again", ask, model="m", messages=[]))
            asked.append(run.llm("ask the first", ask, model="m", messages=[], sample=0))
        return asked

    with kedge.run("r", store=store) as run:
        assert both() == ["answer 1", "answer 2", "answer 1"]
    for key, number in (("a", 0), ("b", 1), ("c", 1)):
        with kedge.run(key, store=store), kedge.llm.sample(number):
            assert judge("x") == f"verdict {3 + number}"
    assert calls == [0, 1, 0, 1]


def test_money_of_a_map_inside_a_cached_step(store: kedge.CheckpointManager) -> None:
    """What the items pay for is what the step cost, whichever thread paid."""

    def ask(number: int) -> Any:
        run = kedge.current_run()
        usage = {"prompt_tokens": 1000, "completion_tokens": 100}
        return run.llm("ask", lambda **_: {"usage": usage}, model="gpt-4o-mini", messages=[{"content": str(number)}])

    @kedge.step(cache="llm")
    def judge() -> int:
        return len(kedge.current_run().map(ask, range(8), workers=4))

    for key in ("a", "b"):
        with kedge.run(key, store=store):
            assert judge() == 8
    bills = {key: bill for (key,), bill in kedge.llm.totals(store, by=("run",)).items()}
    assert (bills["a"].paid, bills["a"].found) == (8, 0)
    assert (bills["b"].paid, bills["b"].found) == (0, 1)
    assert bills["b"].saved == bills["a"].spent > 0
