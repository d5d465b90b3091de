"""1 KB saves from 1, 8 and 64 threads, and from 8 processes; each with a job of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import kedge

from .harness import Bench, Row, Stopwatch, interleave, per_second
from .peers import SqliteTable, connect

PAYLOAD_BYTES = 1024
TARGETS = {1: 0.65, 8: 1.0, 64: 1.2}
PROCESSES = 8


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
    return [*rows, *_from_processes(bench, duration_s)]


def _from_processes(bench: Bench, duration_s: float) -> list[Row]:
    """The second row shows what the first one hides: whether all of them get a turn."""
    store, table = bench.workspace / "small" / "store", bench.workspace / "small" / "peer.sqlite"
    slowest: dict[str, list[float]] = {"kedge": [], "sqlite": []}

    def measure(side: str, work: Callable[[Path, float], int], path: Path) -> float:
        with ProcessPoolExecutor(PROCESSES, get_context("spawn")) as pool:
            list(pool.map(work, [path] * PROCESSES, [0.0] * PROCESSES))  # all of them have begun
            counts = list(pool.map(work, [path] * PROCESSES, [duration_s] * PROCESSES))
        slowest[side].append(duration_s / min(counts))
        return duration_s / sum(counts)  # without opening and closing

    samples = interleave(
        bench.rounds,
        {
            "kedge": lambda: measure("kedge", _save_for, store),
            "sqlite": lambda: measure("sqlite", _insert_for, table),
        },
    )
    work = f"1 KB save, {PROCESSES} processes"
    return [
        Row(work, samples["kedge"], "SQLite FULL", samples["sqlite"], target=1.2, show=per_second),
        Row(f"{work}: the slowest", slowest["kedge"], "SQLite FULL", slowest["sqlite"], show=per_second),
    ]


def _save_for(path: Path, duration_s: float) -> int:
    job = f"job-{os.getpid()}"
    with kedge.open(path) as manager:
        return _repeat(lambda n: manager.save(job, "step", {"payload": os.urandom(PAYLOAD_BYTES)}), duration_s)


def _insert_for(path: Path, duration_s: float) -> int:
    prefix = os.urandom(4).hex()
    statement = "INSERT INTO states (id, job, state) VALUES (?, ?, ?)"
    with closing(connect(path)) as connection:
        return _repeat(
            lambda n: connection.execute(statement, (f"step_{prefix}_{n}", "job", os.urandom(PAYLOAD_BYTES))),
            duration_s,
        )


def _repeat(operation: Callable[[int], object], duration_s: float) -> int:
    """How often, in a thread of its own, as in the other rows: the main thread has signal handlers to care for."""

    def repeat() -> int:
        until, count = time.monotonic() + duration_s, 0
        while not count or time.monotonic() < until:
            operation(count)
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(repeat).result()


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
