"""A store from asyncio."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import kedge


def test_async_with(tmp_path: Path) -> None:
    async def work() -> object:
        async with kedge.open(tmp_path / "store") as store:
            await store.save("job", "step", {"n": 1})
            async with store.lease("job") as lease:
                await store.save("job", "step", {"n": 2}, lease=lease)
            return await store.load("job")

    assert asyncio.run(work()) == {"n": 2}


def test_it_is_closed_behind_the_block(tmp_path: Path) -> None:
    manager = kedge.open(tmp_path / "store")

    async def work() -> None:
        async with manager as store:
            await store.save("job", "step", 1)

    asyncio.run(work())
    with pytest.raises(kedge.Conflict, match="is closed"):
        manager.save("job", "step", 2)
