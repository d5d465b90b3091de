"""Listeners of one feed: whoever goes, however often it is told to go, leaves the others as they were."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kedge
from kedge.server.events import Feed


def feed_of(store: kedge.CheckpointManager) -> Feed:
    async def in_thread(read: Any) -> Any:
        return await asyncio.to_thread(read)

    service: Any = SimpleNamespace(manager=lambda namespace: store, in_thread=in_thread)
    return Feed(service, "default")


@pytest.mark.parametrize("steps", range(6))
def test_a_listener_that_is_cancelled_again_and_again_takes_nothing_from_the_others(tmp_path: Path, steps: int) -> None:
    """As anyio cancels: at every step of the loop, until the task has ended."""

    async def listen(store: kedge.CheckpointManager) -> None:
        feed = feed_of(store)
        newest = await feed.newest()
        others = [asyncio.create_task(feed.after(newest, 60)) for _ in range(2)]
        leaving = [asyncio.create_task(feed.after(newest, 60)) for _ in range(3)]
        while feed._listeners < 5:
            await asyncio.sleep(0)  # sleep: a step of the loop
        for _ in range(steps):
            await asyncio.sleep(0)  # sleep: a step of the loop
        while not all(task.done() for task in leaving):
            for task in leaving:
                task.cancel()
            await asyncio.sleep(0)  # sleep: a step of the loop
        others.append(asyncio.create_task(feed.after(newest, 60)))
        await asyncio.to_thread(store.save, "job", "step", 1)
        for events in await asyncio.wait_for(asyncio.gather(*others), 60):
            assert [event.action for event in events] == ["save"]
        assert feed._listeners == 0

    with kedge.open(tmp_path / "store") as store:
        asyncio.run(listen(store))


def test_nothing_new_is_an_answer_too(tmp_path: Path) -> None:
    async def listen(store: kedge.CheckpointManager) -> None:
        feed = feed_of(store)
        saved = await feed.newest()
        assert await feed.after(saved, 0.01) == []
        assert [event.id for event in await feed.after(saved - 1, 60)] == [saved]

    with kedge.open(tmp_path / "store") as store:
        store.save("job", "step", 1)
        asyncio.run(listen(store))
