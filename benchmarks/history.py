"""Whether a long history costs anything: the same operations in a store of 10³ and in one of 10⁶ checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import kedge
from kedge.ports import NewCheckpoint

from .harness import Bench, Row, log, milliseconds, per_second, timed

SMALL = 1_000
LARGE = 1_000_000
OTHER_JOBS = 1_000
BATCH = 5_000
TARGET = 1.5


def run(bench: Bench) -> list[Row]:
    large = LARGE // 10 if bench.quick else LARGE
    stores = [_filled(bench, "history-small", SMALL), _filled(bench, "history-large", large)]
    operations: dict[str, Callable[[kedge.CheckpointManager], object]] = {
        "list 50": lambda store: store.list("job", limit=50),
        "latest": lambda store: store.load_latest("job"),
        "save": lambda store: store.save("job", "step", _state()),
    }
    rows = []
    for name, operation in operations.items():
        samples: tuple[list[float], list[float]] = ([], [])
        for _ in range(100 * bench.rounds):
            for store, costs in zip(stores, samples, strict=True):
                costs.append(timed(partial(operation, store)))
        work = f"{name} at {large:,} checkpoints"
        rows.append(Row(work, samples[1], f"at {SMALL:,}", samples[0], TARGET, "share", milliseconds))
    for store in stores:
        store.close()
    return rows


def rate(bench: Bench) -> list[Row]:
    """Saves in a row: behind a million of the same job, against the first ones of a job in a new store."""
    count = LARGE // 10 if bench.quick else LARGE
    large = _filled(bench, "rate", count, other_jobs=0)
    samples: tuple[list[float], list[float]] = ([], [])
    for n in range(bench.rounds):
        with kedge.open(bench.fresh(f"rate-{n}") / "store") as small:
            for store, costs in zip((large, small), samples, strict=True):
                costs.append(timed(partial(_save_many, store)) / SMALL)
    large.close()
    work = f"{SMALL:,} saves behind {count:,} of the same job"
    return [Row(work, samples[0], "the first", samples[1], 0.9, show=per_second)]


def _save_many(store: kedge.CheckpointManager) -> None:
    for _ in range(SMALL):
        store.save("job", "step", _state())


def _state() -> dict[str, bytes]:
    return {"payload": os.urandom(1024)}


def _filled(bench: Bench, name: str, count: int, other_jobs: int = OTHER_JOBS) -> kedge.CheckpointManager:
    """A store where one job has half of all checkpoints and others share the rest, or one job has them all.

    Written in large transactions, and opened again when all of it is in packs.
    """
    place = bench.fresh(name) / "store"
    store = kedge.open(place)
    index = store.store.index
    first = store.save("job", "step", _state())
    template = replace(NewCheckpoint.of(*index.read(first)), job="job")
    others = min(other_jobs, count // 100)
    for start in range(1, count, BATCH):
        records = [
            replace(
                template,
                id=f"step_{1_700_000_000 + n}_{n:08x}",
                job="job" if n % 2 or not others else f"other-{n // 2 % others:04}",
                created_us=template.created_us + n,
            )
            for n in range(start, min(start + BATCH, count))
        ]
        index.commit(records, actor="benchmark")
    store.close()
    log(f"  {count:,} checkpoints")
    return kedge.open(place)
