"""Runs in a database that many machines share: PostgreSQL that syncs, against DBOS on the same server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import kedge
from kedge.pipeline.consumer import Worker

from .harness import Bench, Row, interleave, milliseconds, per_second
from .machines import postgres_server
from .pipelines import Dbos, run_steps, run_whole
from .queues import fill, nothing

THREADS = 16  # of a worker; DBOS begins whatever it finds
WORKERS = 8


def steps(bench: Bench) -> list[Row]:
    """A durable step, the same one found again, and a run of one step from its beginning to its end."""
    count = 100 if bench.quick else 200
    keys = iter(range(10**9))
    with postgres_server() as url, kedge.open(url) as store:
        peer = _dbos(url)

        ran = interleave(
            bench.rounds, {"kedge": lambda: run_steps(store, f"r{next(keys)}", count), "dbos": lambda: peer.run(count)}
        )
        run_steps(store, "again", count)
        found = interleave(
            bench.rounds, {"kedge": lambda: run_steps(store, "again", count), "dbos": lambda: peer.replay(count)}
        )
        one = interleave(
            bench.rounds,
            {"kedge": lambda: run_whole(store, f"whole-{next(keys)}", count), "dbos": lambda: peer.run_whole(count)},
        )
        peer.close()
    return [
        Row("PostgreSQL, durable step, 1 KB", ran["kedge"], "DBOS", ran["dbos"], target=3, show=per_second),
        Row("PostgreSQL, finished step, 1 KB", found["kedge"], "DBOS", found["dbos"], target=20, show=milliseconds),
        Row("PostgreSQL, a whole run of one step", one["kedge"], "DBOS", one["dbos"], target=1.5, show=per_second),
    ]


def queues(bench: Bench) -> list[Row]:
    """Runs that do nothing, submitted by one thread and carried out by one worker in the same process; long queues."""
    count, short, long = (100, 1_000, 10_000) if bench.quick else (400, 1_000, bench.rows or 100_000)
    numbers = iter(range(10**9))
    with postgres_server() as url, kedge.open(url) as store:
        peer = _dbos(url)
        both = interleave(
            bench.rounds,
            {"kedge": lambda: _enqueue(store, next(numbers), count), "dbos": lambda: peer.enqueue(count)},
        )
        peer.close()
        stores = {length: kedge.open(url, namespace=f"q{length}") for length in (short, long)}
        for length, each in stores.items():
            fill(each, length)
        few = min(count, short // (2 * bench.rounds))  # the short queue must last for all rounds
        lengths = interleave(
            bench.rounds,
            {f"{n}": lambda each=each: _carry_out(each, few) for n, each in stores.items()},  # type: ignore[misc]
        )
        for each in stores.values():
            each.close()
    return [
        Row("PostgreSQL, enqueue and run nothing", both["kedge"], "DBOS", both["dbos"], target=2, show=per_second),
        Row(
            f"PostgreSQL, run nothing, {long:,} queued", lengths[f"{long}"], f"{short:,} queued", lengths[f"{short}"],
            target=1.2, kind="share", show=per_second,
        ),
    ]  # fmt: skip


def workers(bench: Bench) -> list[Row]:
    """A queue worked off by eight worker processes, against one."""
    count = 200 if bench.quick else 1_000
    numbers = iter(range(10**9))
    with postgres_server() as url:

        def work_off(processes: int) -> float:
            namespace = f"w{next(numbers)}"
            with kedge.open(url, namespace=namespace) as store:
                fill(store, count)
            with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
                list(pool.map(_work_off, [url] * processes, [f"{namespace}-none"] * processes))  # all have begun
                began = time.perf_counter()
                list(pool.map(_work_off, [url] * processes, [namespace] * processes))
                return (time.perf_counter() - began) / count

        rates = interleave(bench.rounds, {"eight": lambda: work_off(WORKERS), "one": lambda: work_off(1)})
    return [
        Row(
            f"PostgreSQL, {WORKERS} workers", rates["eight"], "one worker", rates["one"], target=5, show=per_second
        )
    ]  # fmt: skip


def _dbos(url: str) -> Dbos:
    """In a database of its own, on the same server."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as db:
        db.execute("CREATE DATABASE dbos")
    return Dbos(url.replace("/postgres?", "/dbos?"))


def _work_off(url: str, namespace: str) -> None:
    with kedge.open(url, namespace=namespace) as store:
        Worker(store, ["q"], {"nothing": nothing}, concurrency=THREADS).serve(until_empty=True)


def _enqueue(store: kedge.CheckpointManager, batch: int, count: int) -> float:
    """Seconds for each, from the first submission to the last end."""
    return _served(store, count, lambda: _submit(store, batch, count))


def _carry_out(store: kedge.CheckpointManager, count: int) -> float:
    return _served(store, count, lambda: None)


def _submit(store: kedge.CheckpointManager, batch: int, count: int) -> None:
    queue = kedge.queue("q", store=store)
    for number in range(count):
        queue.submit(nothing, number, key=f"submitted-{batch}-{number}")


def _served(store: kedge.CheckpointManager, count: int, submit: Callable[[], None]) -> float:
    completed: list[str] = []

    def report(run: str, text: str) -> None:
        completed.append(run)
        if len(completed) >= count:  # several threads may report before one looks
            worker.stop("enough")

    worker = Worker(store, ["q"], {"nothing": nothing}, report=report, concurrency=THREADS)
    thread = threading.Thread(target=worker.serve)
    began = time.perf_counter()
    thread.start()
    submit()
    thread.join()
    return (time.perf_counter() - began) / len(completed)
