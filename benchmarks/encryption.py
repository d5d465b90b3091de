"""What encryption costs: the same work on a plain store and on an encrypted one, in turns."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

import kedge

from .harness import Bench, Row, interleave, mib, per_second, timed
from .small_saves import PAYLOAD_BYTES, cost_of
from .state import State

KEY = bytes(range(32))
MOST = 1 / 0.7  # costs at most 30 % of the throughput
SIDES = {"plain": "none", "encrypted": KEY}


def _open(bench: Bench, name: str, side: str) -> AbstractContextManager[kedge.CheckpointManager]:
    return kedge.open(bench.fresh(f"{name}-{side}") / "store", key=SIDES[side])


def arrays(bench: Bench) -> list[Row]:
    state = State(bench.state_bytes)
    into = {name: np.empty_like(array) for name, array in state.arrays.items()}
    loads: dict[str, list[float]] = {side: [] for side in SIDES}

    def full(side: str) -> Callable[[], float]:
        def save() -> float:
            state.change_all()
            with _open(bench, "full", side) as manager:
                cost = timed(lambda: manager.save("train", "epoch", state.arrays), memory=2 * state.size_bytes)
                (saved,) = manager.list("train")
                loads[side].append(timed(lambda: manager.load(saved.id, into=into), memory=2 * state.size_bytes))
            return cost

        return save

    saves = interleave(bench.rounds, {side: full(side) for side in SIDES})
    size = mib(state.size_bytes)
    return [
        Row(f"{size} of arrays, full save, encrypted", saves["encrypted"], "plain", saves["plain"], MOST, "share"),
        Row(f"{size} of arrays, load, encrypted", loads["encrypted"], "plain", loads["plain"], None, "share"),
    ]


def small_saves(bench: Bench) -> list[Row]:
    duration_s = 0.7 if bench.quick else 2.0
    rows = []
    with _open(bench, "small", "plain") as plain, _open(bench, "small", "encrypted") as encrypted:
        managers = {"plain": plain, "encrypted": encrypted}

        def saver(side: str) -> Callable[[int], Callable[[int], object]]:
            def of_thread(thread: int) -> Callable[[int], object]:
                return lambda _: managers[side].save(f"job-{thread}", "s", {"payload": os.urandom(PAYLOAD_BYTES)})

            return of_thread

        for threads in (1, 8):
            samples = interleave(
                bench.rounds,
                {side: lambda side=side, n=threads: cost_of(saver(side), n, duration_s) for side in SIDES},
            )
            work = f"1 KB save, {threads} thread{'s' if threads > 1 else ''}, encrypted"
            row = Row(work, samples["encrypted"], "plain", samples["plain"], MOST, "share", show=per_second)
            rows.append(row)
    return rows
