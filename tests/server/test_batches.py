"""Short questions in batches: each gets its own answer, those who wait are served together, nobody is forgotten."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from kedge.server.batches import Batches
from tests.waiting import wait_for_async


class Doubling:
    """Waits in its first turn until it is told to go on."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go_on = threading.Event()

    def __call__(self, items: Sequence[int]) -> list[int | BaseException]:
        self.batches.append(list(items))
        if len(self.batches) == 1:
            assert self.go_on.wait(60)
        if 99 in items:
            raise RuntimeError("a mistake of ours")
        return [ValueError(str(item)) if item < 0 else 2 * item for item in items]


def test_who_comes_meanwhile_is_served_together() -> None:
    serve = Doubling()
    batches = Batches("test", serve)

    async def ask() -> list[int | BaseException]:
        first = asyncio.create_task(batches.ask(1))
        await wait_for_async(lambda: bool(serve.batches), "nobody is served")
        others = [asyncio.create_task(batches.ask(item)) for item in (2, -3, 4)]
        await asyncio.sleep(0)  # sleep: a round of the loop, in which they ask
        await asyncio.sleep(0)  # sleep: and one in which they are handed over
        others[2].cancel()  # went away
        serve.go_on.set()
        return await asyncio.gather(first, *others, return_exceptions=True)

    answers = asyncio.run(ask())
    batches.close()
    assert answers[:2] == [2, 4]
    assert [type(answer) for answer in answers[2:]] == [ValueError, asyncio.CancelledError]
    assert serve.batches == [[1], [2, -3, 4]]


def test_a_failure_of_all_reaches_all_and_ends_nothing() -> None:
    serve = Doubling()
    serve.go_on.set()
    batches = Batches("test", serve, gather_s=0.01)

    async def ask() -> None:
        for answer in await asyncio.gather(batches.ask(99), batches.ask(1), return_exceptions=True):
            assert isinstance(answer, RuntimeError)
        assert await batches.ask(3) == 6

    asyncio.run(ask())
    batches.close()
    asyncio.run(again(batches))


async def again(batches: Batches[int, int]) -> None:
    """After the end it begins anew, in another loop."""
    assert await batches.ask(4) == 8
    batches.close()


def test_close_finishes_what_was_asked() -> None:
    serve = Doubling()
    batches = Batches("test", serve, gather_s=5.0)

    async def ask() -> list[int]:
        asked = [asyncio.create_task(batches.ask(item)) for item in range(3)]
        await wait_for_async(lambda: bool(serve.batches), "nobody is served")
        asked.append(asyncio.create_task(batches.ask(7)))
        await asyncio.sleep(0)  # sleep: a round of the loop, in which it asks
        await asyncio.sleep(0)  # sleep: and one in which it is handed over
        serve.go_on.set()
        await asyncio.to_thread(batches.close)  # does not wait for those who were served before to come back
        return await asyncio.gather(*asked)

    assert asyncio.run(ask()) == [0, 2, 4, 14]


@pytest.mark.parametrize("count", [1, 200])
def test_any_number_at_once(count: int) -> None:
    serve = Doubling()
    serve.go_on.set()
    batches = Batches("test", serve)

    async def ask() -> list[int]:
        return await asyncio.gather(*(batches.ask(item) for item in range(count) if item != 99))

    assert asyncio.run(ask()) == [2 * item for item in range(count) if item != 99]
    batches.close()
