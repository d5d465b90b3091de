"""Queues: what submitting and carrying out a run that does nothing costs, in short and long queues; takeovers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import kedge
from kedge import codec
from kedge.pipeline.consumer import Worker
from kedge.pipeline.entries import DELAYED, RUNNING, new_entry, queue_job, ready, schedule_job
from kedge.store.request import parse_request

from .harness import Bench, Row, interleave, per_second

LEASE_S = 1.0
_FILLED_AT_ONCE = 1000
_READING = 0.05  # of a core: a worker that takes more still reads the schedules


@kedge.pipeline
def nothing(number: int) -> int:
    return number


def rates(bench: Bench) -> list[Row]:
    """One worker, one run at a time: durable submission, lease, two status records, the end."""
    count, short, long = (50, 1_000, 10_000) if bench.quick else (200, 1_000, 100_000)
    stores = {length: kedge.open(bench.fresh(f"queue{length}") / "store") for length in (short, long)}
    for length, store in stores.items():
        fill(store, length)
    numbers = iter(range(10**9))
    submitted = [_submit(stores[short], next(numbers), count) for _ in range(bench.rounds)]
    carried_out = interleave(
        bench.rounds,
        {f"{length}": lambda store=store: _carry_out(store, count) for length, store in stores.items()},
    )
    for store in stores.values():
        store.close()
    return [
        Row("submission to a queue", submitted, show=per_second),
        Row(f"run that does nothing, {short:,} queued", carried_out[f"{short}"], show=per_second),
        Row(
            f"run that does nothing, {long:,} queued", carried_out[f"{long}"], f"{short:,} queued",
            carried_out[f"{short}"], target=1.2, kind="share", show=per_second,
        ),
    ]  # fmt: skip


def takeover(bench: Bench) -> list[Row]:
    """From the last sign of a worker on another machine until its run is completed here, in leases."""
    costs = []
    for round_number in range(bench.rounds):
        with kedge.open(bench.fresh(f"takeover{round_number}") / "store") as store:
            queue = kedge.queue("q", store=store)
            handle = queue.submit(nothing, 1)
            (entry,) = queue.entries()
            store.tag(entry.id, state=RUNNING)
            store.take_lease(handle.key, "a worker elsewhere", LEASE_S)
            began = time.perf_counter()
            Worker(store, ["q"], {"nothing": nothing}, lease_s=LEASE_S).serve(until_empty=True)
            costs.append((time.perf_counter() - began) / LEASE_S)
            handle.result(0)
    return [Row("takeover, in leases", costs, target=2, kind="limit", show=lambda cost: f"{cost:.2f}")]


def idle(bench: Bench) -> list[Row]:
    """The share of a core that an idle worker takes, with many schedules and with none."""
    count = 10_000 if bench.quick else 100_000
    shares = {number: _idle_share(bench, number) for number in (count, 0)}
    return [
        Row(
            f"idle worker, {count:,} schedules, share of a core", shares[count], "no schedules", shares[0],
            target=0.01, kind="limit", show=lambda share: f"{share:.2%}",
        )
    ]  # fmt: skip


def _idle_share(bench: Bench, count: int) -> list[float]:
    with kedge.open(bench.fresh(f"schedules{count}") / "store") as store:
        queue = kedge.queue("q", store=store)
        if count:
            kedge.schedule(queue, "first", nothing, 0, cron="0 3 1 1 *")
            (first,) = store.list(schedule_job("q"))
            about: Any = dict(first.metadata)
            fill(store, count - 1, schedule_job("q"), lambda n: _schedule(about, n))
        worker = Worker(store, ["q"], {"nothing": nothing})
        thread = threading.Thread(target=worker.serve)
        thread.start()
        for _ in range(100):
            if _cpu_share() < _READING:
                break
        shares = [_cpu_share() for _ in range(bench.rounds)]
        worker.stop("enough")
        thread.join()
    return shares


def _schedule(about: dict[str, Any], number: int) -> tuple[dict[str, Any], dict[str, str]]:
    name = f"schedule-{number}"
    entry = {**about, "run": f"schedule:q:{name}", "schedule": {**about["schedule"], "name": name}}
    return entry, {"state": DELAYED, "run": entry["run"], "schedule": name}


def _cpu_share() -> float:
    began, used = time.perf_counter(), time.process_time()
    time.sleep(2)
    return (time.process_time() - used) / (time.perf_counter() - began)


def _ready(number: int) -> tuple[dict[str, Any], dict[str, str]]:
    entry = {**new_entry(f"filled-{number}", "nothing"), "kind": "entry"}
    return entry, {"state": ready(5), "run": entry["run"]}


def fill(
    store: kedge.CheckpointManager,
    length: int,
    job: str = queue_job("q"),
    entry_of: Callable[[int], tuple[dict[str, Any], dict[str, str]]] = _ready,
) -> None:
    """As `Queue.submit` does, many at a time."""
    call = codec.encode({"args": [0], "kwargs": {}})
    for start in range(0, length, _FILLED_AT_ONCE):
        saves = []
        for number in range(start, min(start + _FILLED_AT_ONCE, length)):
            entry, tags = entry_of(number)
            request = parse_request(job, "nothing", "pipeline", tags=tags, metadata=entry)
            saves.append((request, call, "bench"))
        for outcome in store.save_many(saves):
            if isinstance(outcome, BaseException):
                raise outcome


def _submit(store: kedge.CheckpointManager, batch: int, count: int) -> float:
    queue = kedge.queue("q", store=store)
    began = time.perf_counter()
    for number in range(count):
        queue.submit(nothing, number, key=f"submitted-{batch}-{number}")
    return (time.perf_counter() - began) / count


def _carry_out(store: kedge.CheckpointManager, count: int) -> float:
    completed: list[str] = []

    def report(run: str, text: str) -> None:
        completed.append(run)
        if len(completed) >= count:  # several threads may report before one looks
            worker.stop("enough")

    worker = Worker(store, ["q"], {"nothing": nothing}, report=report)
    began = time.perf_counter()
    worker.serve()
    return (time.perf_counter() - began) / len(completed)
