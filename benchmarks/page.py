"""The web page over a large store: how long each view takes, and how large it is.

100,000 jobs of several kinds, one with 100,000 checkpoints, a run with a map of 100,000 items, a long thread.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from urllib.parse import quote

import httpx

import kedge
from kedge.model import RunStatus
from kedge.ports import NewCheckpoint

from .harness import Bench, Cost, Row, log, milliseconds
from .server import Server, serving

COUNT = 100_000
LOOKS = 100
BATCH = 5_000
LIMIT_S = 0.1
LIMIT_BYTES = 50_000


def run(bench: Bench) -> list[Row]:
    """Each view: its first look, p99 of a hundred later ones, CPU times; and the size of the largest answer."""
    count = bench.rows or (COUNT // 10 if bench.quick else COUNT)
    place = bench.fresh("page") / "store"
    known = fill(place, count)
    rows, sizes = [], {}
    with serving(place) as server, httpx.Client(base_url=str(server), headers={"Accept": "text/html"}) as client:
        for name, address in views(known).items():
            first, _ = _looks(server, client, address, 1)
            samples = []
            for _ in range(bench.rounds):
                cost, size = _looks(server, client, address, LOOKS)
                sizes[name] = max(sizes.get(name, 0), size)
                samples.append(cost)
            log(f"{name}: first {first * 1e3:.0f} ms, later {max(samples) * 1e3:.0f} ms, {sizes[name] / 1e3:.0f} KB")
            rows.append(
                Row(f"{name} of {count:,}, first look", [first], target=LIMIT_S, kind="limit", show=milliseconds)
            )
            rows.append(Row(f"{name} of {count:,}, p99", samples, target=LIMIT_S, kind="limit", show=milliseconds))
    largest = max(sizes, key=lambda name: sizes[name])
    size = [float(sizes[largest])]
    return [*rows, Row(f"largest page: {largest}", size, target=LIMIT_BYTES, kind="limit", show=_kilobytes)]


def _looks(server: Server, client: httpx.Client, address: str, count: int) -> tuple[Cost, int]:
    """p99 of so many looks with the CPU time of one, and the size of the largest answer."""
    before_s, times, largest = server.cpu_s(), [], 0
    for _ in range(count):
        answer = client.get(address).raise_for_status()
        times.append(answer.elapsed.total_seconds())
        largest = max(largest, len(answer.content))
    cost = Cost(statistics.quantiles(times, n=100)[98] if count > 1 else times[0])
    cost.cpu_s = (server.cpu_s() - before_s) / count
    return cost, largest


def _kilobytes(size: float) -> str:
    return f"{size / 1e3:.0f} KB"


def views(known: dict[str, str]) -> dict[str, str]:
    """Every page, and the parts that are fetched later, by address."""
    step, long = quote(known["step"]), "/jobs/long"
    return {
        "jobs": "/",
        "jobs, kind": "/?kind=run",
        "jobs, last page": "/?after=job-099",
        "search page": "/search",
        "search, no hit": "/search?q=nowhere-at-all",
        "search, all hit": "/search?q=job",
        "search, status": "/search?status=failed",
        "search, tag": "/search?tag=best",
        "search, kind": "/search?q=1&kind=workflow",
        "job": long,
        "job, older rows": f"{long}?before=50000&part=rows",
        "numbers": f"{long}/numbers",
        "clean-up, preview": f"{long}/cleanup?keep_last=10",
        "retention, preview": f"{long}/retention?keep_last=5&daily=7&part=plan",
        "retention of all, preview": "/retention?keep_last=5&part=plan",
        "checkpoint": f"/checkpoints/{known['checkpoint']}",
        "compare": f"/compare?id={known['first']}&id={known['checkpoint']}",
        "thread": f"/jobs/{quote(known['thread'])}",
        "runs": "/runs",
        "runs, failed": "/runs?status=failed",
        "run": "/runs/mapped",
        "run, log": "/runs/mapped?level=warning",
        "step": f"/runs/mapped/step?path={step}",
        "item": "/runs/mapped/item?map=items&item=77",
        "fork": f"/runs/mapped/fork?step={step}",
        "approvals": "/approvals",
        "queues": "/queues",
        "models": "/models",
        "storage": "/storage",
        "storage, garbage": "/storage/garbage",
        "activity": "/activity",
        "activity, actor": "/activity?actor=nobody",
        "tokens": "/tokens",
        "webhooks": "/webhooks",
    }


def fill(place: Path, count: int) -> dict[str, str]:
    """A store worth measuring; the addresses of what it holds."""
    with kedge.open(place) as store:
        _jobs(store, count)
        first, last = _long(store, count)
        _mapped(store, count)
        thread = _thread(store)
    log(f"  a store of {count:,} is made")
    return {"first": first, "checkpoint": last, "thread": thread, "step": "read"}


def _template(store: kedge.CheckpointManager, job: str) -> NewCheckpoint:
    saved = store.save(job, "step", {"n": 1}, metadata={"loss": 0.5, "note": "made for a benchmark"})
    return replace(NewCheckpoint.of(*store.store.index.read(saved)), job=job)


def _jobs(store: kedge.CheckpointManager, count: int) -> None:
    """Of ten jobs two are runs, one of which failed."""
    job = _template(store, "job-first")
    about = {"kind": "run", "session": 1, "pipeline": "bench", "version": "", "ran": 3, "reused": 0}
    runs = [
        replace(
            job, step=f"run {status}", tags={"kind": "run"}, metadata_json=json.dumps({**about, "status": str(status)})
        )
        for status in (RunStatus.COMPLETED, RunStatus.FAILED)
    ]

    def records() -> Iterator[NewCheckpoint]:
        for n in range(count):
            source = runs[n % 10] if n % 10 < 2 else job
            yield replace(source, job=f"job-{n:06}", id=_id(n, 1), created_us=job.created_us + n)

    _commit(store, records())


def _long(store: kedge.CheckpointManager, count: int) -> tuple[str, str]:
    first = _template(store, "long")

    def records() -> Iterator[NewCheckpoint]:
        for n in range(1, count):
            tags = {"best": ""} if n % 1000 == 0 else {}
            metadata = json.dumps({"loss": 1 / n, "accuracy": n / count})
            created = first.created_us - (count - n) * 60_000_000
            yield replace(first, id=_id(n, 2), step=f"step {n}", created_us=created, tags=tags, metadata_json=metadata)

    _commit(store, records())
    return str(first.id), str(store.list("long", limit=1)[0].id)


def _mapped(store: kedge.CheckpointManager, count: int) -> None:
    def work(n: int) -> int:
        if n % 50_000 == 77:
            raise ValueError("no data")
        return n

    with kedge.run("mapped", store=store, progress=False, signals=False) as run:
        run.step("read", lambda: count)
        run.map(work, range(count), name="items", key=str, on_error="collect")
        for n in range(500):
            run.log(f"line {n}", level="warning" if n % 5 else "info")


def _thread(store: kedge.CheckpointManager) -> str:
    messages: list[dict[str, str]] = []
    for n in range(200):
        messages.append({"role": ("user", "assistant")[n % 2], "content": f"Message {n}. " + "text " * 40})
        store.save("session:customer", f"turn {n}", {"messages": list(messages)})
    return "session:customer"


def _commit(store: kedge.CheckpointManager, records: Iterator[NewCheckpoint]) -> None:
    while batch := list(islice(records, BATCH)):
        store.store.index.commit(batch, actor="benchmark")


def _id(n: int, kind: int) -> str:
    return f"step_{1_700_000_000 + n}_{kind:x}{n:07x}"
