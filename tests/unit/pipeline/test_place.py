"""Idempotency keys: the same for every attempt of a piece of work, another for any other."""

import asyncio
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kedge
from kedge import CheckpointManager
from kedge.pipeline.consumer import Worker
from kedge.pipeline.fork import fork, plan_fork
from kedge.pipeline.history import delete_run
from tests.waiting import Clock


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointManager]:
    with kedge.open(tmp_path / "store") as opened:
        yield opened


def key_of_item(number: int) -> str:
    return kedge.idempotency_key()


def key_of_step(part: str = "") -> str:
    return kedge.idempotency_key(part)


def test_a_key_is_that_of_the_step_in_every_attempt_and_session(store: CheckpointManager) -> None:
    seen: list[str] = []

    def charge(amount: int) -> str:
        seen.append(kedge.idempotency_key())
        if len(seen) < 4:
            raise ConnectionError("no answer")
        return seen[-1]

    def session(key: str = "order", amount: int = 9) -> str:
        with kedge.run(key, store=store, progress=False) as run:
            return run.step("charge", charge, amount, retries=kedge.Retry(times=1, delay_s=0))  # type: ignore[no-any-return]

    with pytest.raises(ConnectionError):
        session()
    first = session()
    assert seen == [first] * 4
    assert str(uuid.UUID(first)) == first
    others = {session(amount=10), session("other")}
    delete_run(store, "order")
    others.add(session())
    assert len(others | {first}) == 4


def test_each_piece_of_work_has_its_own_key(store: CheckpointManager) -> None:
    async def in_a_task() -> str:
        return kedge.idempotency_key()

    async def main() -> list[str]:
        async with kedge.run("tasks", store=store, progress=False) as run:
            return [await run.step("task", in_a_task), *await run.aio.map(_async_item, [1, 2])]

    with kedge.run("r", store=store, progress=False) as run:
        keys = [run.step("plain", key_of_step), run.step("second", key_of_step)]
        keys.append(run.step("part", key_of_step, "part"))
        keys.append(run.step("in a thread", key_of_step, timeout_s=60, timeout_in="thread"))
        keys.append(run.step("in a process", key_of_step, timeout_s=60))
        keys += run.map(key_of_item, [1, 2], name="threads")
        keys += run.map(key_of_item, [1, 2], name="processes", executor="process", workers=1)
        outer, inner = run.step("outer", lambda: [key_of_step(), run.step("inner", key_of_step)])
        with pytest.raises(kedge.Conflict, match="no step here"):
            kedge.idempotency_key()
    keys += [outer, inner, *asyncio.run(main())]
    assert len(set(keys)) == len(keys) == 14
    with pytest.raises(kedge.Conflict, match="no step here"):
        kedge.idempotency_key()


async def _async_item(number: int) -> str:
    return kedge.idempotency_key()


def test_an_item_in_a_process_has_the_key_it_has_in_a_thread(store: CheckpointManager) -> None:
    """So has one that is tried again in the process of a worker."""
    found: list[list[Any]] = []
    for executor in ("thread", "process"):
        with pytest.raises(RuntimeError), kedge.run("r", store=store, progress=False) as run:
            found.append(run.map(key_of_item, [1, 2], name="m", executor=executor, workers=1))
            for record in store.list("r", level="substep"):
                store.delete("r", record.id)  # as if it had not come to save them
            raise RuntimeError("the end")
    assert found[0] == found[1]


def test_a_fork_makes_its_own_requests(store: CheckpointManager) -> None:
    @kedge.pipeline
    def order() -> str:
        return kedge.current_run().step("charge", key_of_step)  # type: ignore[no-any-return]

    with kedge.queue("q", store=store) as queue:
        first = queue.submit(order, key="first")
        worker = {"order": order}
        Worker(store, ["q"], worker).serve(until_empty=True)
        fork(store, plan_fork(store, "first", "charge", new_key="second"))
        Worker(store, ["q"], worker).serve(until_empty=True)
        assert first.result(0) != queue.handle("second").result(0)


@pytest.mark.parametrize("way", ["call", "queue", "background"])
def test_a_pipeline_has_a_limit_however_it_is_started(
    store: CheckpointManager, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Without it, a request could be repeated when the service has forgotten its key."""
    clock = Clock(monkeypatch)

    @kedge.pipeline(timeout_s=86_400)
    def order() -> None:
        clock.advance(86_401)
        kedge.current_run().step("charge", key_of_step)

    with pytest.raises(kedge.StepTimeout, match="run order took longer"):
        if way == "call":
            order.at(store=store)()
        elif way == "background":
            kedge.start(order, store=store).result()
        else:
            with kedge.queue("q", store=store) as queue:
                handle = queue.submit(order)
                Worker(store, ["q"], {"order": order}).serve(until_empty=True)
                handle.result(0)
