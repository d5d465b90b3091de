"""1 KB saves from 1, 8 and 64 threads, each thread with a job of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import kedge

from .harness import Bench, Row, Stopwatch, interleave, per_second
from .peers import SqliteTable

PAYLOAD_BYTES = 1024
TARGETS = {1: 0.8, 8: 2.5, 64: 6.0}


def run(bench: Bench) -> list[Row]:
    duration_s = 0.7 if bench.quick else 2.0
    rows = []
    with kedge.open(bench.fresh("small") / "store") as manager:
        table = SqliteTable(bench.workspace / "small" / "peer.sqlite")

        def saver(thread: int) -> Callable[[int], object]:
            job = f"job-{thread}"
            return lambda n: manager.save(job, "step", {"payload": os.urandom(PAYLOAD_BYTES)})

        def inserter(thread: int) -> Callable[[int], object]:
            connection = table.connect()
            job = f"job-{thread}"
            prefix = os.urandom(4).hex()
            statement = "INSERT INTO states (id, job, state) VALUES (?, ?, ?)"
            return lambda n: connection.execute(statement, (f"step_{prefix}_{n}", job, os.urandom(PAYLOAD_BYTES)))

        for threads, target in TARGETS.items():
            samples = interleave(
                bench.rounds,
                {
                    "kedge": lambda threads=threads: cost_of(saver, threads, duration_s),
                    "sqlite": lambda threads=threads: cost_of(inserter, threads, duration_s),
                },
            )
            work = f"1 KB save, {threads} thread{'s' if threads > 1 else ''}"
            rows.append(Row(work, samples["kedge"], "SQLite FULL", samples["sqlite"], target=target, show=per_second))
    return rows


def cost_of(make: Callable[[int], Callable[[int], object]], threads: int, duration_s: float) -> float:
    """Wall seconds per operation while `threads` threads work for `duration_s`."""
    counts = [0] * threads
    failures: list[BaseException] = []
    ready = threading.Barrier(threads + 1)
    stop = threading.Event()

    def work(thread: int) -> None:
        try:
            operation = make(thread)
            operation(-1)
            ready.wait()
            while not stop.is_set():
                operation(counts[thread])
                counts[thread] += 1
        except BaseException as error:  # noqa: BLE001 - raised by the one who waits
            failures.append(error)
            ready.abort()

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    try:
        ready.wait()
    except threading.BrokenBarrierError:
        pass
    since = Stopwatch()
    time.sleep(duration_s)
    stop.set()
    for worker in workers:
        worker.join()
    cost = since.cost()
    if failures:
        raise failures[0]
    return cost / sum(counts)
