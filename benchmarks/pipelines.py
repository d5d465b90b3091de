"""Steps and maps of pipelines: what durability costs, and what a finished step costs when it is asked for again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import holdfast

from .harness import Bench, Missing, Row, interleave, milliseconds, per_second

PAYLOAD = os.urandom(512).hex()  # 1 KB


def one_kilobyte(number: int) -> str:
    return PAYLOAD


def tiny(number: int) -> int:
    return number + 1


def steps(bench: Bench) -> list[Row]:
    """A durable step with a result of 1 KB, and the same one found again."""
    count = 200 if bench.quick else 500
    store = holdfast.open(bench.fresh("steps") / "store")
    keys = iter(range(10**9))
    sides: dict[str, Callable[[], float]] = {"holdfast": lambda: _run_steps(store, f"r{next(keys)}", count)}
    try:
        peer = _dbos(bench.workspace / "steps" / "dbos.sqlite")
        sides["dbos"] = lambda: peer(count)
    except Missing:
        pass
    durable = interleave(bench.rounds, sides)
    _run_steps(store, "again", count)
    cached = interleave(bench.rounds, {"holdfast": lambda: _run_steps(store, "again", count)})
    store.close()
    return [
        Row("durable step, 1 KB", durable["holdfast"], "DBOS", durable.get("dbos", []), target=5, show=per_second),
        Row("finished step, 1 KB", cached["holdfast"], target=100e-6, kind="limit", show=milliseconds),
    ]


def _run_steps(store: holdfast.CheckpointManager, key: str, count: int) -> float:
    with holdfast.run(key, store=store, progress=False) as run:
        began = time.perf_counter()
        for number in range(count):
            run.step(f"step {number}", one_kilobyte, number)
        return (time.perf_counter() - began) / count


def _dbos(database: Path) -> Callable[[int], float]:
    try:
        from dbos import DBOS, SetWorkflowID
    except ImportError:
        raise Missing("DBOS is not installed (pip install dbos)") from None

    DBOS(config={"name": "bench", "system_database_url": f"sqlite:///{database}", "log_level": "ERROR"})
    step: Any = DBOS.step()(one_kilobyte)

    @DBOS.workflow()
    def workflow(count: int) -> float:
        began = time.perf_counter()
        for number in range(count):
            step(number)
        return (time.perf_counter() - began) / count

    DBOS.launch()

    def measure(count: int) -> float:
        with SetWorkflowID(os.urandom(8).hex()):
            return float(workflow(count))

    return measure


def maps(bench: Bench) -> list[Row]:
    """Tiny items in 2 processes: what each costs; and how soon a map that is 99 % done is at work again."""
    count = 20_000 if bench.quick else 100_000
    overhead, resumed = [], []
    for round_number in range(min(bench.rounds, 3)):
        place = bench.fresh(f"map{round_number}") / "store"
        with holdfast.run("map", store=place, progress=False) as run:
            run.step("warm", abs, -1, timeout_s=60)
            began = time.perf_counter()
            run.map(tiny, range(count * 99 // 100), executor="process", workers=2, collect=False)
            overhead.append((time.perf_counter() - began) / (count * 99 // 100))
        with holdfast.run("map", store=place, progress=False) as run:
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
