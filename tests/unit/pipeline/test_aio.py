"""Waits and maps in coroutines: the event loop goes on meanwhile."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager, StepTimeout, Validation
from kedge.pipeline.approval import pending_approvals


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def test_many_waits_at_once_and_the_loop_goes_on(store: CheckpointManager) -> None:
    """More waits than asyncio has threads; other tasks answer them."""
    names = [f"go {number}" for number in range(40)]

    async def decide_all() -> None:
        while len(pending := await asyncio.to_thread(pending_approvals, store, "r")) < len(names):
            await asyncio.sleep(0.01)  # sleep: until all of them are asked
        for asked in pending:
            await asyncio.to_thread(kedge.decide, store, "r", asked.name, True)
        await asyncio.to_thread(kedge.send, store, "r", "rows", 7)

    async def pipeline() -> Any:
        async with kedge.run("r", store=store) as run:
            decider = asyncio.ensure_future(decide_all())
            *decisions, rows = await asyncio.gather(*map(run.aio.approval, names), run.aio.signal("rows"))
            await decider
            await run.aio.sleep(0)
            return [decision.approved for decision in decisions], rows

    assert asyncio.run(pipeline()) == ([True] * 40, 7)


def test_waits_that_would_block_the_loop_are_refused(store: CheckpointManager) -> None:
    async def pipeline() -> None:
        async with kedge.run("r", store=store) as run:
            with pytest.raises(Validation, match="block the event loop"):
                run.approval("go")
            with pytest.raises(Validation, match="block the event loop"):
                run.sleep(1)

    asyncio.run(pipeline())


def test_a_map_of_coroutines(store: CheckpointManager) -> None:
    calls: list[int] = []
    at_once = most = 0

    async def work(item: int) -> int:
        nonlocal at_once, most
        calls.append(item)
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)  # sleep: lets the other tasks go on
        run = kedge.current_run()
        doubled = await run.step("double", double, item)
        at_once -= 1
        return doubled  # type: ignore[no-any-return]

    async def double(item: int) -> int:
        return 2 * item

    async def pipeline(count: int) -> Any:
        async with kedge.run("r", store=store) as run:
            return await run.aio.map(work, range(count), workers=3)

    assert asyncio.run(pipeline(10)) == [2 * n for n in range(10)]
    assert asyncio.run(pipeline(12)) == [2 * n for n in range(12)]
    assert sorted(calls) == list(range(12))
    assert most <= 3


def test_an_item_that_takes_too_long_is_cancelled(store: CheckpointManager) -> None:
    cancelled: list[int] = []

    async def work(item: int) -> int:
        try:
            if item == 1:  # the others never wait, so that no limit, however short, ends them
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return item

    async def pipeline() -> Any:
        async with kedge.run("r", store=store) as run:
            with pytest.raises(StepTimeout):
                await run.aio.map(work, [1], timeout_s=0.05, name="stops")  # limit: it is reached
            return await run.aio.map(work, range(3), timeout_s=0.05, on_error="collect")  # limit: by one

    first, failed, last = asyncio.run(pipeline())
    assert [first, last] == [0, 2]
    assert isinstance(failed, kedge.ItemError)
    assert cancelled == [1, 1]


def test_an_ordinary_function_is_mapped_beside_the_loop(store: CheckpointManager) -> None:
    async def pipeline() -> Any:
        async with kedge.run("r", store=store) as run:
            return await run.aio.map(abs, [-1, -2], workers=2)

    assert asyncio.run(pipeline()) == [1, 2]
