"""What the annotations mean for a program: `test_documents.py` checks it with mypy --strict, and nobody runs it.

Each `type: ignore` is a mistake that must be found: an unused one is an error.
"""

from __future__ import annotations

import asyncio
from typing import assert_type

import kedge
from kedge.pipeline import Handle, ItemError


def double(number: int, *, times: int = 1) -> float:
    return number * 2.0 * times


async def fetch(url: str) -> bytes:
    return url.encode()


@kedge.step(retries=3)
def decorated(name: str) -> list[str]:
    return [name]


@kedge.pipeline
def nightly(day: str, workers: int = 2) -> dict[str, float]:
    with kedge.run("inside") as run:
        assert_type(run.step("double", double, workers), float)
    return {day: 1.0}


with kedge.run("typed") as run:
    assert_type(run.step("a", double, 1), float)
    assert_type(run.step("b", double, 1, times=2), float)
    assert_type(run.step("c", double, 1, retries=3, timeout_s=60), float)
    assert_type(run.step("d", double, 1, inputs="day"), float)
    assert_type(run.step("e", double, 1, version=2), float)
    run.step("g", double, "one")  # type: ignore[call-overload]
    run.step("h", double, 1, tims=2)  # type: ignore[call-arg]
    run.step("i", double, 1, retries="three")  # type: ignore[call-arg]

    assert_type(run.map(double, [1, 2], name="m", workers=2), list[float])
    assert_type(run.map(double, [1, 2], on_error="collect"), list[float | ItemError])
    for result in run.map(double, [1, 2], collect=False):
        assert_type(result, float)
    run.map(double, ["one"])  # type: ignore[arg-type]
    run.map(double, [1], worker=2)  # type: ignore[call-overload]

    assert_type(decorated("x"), list[str])
    decorated(1)  # type: ignore[arg-type]
    child = kedge.start(nightly, "monday")
    assert_type(child, Handle[dict[str, float]])
    assert_type(run.result(child), dict[str, float])
    assert_type(run.approval("publish").approved, bool)

assert_type(nightly("monday"), dict[str, float])
nightly(1)  # type: ignore[arg-type]
nightly.at(key="monday", grace_s=5)("monday")
nightly.at(key="monday", grace=5)  # type: ignore[call-arg]

with kedge.queue("nights") as queue:
    assert_type(queue.submit(nightly, "monday", key="monday").result(timeout_s=60), dict[str, float])


async def main() -> None:
    async with kedge.run("async") as run:
        assert_type(await run.step("fetch", fetch, "url"), bytes)
        assert_type(await run.aio.map(fetch, ["url"]), list[bytes])
        assert_type(await run.aio.map(double, [1]), list[float])


asyncio.run(main())
